"""Interleaved calls of one op, ours and a baseline's: every sample kept."""

from typing import Any


class BaselineError(RuntimeError):
    """A call of a baseline's failed, and its process goes on: it has no kernel for the case, say."""


def samples(
    ours: Any, baseline: Any, case: int, *, what: str, rounds: int, turn_s: float, long_s: float, pause: Any,
    backends: tuple[str, ...] = (),
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Seconds of calls by side and round: ours, and the `baseline` process's if there is one. `ours(what, calls)` times our calls;
    `turn_s`: target seconds of a round; calls longer than `long_s` need no warm-up; `pause()` precedes each round. `backends` of
    the baseline are interleaved separately, those that fail are dropped."""
    call_s, sides = ours(what, 1)[0], {"ours": what}
    requested = {name: f"{what} {name}" for name in backends} or {"peer": what}
    for name, call in requested.items() if baseline else ():
        assert baseline
        try:
            baseline.run(case, call, calls=1, warm_up=0)
            call_s = max(call_s, baseline.run(case, call, calls=1, warm_up=0)[0])
        except BaselineError:
            if not backends:
                raise
        else:
            sides[name] = call
    calls, warm_up = max(1, round(turn_s / call_s)), int(call_s < long_s)

    def timed_round(name: str) -> list[float]:
        pause()
        if name == "ours":
            return ours(what, warm_up + calls)[warm_up:]
        assert baseline
        return baseline.run(case, sides[name], calls=calls, warm_up=warm_up)

    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(seconds) if i % 2 else reversed(list(seconds)):
            seconds[name].append(timed_round(name))
    return seconds
