"""How many digits of a variance are left when the mean is far from zero, by the way in which a row is summed.

    python benchmarks/shifted_sums.py --out benchmarks/results/shifted-sums.json

Rows of 4096 normals plus a mean of 10 to 10,000 deviations, in fp32. Sums are NumPy's, in fp32 and in pairs; "layernorm" is the
kernel. Errors are relative, the largest of all rows, against float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from barellm import kernels
from barellm.cpu.isa import host

N, ROWS, RATIOS = 4096, 200, (0, 10, 30, 100, 300, 1000, 3000, 10_000)


def mean(x: np.ndarray) -> np.ndarray:
    """Of each row, in the precision of x."""
    return x.sum(-1) / x.dtype.type(x.shape[-1])


def plain(x: np.ndarray) -> np.ndarray:
    """E[x^2] - E[x]^2."""
    return mean(x * x) - mean(x) ** 2


def subtracted_in_double(x: np.ndarray) -> np.ndarray:
    """The same sums in fp32, and only their difference in double."""
    return mean(x * x).astype(np.float64) - mean(x).astype(np.float64) ** 2


def shifted(x: np.ndarray) -> np.ndarray:
    """E[d^2] - E[d]^2 of the distances d from the row's first element."""
    return plain(x - x[:, :1])


def in_two_passes(x: np.ndarray) -> np.ndarray:
    """E[(x - E[x])^2]: needs the row twice."""
    return mean((x - mean(x)[:, None]) ** 2)


def layernorm(x: np.ndarray) -> np.ndarray:
    """The variance by which the kernel divides, from its result."""
    y = kernels.layernorm(x, np.ones(x.shape[-1], np.float32), eps=0.0).astype(np.float64)
    d = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    return ((d * d).sum(-1) / (y * d).sum(-1)) ** 2


WAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    way.__name__.replace("_", " "): way for way in (plain, subtracted_in_double, shifted, in_two_passes, layernorm)
}


def errors(ratio: float, rows: int = ROWS, n: int = N) -> dict[str, float]:
    """The largest relative error of the variance, by the way."""
    x = (ratio + np.random.default_rng(int(ratio)).standard_normal((rows, n))).astype(np.float32)
    exact = x.astype(np.float64).var(-1)
    return {name: float(np.abs(way(x) / exact - 1).max()) for name, way in WAYS.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = {str(ratio): errors(ratio) for ratio in RATIOS}
    for ratio, by in found.items():
        print(f"{ratio:>6}", *(f"{name} {error:.1e}" for name, error in by.items()), sep="  ")
    args.out.write_text(json.dumps({"isa": host().name, "columns": N, "rows": ROWS, "errors": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
