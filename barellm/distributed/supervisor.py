"""Supervision of the ranks of one machine from outside. Ranks send each other heartbeats (`distributed.heartbeat`) from their first
collective to their last; one that is stopped, or exits, before or after that would hang the others for ever.

`barellm train --ranks` looks from the launcher (`Supervisor`). Under `mpirun` or `srun` the ranks do it (`PeerSupervisor`)."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from barellm.distributed import exit_order, heartbeat, world

LOOK_S, SOON_S = 1.0, 0.002  # between two looks; until all ranks have been seen
FAILED_S = 3.0  # for which the others may go on after a rank that has ended by itself, and not well
NEVER_SEEN = 0  # stands for processes that have ended before the first look
LATER = 1.25  # times the watch's limit: where the watch is on, it speaks


class Supervisor(threading.Thread):
    """Kills all ranks below the process `launcher` (mpiexec) where one has been stopped for long, or has ended long before the
    others. `count`: how many there will be. `alone`: this ends all where one is killed, or `failed_s` seconds after one has failed.
    `numbers` is {process: rank} of all that it has seen, and `words` what it has done, or "". After `end`, `first` is the
    rank's process that has ended first, and how (as in `ExitOrder.status`); None where nobody knows."""

    def __init__(self, launcher: int, count: int = 0, alone: bool = False, failed_s: float = FAILED_S) -> None:
        super().__init__(name="supervisor", daemon=True)
        self.numbers: dict[int, int] = {}
        self.words = ""
        self.first: tuple[int, int | None] | None = None
        self._launcher, self._count, self._alone, self._failed_s = launcher, count, alone, failed_s
        self._limit = LATER * heartbeat.limit_seconds()
        self._seconds: dict[int, float] = {}  # for which a process has been stopped, or gone
        self._exit_order, self._over = exit_order.ExitOrder(), False

    def run(self) -> None:
        """Thread: check the ranks until the end, often until all have been seen."""
        last = time.monotonic()
        while True:
            self._exit_order.wait(LOOK_S if len(self.numbers) >= self._count else SOON_S)
            if self._over:
                return
            now = time.monotonic()
            passed, last = min(now - last, 2 * LOOK_S), now  # this process may have been stopped itself
            if self.look(passed):
                return

    def end(self) -> None:
        self._over = True
        self._exit_order.wake()
        self.join()
        self._exit_order.wait(0)  # for those that have ended since the last look
        self.first = next(((process, self._exit_order.status(process)) for process in self._exit_order.order), None)
        self._exit_order.close()

    def look(self, passed: float) -> bool:
        """Check all ranks, `passed` seconds after the last check: where one has failed, or has been stopped or gone for too long,
        kill all. True if they had to be killed. Adds to `numbers`, `_seconds` and the exit order; sets `words` after a timeout."""
        found = {process: rank for process, rank in ranks_below(self._launcher) if _state(process) != "Z"}
        self.numbers |= found
        for process in found:
            self._exit_order.follow(process)
        missing = [process for process in self.numbers if process not in found or _state(process) in "Tt"]  # T, t: stopped, traced
        if self._alone and len(self.numbers) < self._count:
            missing.append(NEVER_SEEN)
        # Only while others live (`found`): when all have ended there is nobody to kill. A process that came back counts from 0.
        self._seconds = {process: self._seconds.get(process, 0.0) + passed for process in missing if found}
        for process, seconds in self._seconds.items():
            if self._alone and process in self._exit_order.order and (status := self._exit_order.status(process)) != 0:
                killed = status is not None and os.WIFSIGNALED(status)
                if killed or seconds > self._failed_s:
                    self.kill(found)
                    return True
            elif seconds > self._limit:
                culprit = f"rank {self.numbers[process]} (process {process})" if process in self.numbers else "a rank"
                state = "has been stopped for" if process in found else "has been gone for"
                self.words = f"{culprit} {state} {seconds:.0f} s: the run is ended"
                self.kill(found)
                return True
        return False

    def kill(self, processes: Iterable[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class PeerSupervisor(Supervisor):
    """A guard in a rank, for those that have been started by the same process. The lowest number acts; the others wait a little."""

    def __init__(self) -> None:
        super().__init__(os.getppid())
        self._before = self._limit

    def look(self, passed: float) -> bool:
        well = sorted(rank for process, rank in ranks_below(self._launcher) if _state(process) not in "TtZ")
        own = world.rank_from_environment()
        self._limit = self._before + 3 * LOOK_S * (well.index(own) if own in well else 0)
        return super().look(passed)

    def kill(self, processes: Iterable[int]) -> None:
        os.write(2, f"barellm: error: {self.words}\n".encode())
        super().kill(process for process in processes if process != os.getpid())
        os._exit(1)


@contextmanager
def peer_supervisor() -> Iterator[None]:
    """While entered, this rank looks at the others of its machine, unless `barellm train --ranks` does."""
    if os.environ.get("BARELLM_RANKS"):
        yield
        return
    found = PeerSupervisor()
    found.start()
    try:
        yield
    finally:
        found.end()


def ranks_below(launcher: int) -> Iterator[tuple[int, int]]:
    """(process, rank) of the ranks that a launcher of this machine has started, by the variables that it gives them."""
    for process in below(launcher):
        with suppress(OSError):
            found = variables(process)
            if any(name in found for name in world.NUMBERS):
                yield process, world.rank_from_environment(found)


def variables(process: int) -> Mapping[str, str]:
    """The environment with which a process of this user was started; none during its start. OSError if unknown or gone."""
    lines = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def below(process: int) -> Iterator[int]:
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
