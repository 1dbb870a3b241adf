"""Loads, stores and copies: parameters, global memory, shared memory.

A global address carries the number of its operand, and its bytes are held against that; a shared one is held against its block's
window. Each begins at a multiple of its size. `cp.async` copies at once or, where the run is `late`, when its group is waited
for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np

from tests.simulators.ptx.machine import PARAMETERS_AT, TYPES, WARP, Array, Fault, Machine, aligned, at_end, op
from tests.simulators.ptx.parse import Address, Instruction, Operand, Vector

SECTOR = 32  # bytes that global memory moves at least
BANKS = 32  # of shared memory, 4 bytes wide
HOST = ctypes.c_uint8 * (1 << 46)  # of this process, from some address on


def _shape(i: Instruction, data: Operand) -> tuple[np.dtype, list[Operand]]:
    """The type of an element, and the register of each."""
    items = list(data.items) if isinstance(data, Vector) else [data]
    words = [w for w in i.modifiers if w in ("v2", "v4", "v8")]
    assert len(items) == (int(words[0][1:]) if words else 1), i.text
    return TYPES[i.modifiers[-1]], items


@op("ld.param")
def ld_param(m: Machine, i: Instruction, threads: Array) -> None:
    dtype, items = _shape(i, i.operands[0])
    where = i.operands[1]
    assert isinstance(where, Address)
    at = int(m.read(where.base, threads, "u64").reshape(-1)[0]) + where.offset - PARAMETERS_AT
    aligned(np.array([at], np.uint64), dtype.itemsize * len(items))
    if not 0 <= at <= len(m.parameters) - dtype.itemsize * len(items):
        raise Fault(f"parameters have {len(m.parameters)} bytes")
    for k, register in enumerate(items):
        m.write(register, threads, m.parameters[at + k * dtype.itemsize :][: dtype.itemsize].view(dtype)[0])


@op("ld.global")
def ld_global(m: Machine, i: Instruction, threads: Array) -> None:
    dtype, items = _shape(i, i.operands[0])
    addresses = m.address(i.operands[1], threads)
    found = load(m, i, threads, addresses, dtype.itemsize * len(items)).view(dtype)
    for k, register in enumerate(items):
        m.write(register, threads, np.ascontiguousarray(found[:, k]))


@op("st.global")
def st_global(m: Machine, i: Instruction, threads: Array) -> None:
    dtype, items = _shape(i, i.operands[1])
    store(m, i, threads, m.address(i.operands[0], threads), _row(m, threads, dtype, items))


@op("ld.shared")
def ld_shared(m: Machine, i: Instruction, threads: Array) -> None:
    dtype, items = _shape(i, i.operands[0])
    nbytes = dtype.itemsize * len(items)
    found = load_shared(m, i, threads, m.address(i.operands[1], threads), nbytes).view(dtype).reshape(-1, len(items))
    for k, register in enumerate(items):
        m.write(register, threads, np.ascontiguousarray(found[:, k]))


@op("st.shared")
def st_shared(m: Machine, i: Instruction, threads: Array) -> None:
    dtype, items = _shape(i, i.operands[1])
    store_shared(m, i, threads, m.address(i.operands[0], threads), _row(m, threads, dtype, items))


@op("atom.global")
def atom_global(m: Machine, i: Instruction, threads: Array) -> None:
    """A sum that acquires and releases, of one thread after the other: a relaxed one would order nothing."""
    if i.modifiers[-4:-1] != ("gpu", "acq_rel", "add"):
        raise Fault(f"no machine knows {i.opcode}")
    dtype = TYPES[i.modifiers[-1]]
    to, where, value = i.operands
    addresses = m.address(where, threads)
    values = np.broadcast_to(m.read(value, threads, dtype), threads.shape)
    before = np.empty(threads.shape, dtype)
    for k in range(len(threads)):
        one = slice(k, k + 1)
        before[one] = load(m, i, threads[one], addresses[one], dtype.itemsize).view(dtype)[:, 0]
        store(m, i, threads[one], addresses[one], (before[one] + values[one]).view(np.uint8)[None])
    m.write(to, threads, before)


def _row(m: Machine, threads: Array, dtype: np.dtype, items: list[Operand]) -> Array:
    """The bytes (threads, n) of registers side by side."""
    parts = [np.broadcast_to(m.read(o, threads, f"b{8 * dtype.itemsize}"), threads.shape) for o in items]
    return np.stack(parts, -1).view(np.uint8)


# --- shared memory ---


def load_shared(m: Machine, i: Instruction, threads: Array, addresses: Array, nbytes: int) -> Array:
    """The bytes (threads, nbytes) at addresses."""
    m.check_shared(addresses, threads, nbytes)
    count_passes(m, i, threads, addresses, nbytes)
    m.order.read(threads // WARP, m.order.at(addresses, nbytes))
    return m.shared.view(f"V{nbytes}")[addresses // np.uint64(nbytes)].view(np.uint8).reshape(-1, nbytes)


def store_shared(m: Machine, i: Instruction, threads: Array, addresses: Array, data: Array) -> None:
    """Threads of one instruction that write one address must write the same."""
    nbytes = data.shape[1]
    m.check_shared(addresses, threads, nbytes)
    count_passes(m, i, threads, addresses, nbytes)
    kind = f"u{nbytes}" if nbytes <= 8 else f"V{nbytes}"
    at = addresses // np.uint64(nbytes)
    room, data = m.shared.view(kind), np.ascontiguousarray(data).view(kind)[:, 0]
    same = room[at] == data
    room[at] = data
    if (room[at] != data).any():
        raise Fault("threads write different bytes to one address")
    m.order.write(threads // WARP, m.order.at(addresses, nbytes), same[:, None])


# --- global memory ---


def load(m: Machine, i: Instruction, threads: Array, addresses: Array, nbytes: int) -> Array:
    """The bytes (threads, nbytes) at addresses."""
    plain = _checked(m, i, threads, addresses, nbytes, write=False)
    return _host(plain, nbytes).view(np.uint8).reshape(-1, nbytes)


def store(m: Machine, i: Instruction, threads: Array, addresses: Array, data: Array) -> None:
    """Threads of one instruction that write one address must write the same: who comes last is nobody's business."""
    nbytes = data.shape[1]
    plain = _checked(m, i, threads, addresses, nbytes, write=True)
    data = np.ascontiguousarray(data).view(f"V{nbytes}")[:, 0]
    _host(plain, nbytes, data)


def _checked(m: Machine, i: Instruction, threads: Array, addresses: Array, nbytes: int, *, write: bool) -> Array:
    plain = m.memory.untagged(addresses, np.array(True), nbytes, write=write)
    aligned(plain, nbytes)
    if m.counts is not None:
        count_sectors(m, i, threads, plain, nbytes)
    return plain


def _host(plain: Array, nbytes: int, data: Array | None = None) -> Array:
    """The bytes at this process's addresses, after they became `data`."""
    low = int(plain.min()) & ~15
    room = np.frombuffer(HOST.from_address(low), f"V{nbytes}")
    at = (plain - np.uint64(low)) // np.uint64(nbytes)
    if data is not None:
        room[at] = data
        if (room[at] != data).any():
            raise Fault("threads write different bytes to one address")
    return room[at]


# --- copies from global to shared memory ---


@dataclass
class Copy:
    """Of cp.async, not yet waited for: a place for each thread, and which of the thread's groups it is part of."""

    i: Instruction
    threads: Array
    to: Array
    source: Array
    nbytes: int
    given: Array  # bytes that are copied; the rest is filled with zeros
    group: Array
    moved: bool = False

    def move(self, m: Machine, sample_indices: Array) -> None:
        """The bytes of `some`, a mask."""
        for n in np.unique(self.given[sample_indices]):
            now = sample_indices & (self.given == n)
            data = np.zeros((int(now.sum()), self.nbytes), np.uint8)
            if n:
                if n != self.nbytes:
                    raise Fault(f"copies {n} bytes of {self.nbytes}")
                data = load(m, self.i, self.threads[now], self.source[now], int(n))
            m.shared.view(f"V{self.nbytes}")[self.to[now] // np.uint64(self.nbytes)] = data.view(f"V{self.nbytes}")[:, 0]

    def finish(self, m: Machine, sample_indices: Array) -> Copy:
        """`some` have waited; the rest is left."""
        if not self.moved:
            self.move(m, sample_indices)
        m.order.came(self.threads[sample_indices] // WARP, m.order.at(self.to[sample_indices], self.nbytes))
        rest = {name: getattr(self, name)[~sample_indices] for name in ("threads", "to", "source", "given", "group")}
        return replace(self, **rest)


def _groups(m: Machine) -> Array:
    """How many groups each thread has committed."""
    return m.state.setdefault("cp.async groups", np.zeros(m.everyone.shape, np.int64))


def _copies(m: Machine) -> list[Copy]:
    return m.state.setdefault("cp.async copies", [])


@op("cp.async.ca", "cp.async.cg")
def cp_async(m: Machine, i: Instruction, threads: Array) -> None:
    to, source, size, *given = i.operands
    nbytes = int(m.read(size, threads, "u32"))
    targets = m.address(to, threads)
    m.check_shared(targets, threads, nbytes)
    count_passes(m, i, threads, targets, nbytes)
    count = np.broadcast_to(m.read(given[0], threads, "u32") if given else np.uint32(nbytes), threads.shape)
    copy = Copy(i, threads, targets, m.address(source, threads), nbytes, count, _groups(m)[threads])
    m.order.start_writing(threads // WARP, m.order.at(targets, nbytes))
    if not m.late:
        copy.move(m, np.ones(len(threads), bool))
        copy.moved = True
    _copies(m).append(copy)


@op("cp.async.commit_group")
def commit(m: Machine, i: Instruction, threads: Array) -> None:
    groups = _groups(m).copy()
    groups[threads] += 1
    m.state["cp.async groups"] = groups


@op("cp.async.wait_group", "cp.async.wait_all")
def wait(m: Machine, i: Instruction, threads: Array) -> None:
    """Until at most so many groups of the thread, the youngest, are under way; wait_all: also what is in no group yet."""
    everything = "wait_all" in i.modifiers
    pending = 0 if everything else int(m.read(i.operands[0], threads, "u32"))
    mine = np.zeros(m.everyone.shape, bool)
    mine[threads] = True
    done = _groups(m) - pending + (1 if everything else 0)
    left = []
    for copy in _copies(m):
        sample_indices = mine[copy.threads] & (copy.group < done[copy.threads])
        rest = copy.finish(m, sample_indices) if sample_indices.any() else copy
        if len(rest.threads):
            left.append(rest)
    m.state["cp.async copies"] = left


@at_end
def all_copies_were_awaited(m: Machine) -> None:
    """Shared memory may belong to the next block when they arrive."""
    if left := [c for c in _copies(m) if (c.given > 0).any()]:
        raise Fault(f"{m.kernel.name} ends while a copy is under way: {left[0].i.text}")


# --- counts ---


def count_sectors(m: Machine, i: Instruction, threads: Array, plain: Array, nbytes: int) -> None:
    """By warps and instruction: sectors that are touched, and those that as many different bytes would fill."""
    assert m.counts is not None
    warp = threads // WARP
    owner = warp.astype(np.uint64) << np.uint64(48)
    touched = [owner ^ (plain + np.uint64(k)) // np.uint64(SECTOR) for k in range(0, nbytes, SECTOR)]
    distinct = np.unique(owner ^ plain)
    m.counts.sectors[i.text] += len(np.unique(np.stack(touched)))
    per_warp = np.unique(distinct >> np.uint64(48), return_counts=True)[1]
    m.counts.asked[i.text] += int((-(-per_warp * nbytes // SECTOR)).sum())


def count_passes(m: Machine, i: Instruction, threads: Array, addresses: Array, nbytes: int) -> None:
    """Of a warp's access to shared memory: 32 lanes of 4 bytes at once, 16 of 8, 8 of 16."""
    if m.counts is None:
        return
    lanes = max(1, min(WARP, BANKS * 4 // nbytes))
    rows = np.full((len(m.all_warps) * WARP // lanes, lanes), np.iinfo(np.uint64).max, np.uint64)
    rows.reshape(-1)[threads] = addresses
    rows = rows[(rows != np.iinfo(np.uint64).max).any(1)]
    m.counts.passes[i.text] += int(passes(rows, nbytes).sum())
    m.counts.needed[i.text] += len(rows)


def passes(rows: Array, nbytes: int) -> Array:
    """How often the banks are asked for each row of addresses, of lanes that are served together; the largest number stands for a
    lane that takes no part."""
    words = rows[:, :, None] // np.uint64(4) + np.arange(-(-nbytes // 4), dtype=np.uint64)
    words = np.sort(words.reshape(len(rows), -1), axis=1)
    idle = np.iinfo(np.uint64).max // np.uint64(4)
    new = np.ones(words.shape, bool)
    new[:, 1:] = words[:, 1:] != words[:, :-1]
    new &= words < idle
    found = np.zeros((len(rows), BANKS), np.int64)
    row, _ = np.nonzero(new)
    np.add.at(found, (row, (words[new] % np.uint64(BANKS)).astype(np.int64)), 1)
    return found.max(1)
