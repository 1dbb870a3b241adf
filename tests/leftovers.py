"""Threads and processes that outlive the test that started them: they would run beside later tests, and fail those."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from barellm.kernels import executor

END_S = 20.0


def running() -> dict[object, str]:
    """Threads of Python and child processes, each with what it is. A library's own class of thread, such as the monitor that tqdm
    starts once a process, is that library's."""
    found: dict[object, str] = {
        t: f"thread {t.name}, {_target(t)}"
        for t in threading.enumerate()
        if t.name != "transfers"  # of a rank: it ends with the rank's process
        and type(t).__module__.split(".")[0] in ("threading", "barellm", "benchmarks", "tests")
    }
    return found | {pid: f"process {pid}, {_command(pid)}" for pid in _children()}


def _target(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else type(thread).__name__


def _children() -> Iterator[int]:
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            yield from map(int, file.read_text().split())
        except OSError:  # a thread that has ended, or a system without /proc
            continue


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def left(before: dict[object, str]) -> list[str]:
    """What runs that did not run before, once it had time to end: a session that only a cycle holds is collected first. The
    threads that all array functions share stay for the next test."""
    new = running().keys() - before.keys() - _shared()
    if new:
        gc.collect()
    end = time.monotonic() + END_S
    while new and time.monotonic() < end:
        time.sleep(0.01)
        new &= running().keys()
    names = running()
    return sorted(names[what] for what in new & names.keys())


def _shared() -> set[object]:
    found = executor._executor
    return {t for pool in (found.pool, found.here) for t in (pool._leader, *pool._workers)} if found else set()
