"""Noticing that a rank is gone. Each tells the others twice a second that it is there, and how many waits it has begun.

One that is silent, or that the others wait for in vain while it goes on, ends the run on all ranks: whoever notices first says
in one line which it is, and ends its process; the launcher ends the rest.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from barellm.errors import UserError

BEAT_S = 0.5
LIMIT_S = 20.0  # of silence, or of being late
SPINS = 200  # looks in a row before a waiting rank lets others of its machine have the core for longer
NAP_S = 0.0002


def limit_seconds() -> float:
    """`BARELLM_RANK_LIMIT`, else 20."""
    asked = os.environ.get("BARELLM_RANK_LIMIT")
    if asked is None:
        return LIMIT_S
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not 2 * BEAT_S < seconds < float("inf"):
        raise UserError(f"BARELLM_RANK_LIMIT is {asked!r}, expected seconds, more than {2 * BEAT_S:g}")
    return seconds


class Watch:
    """`comm`: a communicator of its own, which nobody else uses. `fail` gets the line that names the rank at fault, and does not
    return."""

    def __init__(self, mpi: Any, comm: Any, *, fail: Callable[[str], None] | None = None) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank, self._limit = comm.Get_rank(), limit_seconds()
        self._fail = fail or self._end
        self._others = [rank for rank in range(comm.Get_size()) if rank != self._rank]
        now = time.monotonic()
        self._heard = dict.fromkeys(self._others, now)
        self._begun = dict.fromkeys(self._others, 0)
        self._waits = 0  # that this rank has begun
        self._since: float | None = None  # when the wait began in which it is, unless that is patient
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="watch", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, *, patient: bool = False) -> Iterator[Callable[[], None]]:
        """While entered, this rank waits for others: for one that is late only so long, unless it is `patient`. Gives a function to
        call between two looks at what it waits for."""
        self._waits += 1
        self._since = None if patient else time.monotonic()
        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks < SPINS:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

        try:
            yield look
        finally:
            self._since = None

    def close(self) -> None:
        """End the watch, after all ranks have met: silence means nothing any more."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        inbox = {rank: np.zeros(1, np.int64) for rank in self._others}
        coming = {rank: self._comm.Irecv(inbox[rank], rank) for rank in self._others}
        going: dict[int, Any] = dict.fromkeys(self._others, self._mpi.REQUEST_NULL)
        outbox = {rank: np.zeros(1, np.int64) for rank in self._others}
        last = time.monotonic()
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if now - last > 4 * BEAT_S:  # this process itself was stopped meanwhile: the others may be well
                self._heard = dict.fromkeys(self._others, now)
                self._since = None if self._since is None else now
            last = now
            for rank in self._others:
                if going[rank].Test():
                    outbox[rank][0] = self._waits
                    going[rank] = self._comm.Isend(outbox[rank], rank)
                while coming[rank].Test():
                    self._heard[rank], self._begun[rank] = now, int(inbox[rank][0])
                    coming[rank] = self._comm.Irecv(inbox[rank], rank)
            if words := self.fault(now):
                self._fail(words)
        for request in coming.values():
            request.Cancel()
            request.Wait()

    def fault(self, now: float) -> str:
        """What is wrong with which rank; "" if nothing is."""
        for rank, heard in self._heard.items():
            if now - heard > self._limit:
                return f"rank {rank} has not been heard of for {now - heard:.0f} s: the run is ended"
        since = self._since
        if since is not None and now - since > self._limit:
            for rank, begun in self._begun.items():
                if begun < self._waits:
                    return f"rank {rank} is {now - since:.0f} s later than the others: the run is ended"
        return ""

    def _end(self, words: str) -> None:
        now = time.monotonic()
        well = [rank for rank, heard in self._heard.items() if now - heard < self._limit / 2]
        if min([self._rank, *well]) == self._rank:
            sys.stdout.flush()
            os.write(2, f"barellm: error: {words}\n".encode())
        else:
            time.sleep(2 * BEAT_S)  # the first end is the launcher's sign to end all
        end_all(self._comm, 1)


def end_all(comm: Any, status: int) -> NoReturn:
    """End this process and all others of the run, also those that do not answer."""
    threading.Timer(BEAT_S * 4, os._exit, (status,)).start()  # where MPI cannot
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it would say so, in words of its own
    comm.Abort(status)
    os._exit(status)
