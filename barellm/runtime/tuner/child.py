"""The tuner's child process: requests are pickles with their length before them on standard input, answers JSON lines on output.

A candidate is timed only after it was checked here. Whatever a candidate does to this process, the parent survives.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Wrong(Exception):
    """Why a candidate is rejected."""


class Harness(Protocol):
    """The test and timing harness of one open problem, with its memory and programs. `seconds`: the default's last time."""

    seconds: float

    def check(self, candidate: Any) -> Any:
        """Run the candidate at every size, and return what `time` takes. Raises Wrong if a value or a bit is wrong, or a byte
        elsewhere has changed."""
        ...

    def time(self, candidates: list[Any], rounds: int) -> list[list[float]]:
        """The ratios of the time of each result of `check` to that of the default, one for each round. Rounds are interleaved, in
        alternating order."""
        ...

    def close(self) -> None: ...


class Child:
    """The loop of a child process. `make_bed(work, *how)` opens a piece of work."""

    def __init__(self, make_harness: Callable[..., Harness]) -> None:
        self.make_harness = make_harness
        self.harness: Harness | None = None
        self.checked: dict[str, Any] = {}

    def open(self, work: Any, *how: Any) -> dict[str, Any]:
        if self.harness is not None:
            self.harness.close()
        self.harness, self.checked = None, {}
        try:
            self.harness = self.make_harness(work, *how)
        except Exception as error:
            traceback.print_exc()
            return {"rejected": str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"}
        return {}

    def check(self, candidate: Any) -> dict[str, Any]:
        assert self.harness is not None
        try:
            self.checked[str(candidate)] = self.harness.check(candidate)
        except Wrong as why:
            return {"rejected": str(why)}
        except Exception as error:  # of whatever kind: it cannot be emitted, compiled or loaded
            return {"rejected": f"{type(error).__name__}: {error}", "spoilt": getattr(error, "lost", False)}
        return {}

    def time(self, candidates: list[Any], rounds: int) -> dict[str, Any]:
        assert self.harness is not None
        ratios = self.harness.time([self.checked[str(c)] for c in candidates], rounds)
        return {"ratios": ratios, "default_s": self.harness.seconds}


def serve(child: Child) -> None:
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
