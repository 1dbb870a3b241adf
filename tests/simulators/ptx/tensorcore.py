"""Instructions of tensor cores: ldmatrix, stmatrix, mma.sync, and wgmma with operands in shared memory.

A wgmma runs when it is issued, and its sums reach their registers when they are waited for: until then those hold `UNDER_WAY`, a
NaN, and whoever writes them, or the registers of its first operand, is found at the wait. Products are exact and are added in
fp32; in which order tensor cores add, and with how many bits, is not documented.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.simulators.ptx import fragments
from tests.simulators.ptx.machine import Machine, at_end, op
from tests.simulators.ptx.memory import load_shared, store_shared
from tests.simulators.ptx.order import Fault, Held
from tests.simulators.ptx.parse import Instruction, Number, Operand, Vector

UNDER_WAY = np.uint32(0xFFFFBAD1)
WIDTH = {"bf16": 2, "f16": 2, "tf32": 1}  # elements in a register
WARPS = 4  # of a warpgroup
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def registers(m: Machine, operand: Operand, threads: np.ndarray) -> np.ndarray:
    """(registers, warps, lanes) of a vector operand, uint32."""
    assert isinstance(operand, Vector)
    values = [np.broadcast_to(m.read(item, threads, "u32"), threads.shape) for item in operand.items]
    return np.stack(values).reshape(len(values), -1, fragments.LANES)


def keep(m: Machine, operand: Operand, threads: np.ndarray, values: np.ndarray) -> None:
    """Write (registers, warps, lanes)."""
    assert isinstance(operand, Vector) and len(operand.items) == len(values)
    for item, value in zip(operand.items, values, strict=True):
        m.write(item, threads, np.ascontiguousarray(value.reshape(-1)).view(np.uint32))


def shape_of(i: Instruction) -> tuple[int, int, int]:
    (found,) = SHAPE.findall(i.opcode)
    rows, cols, depth = (int(n) for n in found)
    return rows, cols, depth


# --- matrices of 8 x 8 between registers and shared memory ---


def _row_addresses(m: Machine, i: Instruction, threads: np.ndarray, operand: Operand, count: int) -> np.ndarray:
    """(matrices, warps, 8 rows) of 16 bytes: lanes 8 j on give the rows of matrix j."""
    assert "m8n8" in i.modifiers and "b16" in i.modifiers, i.text
    at = np.broadcast_to(m.address(operand, threads), threads.shape).reshape(-1, 4, 8)[:, :count]
    return np.ascontiguousarray(at.transpose(1, 0, 2))


def _of_rows(threads: np.ndarray, at: np.ndarray) -> np.ndarray:
    """A thread of the warp that each row is of."""
    return np.broadcast_to(threads[:: fragments.LANES, None], at.shape).reshape(-1)


def _matrices(i: Instruction) -> int:
    return next(int(word[1:]) for word in i.modifiers if word in ("x1", "x2", "x4"))


@op("ldmatrix")
def ldmatrix(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    m.whole(threads)
    to, source = i.operands
    at = _row_addresses(m, i, threads, source, _matrices(i))
    found = load_shared(m, i, _of_rows(threads, at), at.reshape(-1), 16)
    rows = found.view(np.uint16).reshape(*at.shape, 8)  # (matrices, warps, 8, 8)
    keep(m, to, threads, fragments.matrix_register(rows.swapaxes(-1, -2) if "trans" in i.modifiers else rows))


@op("stmatrix")
def stmatrix(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    m.whole(threads)
    to, source = i.operands
    at = _row_addresses(m, i, threads, to, _matrices(i))
    rows = fragments.matrix_rows(registers(m, source, threads))
    rows = rows.swapaxes(-1, -2) if "trans" in i.modifiers else rows
    store_shared(m, i, _of_rows(threads, at), at.reshape(-1), np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16))


@op("mma.sync")
def mma(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    m.whole(threads)
    rows, cols, depth = shape_of(i)
    assert (rows, cols) == (16, 8) and i.modifiers[1:5:3] == ("aligned", "col"), i.text
    if i.modifiers[-2:] == ("and", "popc"):
        bits(m, i, threads, depth)
        return
    dtypes = i.modifiers[-4:]
    assert dtypes[0] == dtypes[3] == "f32" and dtypes[1] == dtypes[2], i.text
    a = fragments.a_fragment(registers(m, i.operands[1], threads), dtypes[1])
    b = fragments.b_fragment(registers(m, i.operands[2], threads), dtypes[1])
    assert a.shape[-1] == b.shape[-2] == depth, i.text
    with np.errstate(all="ignore"):
        sums = fragments.c_fragment(registers(m, i.operands[3], threads)) + a @ b
    keep(m, i.operands[0], threads, fragments.c_registers(sums))


def bits(m: Machine, i: Instruction, threads: np.ndarray, depth: int) -> None:
    """Counts, in s32, of the places where a row of one-bit elements and a column of them both are one."""
    assert i.modifiers[-6:-2] == ("s32", "b1", "b1", "s32") and depth == 256, i.text
    a = fragments.a_fragment(registers(m, i.operands[1], threads), "b1")
    b = fragments.b_fragment(registers(m, i.operands[2], threads), "b1")
    assert a.shape[-1] == b.shape[-2] == depth, i.text
    sums = fragments.c_fragment(registers(m, i.operands[3], threads), np.int32) + (a @ b).astype(np.int32)
    keep(m, i.operands[0], threads, fragments.c_registers(sums, np.int32))


# --- wgmma ---


@dataclass
class Product:
    """One that is under way. `held`: the registers of its first operand and what they held, or none; `reads`: the words of
    shared memory that it reads."""

    sums: Vector
    held: tuple[Vector, np.ndarray] | None
    reads: Held


@dataclass
class Group:
    """A warpgroup's products: since the last commit, and the groups before."""

    threads: np.ndarray
    results: dict[tuple[Operand, ...], np.ndarray]  # sums under way (4 warps, 16, cols), by their registers
    open: list[Product]
    committed: list[list[Product]]


def _groups(m: Machine, threads: np.ndarray) -> tuple[list[tuple[Group, np.ndarray]], np.ndarray | None]:
    """The warpgroups that are here with all their warps, and the warps of those that are not."""
    warps = m.whole(threads)
    count = np.bincount(warps // WARPS)
    blocked = warps[count[warps // WARPS] < WARPS]
    made = m.state.setdefault("wgmma", {})
    found = []
    for number in np.flatnonzero(count == WARPS):
        own = np.arange(number * WARPS * fragments.LANES, (number + 1) * WARPS * fragments.LANES)
        found.append((made.setdefault(int(number), Group(own, {}, [], [])), own))
    return found, blocked if blocked.size else None


def _operand(m: Machine, group: Group, described: Operand, rows: int, depth: int, kind: str, transposed: bool) -> Any:
    """An operand in shared memory (rows, depth) in fp32, and its addresses."""
    values = np.unique(m.read(described, group.threads, "u64"))
    if len(values) != 1:
        raise Fault("the threads of a warpgroup have different descriptors")
    itemsize = 4 // WIDTH[kind]
    window = int(m.window(group.threads)[0])
    at = window + fragments.operand_addresses(int(values[0]), rows, depth, itemsize, transposed=transposed)
    m.check_shared(at.reshape(-1).astype(np.uint64), group.threads[:1], itemsize)
    if kind == "f16":
        return m.shared.view(np.float16)[at >> 1].astype(np.float32), at
    if itemsize == 2:
        return (m.shared.view(np.uint16)[at >> 1].astype(np.uint32) << np.uint32(16)).view(np.float32), at
    return (m.shared.view(np.uint32)[at >> 2] & np.uint32(0xFFFFE000)).view(np.float32), at


@op("wgmma.mma_async")
def wgmma(m: Machine, i: Instruction, threads: np.ndarray) -> np.ndarray | None:
    rows, cols, depth = shape_of(i)
    assert rows == 64 and i.modifiers[-3] == "f32" and i.modifiers[-1] == i.modifiers[-2], i.text
    kind = i.modifiers[-1]
    itemsize = 4 // WIDTH[kind]
    assert depth * itemsize == 32, i.text
    sums, a, b, scale, *immediates = i.operands
    assert isinstance(sums, Vector) and 2 * len(sums.items) == cols, i.text
    flags = [n.bits for n in immediates if isinstance(n, Number)]
    assert flags[:2] == [1, 1], "a negated operand"
    transposed = [False, *map(bool, flags[2:])][-2:]  # of 16 bits only
    check_fenced(m, i)
    groups, blocked = _groups(m, threads)
    for group, own in groups:
        reads, held = [], None
        if isinstance(a, Vector):
            fragment = registers(m, a, own)
            held = a, fragment
            x = fragments.a_fragment(fragment, kind).reshape(rows, depth)
        else:
            x, at = _operand(m, group, a, rows, depth, kind, transposed[0])
            reads.append(at)
        y, at = _operand(m, group, b, cols, depth, kind, transposed[1])
        reads.append(at)
        adds = m.read(scale, own, "pred") if not isinstance(scale, Number) else np.array([scale.bits != 0])
        assert np.all(adds == adds.flat[0]), "threads of a warpgroup disagree"
        before = group.results.get(sums.items)
        if before is None:
            if any(set(sums.items) & set(key) for key in group.results):
                raise Fault(f"{i.text[:60]}: some of its sums are under way in another product")
            before = fragments.c_fragment(registers(m, sums, own))
            keep(m, sums, own, np.broadcast_to(UNDER_WAY, (len(sums.items), WARPS, fragments.LANES)))
        with np.errstate(all="ignore"):
            product = (x @ y.T).reshape(WARPS, 16, cols)
            group.results[sums.items] = product + before if adds.flat[0] else product
        words = np.unique(np.concatenate([m.order.at(r.reshape(-1), itemsize).reshape(-1) for r in reads]))
        group.open.append(Product(sums, held, m.order.start_reading(own[:: fragments.LANES] // fragments.LANES, words)))
    return blocked


def check_fenced(m: Machine, i: Instruction) -> None:
    """A product's registers must be fenced behind what else touched them: since the last wait, and in the same straight line. LLVM
    moves arithmetic for them behind the fence, which knows no registers; ptxas knows them, and puts its own behind all of it."""
    known = m.state.setdefault("fenced", set())
    if i.number in known:
        return
    targets = set(m.kernel.labels.values())
    for before in reversed(m.kernel.instructions[: i.number]):
        if before.opcode.startswith("wgmma.fence"):
            known.add(i.number)
            return
        if before.number + 1 in targets or before.opcode.startswith(("bra", "brx", "wgmma.wait_group")):
            break
    raise Fault("no wgmma.fence before a product")


@op("wgmma.fence")
def wgmma_fence(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """`check_fenced` looks for it."""
    m.whole(threads)


@op("wgmma.commit_group")
def wgmma_commit(m: Machine, i: Instruction, threads: np.ndarray) -> np.ndarray | None:
    groups, blocked = _groups(m, threads)
    for group, _ in groups:
        group.committed.append(group.open)
        group.open = []
    return blocked


@op("wgmma.wait_group")
def wgmma_wait(m: Machine, i: Instruction, threads: np.ndarray) -> np.ndarray | None:
    assert isinstance(i.operands[0], Number)
    pending = i.operands[0].bits
    groups, blocked = _groups(m, threads)
    for group, own in groups:
        while len(group.committed) > pending:
            for product in group.committed.pop(0):
                _finish(m, group, own, product)
        left = {p.sums.items for products in [*group.committed, group.open] for p in products}
        for items in [items for items in group.results if items not in left]:
            found = registers(m, Vector(items), own)
            if (found != UNDER_WAY).any():
                raise Fault("registers were written while a product's sums were under way to them")
            keep(m, Vector(items), own, fragments.c_registers(group.results.pop(items)))
    return blocked


def _finish(m: Machine, group: Group, own: np.ndarray, product: Product) -> None:
    product.reads.read()
    if product.held is not None:
        operand, before = product.held
        if (registers(m, operand, own) != before).any():
            raise Fault("registers of an operand were written while its product was under way")


@at_end
def no_product_under_way(m: Machine) -> None:
    if any(group.results for group in m.state.get("wgmma", {}).values()):
        raise Fault("the kernel ends while products are under way")
