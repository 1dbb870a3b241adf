"""What the system counts for this process: time since its start, memory, page faults, switches; and Python's calls."""

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def seconds_since_start() -> float | None:
    """Wall time since the process began, to 0.01 s; None where the system does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError):
        return None


def resident_bytes() -> tuple[int, int]:
    """(now, the most so far). The peak of getrusage would be a parent's, for a process that was forked from a large one."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # pyright: ignore
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak


@dataclass(frozen=True)
class Usage:
    """Counts of the whole process, all threads."""

    cpu_s: float
    minor_faults: int
    major_faults: int
    voluntary_switches: int
    involuntary_switches: int

    @classmethod
    def now(cls) -> "Usage":
        u = resource.getrusage(resource.RUSAGE_SELF)
        return cls(u.ru_utime + u.ru_stime, u.ru_minflt, u.ru_majflt, u.ru_nvcsw, u.ru_nivcsw)

    def since(self, before: "Usage") -> "Usage":
        return Usage(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


class CallCounter:
    """Counts Python's calls on every thread that is started inside `watching_new_threads`, and on the thread that counts."""

    def __init__(self) -> None:
        self.calls = self.c_calls = 0
        self._counting = False

    def _event(self, frame: Any, event: str, arg: Any) -> None:
        if self._counting:
            self.calls += event == "call"
            self.c_calls += event == "c_call"

    @contextmanager
    def watching_new_threads(self) -> Iterator[None]:
        threading.setprofile(self._event)
        try:
            yield
        finally:
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.calls = self.c_calls = 0
        self._counting = True
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._counting = False
