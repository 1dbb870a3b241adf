"""The output of a run: plain lines in a log, one live line in a terminal, or JSON lines for machines."""

import errno
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Console:
    """`json_lines`: stdout carries JSON objects only, one a line. Otherwise text; `progress` overwrites itself in a
    terminal and becomes a line every `PLAIN_S` seconds elsewhere. `several`: a launcher passes the output on, which may give
    each of its processes a terminal of its own and write to a file."""

    LIVE_S = 0.2
    PLAIN_S = 5.0
    INSIDE_S = 60.0
    SHORT_S = 1.0  # evaluations and texts up to here say nothing on the way

    def __init__(self, *, json_lines: bool = False, stream: TextIO | None = None, several: bool = False) -> None:
        self.stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115  (closed: a daemon's, `>&-`)
        self.json_lines = json_lines
        self.notebook = type(self.stream).__module__.startswith("ipykernel")  # its cells take a carriage return, and no codes
        self.live = not json_lines and not several and (self.stream.isatty() or self.notebook)
        self._open = 0  # characters of the live line
        self._next = 0.0
        self.on_lost: Callable[[], None] | None = None

    def due(self, *, inside: bool = False) -> bool:
        """Whether a progress line is wanted now: asked before it is made. `inside` a step a log gets few."""
        wait = self.INSIDE_S - self.PLAIN_S if inside and not self.live else 0.0
        return not self.json_lines and time.monotonic() >= self._next + wait

    def progress(self, text: str) -> None:
        """Show one line of progress: it replaces the last one in a terminal, and is a plain line elsewhere."""
        self._next = time.monotonic() + (self.LIVE_S if self.live else self.PLAIN_S)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            if len(text) > width:  # its last numbers are left out, none is cut
                text = text[: width + 2].rpartition("  ")[0] or text[:width]
            self._erase()
            self._write(text)
            self._open = len(text)
        else:
            self.line(text)

    def evaluating(self, windows: int) -> Callable[[int], None]:
        """A progress callback for an evaluation of so many windows; one that ends at once stays silent."""
        tell = self._patiently()
        return lambda done: tell(lambda: f"evaluating: {done} of {windows} windows")

    def megabytes(self, doing: str) -> Callable[[int, int], None]:
        """A callback (bytes done, bytes in all or 0) that shows megabytes, the rate and the time left."""
        show_due, begin, start = self._patiently(), time.monotonic(), [-1]

        def text(done: int, total: int) -> str:
            rate = (done - start[0]) / max(time.monotonic() - begin, 1e-3)
            of = f" of {total / 1e6:,.1f}" if total else ""
            left = f", {duration((total - done) / rate)} left" if total and rate else ""
            return f"{doing}: {done / 1e6:,.1f}{of} MB, {rate / 1e6:,.1f} MB/s{left}"

        def update(done: int, total: int) -> None:
            if start[0] < 0:
                start[0] = done  # a run that goes on has not done this now
            show_due(lambda: text(done, total))

        return update

    def _patiently(self) -> Callable[[Callable[[], str]], None]:
        begin = time.monotonic()

        def tell(words: Callable[[], str]) -> None:
            if time.monotonic() - begin > self.SHORT_S and self.due():
                self.progress(words())

        return tell

    def clear(self) -> None:
        if self._open:
            self._erase()
            self._open = 0

    def _erase(self) -> None:
        self._write(f"\r{' ' * self._open}\r" if self.notebook else "\r\x1b[2K")

    def line(self, text: str = "") -> None:
        if self.json_lines:
            return
        self.clear()
        self._write((fitted(text, shutil.get_terminal_size().columns) if self.live else text) + "\n")

    def record(self, row: dict[str, Any]) -> None:
        """A row of the metrics, shown only as JSON."""
        if self.json_lines:
            self._write(json.dumps(row) + "\n")

    def _write(self, text: str) -> None:
        """Write to the stream without ever failing the run: if the reader is gone, call `on_lost` and discard output from then on;
        if the disk behind it is full, only this text is lost."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if self.on_lost is None:
                raise
            if lost := error.errno in (errno.EPIPE, errno.EIO):
                self.on_lost()
            fd = self.stream.fileno()
            saved_fd = os.dup(fd)
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), fd)
                self.stream.flush()  # what it holds would fail again at the next line, and at the end of the process
            if not lost:
                os.dup2(saved_fd, fd)
            os.close(saved_fd)

    def can_show(self, text: str) -> bool:
        """Whether the stream's encoding has these characters."""
        try:
            text.encode(self.stream.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True


@contextmanager
def evaluation_progress(windows: int) -> Iterator[Callable[[int], None]]:
    """A callback for an evaluation of so many windows; what it shows, on a terminal alone, is cleared at the end."""
    console = Console(json_lines=not sys.stderr.isatty(), stream=sys.stderr)
    yield console.evaluating(windows)
    console.clear()


def fitted(text: str, columns: int) -> str:
    """Wrap text to a terminal's width: words below the first word behind a title, sample lines (" | ") anywhere."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= columns:
            lines.append(line)
        elif line.startswith("  | "):
            size = max(8, columns - 4)
            lines += [f"  | {line[at : at + size]}" for at in range(4, len(line), size)]
        else:
            how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * 9}
            lines += textwrap.wrap(line, columns, **how)
    return "\n".join(lines)


def show(text: str, stream: TextIO | None = None) -> None:
    """Print a text, on stdout unless another stream is given, in lines that a terminal does not break."""
    to = stream or sys.stdout
    print(fitted(text, shutil.get_terminal_size().columns) if to.isatty() else text, file=to, flush=True)


def duration(seconds: float) -> str:
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def in_words(seconds: float) -> str:
    """About how long, in the unit that a person would take: 40 seconds, 12 minutes, 5.2 hours, 9 days, 7 months."""
    for limit, unit, name, digits in (
        (90, 1, "seconds", 0), (90 * 60, 60, "minutes", 0), (48 * 3600, 3600, "hours", 1), (60 * 86400, 86400, "days", 0),
        (float("inf"), 30.4 * 86400, "months", 0),
    ):  # fmt: skip
        if seconds < limit:
            return f"{seconds / unit:,.{digits}f} {name}"
    return "for ever"


def short(count: float) -> str:
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if abs(count) < 0.9995 * limit:  # or it would be rounded to 1e+03
            return f"{count / (limit / 1e3):.3g}{unit}"
    return f"{count / 1e12:.3g}T"
