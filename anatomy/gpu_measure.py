"""The GPU's rungs: what the compiler made of each, on any machine, and how fast they are, where there is a Hopper card.

**They have not yet run on a GPU.** Their compiled PTX has been run by the simulator of the tests, against float64.
"""

from __future__ import annotations

import re
from collections import Counter
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from anatomy import gpu
from anatomy.gpu_rung import GPU_RUNGS, HOPPER, GpuRung
from barellm.cuda import bench, driver, step
from barellm.cuda.compile import Code, compiled
from barellm.cuda.kernel import Sizes, Target
from barellm.cuda.launch import BoundLaunch, Kernel
from barellm.errors import UserError
from barellm.runtime.lowering import Region
from barellm.tools.inspect import device_code

assert gpu and GPU_RUNGS
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
REGISTERS, SHARED_KIB, THREADS, BLOCKS = 65536, 228, 2048, 32  # of a multiprocessor of Hopper
# LDSM and STSM move four or eight pieces of 8 x 8 numbers between registers and shared memory with one instruction. "multicast":
# those of UTMALDG that write into the shared memory of several blocks.
SHOWN = ("FFMA", "HGMMA", "LDG", "STG", "LDS", "LDSM", "STS", "STSM", "UTMALDG", "multicast", "UTMASTG", "BAR")
SCALARS_BYTES = 4096
ROWS_CHECKED = 64


def resident(registers: int, shared: int, threads: int) -> int:
    """How many blocks fit on a multiprocessor. Registers are given out to warps in pieces of 8 for each thread, and a block takes
    1 KiB of shared memory for itself."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(by_registers, (SHARED_KIB << 10) // (shared + 1024), THREADS // threads, BLOCKS)


def facts_of(code: Code) -> dict[str, Any]:
    """What ptxas says of a kernel, and how often it has the instructions that matter."""
    sass = device_code.disassembled(code.cubin)
    found = device_code.read(code.cubin, shared=code.shared_bytes, sass=sass)
    words = [m[1].split(".") for m in re.finditer(device_code.INSTRUCTION, sass)]
    names = Counter(name for name, *_ in words)
    names["multicast"] = sum("MULTICAST" in rest for _, *rest in words)
    wide = {name: n for name, n in found.widths.items() if name.endswith(".128")}
    return {
        "threads": code.threads,
        "registers": found.registers,
        "spills": found.spills,
        "stack": found.stack,
        "shared": found.shared,
        "resident": resident(found.registers, found.shared, code.threads),
        "counts": {name: names[name] for name in SHOWN if names[name]} | wide,
    }


def facts(rungs: list[GpuRung], size: int) -> list[dict[str, Any]]:
    """A row for each rung, compiled for sm_90a."""
    specs = {r: r.product(size, size, size)[1].spec for r in rungs}
    codes = compiled(specs.values(), HOPPER.arch, processes=step.processes())
    rows = []
    for r, spec in specs.items():
        head = {"number": r.number, "name": r.name, "file": r.file, "changes": r.changes, "dtype": r.dtype}
        rows.append(head | facts_of(r.mended(spec, codes[spec])))
    return rows


class OnGpu:
    """A rung with its operands in the memory of this machine's GPU."""

    def __init__(self, rung: GpuRung, size: tuple[int, int, int], device: driver.Device, context: driver.Context) -> None:
        self.rung, self.context, self.dtype = rung, context, DTYPES[rung.dtype]
        self.product, launch = rung.product(*size, target=Target.of(device))
        rng, p = np.random.default_rng(0), self.product
        self.a, self.b = (rng.standard_normal(t.shape, np.float32).astype(self.dtype) for t in (p.a, p.b))
        held = {p.a: self.a, p.b: self.b, p.c: np.full(p.c.shape, np.nan, self.dtype)} | p.tables
        self.memory = {tensor: driver.DeviceMemory(values.nbytes) for tensor, values in held.items()}
        for tensor, values in held.items():
            self.memory[tensor].write(0, np.ascontiguousarray(values).reshape(-1).view(np.uint8), context.stream)
        self.scalars = driver.DeviceMemory(SCALARS_BYTES)
        self.scalars.fill(0, 0, SCALARS_BYTES, context.stream)
        code = bench.compiled([launch.spec], device.arch, processes=1)[launch.spec]
        self.kernel = Kernel(rung.mended(launch.spec, code), device)
        self.bound = BoundLaunch(launch, self.kernel, Sizes(), self._address, self.scalars.address)

    def _address(self, region: Any) -> int:
        assert isinstance(region, Region)
        return self.memory[region.tensor].address + region.start

    def check(self) -> None:
        """Run once, and compare some rows of C with float64."""
        self.bound.run(self.context.stream)
        c = self.memory[self.product.c]
        found = c.read(0, c.nbytes, self.context.stream).view(self.dtype).reshape(self.product.M, self.product.N)
        rows = np.unique(np.linspace(0, self.product.M - 1, ROWS_CHECKED).astype(int))
        x, y = self.a[rows].astype(np.float64), self.b.astype(np.float64)
        exact, rounding = x @ y, 2.0**-8 if self.rung.dtype == "bf16" else 0.0
        allowed = 4 * self.product.K**0.5 * 2.0**-24 * (abs(x) @ abs(y)) + rounding * abs(exact)
        wrong = ~(abs(found[rows].astype(np.float64) - exact) <= allowed)
        assert not wrong.any(), f"{self.rung.name}: {wrong.sum()} of {wrong.size} numbers of C are wrong"

    def seconds(self, repeats: int) -> float:
        return bench.graph_seconds(self.context, lambda: self.bound.run(self.context.stream), repeats)

    def free(self) -> None:
        self.kernel.unload()
        for memory in (*self.memory.values(), self.scalars):
            memory.free()


def measured(rungs: list[GpuRung], size: int, rounds: int) -> dict[int, dict[str, Any]]:
    """By number of the rung: seconds of each round, FLOP/s and share of the peak, which is measured in the same rounds."""
    machine = bench.Bench()
    if machine.device.arch != HOPPER.arch:
        raise UserError(f"the GPU's rungs are for compute capability 9.0, {machine.device.name} has {machine.device.arch}")
    timed = {r: OnGpu(r, (size, size, size), machine.device, machine.context) for r in rungs}
    for t in timed.values():
        t.check()
    peaks: dict[str, list[float]] = {dtype: [] for dtype in {r.dtype for r in rungs}}
    samples: dict[GpuRung, list[float]] = {r: [] for r in rungs}
    for _ in range(rounds):
        for dtype, found in peaks.items():
            found.append(machine.peak(dtype))
        for r, t in timed.items():
            samples[r].append(t.seconds(10))
    for t in timed.values():
        t.free()
    machine.close()
    rates = {r: 2 * size**3 / median(seconds) for r, seconds in samples.items()}
    return {
        r.number: {"seconds": samples[r], "flops": rate, "percent": 100 * rate / median(peaks[r.dtype])}
        for r, rate in rates.items()
    }
