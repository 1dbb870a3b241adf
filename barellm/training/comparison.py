"""Whether the losses of two groups of runs differ by rounding, or by a fault: tests of means over seeds.

Runs of both groups that share their seeds begin with the same weights and see the same batches, so their differences are tested
(paired t-test); other groups by Student's test of two means with one variance. Both have whole degrees of freedom, for which the
distribution of t is a finite sum (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import atan, cos, inf, isfinite, log, pi, sin, sqrt
from statistics import fmean, stdev, variance
from typing import Any

from barellm.errors import UserError

ALPHA = 0.01  # of all quantities together: a change that only rounds is called a fault so often
NEGLIGIBLE = 0.05  # of the standard deviation over seeds: smaller differences are no fault, however certain they are
QUANTITIES = {
    "val": "validation loss at the end", "loss": "training loss, mean of the curve", "norm": "log of the gradient norm, mean",
}  # fmt: skip


def measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The quantities of a run, from its rows of metrics.jsonl; without those that it has not. A step that is not finite: inf."""
    steps, evaluated = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    found = {"val": evaluated[-1]["val_nats"]} if evaluated else {}
    for name, key, of in (("loss", "loss", float), ("norm", "grad_norm", lambda x: log(max(x, 1e-30)))):
        if steps:
            found[name] = fmean(inf if row[key] is None else of(row[key]) for row in steps)
    return found


def p_value(t: float, df: int) -> float:
    """The probability of a |t| of Student's distribution with `df` degrees of freedom that is as large, or larger."""
    angle = atan(abs(t) / sqrt(df))
    total, term = 0.0, cos(angle) if df % 2 else 1.0
    for i in range(2 if df % 2 else 1, df, 2):
        total += term
        term *= cos(angle) ** 2 * i / (i + 1)
    within = (angle + sin(angle) * total) * 2 / pi if df % 2 else sin(angle) * total
    return min(1.0, max(0.0, 1 - within))


def critical(p: float, df: int) -> float:
    """The t whose `p_value` is p."""
    low, high = 0.0, 1.0
    while p_value(high, df) > p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, df) > p else (low, middle)
    return high


@dataclass(frozen=True)
class Test:
    """Of one quantity. `spread`: standard deviation over seeds; `detectable`: the least difference that would have been a fault."""

    quantity: str
    a: float
    b: float
    difference: float
    paired: bool
    seeds: int
    spread: float
    p: float
    detectable: float
    fault: bool


def tested(a: Mapping[int, float], b: Mapping[int, float], quantity: str, alpha: float) -> Test:
    """Student's t-test of two groups, {seed: value of `quantity`}: paired by seed where more than two seeds are in both, else of
    independent groups with one variance. `alpha`: p below which a difference is a fault, unless it is NEGLIGIBLE. UserError where
    there are too few seeds for any spread."""
    both = sorted(a.keys() & b.keys())
    paired = len(both) > 2
    one, other = (([x[seed] for seed in both] if paired else list(x.values())) for x in (a, b))
    # The pooled standard deviation over seeds.
    free = len(one) + len(other) - 2
    if free < 1:
        raise UserError(f"{len(one)} and {len(other)} runs have no spread over seeds, expected at least 3 runs with several --seed")
    squares = sum(variance(x) * (len(x) - 1) for x in (one, other) if len(x) > 1)
    spread = sqrt(squares / free)
    # The difference of the means, its standard error, and the degrees of freedom of that.
    if paired:
        differences = [y - x for x, y in zip(one, other, strict=True)]
        difference, error = fmean(differences), stdev(differences) / sqrt(len(both))
        df = len(both) - 1
    else:
        difference, error = fmean(other) - fmean(one), spread * sqrt(1 / len(one) + 1 / len(other))
        df = free
    if error:
        t = difference / error
    else:  # all seeds agree: certain, or no difference
        t = inf if difference else 0.0
    p = p_value(t, df) if isfinite(t) else 0.0
    detectable = max(critical(alpha, df) * error, NEGLIGIBLE * spread)
    fault = p < alpha and not abs(difference) <= NEGLIGIBLE * spread
    return Test(quantity, fmean(one), fmean(other), difference, paired, min(len(one), len(other)), spread, p, detectable, fault)


def compare(a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]) -> list[Test]:
    """The tests of all quantities that both groups have, {seed: `measures`} each. ALPHA is shared out among them (Bonferroni)."""
    names = [name for name in QUANTITIES if all(name in found for group in (a, b) for found in group.values())]
    of = [[{seed: found[name] for seed, found in group.items()} for group in (a, b)] for name in names]
    return [tested(one, other, name, ALPHA / len(names)) for name, (one, other) in zip(names, of, strict=True)]


def lines(name: str, tests: Sequence[Test]) -> list[str]:
    """A table of one comparison, and its verdict."""
    first = tests[0]
    how = f"{first.seeds} seeds, {'paired' if first.paired else 'not paired'}"
    out = [f"{name} ({how})", f"  {'':<32} {'A':>9} {'B':>9} {'B - A':>10} {'seeds sd':>9} {'p':>8}"]
    for test in tests:
        numbers = f"{test.a:>9.4f} {test.b:>9.4f} {test.difference:>+10.2e} {test.spread:>9.1e} {test.p:>8.2g}"
        out.append(f"  {QUANTITIES[test.quantity]:<32} {numbers}")
    return [*out, f"  {verdict(tests)}"]


def verdict(tests: Sequence[Test]) -> str:
    faults = [QUANTITIES[test.quantity] for test in tests if test.fault]
    smallest = ", ".join(f"{test.detectable:.1e} ({test.quantity})" for test in tests)
    seen = f"the least differences that {tests[0].seeds} seeds show: {smallest}"
    return f"fault: {' and '.join(faults)} differ by more than rounding; {seen}" if faults else f"noise: {seen}"
