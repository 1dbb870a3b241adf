"""A baseline in a process of its own, whose calls are timed in interleaved rounds with ours (peers/serving.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from barellm.tools.bench.interleaved import BaselineError


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
def opened(script: Path, cases: list[dict[str, Any]], *, device: str, environment: dict[str, str]) -> Iterator[Baseline]:
    """The process of a baseline."""
    baseline = Baseline(script, cases, device=device, environment=environment)
    try:
        yield baseline
    finally:
        baseline.end()
