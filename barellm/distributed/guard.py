"""What the launcher of a run sees of its processes. Ranks watch each other (`distributed.watch`) from their first meeting to their
last; one that is stopped before or after that would hold up the others for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from barellm.distributed.watch import limit_seconds

LOOK_S = 1.0
LATER = 1.25  # times the watch's limit: where the watch is on, it speaks


class Guard(threading.Thread):
    """Kills all ranks below the process `launcher` (mpiexec) where one has been stopped for long. `numbers` is {process: rank} of
    all that it has seen, and `words` what it has done, or ""."""

    def __init__(self, launcher: int) -> None:
        super().__init__(name="guard", daemon=True)
        self.numbers: dict[int, int] = {}
        self.words = ""
        self._launcher, self._limit = launcher, LATER * limit_seconds()
        self._stopped: dict[int, float] = {}  # seconds
        self._over = threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            passed, last = min(now - last, 2 * LOOK_S), now  # this process may have been stopped itself
            if self.look(passed):
                return

    def end(self) -> None:
        self._over.set()
        self.join()

    def look(self, passed: float) -> bool:
        """Look at all ranks, `passed` seconds after the last time. True if it has ended them."""
        found = dict(ranks_below(self._launcher))
        self.numbers |= found
        stopped = [process for process in found if _state(process) in "Tt"]
        self._stopped = {process: self._stopped.get(process, 0.0) + passed for process in stopped}
        for process, seconds in self._stopped.items():
            if seconds > self._limit:
                self.words = (
                    f"rank {found[process]} (process {process}) has been stopped for {seconds:.0f} s: the run is ended"
                )
                for other in found:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
                return True
        return False


def ranks_below(launcher: int) -> Iterator[tuple[int, int]]:
    """(process, rank) of the ranks that a launcher of this machine has started, by the variable that MPICH's gives them."""
    for process in below(launcher):
        with suppress(OSError):
            found = variables(process)
            if found.get("PMI_RANK", "").isdigit():
                yield process, int(found["PMI_RANK"])


def variables(process: int) -> Mapping[str, str]:
    """The environment with which a process of this user was started. OSError where no system says, or it is gone."""
    lines = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def below(process: int) -> Iterator[int]:
    """The children of a process, and theirs."""
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from below(int(child))


def _state(process: int) -> str:
    """One letter, as ps has it; Z for one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
