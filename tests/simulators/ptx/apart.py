"""Lanes of a warp that take different ways, as in the reduction of a sine's argument: one side after the other, until they meet."""

from __future__ import annotations

from functools import cache, reduce
from operator import and_

import numpy as np

from tests.simulators.ptx.machine import Array, Fault, Machine
from tests.simulators.ptx.parse import Instruction, Kernel, Symbol


def part(m: Machine, i: Instruction, taken: Array, threads: Array) -> int:
    """Both sides of a branch that only the threads `taken` take. Gives the instruction at which all go on."""
    meet = meeting(m.kernel)[i.number]
    _run(m, taken, target(m.kernel, i), meet)
    _run(m, np.setdiff1d(threads, taken), i.number + 1, meet)
    return meet


def _run(m: Machine, threads: Array, pc: int, until: int) -> None:
    """Instructions that need no other thread, from `pc` to before `until`."""
    while pc != until:
        i, handler = m.kernel.instructions[pc], m.program[pc]
        active = m.active(i, threads)
        m.done += 1
        if handler is not None:
            if len(active) and handler(m, i, active) is not None:
                raise Fault(f"lanes that are apart wait at {i.text}")
            pc += 1
        elif i.opcode.split(".")[0] != "bra":
            raise Fault(f"lanes are apart at {i.text}")
        elif len(active) in (0, len(threads)):
            pc = target(m.kernel, i) if len(active) else pc + 1
        else:
            pc = part(m, i, active, threads)


def target(kernel: Kernel, i: Instruction) -> int:
    label = i.operands[0]
    assert isinstance(label, Symbol), i.text
    return kernel.labels[label.name]


@cache
def meeting(kernel: Kernel) -> dict[int, int]:
    """Of each branch under a condition, the first instruction that all ways from it come by."""
    end = len(kernel.instructions)
    following = [_following(kernel, i) for i in kernel.instructions]
    behind = [1 << k for k in range(end + 1)]  # what every way from an instruction comes by, itself included, as bits
    known = [False] * end + [True]
    changed = True
    while changed:
        changed = False
        for k in range(end - 1, -1, -1):
            if ways := [behind[n] for n in following[k] if known[n]]:
                found = reduce(and_, ways) | 1 << k
                changed |= not known[k] or found != behind[k]
                behind[k], known[k] = found, True
    return {i.number: _nearest(behind, i.number) for i in kernel.instructions if i.opcode.startswith("bra") and i.guard}


def _nearest(behind: list[int], k: int) -> int:
    """Of what all ways from an instruction come by, the one that comes by all the others."""
    others = behind[k] & ~(1 << k)
    return next(n for n in range(len(behind)) if others >> n & 1 and behind[n] == others)


def _following(kernel: Kernel, i: Instruction) -> list[int]:
    word = i.opcode.split(".")[0]
    on = [i.number + 1]
    if word == "bra":
        return [target(kernel, i), *(on if i.guard else [])]
    if word == "brx":
        (table,) = [o.name for o in i.operands if isinstance(o, Symbol)]
        return [kernel.labels[name] for name in kernel.tables[table]]
    if word in ("ret", "exit"):
        return [len(kernel.instructions), *(on if i.guard else [])]
    return on
