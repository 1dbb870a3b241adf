"""The memory hierarchy of this machine, measured: how long one load takes that the next one waits for, and how much one core
reads in a second, from buffers of all sizes. Where a buffer outgrows a cache, the first number jumps and the second falls.
"""

from __future__ import annotations

import mmap
from statistics import median
from typing import Any

import numpy as np

from barellm.cpu.backend import Bench
from barellm.cpu.processor import caches
from barellm.cpu.specialisation import Specialisation

LINE = 64  # bytes of a cache line
UNROLLED = 8  # steps of a turn of either loop
HUGE = 2 << 20
LOADS = 1 << 17  # of a chase: half a millisecond in L1, 15 in memory
READ_BYTES = 1 << 26  # of a measurement of bandwidth, at least


def chase(k, out, ring, turns):
    """Each load gives the index of the next one: nothing can be done ahead."""
    at = k.var(k.int(0))
    with k.loop(0, turns):
        for _ in range(UNROLLED):
            at.value = ring.get(at.value)
    out.put(at.value)


def stream(k, out, data, vectors, turns):
    """`turns` times the sum of all vectors of a buffer, in UNROLLED sums that do not wait for each other."""
    sums = [k.var_vec(0.0) for _ in range(UNROLLED)]
    with k.loop(0, turns), k.loop(0, vectors, UNROLLED) as v:
        for i, total in enumerate(sums):
            total.value = total.value + data.load((v + i) * k.lanes)
    for total in sums[1:]:
        sums[0].value = sums[0].value + total.value
    out.store(sums[0].value)


def huge(nbytes: int) -> np.ndarray:
    """Zeroed bytes on pages of 2 MiB where the system has them: with small ones, misses of the page table would be measured too."""
    room = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(room, np.uint8)
    skip = -raw.ctypes.data % HUGE
    return raw[skip : skip + nbytes]


def sizes() -> list[int]:
    """From a quarter of L1 to four times the last one: powers of two, and three quarters of them."""
    least, most = caches()[1] // 4, 4 * max(caches().values())
    powers = [1 << n for n in range(least.bit_length() - 1, most.bit_length())]
    return sorted({n for p in powers for n in (p * 3 // 4, p) if least <= n <= most})


def ring_of(lines: int) -> np.ndarray:
    """Indices of 64-bit words that lead through all lines in a random circle."""
    order = np.random.default_rng(0).permutation(lines)
    ring = np.zeros((lines, LINE // 8), np.int64)
    ring[order, 0] = np.roll(order, -1) * (LINE // 8)
    return ring


class Hierarchy:
    """Both measurements, on one core."""

    def __init__(self) -> None:
        self.bench = Bench(threads=1)
        self.room = huge(max(sizes()))
        self.out = np.zeros(64, np.float32)

    def row(self, nbytes: int, rounds: int) -> dict[str, Any]:
        lines, vector = nbytes // LINE, 4 * self.bench.isa.lanes
        buffer = self.room[: lines * LINE]
        buffer.view(np.int64).reshape(lines, -1)[:] = ring_of(lines)
        spec = Specialisation(chase, ("i64", "i64", "int"), ())
        loads = max(LOADS, 2 * lines) if nbytes <= caches()[2] else LOADS
        warm = [self.out.ctypes.data, buffer.ctypes.data, -(-lines // UNROLLED)]
        self.bench.timed(spec, warm, repeats=1)
        chased = self.bench.timed(spec, [*warm[:2], loads // UNROLLED], repeats=rounds)
        buffer[:] = 0
        turns = max(1, READ_BYTES // buffer.size)
        step = UNROLLED * vector
        spec = Specialisation(stream, ("fp32", "fp32", "int", "int"), ())
        arguments = [self.out.ctypes.data, buffer.ctypes.data, buffer.size // step * UNROLLED, turns]
        read = self.bench.timed(spec, arguments, repeats=rounds + 1)[1:]
        nanoseconds = 1e9 * median(chased) / loads
        return {
            "bytes": nbytes,
            "latency_ns": round(nanoseconds, 3),
            "bytes_per_s": round(buffer.size // step * step * turns / median(read)),
        }

    def close(self) -> None:
        self.bench.close()


def measured(rounds: int) -> list[dict[str, Any]]:
    hierarchy = Hierarchy()
    try:
        return [hierarchy.row(nbytes, rounds) for nbytes in sizes()]
    finally:
        hierarchy.close()


def levels(rows: list[dict[str, Any]], cached: dict[int, int]) -> dict[str, dict[str, Any]]:
    """The row that stands for each level: half of L1, four times the cache before for the others (if that fits), and
    the largest buffer for memory."""
    found, before = {}, 0
    for level, size in sorted(cached.items()):
        wanted = min(4 * before, size // 2) if before else size // 2
        found[f"L{level}"] = min(rows, key=lambda row: abs(row["bytes"] - wanted))
        before = size
    return found | {"memory": rows[-1]}
