"""Waits of ranks that are threads of one process. They end with what they wait for, where a rank has failed, or where nobody
works: how long a rank takes says how busy the machine is, and nothing about the rank."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

IDLE_S = 20.0
POLL_S = 0.05
_of = threading.local()


class Failed(AssertionError):
    """Another rank has failed, which is what the test is told of."""


def group(failed: threading.Event) -> None:
    """The calling thread is a rank of a group, in which `failed` is set where one fails."""
    _of.failed = failed


def wait(arrived: Callable[[float], bool], *, idle_s: float = IDLE_S, failed: threading.Event | None = None) -> bool:
    """Whether `arrived(seconds)`, which waits for so long at most, comes true before this process has done nothing at all for
    `idle_s` seconds. Raises Failed where a rank of the group has failed."""
    failed = failed or getattr(_of, "failed", None)
    window = min(1.0, idle_s)
    begin, used, idle = time.monotonic(), time.process_time(), 0.0
    while not arrived(min(POLL_S, idle_s)):
        if failed is not None and failed.is_set():
            raise Failed("another rank has failed")
        if (passed := time.monotonic() - begin) >= window:
            idle = idle + passed if time.process_time() - used < 0.05 * passed else 0.0
            begin, used = time.monotonic(), time.process_time()
        if idle >= idle_s:
            return False
    return True


def receive(box: queue.Queue, *, failed: threading.Event | None = None, idle_s: float = IDLE_S) -> Any:
    """What comes first into a box. Raises queue.Empty where it never does."""
    found: list[Any] = []

    def arrived(seconds: float) -> bool:
        with contextlib.suppress(queue.Empty):
            found.append(box.get(timeout=seconds))
        return bool(found)

    if not wait(arrived, failed=failed, idle_s=idle_s):
        raise queue.Empty
    return found[0]
