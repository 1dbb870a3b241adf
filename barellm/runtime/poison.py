"""Debug mode (`BARELLM_POISON=1`): bytes that nobody owns hold NaN, and gaps between tensors are watched.

Before a program runs its workspace is NaN but for the inputs. After the last op that uses a tensor its bytes become NaN again,
so a lifetime that ends too early, or a kernel that reads what it did not write, shows in the results at once. Guards of 64 bytes
stand behind every tensor and must come out of a run unchanged."""

import os
from typing import Protocol

import numpy as np

from barellm.program.planner import Plan
from barellm.program.tensor import Tensor

GUARD = 64
BYTE = 0xFF  # every dtype's pattern of ones is a NaN; as an index it is -1


class Arena(Protocol):
    """The operations of a session on the bytes of its arena that poison mode needs."""

    def _get(self, start: int, stop: int) -> np.ndarray: ...
    def _fill(self, start: int, stop: int, byte: int) -> None: ...


def requested() -> bool:
    return os.environ.get("BARELLM_POISON") == "1"


def deaths(plan: Plan, program: str) -> dict[int, list[Tensor]]:
    """The tensors whose bytes nobody owns after an op, by the op's number."""
    found: dict[int, list[Tensor]] = {}
    for t, (_, last) in plan.lifetimes[program].items():
        if t.role not in ("input", "output"):
            found.setdefault(last, []).append(t)
    return found


class Guards:
    """The watched bytes of an arena: everything in the persistent segment that no tensor covers."""

    def __init__(self, arena: Arena, plan: Plan) -> None:
        self.arena, self.plan = arena, plan
        self.after = {t: plan.offsets[t] + t.nbytes for t in plan.offsets}
        for t in plan.persistent:
            arena._fill(self.after[t], self.after[t] + GUARD, BYTE)

    def prepare(self, program: str) -> None:
        """Fill the whole workspace with ones, so that the program reads NaN where it has not written."""
        self.arena._fill(self.plan.persistent_bytes, self.plan.arena_bytes, BYTE)

    def check(self, program: str) -> None:
        """RuntimeError naming each tensor that was written past its end (its guard bytes changed and belong to no other tensor)."""
        lives = self.plan.lifetimes[program]
        owned = [(self.plan.offsets[t], self.plan.offsets[t] + t.nbytes) for t in lives]
        wrong = []
        for t in (*self.plan.persistent, *lives):
            at = self.after[t]
            if any(a < at + GUARD and at < b for a, b in owned):  # another tensor of this program lies there, and may write
                continue
            if (self.arena._get(at, at + GUARD) != BYTE).any():
                wrong.append(t.name)
        if wrong:
            raise RuntimeError(f"{program} wrote past the end of {', '.join(wrong)}")
