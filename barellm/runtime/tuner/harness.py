"""The test and timing harness of one open problem: what both backends do alike. It runs only in the tuner's child process: what
runs here may crash, hang, or write where it should not.

The default's results are compared with float64, other bytes with those before. A candidate must leave the default's bytes."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from statistics import median
from typing import Any

import numpy as np

from barellm.program.dtypes import FORMATS, numpy_dtype
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, SLOPES
from barellm.runtime.tuner.problem import Candidate

EPS = 2.0**-24
REPETITION_SECONDS = 2e-3
PERIOD = 1_000_003  # numbers that are drawn; a prime, so that rows and tiles differ
TILE = 128  # rows and columns by which a wrong value's place is reported


class Wrong(Exception):
    """Why a candidate is rejected."""


class Harness:
    """The memory and programs of a problem: `Harness(problem, **options)` of a backend, which also has the methods without a body.
    A run is one size of the problem; a loaded candidate is whatever `load` returns."""

    runs: Sequence[Any]
    max_calls: int  # of a timed repetition

    def load(self, candidate: Candidate) -> Any: ...  # compile it
    def run(self, loaded: Any, run: Any) -> None: ...  # run it once, from the given operands
    def verify(self, loaded: Any, run: Any) -> None: ...  # Wrong where a value is off, or another byte than the result's changed
    def snapshot(self, loaded: Any, run: Any) -> Any: ...  # what lies in memory after a run
    def differs(self, loaded: Any, run: Any) -> bool: ...  # whether memory differs from `expected`
    def difference(self, loaded: Any, run: Any) -> str: ...  # where, in words; memory may be another afterwards
    def repeat(self, loaded: Any, calls: int) -> float: ...  # seconds of one call of the full size, over so many
    def prepare(self, loaded: Any, calls: int) -> None: ...  # what `repeat` needs
    def unload(self, loaded: Any) -> None: ...  # free a rejected candidate
    def close(self) -> None: ...

    def open(self, default: Any) -> None:
        """Run and verify the default configuration at every size: `expected` is what candidates must leave in memory."""
        self.default = self.load(Candidate(default))
        self.seconds = 0.0  # one call of the default, as last timed
        self.checked: dict[str, Any] = {}
        self.expected: dict[Any, Any] = {}
        for run in self.runs:
            self.run(self.default, run)
            self.verify(self.default, run)
            self.expected[run] = self.snapshot(self.default, run)
        self.prepare(self.default, 1)

    def check(self, candidate: Candidate) -> None:
        """Run the candidate at every size. Raises Wrong if it is wrong, differs in a bit from the default (unless `other_bits`), or
        changes memory outside its results."""
        loaded = self.load(candidate)
        try:
            for run in self.runs:
                self.run(loaded, run)
                differs = not candidate.other_bits and self.differs(loaded, run)
                if differs or candidate.other_bits:
                    self.verify(loaded, run)
                if differs:
                    raise Wrong(f"other bits than the default's ({run}): {self.difference(loaded, run)}")
            self.prepare(loaded, 1)
        except BaseException:
            self.unload(loaded)
            raise
        self.checked[str(candidate)] = loaded

    def time(self, candidates: list[Candidate], rounds: int) -> list[list[float]]:
        """Time ratios of checked candidates to the default, one per round. Rounds are interleaved, alternating against drift."""
        loaded_kernels = [self.default, *(self.checked[str(c)] for c in candidates)]
        self.prepare(self.default, 1)
        call_s = max(self.repeat(self.default, 1), 1e-9)
        # Long enough for the clock, within `max_calls` (whose memory is prepared)
        calls = max(1, min(self.max_calls, round(REPETITION_SECONDS / call_s)))
        for loaded in loaded_kernels:
            self.prepare(loaded, calls)
        samples = np.zeros((rounds, len(loaded_kernels)))
        for r in range(rounds):
            for i in range(len(loaded_kernels))[:: -1 if r % 2 else 1]:
                samples[r, i] = self.repeat(loaded_kernels[i], calls)
        self.seconds = float(median(samples[:, 0]))
        return (samples[:, 1:] / samples[:, :1]).T.tolist()


def random_normal(shape: tuple[int, ...], dtype: str = "fp32", seed: int = 1) -> np.ndarray:
    """Normally distributed numbers, which repeat after PERIOD of them."""
    base = np.random.default_rng(seed).standard_normal(min(PERIOD, prod(shape)), np.float32).astype(numpy_dtype(dtype))
    return np.resize(base, shape)


def sample_indices(count: int, most: int) -> np.ndarray:
    """Numbers below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def gemm_reference(
    left: np.ndarray, right: np.ndarray, epilogues: Iterable[str], operand: Callable[[str], np.ndarray], slope_error: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """Float64 reference of a GEMM with epilogues: {name: (values, error bound before rounding)} of "out", and of "pre", an
    activation's input. `operand(epilogue)`: the tensor it adds, or the slope's argument; `slope_error`: relative error of that."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    x, results = left @ right, {}
    # One chain of fp32 additions: errors walk at random over the partial sums.
    bound = 10 * EPS * np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=0) + EPS
    for name in epilogues:
        if name in SLOPES:
            bound = bound + slope_error * np.abs(x)
            x = x * SLOPES[name].slope(operand(name).astype(np.float64))
        elif name in ACTIVATIONS:
            results["pre"], x = (x, bound), ACTIVATIONS[name].value(x)
        else:
            x = x + operand(name)
    return results | {"out": (x, bound)}


def compare(
    name: str, found: np.ndarray, want: np.ndarray, bound: np.ndarray, at: tuple[np.ndarray, np.ndarray], run: Any
) -> float:
    """Compare results at the given rows and columns (`at`) with the reference `want`: returns the largest error over its bound.
    Raises Wrong above 1, naming the first wrong tile and the factor: 1.3 looks like too small a bound, 1000 like a fault."""
    values = found.astype(np.float64)
    (half_ulp,) = (f.half_ulp for f in FORMATS.values() if f.kind == "float" and numpy_dtype(f.name) == found.dtype)
    # Rounding of the result to its dtype, and of the fp32 epilogue
    bound = bound + 1.1 * half_ulp * (np.abs(want) + bound) + 16 * EPS * np.abs(want)
    with np.errstate(invalid="ignore"):
        error_ratio = np.nan_to_num(np.abs(values - want) / bound, nan=np.inf)
    bad = error_ratio > 1
    if bad.any():
        r, c = (int(i) for i in np.argwhere(bad)[0])
        row, column = int(at[0][r]), int(at[1][c])
        where = f"{name}[{row}, {column}] is {values[r, c]:.6g}, expected {want[r, c]:.6g}"
        tile = f"first in tile ({row // TILE}, {column // TILE}) of {TILE} x {TILE}"
        extent = f"{int(bad.sum())} of {bad.size} looked at, by up to {error_ratio.max():.3g} times the bound"
        raise Wrong(f"wrong values ({run}): {where}; {extent}; {tile}")
    return float(error_ratio.max())
