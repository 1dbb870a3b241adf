"""Runs rungs in turns and says how fast they are, as a share of the peak that was measured in the same turns.

Each round measures the peaks and every rung once, so a slow moment of the machine touches all of them alike; medians of the
rounds are reported. Before it is timed, a rung's result is compared with the product in float64.
"""

from __future__ import annotations

import ctypes
import os
import time
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from anatomy import cpu, memory
from anatomy.rung import RUNGS, Rung
from barellm.cpu import isa as isas
from barellm.cpu import jit, processor
from barellm.cpu.backend import Bench
from barellm.cpu.isa import ISA
from barellm.cpu.lang.sync import RECORD_NBYTES
from barellm.tools.bench.description import machine
from barellm.tools.inspect import machine_code

assert cpu and RUNGS
TILES = 96  # a multiple of all tiles' rows and columns
SAMPLE = 0.05  # seconds of one sample, at least
OFFSET = 4096 + 64 * 7  # between operands: rows of equal numbers in different sets of the cache
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Problem:
    """Random operands of one product, on huge pages, and its result in float64."""

    def __init__(self, M: int, N: int, K: int) -> None:
        self.M, self.N, self.K = M, N, K
        shapes = {"c": (M, N), "a": (M, K), "b": (K, N)}
        self.room = room = memory.huge(sum(4 * m * n + OFFSET for m, n in shapes.values()) * 2)
        self.arrays: dict[tuple[str, str], np.ndarray] = {}
        self.exact: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        rng, at = np.random.default_rng(0), 0
        for name, (m, n) in shapes.items():
            values = rng.standard_normal((m, n))
            for dtype in DTYPES if name != "c" else ("fp32",):
                nbytes = m * n * DTYPES[dtype].itemsize
                array = room[at : at + nbytes].view(DTYPES[dtype]).reshape(m, n)
                array[:] = values
                self.arrays[name, dtype] = array
                at += -(-nbytes // 64) * 64 + OFFSET

    def operands(self, dtype: str) -> list[np.ndarray]:
        return [self.arrays["c", "fp32"], self.arrays["a", dtype], self.arrays["b", dtype]]

    def check(self, dtype: str, what: str) -> float:
        """The largest error of C as a share of what is allowed; AssertionError where it is more than that. Allowed are four times
        the square root of K roundings of the sum of the products' magnitudes."""
        c, a, b = self.operands(dtype)
        if dtype not in self.exact:
            x, y = a.astype(np.float64), b.astype(np.float64)
            self.exact[dtype] = x @ y, abs(x) @ abs(y) * 4 * self.K**0.5 * 2.0**-24
        exact, allowed = self.exact[dtype]
        with np.errstate(invalid="ignore"):
            share = float(np.max(np.abs(c - exact) / allowed))
        assert share <= 1, f"{what}: {self.M} x {self.N} x {self.K} is wrong by {share:.3g} times what is allowed"
        return share


class Timed:
    """A rung compiled for a problem. `error`: as `Problem.check` gives it."""

    def __init__(self, rung: Rung, problem: Problem, bench: Bench) -> None:
        self.rung, self.bench = rung, bench
        spec = rung.specialised(problem.M, problem.N, problem.K)
        # Not from the cache of objects, which does not know that rungs are made of each other.
        self.linked = jit.Library([jit.compile_object(spec.ir(bench.isa), bench.isa)], bench.isa)
        self.arguments = np.array([x.ctypes.data for x in problem.operands(rung.dtype)], np.int64)
        self.thread_scratch = -(-max(rung.scratch(bench.isa, problem.N, problem.K), 64) // 4096) * 4096
        self.scratch = memory.huge(self.thread_scratch * bench.threads)
        self._block = ctypes.create_string_buffer(2 * RECORD_NBYTES)
        self.record = (ctypes.addressof(self._block) + RECORD_NBYTES - 1) & -RECORD_NBYTES
        (ctypes.c_int64 * 3).from_address(self.record)[:] = (
            self.linked.address(spec.symbol()), self.arguments.ctypes.data, 1
        )  # fmt: skip
        problem.arrays["c", "fp32"].fill(np.nan)
        self.calls = 1
        seconds = self.sample()
        self.error = problem.check(rung.dtype, rung.name)
        self.calls = max(1, round(SAMPLE / seconds))

    def sample(self) -> float:
        """Seconds of one product."""
        self.bench.pool.bind(0, self.scratch.ctypes.data, self.thread_scratch, memory=self)
        start = time.perf_counter()
        for _ in range(self.calls):
            self.bench.pool.run(self.record, 1)
        return (time.perf_counter() - start) / self.calls


def code_of(rung: Rung, isa: ISA, size: int) -> dict[str, Any]:
    """What the compiler made of the rung's inner loop."""
    whole = -(-size // TILES) * TILES  # else it may be the loop of a narrow tile at the edge
    inner = machine_code.read(jit.assembly(rung.specialised(whole, whole, whole).ir(isa), isa)).inner
    assert inner, rung.name
    keys = ("instructions", "multiply_adds", "loads", "stores", "vector_spills", "widest")
    return {"isa": isa.name, **{key: getattr(inner, key) for key in keys}}


def compiled_for(rung: Rung) -> ISA:
    """The host's instruction set, or the least of x86-64 that the rung needs."""
    if rung.needs(isas.host()):
        return isas.host()
    return next(isas.cross(name, "x86_64-unknown-linux-gnu") for name in reversed(isas.X86) if rung.needs(isas.X86[name]))


def ladder(rungs: list[Rung], size: int, rounds: int) -> dict[str, Any]:
    """All that is measured, as it is written to JSON."""
    load_before = os.getloadavg()
    benches = {False: Bench(1), True: Bench()}  # by whether all threads run
    try:
        problem = Problem(size, size, size)
        timed = {r: Timed(r, problem, benches[r.threads]) for r in rungs if r.needs(benches[True].isa)}
        threads = {kind: bench.threads for kind, bench in benches.items()}  # equal where there is one core
        counted = {bench.threads: bench for bench in benches.values()}
        kinds = sorted({(threads[r.threads], r.dtype) for r in timed} | {(count, "fp32") for count in counted})
        peaks: dict[Any, list[float]] = {kind: [] for kind in kinds}
        samples: dict[Rung, list[float]] = {r: [] for r in timed}
        for _ in range(rounds):
            for count, dtype in kinds:
                peaks[count, dtype].append(counted[count].peak(dtype))
            for r, t in timed.items():
                samples[r].append(t.sample())
    finally:
        for bench in benches.values():
            bench.close()
    hierarchy = memory.measured(rounds)
    rows = []
    for r in rungs:
        isa = compiled_for(r)
        operations, nbytes = r.step(isa)
        row = {
            "number": r.number, "name": r.name, "file": r.file, "changes": r.changes, "dtype": r.dtype,
            "threads": threads[r.threads], "flops_per_byte": operations / nbytes, "code": code_of(r, isa, size),
        }  # fmt: skip
        if r in timed:
            seconds, peak = median(samples[r]), median(peaks[threads[r.threads], r.dtype])
            rate = 2 * size**3 / seconds
            row |= {"seconds": samples[r], "flops": rate, "percent": 100 * rate / peak, "error": timed[r].error}
        rows.append(row)
    return {
        "kind": "anatomy",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": machine(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "size": size,
        "rounds": rounds,
        "peaks": [{"threads": count, "dtype": dtype, "flops": found} for (count, dtype), found in peaks.items()],
        "caches": {f"L{level}": nbytes for level, nbytes in sorted(processor.caches().items())},
        "memory": hierarchy,
        "levels": memory.levels(hierarchy, processor.caches()),
        "rungs": rows,
    }
