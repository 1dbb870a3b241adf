"""What works beside the warps on Hopper: mbarriers, the tensor memory accelerator, fences of its proxy; and registers that warps
give to each other.

Bytes of a copy are moved when it starts; until it is waited for, nobody may touch them (order.py), and its mbarrier does not know
of them: in a late run they arrive one copy after the other, drawn, and only when all warps wait.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from barellm.cuda.compile import Descriptor
from tests.simulators.interpreter import Box
from tests.simulators.ptx.fragments import LANES, swizzled
from tests.simulators.ptx.machine import Machine, at_end, idle, op
from tests.simulators.ptx.order import Fault, Held
from tests.simulators.ptx.parse import Address, Instruction, Number, Pair

MOST_COUNT, MOST_BYTES = (1 << 20) - 1, (1 << 20) - 1
SPANS = {0: 16, 1: 32, 2: 64, 3: 128}  # of a tensor map, by the driver's number


# --- mbarriers ---


@dataclass
class Barrier:
    """`missing`: arrivals, and `nbytes`, still to come in this phase; `known`: what those who wait for it will know of others
    (order.py), `past`: of the phases before."""

    count: int
    actor: int
    phase: int = 0
    missing: int = field(init=False)
    nbytes: int = 0
    arrived: int = 0  # copies
    told: bool = False  # to other blocks of the cluster
    known: np.ndarray | None = None
    past: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.missing = self.count

    def signal(self, arrivals: int, nbytes: int, known: np.ndarray | None) -> None:
        self.missing -= arrivals
        self.nbytes += nbytes
        if known is not None:
            self.known = known if self.known is None else np.maximum(self.known, known)
        if self.missing < 0:
            raise Fault("one arrival too many in a phase of an mbarrier")
        if abs(self.nbytes) > MOST_BYTES:
            raise Fault(f"an mbarrier counts {self.nbytes} bytes")
        if self.missing == 0 and self.nbytes == 0:
            self.phase, self.missing, self.past = self.phase + 1, self.count, self.known


def _barrier(m: Machine, address: int) -> Barrier:
    found = m.state.setdefault("mbarriers", {}).get(address)
    if found is None:
        raise Fault(f"no mbarrier was made at {address:#x}")
    return found


def _each(m: Machine, i: Instruction, threads: np.ndarray, operand: Address) -> list[tuple[int, int, int]]:
    """(thread, warp, address) of each thread."""
    at = np.broadcast_to(m.address(operand, threads), threads.shape).astype(np.int64)
    m.check_shared(at.astype(np.uint64), threads, 8, anywhere="shared::cluster" in i.modifiers)
    return [(int(t), int(t) // LANES, int(a)) for t, a in zip(threads, at, strict=True)]


@op("mbarrier.init")
def init(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    where, count = i.operands
    assert isinstance(where, Address) and isinstance(count, Number) and 1 <= count.bits <= MOST_COUNT
    made = m.state.setdefault("mbarriers", {})
    for _, warp, at in _each(m, i, threads, where):
        if at in made:
            raise Fault(f"a second mbarrier at {at:#x}")
        m.order.write(np.array([warp]), m.order.at(np.array([at]), 8), np.array(False))
        made[at] = Barrier(count.bits, m.order.actor(warp))


@op("mbarrier.arrive")
def arrive(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """With "expect_tx" as many bytes are to come besides."""
    _, where, *more = i.operands
    assert isinstance(where, Address)
    expects = "expect_tx" in i.modifiers
    for thread, warp, at in _each(m, i, threads, where):
        number = int(m.read(more[0], np.array([thread]), "u32").flat[0]) if more else 1
        _seen(m, warp, at)
        known = m.order.release(warp)
        _barrier(m, at).signal(1 if expects else number, number if expects else 0, known)


def _seen(m: Machine, warp: int, at: int) -> None:
    """The mbarrier must have been made, as far as this warp can know. Another block's must be told, and its block be there."""
    block = m.block_of(at)
    if block != warp // m.block_warps:
        if not _barrier(m, at).told:
            raise Fault("an mbarrier of another block was not fenced for its cluster")
        if m.ended.reshape(-1, m.block_warps)[block].all():
            raise Fault("an mbarrier's block has ended")
    m.order.read(np.array([warp]), m.order.at(np.array([at]), 8))


@op("mbarrier.try_wait")
def try_wait(m: Machine, i: Instruction, threads: np.ndarray) -> np.ndarray | None:
    assert "parity" in i.modifiers
    done, where, parity = i.operands
    assert isinstance(where, Address)
    at = np.broadcast_to(m.address(where, threads), threads.shape).astype(np.int64)
    wanted = np.broadcast_to(m.read(parity, threads, "u32"), threads.shape)
    blocked = []
    for warp in m.warps(threads):
        mine = threads // LANES == warp
        assert len(set(at[mine])) == len(set(wanted[mine])) == 1, "lanes of a warp wait for different phases"
        _seen(m, int(warp), int(at[mine][0]))
        barrier = _barrier(m, int(at[mine][0]))
        assert wanted[mine][0] in (0, 1), f"{i.text}: a parity of {wanted[mine][0]}"
        if barrier.phase & 1 == wanted[mine][0]:
            blocked.append(warp)
            continue
        if barrier.past is not None:
            m.order.acquire(int(warp), barrier.past)
        m.write(done, threads[mine], np.True_)
    return np.array(blocked) if blocked else None


# --- the tensor memory accelerator ---


@dataclass
class Arrival:
    """A copy on its way into shared memory."""

    barrier: Barrier
    nbytes: int
    held: Held

    def finish(self) -> None:
        b = self.barrier
        b.arrived += 1
        self.held.written(b.actor, b.arrived, proxy=True)
        known = np.zeros_like(self.held.order.seen[0])
        known[b.actor] = b.arrived
        b.signal(0, -self.nbytes, known)


@dataclass
class Departure:
    """A copy out, in a thread's group of that number."""

    thread: int
    group: int
    held: Held


def _box(m: Machine, i: Instruction, thread: int, source: Address) -> tuple[Box, Descriptor, int, int]:
    """The map, and the row and column at which the box begins."""
    at = int(m.read(source.base, np.array([thread]), "u64").flat[0]) + source.offset
    if at not in m.maps:
        raise Fault(f"{i.text[:60]}: no tensor map at {at:#x}")
    column, row = (int(m.read(c, np.array([thread]), "s32").flat[0]) for c in source.coordinates)
    return *m.maps[at], row, column


def slots(box: Descriptor, start: int) -> np.ndarray:
    """Where the bytes of a box lie in shared memory, in units of 16: (rows, units)."""
    rows, columns = box.box
    width, span = columns * box.element_bytes, SPANS[box.swizzle]
    if start % 128 or (span > 16 and start % (8 * span)):
        raise Fault(f"a box begins at {start:#x} of shared memory, where its swizzle does not")
    assert width % 16 == 0 and (span == 16 or width == span), "a box that is not as wide as its swizzle"
    linear = start + np.arange(rows)[:, None] * width + 16 * np.arange(width // 16)[None, :]
    return swizzled(linear, span)


def _matrix(box: Box, itemsize: int, *, writes: bool) -> np.ndarray:
    """The bytes of a map's matrix (rows, bytes of a row), as they lie in memory."""
    pitch, width = box.stride * itemsize, box.columns * itemsize
    start, stop = box.pointer.address, box.pointer.address + (box.rows - 1) * pitch + width
    if start < box.pointer.start or stop > box.pointer.stop or (writes and not box.pointer.writable):
        raise Fault(f"a tensor map of {box.rows} x {box.columns} covers bytes that are not its operand's")
    memory = np.frombuffer((ctypes.c_uint8 * (stop - start)).from_address(start), np.uint8)
    return np.lib.stride_tricks.as_strided(memory, (box.rows, width), (pitch, 1), writeable=writes)


def _inside(box: Box, descriptor: Descriptor, row: int, column: int) -> tuple[slice, slice, slice, slice]:
    """Which part of a box is in the matrix: rows and bytes there, rows and bytes in the box."""
    rows, columns = descriptor.box
    top, bottom = max(row, 0), min(row + rows, box.rows)
    left, right = (n * descriptor.element_bytes for n in (max(column, 0), min(column + columns, box.columns)))
    first = column * descriptor.element_bytes
    bottom, right = max(bottom, top), max(right, left)
    return slice(top, bottom), slice(left, right), slice(top - row, bottom - row), slice(left - first, right - first)


@op("cp.async.bulk.tensor")
def copy(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """One box, by each active thread; of multicast, to each block whose rank is a bit of the mask, and to its mbarrier."""
    loads = "mbarrier::complete_tx::bytes" in i.opcode
    assert "2d" in i.modifiers and "im2col" not in i.opcode, i.text
    for thread in threads.tolist():
        one = np.array([thread])
        if loads:
            to, source, at, *mask = i.operands
            assert isinstance(to, Address) and isinstance(source, Address) and isinstance(at, Address)
            assert bool(mask) == ("multicast::cluster" in i.modifiers), i.text
            places = np.concatenate([m.address(to, one), m.address(at, one)])
            if mask:
                bits = int(m.read(mask[0], one, "u16").flat[0])
                assert 0 < bits < 1 << m.cluster, f"a copy to blocks {bits:#b} of a cluster of {m.cluster}"
                ranks = [np.array([rank]) for rank in range(m.cluster) if bits >> rank & 1]
                everywhere = [m.elsewhere(places, one, rank) for rank in ranks]
            else:
                everywhere = [places]
            for start, barrier in everywhere:
                _load(m, i, thread, int(start), source, int(barrier))
        else:
            to, source = i.operands
            assert isinstance(to, Address) and isinstance(source, Address)
            _store(m, i, thread, to, int(m.address(source, one)[0]))


def _load(m: Machine, i: Instruction, thread: int, start: int, source: Address, at: int) -> None:
    box, descriptor, row, column = _box(m, i, thread, source)
    to = slots(descriptor, start)
    m.check_shared(to.reshape(-1).astype(np.uint64), np.array([thread]), 16, anywhere="multicast::cluster" in i.modifiers)
    _seen(m, thread // LANES, at)
    if m.order.unfenced[m.order.at(np.array([at]), 8)].any():
        raise Fault("the mbarrier of a copy was made without a fence")
    held = m.order.start_writing(np.array([thread // LANES]), m.order.at(to, 16).reshape(1, -1))
    matrix = _matrix(box, descriptor.element_bytes, writes=False)
    there, bytes_there, here, bytes_here = _inside(box, descriptor, row, column)
    data = np.zeros((descriptor.box[0], descriptor.box[1] * descriptor.element_bytes), np.uint8)
    data[here, bytes_here] = matrix[there, bytes_there]
    m.shared.reshape(-1, 16)[to >> 4] = data.reshape(*to.shape, 16)
    arrival = Arrival(_barrier(m, at), data.size, held)
    if m.late:
        m.state.setdefault("arrivals", []).append(arrival)
    else:
        arrival.finish()


@idle
def arrive_one(m: Machine) -> bool:
    """All warps wait: one copy arrives. False where none is under way."""
    arrivals = m.state.get("arrivals", [])
    if arrivals:
        arrivals.pop(int(m.rng.integers(len(arrivals)))).finish()
        return True
    return False


def _store(m: Machine, i: Instruction, thread: int, to: Address, start: int) -> None:
    assert "bulk_group" in i.modifiers, i.text
    box, descriptor, row, column = _box(m, i, thread, to)
    source = slots(descriptor, start)
    m.check_shared(source.reshape(-1).astype(np.uint64), np.array([thread]), 16)
    held = m.order.start_reading(np.array([thread // LANES]), m.order.at(source, 16).reshape(-1))
    matrix = _matrix(box, descriptor.element_bytes, writes=True)
    there, bytes_there, here, bytes_here = _inside(box, descriptor, row, column)
    data = m.shared.reshape(-1, 16)[source >> 4].reshape(descriptor.box[0], -1)
    matrix[there, bytes_there] = data[here, bytes_here]
    group = int(_commits(m)[thread])
    m.state.setdefault("departures", []).append(Departure(thread, group, held))


def _commits(m: Machine) -> np.ndarray:
    """How many groups each thread has committed."""
    return m.state.setdefault("commits", np.zeros(len(m.everyone), np.int64))


@op("cp.async.bulk.commit_group")
def commit(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    _commits(m)[threads] += 1


@op("cp.async.bulk.wait_group")
def wait(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """The bytes of shared memory have been read. What a copy out wrote nobody here reads, so waiting for that is no more."""
    (pending,) = i.operands
    assert isinstance(pending, Number)
    past = np.full(len(m.everyone), -1)
    past[threads] = _commits(m)[threads] - pending.bits
    left = []
    for d in m.state.get("departures", []):
        if d.group < past[d.thread]:
            d.held.read()
        else:
            left.append(d)
    m.state["departures"] = left


@at_end
def nothing_under_way(m: Machine) -> None:
    if m.state.get("departures") or m.state.get("arrivals"):
        raise Fault("the kernel ends while copies are under way")
    for barrier in m.state.get("mbarriers", {}).values():
        if barrier.nbytes:
            raise Fault(f"the kernel ends while an mbarrier waits for {barrier.nbytes} bytes")


@op("fence.proxy.async")
def fence(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    m.order.fence(m.warps(threads))


@op("elect.sync")
def elect(m: Machine, i: Instruction, threads: np.ndarray) -> None:
    """One lane, the same each time; which one nobody promises."""
    m.whole(threads)
    assert isinstance(i.operands[1], Number) and i.operands[1].bits & 0xFFFFFFFF == 0xFFFFFFFF, i.text
    leader = m.state.setdefault("leader", int(m.rng.integers(LANES)))
    pair = i.operands[0]
    assert isinstance(pair, Pair)
    m.write(pair.first, threads, np.full(threads.shape, leader, np.uint32))
    m.write(pair.second, threads, threads % LANES == leader)


# --- registers ---


@op("setmaxnreg")
def set_registers(m: Machine, i: Instruction, threads: np.ndarray) -> np.ndarray | None:
    """More of them wait until the block has as many left. All warps of a warpgroup must take the same ones, in the same order."""
    (count,) = i.operands
    assert isinstance(count, Number) and count.bits % 8 == 0 and 24 <= count.bits <= 256, i.text
    at_start = m.kernel.most_registers
    held = m.state.setdefault("registers", np.full(len(m.all_warps), at_start))
    history = m.state.setdefault("register changes", [[] for _ in held])
    blocked = []
    for warp in m.whole(threads).tolist():
        block = slice(warp // m.block_warps * m.block_warps, (warp // m.block_warps + 1) * m.block_warps)
        change = count.bits - held[warp]
        if change * (1 if "inc" in i.modifiers else -1) < 0:
            raise Fault(f"{i.text} of a warp that has {held[warp]}")
        if held[block].sum() + change > at_start * m.block_warps:
            blocked.append(warp)
            continue
        held[warp] = count.bits
        history[warp].append((i.modifiers[0], count.bits))
    return np.array(blocked) if blocked else None


@at_end
def warpgroups_agree(m: Machine) -> None:
    history = m.state.get("register changes", [])
    for start in range(0, len(history), 4):
        if any(changes != history[start] for changes in history[start : start + 4]):
            raise Fault("warps of a warpgroup changed their registers differently")
