"""The CPU as a backend: open a session, say what the machine is, measure its peak."""

import time
from contextlib import closing
from functools import cache

import numpy as np

from barellm.cpu import jit, step
from barellm.cpu.isa import ISA, host
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels import machine
from barellm.cpu.threads import Pool, record_table, thread_count
from barellm.cpu.threads import cores as cores  # for processes that share the machine
from barellm.program.builder import Program
from barellm.program.planner import Plan
from barellm.runtime import rates


def open_session(programs: dict[str, Program]) -> step.CpuSession:
    """Plan, compile and map `programs` into one arena."""
    return step.CpuSession(programs)


def planned(programs: dict[str, Program]) -> Plan:
    """The plan of such a session."""
    return step.lower_and_plan(programs, written=True).plan


def default_dtype() -> str:
    """bf16 if the processor multiplies it natively, else fp32."""
    return "bf16" if host().dot else "fp32"


def describe() -> dict[str, object]:
    """The facts about the machine that a checkpoint or a benchmark records."""
    return {"device": "cpu", "isa": host().name, "processor": host().cpu or "generic", "threads": thread_count()}


def machine_of(threads: int | None = None, isa: ISA | None = None) -> str:
    """What the rates of a machine depend on, as a text."""
    isa = isa or host()
    return f"{isa.cpu or 'cpu'} {isa.name} {threads or thread_count()} threads"


class Bench:
    """Runs single kernels on a pool of its own, for measuring."""

    def __init__(self, threads: int | None = None, isa: ISA | None = None) -> None:
        self.isa = isa or host()
        self.threads = threads or thread_count()
        self.pool = Pool(self.threads, self.isa)
        self.machine = machine_of(self.threads, self.isa)

    def timed(self, spec: Specialisation, args: list[int], *, repeats: int) -> list[float]:
        """Run a kernel instance `repeats` times with `args` (addresses or integers). Returns the seconds of each run."""
        library = jit.Library([jit.cached_object(spec.key, self.isa, lambda: spec.ir(self.isa))], self.isa)
        packed = np.array([*args, 0], np.int64)
        table, samples = record_table(1), []
        table[0, :3] = (library.address(spec.symbol()), packed.ctypes.data, 1)
        for _ in range(repeats):
            t = time.perf_counter()
            self.pool.run(table.ctypes.data, 1)
            samples.append(time.perf_counter() - t)
        return samples

    def peak(self, dtype: str) -> float:
        """FLOP/s of all threads with operands in registers: the roofline of a GEMM in `dtype`. FP8 is multiplied as bf16."""
        pair = dtype in ("bf16", "fp8") and bool(self.isa.dot)
        out = np.zeros(self.threads * 16, np.float32)
        iterations = 200_000
        spec = Specialisation(machine.peak, ("fp32", "int"), (("pair", pair),))
        best = min(self.timed(spec, [out.ctypes.data, iterations], repeats=5)[1:])
        return iterations * machine.peak_operations(self.isa, pair=pair) * self.threads / best

    def bandwidth(self, mix: tuple[int, int, int], nbytes: int = 1 << 28) -> float:
        """Bytes/s of a loop over some `nbytes` of memory. Of every eight vectors it reads, writes and updates in place as many as
        `mix` says; an update counts twice. If it writes, the better of normal and non-temporal stores counts."""
        read, write, update = mix
        vector = 4 * self.isa.lanes
        iterations = nbytes // (sum(mix) * vector) & -4096  # a multiple of 4096, so that threads get equal parts
        arrays = [np.ones(iterations * n * self.isa.lanes + 16, np.float32) for n in mix]
        addresses = [(a.ctypes.data + 63) & ~63 for a in arrays]
        out = np.zeros(self.threads * self.isa.lanes, np.float32)
        seconds = []
        for nontemporal in (False, True) if write else (False,):
            spec = Specialisation(machine.move, (*["fp32"] * 4, "int"), (("mix", mix), ("nontemporal", nontemporal)))
            seconds += self.timed(spec, [out.ctypes.data, *addresses, iterations], repeats=5)
        return iterations * (read + write + 2 * update) * vector / min(seconds)

    def close(self) -> None:
        self.pool.close()


@cache
def measured_peak(dtype: str) -> rates.Rate:
    """FLOP/s that this machine's threads reach on `dtype` matmuls, measured once a machine (0.3 s)."""
    with closing(Bench()) as bench:
        return rates.rate(bench.machine, dtype, lambda: bench.peak(dtype))
