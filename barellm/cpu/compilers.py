"""Objects that the cache lacks, compiled in one process per core: LLVM inside llvmlite compiles in one thread at a time.

A helper process gets IR through a pipe and sends objects back. It decides nothing, so nothing depends on it: where one cannot
be started, is killed or hangs, this process compiles what is missing. It ends with its input, so it outlives its parent by one
object at most, and it is in a process group of its own, so Ctrl-C is not its business.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from barellm.cpu import jit
from barellm.cpu.isa import ISA

SHARE = 4  # objects for each helper at least: starting one costs as much as compiling a few
LATE_S = 0.5  # nothing else to do for so long: what a helper still holds is compiled here as well
LENGTH = struct.Struct("<q")
START = """
import json, sys
path, isa = json.loads(sys.argv[1])
sys.path[:] = path
from barellm.cpu.compilers import serve
serve(isa)
"""


def cached_objects(emitters: dict[str, Callable[[], str]], isa: ISA, *, processes: int) -> list[bytes]:
    """The object of each key. What the cache does not have is compiled from the key's IR, by this process and up to
    `processes` - 1 others, and kept."""
    found = {key: jit.load(key, isa) for key in emitters}
    missing = [key for key, code in found.items() if code is None]
    if missing:
        queue = Queue()
        helpers: list[Helper] = []
        try:
            for _ in range(min(processes - 1, len(missing) // SHARE)):
                helpers.append(Helper(isa, queue))
            for key in missing:  # helpers start meanwhile, and compile what there is already
                queue.add(key, emitters[key]())
            compiled = queue.finish(isa)
        finally:
            queue.close()
            for helper in helpers:
                helper.close()
        for key, code in compiled.items():
            jit.keep(key, isa, code)
        found |= compiled
        jit.prune()
    return [code for code in found.values() if code is not None]


class Queue:
    """IR that waits for a compiler, the longest first; what is being compiled; and the objects."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, str] = {}
        self._held: dict[str, str] = {}  # by helpers, oldest first
        self._compiled: dict[str, bytes] = {}
        self._closed = False

    def add(self, key: str, ir: str) -> None:
        with self._changed:
            self._waiting[key] = ir
            self._changed.notify()

    def take(self) -> tuple[str, str] | None:
        """For a helper: the next key and its IR, once there is one; None when nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            key = self._longest()
            self._held[key] = ir = self._waiting.pop(key)
            return key, ir

    def put(self, key: str, code: bytes | None) -> None:
        """A helper's object; None gives the key back."""
        with self._changed:
            ir = self._held.pop(key, None)
            if code is not None:
                self._compiled[key] = code
            elif ir is not None:
                self._waiting[key] = ir
            self._changed.notify_all()

    def finish(self, isa: ISA) -> dict[str, bytes]:
        """Compile here too until every object is there."""
        while (job := self._own()) is not None:
            key, ir = job
            code = jit.compile_object(ir, isa)
            with self._changed:
                self._held.pop(key, None)
                self._compiled[key] = code
        return self._compiled

    def close(self) -> None:
        """Nothing more to compile: helpers' threads end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _own(self) -> tuple[str, str] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._held, LATE_S)
            if self._waiting:
                key = self._longest()
                return key, self._waiting.pop(key)
            return next(iter(self._held.items()), None)

    def _longest(self) -> str:
        return max(self._waiting, key=lambda key: len(self._waiting[key]))


class Helper:
    """A process that compiles what the queue gives it, and the thread that talks to it."""

    def __init__(self, isa: ISA, queue: Queue) -> None:
        self._queue, self._process = queue, start(isa)
        self._thread = threading.Thread(target=self._feed, daemon=True)
        if self._process:
            try:
                self._thread.start()
            except RuntimeError:  # no more threads
                self._process.kill()

    def _feed(self) -> None:
        assert self._process and self._process.stdin and self._process.stdout
        while (job := self._queue.take()) is not None:
            key, ir = job
            code = None
            try:
                write(self._process.stdin, ir.encode())
                code = read(self._process.stdout)
            except OSError:
                pass
            self._queue.put(key, code)
            if code is None:  # gone, or the IR is at fault: this process will see
                return

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process:
            self._process.kill()
            if self._thread.ident:
                self._thread.join()
            with self._process, contextlib.suppress(OSError):  # closes the pipes, and waits
                self._process.stdin.close()  # type: ignore[union-attr]  (of a broken pipe: what it holds is lost)


def start(isa: ISA) -> subprocess.Popen[bytes] | None:
    """A helper process, or None where there can be none."""
    if not sys.executable or getattr(sys, "frozen", False):  # embedded, or an executable that is not Python
        return None
    path = [*map(str, sys.path), str(Path(__file__).parents[2])]
    command = [sys.executable, "-I", "-S", "-c", START, json.dumps([path, asdict(isa)])]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
    except OSError:  # no process, no memory
        return None


def serve(isa: dict) -> None:
    """The helper's side: IR in, objects out."""
    target = ISA(**isa)
    while (ir := read(sys.stdin.buffer)) is not None:
        write(sys.stdout.buffer, jit.compile_object(ir.decode(), target))


def write(stream: IO[bytes], data: bytes) -> None:
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """What `write` wrote; None at the end of the stream, also within."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(*LENGTH.unpack(head))
    return data if len(data) == LENGTH.unpack(head)[0] else None
