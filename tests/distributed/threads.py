"""Ranks that are threads of this process: what `distributed.mpi` does by messages, by queues."""

from __future__ import annotations

import copy
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from tests.distributed import waiting
from tests.distributed.waiting import IDLE_S


class ThreadRanks:
    """One of several `runtime.ranks.Ranks`."""

    def __init__(
        self,
        rank: int,
        count: int,
        boxes: dict[tuple[int, int, str], queue.Queue],
        *,
        direct: bool = False,
        failed: threading.Event | None = None,
    ) -> None:
        self.rank, self.count, self._boxes, self.direct = rank, count, boxes, direct
        self.number, self._failed = rank, failed
        self._going: dict[int, Any] = {}

    def _put(self, kind: str, rank: int, value: Any) -> None:
        self._box(self.rank, rank, kind).put(copy.deepcopy(value))

    def _get(self, kind: str, rank: int) -> Any:
        return waiting.receive(self._box(rank, self.rank, kind), failed=self._failed)

    def _box(self, source: int, to: int, kind: str) -> queue.Queue:
        """One for all threads: a defaultdict may make two at once, and keep one."""
        return self._boxes.setdefault((source, to, kind), queue.Queue())

    def prepared(self, sends, receives):
        return lambda: self._transfer(sends, receives)

    def beginning(self, number, sends, receives):
        """What is sent is taken at once: a gradient that changes later would arrive wrong."""

        def begin() -> None:
            self._send(sends, f"round {number}")
            self._going[number] = receives

        return begin

    def ending(self, number):
        return lambda: self._receive(self._going.pop(number), f"round {number}")

    def _transfer(self, sends, receives) -> None:
        self._send(sends, "array")
        self._receive(receives, "array")

    def _send(self, sends, kind: str) -> None:
        for rank, array in sends:
            assert array.flags.c_contiguous
            self._put(kind, rank, array.reshape(-1))

    def _receive(self, receives, kind: str) -> None:
        for rank, array in receives:
            found = self._get(kind, rank)
            assert (found.size, found.dtype) == (array.size, array.dtype)
            array[...] = found.reshape(array.shape)

    def peer_addresses(self, sends):
        others = [rank for rank in range(self.count) if rank != self.rank]
        for rank in others:
            self._put("places", rank, [array.ctypes.data for to, array in sends if to == rank])
        return [(os.getpid(), self._get("places", rank)) for rank in others]

    def barrier(self, *, complete: bool = True) -> None:
        assert complete
        self.gather(None)

    def gather(self, value: Any, *, no_timeout: bool = False) -> list[Any]:
        for rank in range(self.count):
            self._put("gather", rank, value)
        return [self._get("gather", rank) for rank in range(self.count)]

    def abort(self, status: int) -> None:
        raise AssertionError(f"rank {self.rank} ends all with status {status}")

    def send(self, rank: int, value: Any, *, background: bool = False) -> None:
        self._put("background" if background else "value", rank, value)

    def receive(self, rank: int, *, no_timeout: bool = False, background: bool = False) -> Any:
        return self._get("background" if background else "value", rank)


def each_rank(count: int, work: Callable[[ThreadRanks], Any], *, direct: bool = False) -> list[Any]:
    """What `work` gives for each of `count` ranks, which run side by side. `direct`: they read each other's memory."""
    boxes: dict[tuple[int, int, str], queue.Queue] = {}
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    failed = threading.Event()

    def run(rank: int) -> None:
        waiting.group(failed)
        try:
            results[rank] = work(ThreadRanks(rank, count, boxes, direct=direct, failed=failed))
        except BaseException as error:
            errors.append(error)
            failed.set()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for t in threads:
        t.start()
    ended = [waiting.wait(lambda seconds, t=t: not (t.join(seconds) or t.is_alive()), idle_s=2 * IDLE_S) for t in threads]
    if errors:
        raise errors[0]
    assert all(ended), "a rank waits for ever"
    return results
