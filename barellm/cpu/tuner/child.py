"""The tuner's child process: `python -m barellm.cpu.tuner.child`.

Requests are pickles with their length before them on standard input, answers JSON lines on standard output. A candidate is timed
only after it was checked here. Whatever a candidate does to this process, the parent goes on.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import struct
import threading
import traceback
from typing import Any

from barellm.cpu.isa import host
from barellm.cpu.tuner.bed import Bed, Loaded, Wrong
from barellm.cpu.tuner.work import Candidate, Work


class Child:
    def __init__(self) -> None:
        self.bed: Bed | None = None
        self.checked: dict[str, Loaded] = {}

    def open(self, work: Work, threads: int, footprint: int) -> dict[str, Any]:
        if self.bed is not None:
            self.bed.pool.close()
        self.checked = {}
        self.bed = Bed(work, host(), threads, footprint)
        return {}

    def check(self, candidate: Candidate) -> dict[str, Any]:
        assert self.bed is not None
        try:
            self.checked[str(candidate)] = self.bed.check(candidate)
        except Wrong as why:
            return {"rejected": str(why)}
        except Exception as error:  # of whatever kind: it cannot be emitted, compiled or loaded
            return {"rejected": f"{type(error).__name__}: {error}"}
        return {}

    def time(self, candidates: list[Candidate], rounds: int) -> dict[str, Any]:
        assert self.bed is not None
        ratios = self.bed.time([self.checked[str(c)] for c in candidates], rounds)
        return {"ratios": ratios, "default_s": self.bed.seconds}


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    requests: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def listen() -> None:
        # In a thread of its own: when the parent is gone this process ends, whatever its candidate is doing.
        with os.fdopen(os.dup(0), "rb", buffering=0) as pipe:
            while len(head := _exactly(pipe, 8)) == 8:
                requests.put(pickle.loads(_exactly(pipe, struct.unpack("<Q", head)[0])))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    child = Child()
    while True:
        name, arguments = requests.get()
        try:
            answer = getattr(child, name)(*arguments)
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def _exactly(pipe: Any, count: int) -> bytes:
    """`count` bytes, fewer only at the end."""
    parts = b""
    while len(parts) < count and (more := pipe.read(count - len(parts))):
        parts += more
    return parts


if __name__ == "__main__":
    serve()
