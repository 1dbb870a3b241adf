"""The parent's side of the child process: requests with a time limit, a new child where one crashed or hung."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from typing import Any


class Lost(Exception):
    """The child did not answer: why."""


class Worker:
    """A child that has a problem open. `module`: whose `Harness(problem, **options)` it runs; `limit`: seconds that one request
    may take, an `open` OPENING_S more."""

    OPENING_S = 60.0

    def __init__(self, module: str, *, limit: float, environment: dict[str, str] | None = None, **options: Any) -> None:
        self.module, self.options, self.limit, self.environment = module, options, limit, environment or {}
        self.problem: Any = None
        self._checked: set[Any] = set()  # by the child that lives
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, problem: Any) -> None:
        """Prepare operands and the default's results. Lost where those are not what they must be."""
        self.problem, self._checked = None, set()
        if reason := self.ask("open", problem, limit=self.limit + self.OPENING_S, **self.options).get("rejected"):
            raise Lost(f"the default: {reason}")
        self.problem = problem

    def check(self, candidate: Any) -> str:
        """Have the child run and verify a candidate; returns why it is rejected, or "". A crashed or hung child is replaced."""
        try:
            answer = self.ask("check", candidate)
        except Lost as why:
            self._replace()
            return str(why)
        reason = answer.get("rejected", "")
        if answer.get("poisoned"):  # the child can do nothing more
            self._replace()
        if not reason:
            self._checked.add(candidate)
        return reason

    def time(self, candidates: list[Any], rounds: int) -> tuple[list[list[float]], float]:
        """(time ratios to the default by candidate and round, seconds of the default). Candidates that this child has not checked
        are checked first. Raises Lost if the child crashed or hung."""
        try:
            for candidate in candidates:
                if candidate not in self._checked and (reason := self.check(candidate)):
                    raise Lost(f"it was right once, and now: {reason}")
            answer = self.ask("time", candidates, rounds)
            if reason := answer.get("rejected"):
                raise Lost(reason)
        except Lost:
            self._replace()
            raise
        return answer["ratios"], answer["default_s"]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._log.close()
            self._process = None

    def _replace(self) -> None:
        problem = self.problem
        self.close()
        if problem is not None:
            self.open(problem)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the child process, connected by a pipe, with its output in a temporary log."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the child)
        self._connection, theirs = Pipe()
        # A session of its own: Ctrl-C is for the parent, which then ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "barellm.runtime.tuner.child", str(theirs.fileno()), self.module],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=(theirs.fileno(),),
            env=os.environ | self.environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        return self._process

    def ask(self, name: str, *arguments: Any, limit: float = 0.0, **options: Any) -> dict[str, Any]:
        process, limit = self._process or self._start(), limit or self.limit
        try:
            self._connection.send((name, arguments, options))
            if not self._connection.poll(limit):
                raise Lost(f"no answer within {limit:.0f} s: it hangs{self._last()}")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise Lost(self._ended(process)) from None

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        return f"its process {how}{self._last()}"

    def _last(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        shown = [line for line in lines if line.startswith("LLVM ERROR")] or lines[-1:]
        return f": {shown[0].strip()[:200]}" if shown else ""
