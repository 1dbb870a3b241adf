"""Instructions that decide which warps go on, and where: branches, ends, named barriers."""

from __future__ import annotations

import numpy as np

from tests.simulators.ptx import apart
from tests.simulators.ptx.machine import WARP, Array, Fault, Machine, Moves, move
from tests.simulators.ptx.parse import Instruction, Operand, Symbol


@move("bra")
def branch(m: Machine, i: Instruction, active: Array, warps: Array) -> Moves:
    there = apart.target(m.kernel, i)
    taken = m.warps(active) if len(active) else warps[:0]
    if len(taken) * WARP != len(active):
        return [(apart.part(m, i, active, m.threads_of(warps)), warps)]
    if len(taken) == len(warps):
        return [(there, warps)]
    if not len(taken):
        return [(i.number + 1, warps)]
    return [(there, taken), (i.number + 1, np.setdiff1d(warps, taken))]


@move("brx.idx")
def branch_by_index(m: Machine, i: Instruction, active: Array, warps: Array) -> Moves:
    table = m.kernel.tables[_symbol_of(i.operands[1])]
    index = m.read(i.operands[0], active, "u32").reshape(-1, WARP)
    if (index != index[:, :1]).any() or (index >= len(table)).any():
        raise Fault(f"branches by {index.tolist()}, of {len(table)}")
    return [(m.kernel.labels[table[k]], warps[index[:, 0] == k]) for k in np.unique(index)]


@move("ret", "exit")
def end(m: Machine, i: Instruction, active: Array, warps: Array) -> Moves:
    gone = warps[:0] if not len(active) else m.whole(active)
    m.ended[gone] = True
    return [(i.number + 1, np.setdiff1d(warps, gone))]


@move("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")
def barrier(m: Machine, i: Instruction, active: Array, warps: Array) -> Moves:
    """bar.sync and bar.arrive, of a number and, where not the whole block takes part, a number of threads."""
    arrived = m.whole(active) if len(active) else warps[:0]
    number = np.broadcast_to(m.read(i.operands[0], active, "u32"), active.shape)[::WARP].astype(np.int64)
    count = m.read(i.operands[1], active, "u32") if len(i.operands) > 1 else np.array(m.threads)
    count = np.broadcast_to(count, active.shape)[::WARP]
    blocks = arrived // m.block_warps
    if (count % WARP).any() or (number >= 16).any():
        raise Fault(f"barrier {number} of {count} threads")
    old = m.expected[blocks, number]
    if ((old != 0) & (old != count)).any():
        raise Fault(f"barrier {number} awaits {old} threads and now {count}")
    m.expected[blocks, number] = count
    np.add.at(m.arrived, (blocks, number), WARP)
    if (m.arrived > m.expected).any():
        raise Fault(f"more threads at barrier {np.argwhere(m.arrived > m.expected)[0][1]} than it awaits")
    on = np.setdiff1d(warps, arrived)
    released_at = m.state.setdefault("arrivals without waiting", {})
    if "arrive" in i.modifiers:
        on = warps
        for warp, b, n in zip(arrived.tolist(), blocks.tolist(), number.tolist(), strict=True):
            released_at.setdefault((b, n), []).append(m.order.release(warp))
    else:
        m.waiting[arrived], m.resume[arrived] = number, i.number + 1
    full = (m.arrived == m.expected) & (m.expected > 0)
    block, which = np.nonzero(full)
    free = np.zeros(len(m.all_warps), bool)
    for b, n in zip(block, which, strict=True):
        mine = slice(b * m.block_warps, (b + 1) * m.block_warps)
        there = m.waiting[mine] == n
        m.order.meet(np.flatnonzero(there) + mine.start, released_at.pop((b, n), []))
        free[mine] |= there
    m.arrived[full] = m.expected[full] = 0
    released = np.flatnonzero(free)
    m.waiting[released] = -1
    m.release(released, m.resume[released])
    return [(i.number + 1, on)]


def _symbol_of(operand: Operand) -> str:
    assert isinstance(operand, Symbol), operand
    return operand.name
