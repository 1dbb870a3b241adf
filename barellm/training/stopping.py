"""Ctrl-C once ends the run after the step; twice ends it at once. SIGTERM counts as one Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """While entered, the first signal sets `status` (130 for SIGINT, 143 for SIGTERM: scripts must not take a stopped
    run for a finished one); the next ends the process with it, whatever native code other threads are running."""

    def __init__(self) -> None:
        self.status = 0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.status != 0

    def __enter__(self) -> Stopping:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.status:
            os.write(2, b"\nbarellm: stopped at once, without a checkpoint of the last steps\n")
            # RuntimeError: the signal came inside a write to the same stream.
            with contextlib.suppress(RuntimeError, OSError):
                sys.stdout.flush()
            os._exit(self.status)
        self.status = 128 + number
        os.write(2, b"\nbarellm: stopping after this step; once more to stop at once\n")
