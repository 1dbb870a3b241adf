"""Processes with a time limit, which are ended with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERRUPTED_S = 20.0  # that a process has to end by itself once it is interrupted
KILLED_S = 10.0  # that the system may take for one that is killed: the driver clears up after it
LOOK_S = 0.1  # between two looks for the file `begun`


@dataclass(frozen=True)
class Done:
    """`status`: None where it ran past its limit. `out` and `err`: what it printed, also then."""

    status: int | None
    out: str
    err: str

    @property
    def why(self) -> str:
        """In a few words, what became of one that did not end well."""
        how = "it ran past its limit" if self.status is None else f"it ended with status {self.status}"
        return f"{how}: {(self.err or self.out).strip()[-600:]}"


def run(
    command: list[str],
    *,
    limit_s: float,
    environment: dict[str, str] | None = None,
    together: bool = False,
    interrupt: bool = False,
    begun: Path | None = None,
    start_s: float = 0.0,
) -> Done:
    """`together`: both kinds of output in `out`. `interrupt`: at the limit it is first asked to end, as by Ctrl-C. `begun`: a file
    that the process makes when its work begins; the limit counts from there, or at the latest from `start_s` on."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out if together else err,
            process_group=0,
            env=os.environ | (environment or {}),
        )
        try:
            if begun is not None:
                _wait_for(process, begun, start_s)
            status = _wait(process, limit_s)
            if status is None and interrupt:
                process.send_signal(signal.SIGINT)
                _wait(process, INTERRUPTED_S)
        finally:
            end(process)
        for file in (out, err):
            file.seek(0)
        return Done(status, out.read(), err.read())


def _wait_for(process: subprocess.Popen[bytes], file: Path, seconds: float) -> None:
    """Until the file is there, the process has ended or the time is over."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end and _wait(process, LOOK_S) is None:
        pass


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, its group and everything that they started, groups of their own included."""
    below = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait(process, KILLED_S)


def descendants(pid: int) -> list[int]:
    """Every process below this one, as far as /proc tells."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
