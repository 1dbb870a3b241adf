"""Interleaved calls of one op, ours and a baseline's: every sample kept."""

from typing import Any


class BaselineError(RuntimeError):
    """A call of a baseline's failed, and its process goes on: it has no kernel for the case, say."""


def samples(
    ours: Any, baseline: Any, case: int, *, what: str, rounds: int, turn_s: float, long_s: float, pause: Any,
    backends: tuple[str, ...] = (),
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Seconds of calls of each side by round, of ours alone without a `baseline` (benchmarks/baseline_process.py). `ours(what,
    calls)`: seconds of so many calls of ours; `turn_s`: what a round should take; a call of `long_s` needs no call before it;
    `pause()` is called before each round. `backends`: of the baseline, each of which is interleaved under its own name, but for
    those that cannot do it."""
    once, sides = ours(what, 1)[0], {"ours": what}
    requested = {name: f"{what} {name}" for name in backends} or {"peer": what}
    for name, call in requested.items() if baseline else ():
        assert baseline
        try:
            baseline.run(case, call, calls=1, warm_up=0)
            once = max(once, baseline.run(case, call, calls=1, warm_up=0)[0])
        except BaselineError:
            if not backends:
                raise
        else:
            sides[name] = call
    calls, warm_up = max(1, round(turn_s / once)), int(once < long_s)

    def turn(name: str) -> list[float]:
        pause()
        if name == "ours":
            return ours(what, warm_up + calls)[warm_up:]
        assert baseline
        return baseline.run(case, sides[name], calls=calls, warm_up=warm_up)

    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(found) if i % 2 else reversed(list(found)):
            found[name].append(turn(name))
    return found
