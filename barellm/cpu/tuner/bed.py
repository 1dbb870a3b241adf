"""Runs candidates: operands with guards, what the result must be, and a table of calls to time.

This happens only in the child process of the tuner: the code that runs here may crash, hang, or write where it should not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import xxhash

from barellm.cpu import jit
from barellm.cpu.isa import ISA
from barellm.cpu.kernels.gemm import gemm, weight_gradient
from barellm.cpu.kernels.gemm.skinny_gemm import skinny_gemm_scratch_bytes
from barellm.cpu.lang.sync import RECORD_NBYTES
from barellm.cpu.threads import Pool
from barellm.cpu.tuner.work import Candidate, Operand, Work
from barellm.program import scalars
from barellm.program.dtypes import numpy_dtype
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, SLOPES
from barellm.runtime.tuner.child import Wrong

GUARD = 4096  # bytes before and after each operand
SAMPLE = (384, 384)  # rows and columns of the result that are held against float64; bits are compared everywhere
EPS = 2.0**-24
ROUNDING = {"fp32": EPS, "bf16": 2.0**-8}
SLOPE_ERROR = {
    "fp32": 8 * EPS,
    "bf16": 1e-5,
}  # of an activation's slope, which comes of tables where it is rounded to bf16
FRESH = frozenset({"a", "dy"})  # what the op before has just written: in cache when the product starts
TURN_SECONDS = 2e-3  # of one turn of a candidate
MOST_SETS = 16


@dataclass
class Loaded:
    """A candidate's code in this process, by specialisation."""

    libraries: list[jit.Library]
    addresses: list[int]
    thread_scratch: np.ndarray
    thread_scratch_bytes: int


class Bed:
    """One piece of work on `threads` threads. `footprint` is the number of bytes that a step touches. Timing goes round so many
    bytes, so that operands are where a step finds them."""

    def __init__(self, work: Work, isa: ISA, threads: int, footprint: int) -> None:
        self.work, self.isa, self.threads = work, isa, threads
        self.scalars = np.zeros(scalars.MOST, np.int64)
        self.pool = Pool(threads, isa)
        self.data = _Data(work, footprint)
        self.runs = self._runs()
        self.references: dict[tuple[int, int, int], dict[str, tuple]] = {}
        default = self.load(Candidate(work.default(isa)))
        self.expected = {run: self._digests(default, *run) for run in self.runs}
        self.default = default

    def _runs(self) -> list[tuple[int, int, int]]:
        """The runs, as (specialisation, tokens, accumulate): all tokens, one, a prime, all but one, or the least that it is for;
        gradients stored and added to."""
        most = self.work.tokens
        runs = []
        for i, spec in enumerate(self.work.specs):
            constants = dict(spec.constants)
            modes = (0, 1) if constants["mode"] == "start" else (0,)
            least = max(1, constants.get("least", 0))
            counts = {max(n, least) for n in (most, 1, min(37, most), most - 1)}
            runs += [(i, tokens, m) for tokens in sorted(counts) for m in modes]
        return runs

    def load(self, candidate: Candidate) -> Loaded:
        """Compiled here and nowhere kept: an intrinsic that the target cannot select ends the process."""
        specs = [candidate.spec(of) for of in self.work.specs]
        libraries = [jit.Library([jit.compile_object(spec.ir(self.isa), self.isa)], self.isa) for spec in specs]
        addresses = [lib.address(spec.symbol()) for lib, spec in zip(libraries, specs, strict=True)]
        work, choice = self.work, candidate.choice
        if work.few:
            nbytes = skinny_gemm_scratch_bytes(self.isa, work.depth)
        elif work.role == "weight_gradient":
            nbytes = weight_gradient.wgrad_scratch_bytes(self.isa, work.dtype, work.depth, choice)
        else:
            nbytes = gemm.gemm_scratch_bytes(self.isa, work.dtype, work.depth, choice)
        nbytes = -(-nbytes // 4096) * 4096
        return Loaded(libraries, addresses, np.zeros(self.threads * nbytes + 64, np.uint8), nbytes)

    # --- validation ---

    def check(self, candidate: Candidate) -> Loaded:
        """Run it at every size. Wrong where a value is off, a bit differs from the default's, or a byte elsewhere changed."""
        loaded = self.load(candidate)
        for run in self.runs:
            self._run(loaded, *run)
            where = f"{run[1]} tokens" + (", added" if run[2] else "")
            self._compare(run, where)
            got = self.data.digests(self._written(run[0]))
            if got != self.expected[run]:
                raise Wrong(f"other bits than the default's ({where}): {self._difference(run)}")
        touched = self.data.touched()
        if touched:
            raise Wrong(f"it wrote outside its result: {touched}")
        return loaded

    def _written(self, i: int) -> list[Operand]:
        return [o for o in self.work.operands[i] if o is not None and o.written]

    def _run(self, loaded: Loaded, i: int, tokens: int, accumulate: int) -> None:
        self.data.restore()
        table, keep = self._table(loaded, i, 1)
        self._bind(loaded, tokens, accumulate)
        self.pool.run(table, 1)
        del keep

    def _digests(self, loaded: Loaded, i: int, tokens: int, accumulate: int) -> dict[str, str]:
        self._run(loaded, i, tokens, accumulate)
        self._compare((i, tokens, accumulate), f"the default, {tokens} tokens")
        return self.data.digests(self._written(i))

    def _difference(self, run: tuple[int, int, int]) -> str:
        """How far the result that lies there is from the default's."""
        names = [o.name for o in self._written(run[0])]
        got = {name: self.data.array(name).astype(np.float64) for name in names}
        self._run(self.default, *run)
        for name in names:
            want = self.data.array(name).astype(np.float64)
            differ = got[name] != want
            if differ.any():
                far = float(np.nanmax(np.abs(got[name] - want)))
                return f"{int(differ.sum())} of {differ.size} elements of {name}, by {far:.2g} at most"
        return "in the sign of zeros or the bits of NaN"

    def _compare(self, run: tuple[int, int, int], where: str) -> None:
        if run not in self.references:
            self.references[run] = self._reference(*run)
        for name, (rows, cols, want, bound) in self.references[run].items():
            got = self.data.array(name)[np.ix_(rows, cols)].astype(np.float64)
            with np.errstate(invalid="ignore"):
                error = np.abs(got - want)
                bad = ~(error <= bound)
            if bad.any():
                r, c = (int(x) for x in np.argwhere(bad)[0])
                text = f"{name}[{rows[r]}, {cols[c]}] is {got[r, c]:.6g}, expected {want[r, c]:.6g}"
                raise Wrong(f"wrong values ({where}): {text}; {int(bad.sum())} of {bad.size} looked at")

    def _reference(self, i: int, tokens: int, accumulate: int) -> dict[str, tuple]:
        """A sample of each result, by name, as (rows, columns, float64 values, bound). It has the first and the last row and
        column."""
        d, work = self.data, self.work
        constants = dict(work.specs[i].constants)
        adds = constants["mode"] == "add" or (constants["mode"] == "start" and accumulate)
        gradient = work.role == "weight_gradient"
        rows, cols = _sample(work.rows if gradient else tokens, SAMPLE[0]), _sample(work.cols, SAMPLE[1])
        if gradient:
            left, right = d.initial("dy")[:tokens][:, rows].T, d.initial("x")[:tokens][:, cols]
        else:
            left, weight = d.initial("a")[rows], d.initial("weight")
            right = weight[cols].T if constants.get("transposed", True) else weight[:, cols]
        left, right = left.astype(np.float64), right.astype(np.float64)
        x = left @ right
        # One chain of fp32 additions: errors walk at random over the partial sums.
        bound = 8 * EPS * np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=0) + EPS

        def at(name: str) -> np.ndarray:
            whole = d.initial(name)
            return (whole[cols] if whole.ndim == 1 else whole[np.ix_(rows, cols)]).astype(np.float64)

        result: dict[str, np.ndarray] = {}
        for name in constants.get("epilogues", ()):
            if name in ("bias", "residual"):
                x = x + at("other" if name == "residual" else name)
            elif name in SLOPES:
                bound = bound + SLOPE_ERROR[work.dtype] * np.abs(x)
                x = x * SLOPES[name].slope(at("other"))
            else:
                result["second"], x = x, ACTIVATIONS[name].value(x)
        result["dweight" if gradient else "out"] = x
        found = {}
        dtypes = {o.name: o.dtype for o in work.operands[i] if o is not None}
        for name, want in result.items():
            want = want + at(name) if adds and name != "second" else want
            allowed = 1.2 * bound + 1.1 * ROUNDING[dtypes[name]] * (np.abs(want) + bound) + 16 * EPS * np.abs(want)
            found[name] = rows, cols, want, allowed
        return found

    # --- timing ---

    def _bind(self, loaded: Loaded, tokens: int, accumulate: int) -> None:
        values = scalars.defaults() | {"batch": 1, "seq": tokens, "accumulate": accumulate}
        for name, value in values.items():
            self.scalars[scalars.SCALARS[name].index] = value
        thread_scratch = (loaded.thread_scratch.ctypes.data + 63) & ~63
        self.pool.bind(self.scalars.ctypes.data, thread_scratch, loaded.thread_scratch_bytes)

    def _table(self, loaded: Loaded, i: int, records: int) -> tuple[int, Any]:
        """A table of `records` calls of one specialisation, each on the next set of operands: its address, and the objects that
        must live as long."""
        words = RECORD_NBYTES // 8
        block = np.zeros((records + 1) * words, np.int64)
        skip = -block.ctypes.data % RECORD_NBYTES // 8
        rows = block[skip : skip + records * words].reshape(records, words)
        sets = [self._arguments(i, s) for s in range(self.data.sets)]
        for n in range(records):
            rows[n, :3] = loaded.addresses[i], sets[n % len(sets)].ctypes.data, 1
        return rows.ctypes.data, (block, sets)

    def _arguments(self, i: int, which: int) -> np.ndarray:
        spec, operands = self.work.specs[i], self.work.operands[i]
        limits = iter((0, self.work.tokens))  # row_begin, row_limit
        args = []
        for kind, operand in zip(spec.operands, operands, strict=True):
            if kind == "int":
                args.append(next(limits))
            elif operand is not None:
                args.append(self.data.address(operand.name, which))
        return np.array([*args, 0], np.int64)

    def time(self, candidates: list[Loaded], rounds: int) -> list[list[float]]:
        """The ratios of the time of each candidate to that of the default, one for each round. All take turns, in changing
        order."""
        everybody = [self.default, *candidates]
        once = self._seconds(self.default, self._table(self.default, 0, 1), 1)
        records = max(1, min(4096, int(TURN_SECONDS / once)))
        records = -(-records // self.data.sets) * self.data.sets if records > 1 else 1
        tables = [self._table(c, 0, records) for c in everybody]
        samples = np.zeros((rounds, len(everybody)))
        for r in range(rounds):
            order = list(range(len(everybody)))
            for at in order if r % 2 == 0 else reversed(order):
                samples[r, at] = self._seconds(everybody[at], tables[at], records)
        self.seconds = median(samples[:, 0]) / records
        return [(samples[:, i + 1] / samples[:, 0]).tolist() for i in range(len(candidates))]

    def close(self) -> None:
        self.pool.close()

    def _seconds(self, loaded: Loaded, table: tuple[int, Any], records: int) -> float:
        self._bind(loaded, self.work.timed, 0)
        start = time.perf_counter()
        self.pool.run(table[0], records)
        return time.perf_counter() - start


def _sample(n: int, most: int) -> np.ndarray:
    return np.arange(n) if n <= most else np.unique(np.linspace(0, n - 1, most).astype(int))


class _Data:
    """Operands by name, each between guards, in several copies for timing; the first is what validation looks at."""

    def __init__(self, work: Work, footprint: int) -> None:
        operands = {o.name: o for row in work.operands for o in row if o is not None}
        turning = sum(o.nbytes for o in operands.values() if o.name not in FRESH)
        self.sets = max(1, min(MOST_SETS, footprint // max(1, turning)))
        noise = np.random.default_rng(1).standard_normal(1_000_003).astype(np.float32)
        self._initial: dict[str, np.ndarray] = {}
        self._buffers: dict[str, list[np.ndarray]] = {}
        for n, (name, o) in enumerate(operands.items()):
            values = np.resize(np.roll(noise, 7919 * n), o.shape)
            if name == "weight":
                values = values * np.float32(work.depth**-0.5)
            self._initial[name] = values.astype(numpy_dtype(o.dtype))
            copies = 1 if name in FRESH else self.sets
            self._buffers[name] = [np.empty(o.nbytes + 2 * GUARD + 64, np.uint8) for _ in range(copies)]
        self.written = {o.name for row in work.operands for o in row if o is not None and o.written}
        for name in operands:
            for which in range(len(self._buffers[name])):
                self._fill(name, which)
        self._inputs = {name: self._digest(name) for name in operands if name not in self.written}

    def _span(self, name: str, which: int = 0) -> np.ndarray:
        """The operand's bytes with its guards; the operand starts at a multiple of 64."""
        buffer = self._buffers[name][min(which, len(self._buffers[name]) - 1)]
        skip = -buffer.ctypes.data % 64
        return buffer[skip : skip + self._initial[name].nbytes + 2 * GUARD]

    def _fill(self, name: str, which: int = 0) -> None:
        span = self._span(name, which)
        span[:GUARD] = span[-GUARD:] = 0xA5
        span[GUARD:-GUARD] = self._initial[name].view(np.uint8).reshape(-1)

    def restore(self) -> None:
        for name in self.written:
            self._fill(name)

    def address(self, name: str, which: int) -> int:
        return self._span(name, which).ctypes.data + GUARD

    def array(self, name: str) -> np.ndarray:
        initial = self._initial[name]
        return self._span(name)[GUARD:-GUARD].view(initial.dtype).reshape(initial.shape)

    def initial(self, name: str) -> np.ndarray:
        return self._initial[name]

    def _digest(self, name: str) -> str:
        return xxhash.xxh3_128(self._span(name)[GUARD:-GUARD].data).hexdigest()

    def digests(self, written: list[Operand]) -> dict[str, str]:
        return {o.name: self._digest(o.name) for o in written}

    def touched(self) -> str:
        """The bytes that were changed and should not have been: guards, and operands that are only read."""
        spans = {name: self._span(name) for name in self._initial}
        around = [name for name, span in spans.items() if (span[:GUARD] != 0xA5).any() or (span[-GUARD:] != 0xA5).any()]
        inputs = [f"the input {name}" for name, before in self._inputs.items() if self._digest(name) != before]
        return ", ".join([f"beside {name}" for name in around] + inputs)
