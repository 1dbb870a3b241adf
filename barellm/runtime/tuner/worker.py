"""The parent's side of the child process: requests with a time limit, a new child where one crashed or hung."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any


class Lost(Exception):
    """The child did not answer: why."""


class Worker:
    """A child that has a piece of work open. `child`: the module that it runs; `how`: extra arguments of every `open`; `limit`:
    seconds that one request may take."""

    def __init__(
        self, child: str, *how: Any, limit: float, environment: dict[str, str] | None = None, opening_s: float = 60.0
    ) -> None:
        self.child, self.how, self.limit = child, how, limit
        self.environment, self.opening_s = environment or {}, opening_s
        self.work: Any = None
        self._checked: set[Any] = set()  # by the child that lives
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._answer = b""

    def open(self, work: Any) -> None:
        """Prepare operands and what the default gives. Lost where that is not what it must be."""
        self.work, self._checked = None, set()
        answer = self._ask("open", work, *self.how, limit=self.limit + self.opening_s)
        if reason := answer.get("rejected"):
            raise Lost(f"the default: {reason}")
        self.work = work

    def check(self, candidate: Any) -> str:
        """Why the candidate is rejected, or ""."""
        try:
            answer = self._ask("check", candidate)
        except Lost as why:
            self._replace()
            return str(why)
        reason = answer.get("rejected", "")
        if answer.get("spoilt"):  # the child can do nothing more
            self._replace()
        if not reason:
            self._checked.add(candidate)
        return reason

    def time(self, candidates: list[Any], rounds: int) -> tuple[list[list[float]], float]:
        """The ratios to the default by candidate and round, and the seconds of the default. Only a candidate that was checked is
        timed: by this child before, or else now. Raises Lost if the child did not come back."""
        try:
            for candidate in candidates:
                if candidate not in self._checked and (reason := self.check(candidate)):
                    raise Lost(f"it was right once, and now: {reason}")
            found = self._ask("time", candidates, rounds)
        except Lost:
            self._replace()
            raise
        return found["ratios"], found["default_s"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _replace(self) -> None:
        """A new child, which has checked nothing."""
        work = self.work
        self.close()
        if work is not None:
            self.open(work)

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the child)
        self._answer = b""
        environment = os.environ | self.environment
        # A session of its own: Ctrl-C is for the parent, which then ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        return self._process

    def _ask(self, name: str, *arguments: Any, limit: float | None = None) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        request = pickle.dumps((name, arguments))
        try:
            process.stdin.write(struct.pack("<Q", len(request)) + request)
            process.stdin.flush()
        except BrokenPipeError:
            raise Lost(self._ended(process)) from None
        limit = limit or self.limit
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._answer:
                left = end - time.monotonic()
                if left <= 0 or not waiting.select(left):
                    raise Lost(f"no answer within {limit:.0f} s: it hangs")
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise Lost(self._ended(process))
                self._answer += part
        line, self._answer = self._answer.split(b"\n", 1)
        answer = json.loads(line)
        if "failed" in answer:
            raise Lost(f"it failed at {name!r}: {answer['failed'].strip().splitlines()[-1]}")
        return answer

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        how = f"ended with {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("LLVM ERROR")] or lines[-1:]
        return f"its process {how}" + (f": {said[0].strip()[:200]}" if said else "")
