"""The tuner's harness on the CPU: operands between guard bytes, and a table of calls to time."""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from barellm.cpu import jit
from barellm.cpu.isa import host
from barellm.cpu.kernels.gemm import gemm, skinny_gemm, weight_gradient
from barellm.cpu.threads import Pool, record_table
from barellm.cpu.tuner import faults
from barellm.cpu.tuner.problem import GemmProblem, configured
from barellm.program import scalars
from barellm.program.integers import round_up
from barellm.program.ops.pointwise.elementwise import SLOPES
from barellm.runtime.tuner import harness
from barellm.runtime.tuner.problem import Candidate

GUARD, FILL = 4096, 0xA5  # bytes before and after each operand, and what is in them
SAMPLE = 384  # rows and columns of the result that are held against float64; bits are compared everywhere
SLOPE_ERROR = {"fp32": 8 * harness.EPS, "bf16": 1e-5}  # of an activation's slope, which is from tables before bf16
FRESH = frozenset({"a", "dy"})  # what the op before has just written: in cache when the GEMM starts
MOST_SETS = 16


class Run(NamedTuple):
    spec: int
    tokens: int
    accumulate: int  # whether gradients are accumulated, or stored

    def __str__(self) -> str:
        return f"{self.tokens} tokens" + (", accumulated" if self.accumulate else "")


@dataclass
class Loaded:
    """A candidate's code in this process, by specialisation."""

    libraries: list[jit.Library]
    addresses: list[int]
    thread_scratch: np.ndarray
    thread_scratch_bytes: int
    tables: dict[int, tuple[np.ndarray, Any]] = field(default_factory=dict)  # of the first, by number of calls


class Harness(harness.Harness):
    """One GEMM problem on `threads` threads. `footprint`: bytes that a training step touches. Timing cycles through so many bytes,
    so operands are as cold as in a step."""

    max_calls = 4096

    def __init__(self, problem: GemmProblem, threads: int, footprint: int) -> None:
        self.problem, self.isa, self.threads = problem, host(), threads
        self.scalars = np.zeros(scalars.MOST, np.int64)
        self.pool = Pool(threads, self.isa)
        self.data = Operands(problem, footprint)
        self.runs = self._runs()
        self.references: dict[Run, dict[str, tuple]] = {}
        self.open(problem.default(self.isa))

    def _runs(self) -> list[Run]:
        """All tokens, one, a prime, all but one, or the minimum of its kernel; gradients stored and accumulated."""
        most = self.problem.tokens
        runs = []
        for i, spec in enumerate(self.problem.specs):
            constants = dict(spec.constants)
            least = max(1, constants.get("least", 0))
            counts = {max(n, least) for n in (most, 1, min(37, most), most - 1)}
            modes = (0, 1) if constants["mode"] == "start" else (0,)
            runs += [Run(i, tokens, mode) for tokens in sorted(counts) for mode in modes]
        return runs

    def load(self, candidate: Candidate) -> Loaded:
        """Compile a candidate, without keeping it on disk: an intrinsic that the target cannot select ends the process."""
        problem, config = self.problem, candidate.config
        emit = getattr(faults, candidate.fault) if candidate.fault else None
        specs = [configured(spec, config, emit) for spec in problem.specs]
        libraries = [jit.Library([jit.compile_object(spec.ir(self.isa), self.isa)], self.isa) for spec in specs]
        addresses = [lib.address(spec.symbol()) for lib, spec in zip(libraries, specs, strict=True)]
        if problem.skinny:
            nbytes = skinny_gemm.ScratchLayout(self.isa, problem.depth).nbytes
        elif problem.operation == "weight_gradient":
            nbytes = weight_gradient.wgrad_scratch_bytes(self.isa, problem.dtype, problem.depth, config)
        else:
            nbytes = gemm.gemm_scratch_bytes(self.isa, problem.dtype, problem.depth, config)
        nbytes = round_up(nbytes, 4096)
        return Loaded(libraries, addresses, np.zeros(self.threads * nbytes + 64, np.uint8), nbytes)

    # --- validation ---

    def run(self, loaded: Loaded, run: Run) -> None:
        self.data.restore()
        table, keep = self._table(loaded, run.spec, 1)
        self._bind(loaded, run.tokens, run.accumulate)
        self.pool.run(table.ctypes.data, 1)
        del keep

    def snapshot(self, loaded: Loaded, run: Run) -> dict[str, str]:
        return self.data.digests()

    def differs(self, loaded: Loaded, run: Run) -> bool:
        return self.data.digests() != self.expected[run]

    def difference(self, loaded: Loaded, run: Run) -> str:
        """In words: how many elements of which result differ from the default's, which is run again, and by how much at most."""
        written = [o.name for o in self.problem.operands[run.spec] if o is not None and o.written]
        got = {name: self.data.array(name).astype(np.float64) for name in written}
        self.run(self.default, run)
        for name in written:
            want = self.data.array(name).astype(np.float64)
            differ = got[name] != want
            if differ.any():
                far = float(np.nanmax(np.abs(got[name] - want)))
                return f"{int(differ.sum())} of {differ.size} elements of {name}, by {far:.2g} at most"
        return "in the sign of zeros or the bits of NaN"

    def verify(self, loaded: Loaded, run: Run) -> None:
        if run not in self.references:
            self.references[run] = self._reference(*run)
        for name, (at, want, bound) in self.references[run].items():
            harness.compare(name, self.data.array(name)[np.ix_(*at)], want, bound, at, run)
        if touched := self.data.touched():
            raise harness.Wrong(f"it wrote outside its result: {touched}")

    def _reference(self, i: int, tokens: int, accumulate: int) -> dict[str, tuple]:
        """A sample of each result, by name, as ((rows, columns), float64 values, bound). `i`: which of the problem's specs;
        `tokens`: rows of a run, of a weight gradient its depth; `accumulate`: whether mode "start" adds. At most SAMPLE rows and
        columns are computed, from operands as they were before the run."""
        problem, given = self.problem, self.data.initial
        constants = dict(problem.specs[i].constants)
        gradient = problem.operation == "weight_gradient"
        rows = harness.sample_indices(problem.rows if gradient else tokens, SAMPLE)
        at = rows, cols = rows, harness.sample_indices(problem.cols, SAMPLE)
        if gradient:
            left, right = given["dy"][:tokens][:, rows].T, given["x"][:tokens][:, cols]
        else:
            left, weight = given["a"][rows], given["weight"]
            right = weight[cols].T if constants.get("transposed", True) else weight[:, cols]
        result = "dweight" if gradient else "out"
        epilogues = [*constants.get("epilogues", ())]
        if constants["mode"] == "add" or (constants["mode"] == "start" and accumulate):
            epilogues.append(result)

        # Epilogue -> the kernel's operand that it reads: residual and an activation's input share the slot "other".
        operands = dict.fromkeys(("residual", *SLOPES), "other") | {"bias": "bias", result: result}

        def operand(epilogue: str) -> np.ndarray:
            whole = given[operands[epilogue]]
            return whole[cols] if whole.ndim == 1 else whole[np.ix_(*at)]

        found = harness.gemm_reference(left, right, epilogues, operand, SLOPE_ERROR[problem.dtype])
        return {{"pre": "second", "out": result}[name]: (at, *values) for name, values in found.items()}

    # --- timing ---

    def _bind(self, loaded: Loaded, tokens: int, accumulate: int) -> None:
        for name, value in (scalars.defaults() | {"batch": 1, "seq": tokens, "accumulate": accumulate}).items():
            self.scalars[scalars.SCALARS[name].index] = value
        thread_scratch = (loaded.thread_scratch.ctypes.data + 63) & ~63
        self.pool.bind(self.scalars.ctypes.data, thread_scratch, loaded.thread_scratch_bytes)

    def _table(self, loaded: Loaded, i: int, records: int) -> tuple[np.ndarray, Any]:
        """A table of `records` calls of one specialisation, each on the next set of operands; and what must live as long."""
        table, sets = record_table(records), [self._arguments(i, s) for s in range(self.data.sets)]
        for n in range(records):
            table[n, :3] = loaded.addresses[i], sets[n % len(sets)].ctypes.data, 1
        return table, sets

    def _arguments(self, i: int, which: int) -> np.ndarray:
        """The packed arguments of a call of specialisation i, on operand set `which`."""
        spec, operands = self.problem.specs[i], self.problem.operands[i]
        limits = iter((0, self.problem.tokens))  # row_begin, row_limit
        args = []
        for kind, operand in zip(spec.operands, operands, strict=True):
            if kind == "int":
                args.append(next(limits))
            elif operand is not None:
                args.append(self.data.address(operand.name, which))
        return np.array([*args, 0], np.int64)

    def prepare(self, loaded: Loaded, calls: int) -> None:
        """A table of so many calls, each set of operands as often as another."""
        loaded.tables = {calls: self._table(loaded, 0, round_up(calls, self.data.sets) if calls > 1 else 1)}

    def repeat(self, loaded: Loaded, calls: int) -> float:
        table, _ = loaded.tables[calls]
        self._bind(loaded, self.problem.timed, 0)
        start = time.perf_counter()
        self.pool.run(table.ctypes.data, len(table))
        return (time.perf_counter() - start) / len(table)

    def close(self) -> None:
        self.pool.close()


class Operands:
    """Operands by name, each between guards, in several copies for timing; the first is what validation looks at."""

    def __init__(self, problem: GemmProblem, footprint: int) -> None:
        """Allocate and fill the operands: as many copies of those that are cold in a step as cover `footprint` bytes."""
        operands = {o.name: o for row in problem.operands for o in row if o is not None}
        cold = sum(o.nbytes for o in operands.values() if o.name not in FRESH)
        self.sets = max(1, min(MOST_SETS, footprint // max(1, cold)))
        self.written = {name for name, o in operands.items() if o.written}
        self.initial: dict[str, np.ndarray] = {}
        self._buffers: dict[str, list[np.ndarray]] = {}
        for seed, (name, o) in enumerate(operands.items()):
            values = harness.random_normal(o.shape, o.dtype, seed)
            self.initial[name] = values * values.dtype.type(problem.depth**-0.5) if name == "weight" else values
            copies = 1 if name in FRESH else self.sets
            self._buffers[name] = [np.empty(o.nbytes + 2 * GUARD + 64, np.uint8) for _ in range(copies)]
            for which in range(copies):
                self._fill(name, which)

    def _span(self, name: str, which: int = 0) -> np.ndarray:
        """The operand's bytes with its guards; the operand starts at a multiple of 64."""
        buffer = self._buffers[name][min(which, len(self._buffers[name]) - 1)]
        skip = -buffer.ctypes.data % 64
        return buffer[skip : skip + self.initial[name].nbytes + 2 * GUARD]

    def _fill(self, name: str, which: int = 0) -> None:
        span = self._span(name, which)
        span[:GUARD] = span[-GUARD:] = FILL
        span[GUARD:-GUARD] = self.initial[name].view(np.uint8).reshape(-1)

    def restore(self) -> None:
        for name in self.written:
            self._fill(name)

    def address(self, name: str, which: int) -> int:
        return self._span(name, which).ctypes.data + GUARD

    def array(self, name: str) -> np.ndarray:
        initial = self.initial[name]
        return self._span(name)[GUARD:-GUARD].view(initial.dtype).reshape(initial.shape)

    def digests(self) -> dict[str, str]:
        """Of every operand with its guards."""
        return {name: xxhash.xxh3_128(self._span(name).data).hexdigest() for name in self.initial}

    def touched(self) -> str:
        """Name the bytes that were changed and should not have been: guards, and operands that are only read."""
        guards = {name: np.concatenate([self._span(name)[:GUARD], self._span(name)[-GUARD:]]) for name in self.initial}
        guard_names = [f"beside {name}" for name, guard in guards.items() if (guard != FILL).any()]
        inputs = [name for name, a in self.initial.items() if name not in self.written and self._changed(name, a)]
        return ", ".join(guard_names + [f"the input {name}" for name in inputs])

    def _changed(self, name: str, before: np.ndarray) -> bool:
        return not np.array_equal(self.array(name).view(np.uint8), before.view(np.uint8))
