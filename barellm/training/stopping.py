"""Ctrl-C once ends the run after the step; twice ends it at once. SIGTERM and SIGHUP count as one Ctrl-C."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """While entered, the first signal sets `status`: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP (141 where only the
    output's reader went away), since scripts must not take a stopped run for a finished one. The next signal ends the
    process with it, whatever native code other threads are running."""

    tells = True  # of the first signal

    def __init__(self) -> None:
        self.status = 0
        self._requested = False  # by somebody else than another rank: the next signal is the second
        self.terminated: float | None = None  # time.monotonic() of a SIGTERM
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.status != 0

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is not threading.main_thread():
            return self  # the system gives signals to the main thread alone
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def request(self, status: int) -> None:
        """Ask for the end after this step without a signal."""
        self._requested, self.status = True, self.status or status

    def agree(self, statuses: Sequence[int]) -> None:
        """Hear what all ranks of the run have been asked, this one included, which has obeyed already where it is alone."""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the first signal asks the loop to stop, the second ends the process at once."""
        if self._requested:
            _say(b"\nbarellm: stopped at once, without a checkpoint of the last steps\n")
            # RuntimeError: the signal came inside a write to the same stream.
            with contextlib.suppress(RuntimeError, OSError):
                sys.stdout.flush()
            os._exit(self.status)
        self._requested, self.status = True, self.status or 128 + number
        if number == signal.SIGTERM:
            self.terminated = time.monotonic()
        if self.tells:
            _say(b"\nbarellm: stopping after this step; once more to stop at once\n")


class Agreed(Stopping):
    """The same for a rank of several, which all end after the same step: a signal to one of them counts when they have agreed."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tells, self._agreed = rank == 0, False

    def __bool__(self) -> bool:
        return self._agreed

    def agree(self, statuses: Sequence[int]) -> None:
        # Not what this rank alone knows: a signal may have come since it told the others, who would wait for it in the next step.
        reported = max(statuses)
        self._agreed = reported != 0
        self.status = self.status or reported


def _say(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        os.write(2, text)
