"""Compiles what a cache lacks, in one process per core: llvmlite compiles in one thread at a time, and Triton is Python.

A helper process receives jobs, each a text, through a pipe and sends bytes back. It decides nothing, so nothing depends on it: if
a helper cannot be started, is killed or hangs, this process compiles what is missing. A helper ends when its input ends, so it
outlives its parent by one job at most. It is in a process group of its own, so Ctrl-C does not reach it."""

import contextlib
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

LATE_S = 0.5  # nothing else to do for so long: what a helper still holds is compiled here as well
LENGTH = struct.Struct("<q")
START = """
import json, sys
path, module, argument = json.loads(sys.argv[1])
sys.path[:] = path
from barellm.runtime.compilers import Service, serve
serve(Service(module, argument))
"""

Compile = Callable[[str], bytes]


@dataclass(frozen=True)
class Service:
    """What helper processes compile with: `module.compiler(argument)` (sent as JSON) returns a function from a job to bytes."""

    module: str
    argument: Any

    def here(self) -> Compile:
        """Compile in this process."""
        return import_module(self.module).compiler(self.argument)


def compile_all(jobs: Mapping[str, Callable[[], str]], service: Service, *, processes: int, share: int) -> dict[str, bytes]:
    """Compile each key's job to bytes, with up to `processes` - 1 helpers, each worth starting for `share` jobs or more."""
    queue = Queue()
    helpers: list[Helper] = []
    try:
        for _ in range(min(processes - 1, len(jobs) // share)):
            helpers.append(Helper(service, queue))
        for key, job in jobs.items():  # helpers start meanwhile, and compile what there is already
            queue.add(key, job())
        return queue.finish(service.here()) if jobs else {}
    finally:
        queue.close()
        for helper in helpers:
            helper.close()


class Queue:
    """Jobs that wait for a compiler, the longest first; what is being compiled; and the results."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, str] = {}
        self._held: dict[str, str] = {}  # by helpers, oldest first
        self._compiled: dict[str, bytes] = {}
        self._closed = False

    def add(self, key: str, job: str) -> None:
        with self._changed:
            self._waiting[key] = job
            self._changed.notify()

    def take(self) -> tuple[str, str] | None:
        """The next key and its job for a helper, once there is one; None when nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            key = self._longest()
            self._held[key] = job = self._waiting.pop(key)
            return key, job

    def put(self, key: str, code: bytes | None) -> None:
        """A helper's result; None gives the key back."""
        with self._changed:
            job = self._held.pop(key, None)
            if code is not None:
                self._compiled[key] = code
            elif job is not None:
                self._waiting[key] = job
            self._changed.notify_all()

    def finish(self, compile_here: Compile) -> dict[str, bytes]:
        """Compile here too until every result is there."""
        while (own := self._own()) is not None:
            key, job = own
            code = compile_here(job)
            with self._changed:
                self._held.pop(key, None)
                self._compiled[key] = code
        return self._compiled

    def close(self) -> None:
        """Say that nothing more is to be compiled, so that the threads of the helpers end."""
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

    def __init__(self, service: Service, queue: Queue) -> None:
        self._queue, self._process = queue, start(service)
        self._thread = threading.Thread(target=self._feed, daemon=True)
        if self._process:
            try:
                self._thread.start()
            except RuntimeError:  # no more threads
                self._process.kill()

    def _feed(self) -> None:
        """Thread: send jobs to the process and collect results, until there are none or it fails."""
        assert self._process and self._process.stdin and self._process.stdout
        while (taken := self._queue.take()) is not None:
            key, job = taken
            code = None
            try:
                write(self._process.stdin, job.encode())
                code = read(self._process.stdout)
            except OSError:
                pass
            self._queue.put(key, code)
            if code is None:  # gone, or the job is at fault: this process will see
                return

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process:
            self._process.kill()
            if self._thread.ident:
                self._thread.join()
            with self._process, contextlib.suppress(OSError):  # closes the pipes, and waits
                self._process.stdin.close()  # type: ignore[union-attr]  (of a broken pipe: what it holds is lost)


def start(service: Service) -> subprocess.Popen[bytes] | None:
    """A helper process, or None where there can be none."""
    if not sys.executable or getattr(sys, "frozen", False):  # embedded, or an executable that is not Python
        return None
    path = [*map(str, sys.path), str(Path(__file__).parents[2])]
    command = [sys.executable, "-I", "-S", "-c", START, json.dumps([path, service.module, service.argument])]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
    except OSError:  # no process, no memory
        return None


def serve(service: Service) -> None:
    """The helper's side: jobs in, results out."""
    compile_here = service.here()
    while (job := read(sys.stdin.buffer)) is not None:
        write(sys.stdout.buffer, compile_here(job.decode()))


def write(stream: IO[bytes], data: bytes) -> None:
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """The data that `write` wrote, or None where the stream ends, also in the middle of them."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(*LENGTH.unpack(head))
    return data if len(data) == LENGTH.unpack(head)[0] else None
