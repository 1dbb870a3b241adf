"""Instructions between the lanes of a warp."""

from __future__ import annotations

import numpy as np

from tests.simulators.ptx.machine import WARP, Array, Machine, op
from tests.simulators.ptx.parse import Instruction, Operand, Pair


@op("shfl.sync")
def shfl(m: Machine, i: Instruction, threads: Array) -> None:
    """A word from another lane; lanes beyond the segment that `c` bounds keep their own."""
    m.whole(threads)
    to, source, b, c, _ = i.operands
    values = np.broadcast_to(m.read(source, threads, "b32"), threads.shape).reshape(-1, WARP)
    b, c = (np.broadcast_to(m.read(o, threads, "u32"), threads.shape).reshape(-1, WARP).astype(int) for o in (b, c))
    lane, bound, mask = np.arange(WARP), c & 31, c >> 8 & 31
    most, least = lane & mask | bound & ~mask, lane & mask
    mode = i.modifiers[1]
    if mode == "up":
        other = lane - (b & 31)
        inside = other >= most
    else:
        other = {"down": lane + (b & 31), "bfly": lane ^ (b & 31), "idx": least | b & 31 & ~mask}[mode]
        inside = other <= most
    found = np.take_along_axis(values, np.where(inside, other, lane) & 31, 1).reshape(-1)
    register: Operand = to
    if isinstance(to, Pair):
        register = to.first
        m.write(to.second, threads, inside.reshape(-1))
    m.write(register, threads, found)


@op("vote.sync")
def vote(m: Machine, i: Instruction, threads: Array) -> None:
    m.whole(threads)
    votes = np.broadcast_to(m.read(i.operands[1], threads, "pred"), threads.shape).reshape(-1, WARP)
    mode = i.modifiers[1]
    if mode == "ballot":
        found = (votes << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
    else:
        found = {"any": votes.any(1), "all": votes.all(1)}[mode]
    m.write(i.operands[0], threads, np.repeat(found, WARP))


@op("redux.sync")
def redux(m: Machine, i: Instruction, threads: Array) -> None:
    m.whole(threads)
    values = np.broadcast_to(m.read(i.operands[1], threads, i.modifiers[-1]), threads.shape).reshape(-1, WARP)
    names = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    m.write(i.operands[0], threads, np.repeat(names[i.modifiers[1]].reduce(values, axis=1), WARP).astype(values.dtype))


@op("bar.warp.sync", "activemask", "nanosleep")
def together(m: Machine, i: Instruction, threads: Array) -> None:
    """The lanes of a warp are never apart here."""
    m.whole(threads)
    if i.operands and i.opcode.startswith("activemask"):
        m.write(i.operands[0], threads, np.uint32(0xFFFFFFFF))
