"""What a run says: plain lines in a log, one live line in a terminal, or JSON lines for machines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO


class Console:
    """`json_lines`: stdout carries JSON objects only, one a line. Otherwise text; `progress` overwrites itself in a
    terminal and becomes a line every `PLAIN_S` seconds elsewhere."""

    LIVE_S = 0.2
    PLAIN_S = 5.0
    SHORT_S = 1.0  # evaluations up to here say nothing on the way

    def __init__(self, *, json_lines: bool = False, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.json_lines = json_lines
        self.live = not json_lines and self.stream.isatty()
        self._open = False  # a live line stands in the terminal
        self._next = 0.0
        self.on_lost: Callable[[], None] | None = None

    def due(self) -> bool:
        """Whether a progress line is wanted now: asked before it is made."""
        return not self.json_lines and time.monotonic() >= self._next

    def progress(self, text: str) -> None:
        self._next = time.monotonic() + (self.LIVE_S if self.live else self.PLAIN_S)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[2K{text[:width]}")
            self._open = True
        else:
            self.line(text)

    def evaluating(self, windows: int) -> Callable[[int], None]:
        """For the `report` of an evaluation of so many windows: says how far it is. One that is over at once stays silent."""
        begin = time.monotonic()

        def report(done: int) -> None:
            if time.monotonic() - begin > self.SHORT_S and self.due():
                self.progress(f"evaluating: {done} of {windows} windows")

        return report

    def clear(self) -> None:
        """Take the live line away."""
        if self._open:
            self._write("\r\x1b[2K")
            self._open = False

    def line(self, text: str = "") -> None:
        if self.json_lines:
            return
        self.clear()
        self._write(text + "\n")

    def record(self, row: dict[str, Any]) -> None:
        """A row of the metrics, shown only as JSON."""
        if self.json_lines:
            self.final(row)

    def final(self, row: dict[str, Any]) -> None:
        """A JSON line, in every mode."""
        if self._open:
            self.line()
        self._write(json.dumps(row) + "\n")

    def _write(self, text: str) -> None:
        """A reader that went away must not cost the steps since the last checkpoint: `on_lost` hears of it once, what is
        said later is dropped. A full disk behind the stream costs the text only."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if self.on_lost is None:
                raise
            if error.errno in (errno.EPIPE, errno.EIO):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
                self.on_lost()

    def can_show(self, text: str) -> bool:
        """Whether the stream's encoding has these characters."""
        try:
            text.encode(self.stream.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True


def duration(seconds: float) -> str:
    """1:05, 2:03:04; for what is left or was spent."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def short(count: float) -> str:
    """950, 12.3k, 4.56M, 7.89G."""
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if abs(count) < limit:
            return f"{count / (limit / 1e3):.3g}{unit}"
    return f"{count / 1e12:.3g}T"
