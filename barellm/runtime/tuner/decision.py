"""The decision: every candidate is proved, then timed against the default in turns; only a clear winner is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from barellm.runtime.tuner.worker import Lost, Worker

LIMIT = 20.0  # seconds for one request
SCREEN, FINAL = 3, 11  # rounds for all; for the best few
FINALISTS = 3
GAIN = 0.98  # a winner needs at most this much of the default's time,
AGREE = 0.8  # less than the default's time in this share of the rounds, in two contests


@dataclass
class Verdict:
    """What was found for one product. `best` is the default where nothing is clearly faster."""

    work: Any  # `role`, `dtype`, `rows` x `cols` of the result, `depth` of the contraction, `flops`
    default: Any
    best: Any
    ratio: float  # the best one's time over the default's
    default_s: float
    tried: int
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        w = self.work
        return {
            "role": w.role, "dtype": w.dtype, "rows": w.rows, "cols": w.cols, "depth": w.depth,
            "default": str(self.default), "best": str(self.best), "ratio": self.ratio, "default_s": self.default_s,
            "gflops": w.flops / self.default_s / self.ratio / 1e9, "tried": self.tried,
            "rejected": [{"candidate": name, "reason": reason} for name, reason in self.rejected],
        }  # fmt: skip


def tune(
    works: Iterable[Any], worker: Worker, *, candidates: Callable[[Any], list[Any]], keep: Callable[[Verdict], None],
    seconds: float, each: Callable[[Verdict], None],
) -> list[Verdict]:  # fmt: skip
    """Tune one product after the other and `keep` each result at once: an interrupt loses only the one in progress. No product is
    begun after `seconds`. `candidates(work)`: the default first."""
    end = time.monotonic() + seconds
    verdicts = []
    try:
        for work in works:
            if verdicts and time.monotonic() > end:
                break
            default, *others = candidates(work)
            verdict = decide(worker, work, others, default)
            keep(verdict)
            verdicts.append(verdict)
            each(verdict)
    finally:
        worker.close()
    return verdicts


def decide(worker: Worker, work: Any, choices: list[Any], default: Any) -> Verdict:
    """Check every candidate, time those that are right, and choose. All have a `choice`; `default` is the one to beat."""
    worker.open(work)
    rejected: dict[Any, str] = {}
    default_s: list[float] = []

    def contest(contestants: list[Any], rounds: int) -> dict[Any, list[float]]:
        """Ratios to the default's time by round. A child that is lost while it times takes the blame for all of them."""
        try:
            found, seconds = worker.time(contestants, rounds)
        except Lost as why:
            rejected.update(dict.fromkeys(contestants, f"while it was timed: {why}"))
            return {}
        default_s.append(seconds)
        return dict(zip(contestants, found, strict=True))

    screened: dict[Any, float] = {}
    for candidate in choices:
        reason = worker.check(candidate)
        if reason:
            rejected[candidate] = reason
        else:
            screened |= {c: median(ratios) for c, ratios in contest([candidate], SCREEN).items()}
    best = sorted((c for c in screened if screened[c] < 1.0), key=lambda c: screened[c])[:FINALISTS]
    first = contest(best, FINAL) if best else {}
    winner, ratio = default, 1.0
    if first:
        fastest = min(first, key=lambda c: median(first[c]))
        # The fastest of many was also lucky: it is believed only what it does once more.
        again = contest([fastest], FINAL) if _wins(first[fastest]) else {}
        if again and _wins(again[fastest]):
            winner, ratio = fastest, median(again[fastest])
    if not default_s:
        contest([], SCREEN)
    reasons = [(str(c), reason) for c, reason in rejected.items()]
    return Verdict(work, default.choice, winner.choice, ratio, median(default_s), len(choices), reasons)


def _wins(ratios: list[float]) -> bool:
    return median(ratios) <= GAIN and sum(r < 1.0 for r in ratios) >= AGREE * len(ratios)


@dataclass(frozen=True)
class Trial:
    """One candidate, why it was rejected ("": it was not), and whether that is as it should be."""

    candidate: str
    reason: str
    expected: str
    passed: bool


def trials(verdict: Verdict, faults: dict[Any, tuple[str, str]], honest: Any, default: Any) -> list[Trial]:
    """What became of injected candidates, by what each was made to be rejected for, and of one that is right."""
    reasons = dict(verdict.rejected)
    found = []
    for candidate, (name, words) in faults.items():
        reason = reasons.get(str(candidate), "")
        found.append(Trial(name, reason, f"rejected: {words}", words in reason))
    reason = reasons.get(str(honest), "")
    chosen = verdict.best in (default.choice, honest.choice)
    return [*found, Trial("another tile", reason, "not rejected", not reason and chosen)]
