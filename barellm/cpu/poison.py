"""Debug mode (`BARELLM_POISON=1`): bytes that nobody owns hold NaN, and gaps between tensors are watched.

Before a program runs its workspace is NaN but for the inputs. After the last op that uses a tensor its bytes become NaN again,
so a lifetime that ends too early, or a kernel that reads what it did not write, shows in the results at once. Guards of 64 bytes
stand behind every tensor and must come out of a run unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from barellm.cpu.kernel import Call, Spec
from barellm.program.ops.base import Op
from barellm.program.planner import Plan
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part

GUARD = 64
BYTE = 0xFF  # every dtype's pattern of ones is a NaN; as an index it is -1


def requested() -> bool:
    return os.environ.get("BARELLM_POISON") == "1"


def fill(k, out, count) -> None:
    """`count` 4-byte words of ones."""
    ones = k.const(-1, k.ivec)
    with k.claim(count, 16384) as (begin, end):
        whole = end - (end - begin) % k.lanes
        with k.loop(begin, whole, k.lanes) as i:
            out.store_raw(ones, i)
        with k.when(whole < end):
            out.store_raw(ones, whole, k.mask_first(end - whole))


def with_poison(ops: Sequence[Op], calls: Mapping[Op, list[Call]], plan: Plan, program: str) -> list[Call]:
    """The calls of all ops, with a fill after the op at which, by the plan, a tensor dies."""
    deaths: dict[int, list[Tensor]] = {}
    for t, (_, last) in plan.lifetimes[program].items():
        if t.role not in ("input", "output"):
            deaths.setdefault(last, []).append(t)
    out: list[Call] = []
    for i, op in enumerate(ops):
        out += calls[op]
        out += [_fill_call(part(t), op) for t in deaths.get(i, [])]
    return out


def _fill_call(region: Region, op: Op) -> Call:
    words = (region.stop - region.start) // 4
    return Call(Spec(fill, ("i32", "int"), ()), [region, words], [], [region], op)


class Guards:
    """The watched bytes of an arena: everything in the persistent segment that no tensor covers."""

    def __init__(self, arena: np.ndarray, plan: Plan) -> None:
        self.arena, self.plan = arena, plan
        self.after = {t: plan.offsets[t] + t.nbytes for t in plan.offsets}
        for t in plan.persistent:
            self.arena[self.after[t] : self.after[t] + GUARD] = BYTE

    def prepare(self, program: str) -> None:
        """Ones over the whole workspace: what the program reads before writing it is NaN."""
        self.arena[self.plan.persistent_bytes :] = BYTE

    def check(self, program: str) -> None:
        """RuntimeError naming each tensor that was written past its end and whose guard nobody owned since."""
        lives = self.plan.lifetimes[program]
        owned = [(self.plan.offsets[t], self.plan.offsets[t] + t.nbytes) for t in lives]
        wrong = []
        for t in (*self.plan.persistent, *lives):
            at = self.after[t]
            guard = self.arena[at : at + GUARD]
            if (guard != BYTE).any() and not any(a < at + GUARD and at < b for a, b in owned):
                wrong.append(t.name)
        if wrong:
            raise RuntimeError(f"{program} wrote past the end of {', '.join(wrong)}")
