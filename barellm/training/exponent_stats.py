"""exponent_stats.jsonl: exponent histograms (dynamic range) of activations, gradients and weights of some steps, one object a step.

    {"kind": "exponent_stats", "step": 100, "tensors": [{"name": "h.0.attn.c_attn", "what": "activation", "shape": [12, 64, 384],
      "dtype": "bf16", "size": 294912, "zeros": 0, "not_finite": 0, "mean": 0.01, "mean_abs": 0.4, "rms": 0.5, "max": 3.2,
      "first": -20, "counts": [1, 0, 5, ...]}, ...]}

`counts[i]` elements have a magnitude of 2^(first + i) and more, below twice that. `size` counts the elements of this step, `shape`
is the planned one. Numbers are as memory has them: in fp16 gradients carry the loss scale."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from barellm.assembly.build import CompiledModel
from barellm.errors import UserError
from barellm.program.dynamic_range import BIAS, TensorStats, tensor_stats
from barellm.program.exponent_stats import COUNTS, TOTALS, tensors_with_stats
from barellm.program.ops.optim.exponent_stats import BINS, NOT_FINITE, SUMS
from barellm.training.metrics import Metrics, read

FILE, OLD_FILE = "exponent_stats.jsonl", "ranges.jsonl"
KINDS = ("exponent_stats", "ranges")  # of a row, by this version and by older ones


class ExponentStats:
    """Logs exponent histograms from "forward_backward_stats", in the first step and every `every`-th."""

    def __init__(self, path: Path, compiled: CompiledModel, *, every: int) -> None:
        self.every, self.session = every, compiled.session
        self.tensors = tensors_with_stats(compiled.programs["forward_backward_stats"])
        # What a fusion keeps out of memory nobody counts: it stays empty.
        for name in (COUNTS, TOTALS):
            self.session.write(name, np.zeros_like(self.session.read(name)))
        self._rows = Metrics(path)

    def due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def record(self, step: int) -> None:
        """Append the histograms of the last run of the program, as the row of `step`."""
        counts = self.session.read(COUNTS).reshape(-1, BINS)
        sums = self.session.read(TOTALS).reshape(-1, len(SUMS))
        rows = []
        for t in self.tensors:
            found = tensor_stats(counts[t.number], sums[t.number])
            if found.size:
                rows.append({"name": t.name, "what": t.kind, "shape": t.shape, "dtype": t.dtype, **_row(found)})
        self._rows.add({"kind": "exponent_stats", "step": step, "tensors": rows})
        self._rows.rows.clear()  # nobody asks for them before the end, and there are many

    def close(self) -> None:
        self._rows.close()


def _row(found: TensorStats) -> dict[str, Any]:
    at = np.flatnonzero(found.counts[1:NOT_FINITE]) + 1
    first, stop = (int(at[0]), int(at[-1]) + 1) if at.size else (BIAS, BIAS)
    means = {"mean": found.mean, "mean_abs": found.mean_abs, "rms": found.rms, "max": found.largest}
    return {
        "size": found.size, "zeros": found.zeros, "not_finite": found.not_finite,
        **{name: float(f"{value:.6g}") if isfinite(value) else None for name, value in means.items()}, "first": first - BIAS,
        "counts": found.counts[first:stop].tolist(),
    }  # fmt: skip


def tensor_stats_of(row: Mapping[str, Any]) -> TensorStats:
    """The statistics stored in one entry of a row; the means have six digits."""
    counts = np.zeros(BINS, np.int64)
    counts[0], counts[NOT_FINITE] = row["zeros"], row["not_finite"]
    first = int(row["first"]) + BIAS
    counts[first : first + len(row["counts"])] = row["counts"]
    finite = max(1, int(row["size"]) - int(row["not_finite"]))
    mean, mean_abs, rms, largest = (
        float("inf") if row[name] is None else float(row[name]) for name in ("mean", "mean_abs", "rms", "max")
    )
    return TensorStats(counts, mean * finite, mean_abs * finite, rms**2 * finite, largest)


def file_of(run: Path) -> Path:
    """The file of a run, which may have its old name."""
    return run / (OLD_FILE if (run / OLD_FILE).exists() else FILE)


def steps(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's file. UserError where there are none."""
    file = file_of(path) if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} has no {FILE}, expected a run with --train.exponent_stats N")
    rows = [row for row in read(file) if row.get("kind") in KINDS]
    if not rows:
        raise UserError(f"{file} holds no step yet")
    return rows
