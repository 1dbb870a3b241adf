"""A baseline in a process of its own, whose calls are timed in interleaved rounds with ours (benchmarks/peers/serving.py)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class BaselineError(RuntimeError):
    """A call of a baseline's failed, and its process goes on: it has no kernel for the case, say."""


class Baseline:
    """Stopped between its rounds. `facts`: what it says of itself."""

    def __init__(self, script: Path, cases: list[dict[str, Any]], *, device: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(cases), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            process_group=0,  # where we are killed the system ends it, stopped or not
        )
        self.facts = self._answer()

    def run(self, case: int, what: str, *, calls: int, warm_up: int) -> list[float]:
        """Seconds of `calls` calls, after `warm_up` that do not count."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin
        for count in (warm_up, calls) if warm_up else (calls,):
            self._process.stdin.write(json.dumps({"case": case, "what": what, "calls": count}) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            if "error" in answer:
                break
        self._process.send_signal(signal.SIGSTOP)
        if "error" in answer:
            raise BaselineError(f"PyTorch's side could not do {what!r}: {answer['error']}")
        return answer["s"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"PyTorch's side ended with status {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def opened(
    script: Path | None, cases: list[dict[str, Any]], *, device: str, environment: dict[str, str]
) -> Iterator[Baseline | None]:
    """The process of a baseline, or None if there is no script."""
    if script is None:
        yield None
        return
    baseline = Baseline(script, cases, device=device, environment=environment)
    try:
        yield baseline
    finally:
        baseline.end()


def samples(
    ours: Any, baseline: Baseline | None, case: int, *, what: str, rounds: int, turn_s: float, long_s: float, pause: Any,
    backends: tuple[str, ...] = (),
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Seconds of calls of each side by round. `ours(what, calls)`: seconds of so many calls of ours; `turn_s`: what a round should
    take; a call of `long_s` needs no call before it; `pause()` is called before each round. `backends`: of the baseline, each of
    which is interleaved under its own name, but for those that cannot do it."""
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
