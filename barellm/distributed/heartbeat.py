"""Heartbeats between ranks: failure detection. Each sends one twice a second, with how many waits it has begun.

One that is silent, or that the others wait for in vain while it goes on, or waits for something else, ends the run on all ranks:
whoever notices first says in one line which it is, and ends its process; the launcher ends the rest.

A busy machine must not look like a fault. So time is counted by a clock that hardly moves while this process gets no processor,
and a rank of this machine that is seen at work has longer."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from barellm.distributed.launcher_protocol import announce_exit, say
from barellm.errors import UserError

BEAT_S = 0.5
LIMIT_S = 20.0  # of silence, or of being late
AT_WORK = 1.25  # times as long for a rank that is seen at work
AHEAD = 2.0  # times as long for a rank that may be waiting for this one: it has the word
LAST_WORDS_S = 0.25  # for another launcher than ours to read what was said: MPICH's drops what it has not when it ends all
OUR_LAUNCHER_S = 20.0  # for ours to do so, and to end all
SPINS = 200  # looks in a row before a waiting rank lets others of its machine have the core for longer
NAP_S = 0.0002


def limit_seconds() -> float:
    """Timeout of silence in seconds: `BARELLM_RANK_LIMIT`, else LIMIT_S. UserError unless it is more than two beats."""
    requested = os.environ.get("BARELLM_RANK_LIMIT")
    if requested is None:
        return LIMIT_S
    try:
        seconds = float(requested)
    except ValueError:
        seconds = 0.0
    if not 2 * BEAT_S < seconds < float("inf"):
        raise UserError(f"BARELLM_RANK_LIMIT is {requested!r}, expected seconds, more than {2 * BEAT_S:g}")
    return seconds


class Heartbeat:
    """`comm`: a communicator used by nothing else. `fail` gets the line about the rank at fault and does not return."""

    def __init__(self, mpi: Any, comm: Any, *, fail: Callable[[str], None] | None = None) -> None:
        """Start the heartbeat thread; `comm` and `fail` as in the class's docstring."""
        self._mpi, self._comm = mpi, comm
        self._rank, self._limit = comm.Get_rank(), limit_seconds()
        self._fail = fail or self._end
        self._others = [rank for rank in range(comm.Get_size()) if rank != self._rank]
        self._clock = 0.0
        self._heard = dict.fromkeys(self._others, self._clock)
        # The waits that ranks have begun: for all, in which they have the same order, and for one, as two ranks have it.
        self._begun, self._with_us = dict.fromkeys(self._others, 0), dict.fromkeys(self._others, 0)
        self._waits, self._with = 0, dict.fromkeys(self._others, 0)
        self._one: int | None = None  # the rank for which this one waits, unless that is for all
        self._since: float | None = None  # when the wait began in which it is, unless that has no timeout
        self._near: dict[int, Process] = {}
        self.at_fault = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def look_at(self, processes: Mapping[int, int]) -> None:
        """Learn the processes of ranks on this machine: {rank: process}."""
        self._near = {rank: Process(number) for rank, number in processes.items()}

    @contextmanager
    def waiting(self, *, one: int | None = None, no_timeout: bool = False) -> Iterator[Callable[[], None]]:
        """Context manager for a wait: for a collective, or for a message to or from rank `one`. Being late counts as a fault unless
        `no_timeout`. Gives a function to call between polls, which yields the core."""
        if one is None:
            self._waits += 1
        else:
            self._with[one] += 1
        self._one = one
        self._since = None if no_timeout else self._clock
        polls = 0

        def poll() -> None:
            nonlocal polls
            polls += 1
            if polls < SPINS:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

        try:
            yield poll
        finally:
            self._since = None

    def close(self) -> None:
        """End the watch, after all ranks have met: silence means nothing any more."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        """Thread: exchange heartbeats with all ranks and call `fail` when one is at fault. MPI's own errors count as silence."""
        inbox = {rank: np.zeros(2, np.int64) for rank in self._others}
        coming = {rank: self._comm.Irecv(inbox[rank], rank) for rank in self._others}
        going: dict[int, Any] = dict.fromkeys(self._others, self._mpi.REQUEST_NULL)
        outbox = {rank: np.zeros(2, np.int64) for rank in self._others}
        last, gone = time.monotonic(), set()  # ranks that MPI itself misses: they are silent from now on
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            # Later than that, this process was stopped or had no processor: what it has not heard says nothing of the others.
            self._clock += min(now - last, 2 * BEAT_S)
            last = now
            for rank in self._others:
                if rank in gone:
                    continue
                try:
                    if going[rank].Test():
                        outbox[rank][:] = self._waits, self._with[rank]
                        going[rank] = self._comm.Isend(outbox[rank], rank)
                    while coming[rank].Test():
                        self._heard[rank] = self._clock
                        self._begun[rank], self._with_us[rank] = (int(n) for n in inbox[rank])
                        coming[rank] = self._comm.Irecv(inbox[rank], rank)
                except self._mpi.Exception:
                    gone.add(rank)
            if words := self.fault():
                self._fail(words)
        for rank, request in coming.items():
            if rank not in gone:
                request.Cancel()
                request.Wait()

    def fault(self) -> str:
        """A line about the rank at fault (set as `at_fault`), "" if there is none. A rank that waits for another is not blamed:
        candidates are those with the fewest waits begun, or silent for longest. Silence comes first; lateness counts only while
        this rank itself waits with a timeout (`_since`). Seconds are those of `_clock`."""
        limits = dict.fromkeys(self._others, self._limit)
        for rank, process in self._near.items():
            if process.works():
                limits[rank] *= AT_WORK
        for rank, heard in sorted(self._heard.items(), key=lambda item: item[1]):
            if self._clock - heard > limits[rank]:
                self.at_fault = rank
                return f"rank {rank} has not been heard of for {self._clock - heard:.0f} s: the run is ended"
        since, clock, one = self._since, self._clock, self._one
        if since is None:
            return ""
        missed = one is None or self._with_us[one] < self._with[one]  # else that rank has begun our common wait: it is not late
        # A rank may be late because it waits for another, which has begun fewer waits, or has been silent for longer.
        for rank, begun in sorted(self._begun.items(), key=lambda item: (item[1], self._heard[item[0]])):  # the likeliest first
            late = missed and (begun < self._waits or rank == one)
            if late and clock - since > limits[rank] * (AHEAD if begun > self._waits else 1):
                self.at_fault = rank
                return f"rank {rank} is {clock - since:.0f} s later than the others: the run is ended"
        return ""

    def _end(self, words: str) -> None:
        """Report the fault and end all ranks; the lowest healthy rank does it, so that one line appears."""
        # One that is late may be heard of all the same.
        heard = [rank for rank, last in self._heard.items() if self._clock - last < self._limit / 2]
        healthy = [rank for rank in heard if rank != self.at_fault]
        if min([self._rank, *healthy]) != self._rank:
            time.sleep(6 * BEAT_S)  # that one says it, and its end is the launcher's sign to end all
        # Here still: the first of those that are well has not noticed, and its line is not to be had.
        sys.stdout.flush()
        say(f"barellm: error: {words}")
        end_all(self._mpi.COMM_WORLD, 1)  # of a copy MPICH ends this process only, and srun lets the others be


class Process:
    """Another process of this machine."""

    def __init__(self, number: int) -> None:
        self._stat, self._ticks = f"/proc/{number}/stat", -1

    def works(self) -> bool:
        """Whether it wants a processor now, or has had one since the last call. False where no system says."""
        try:
            with open(self._stat, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return False
        before, self._ticks = self._ticks, int(fields[11]) + int(fields[12])
        return fields[0] in b"RD" or (fields[0] == b"S" and -1 < before < self._ticks)


def end_all(world: Any, status: int) -> NoReturn:
    """End this process and all others of the communicator `world`, also those that do not answer."""
    announce_exit(status)
    threading.Event().wait(OUR_LAUNCHER_S if os.environ.get("BARELLM_RANKS") else LAST_WORDS_S)
    threading.Timer(BEAT_S * 4, os._exit, (status,)).start()  # where MPI cannot
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it would say so, in words of its own
    world.Abort(status)
    os._exit(status)
