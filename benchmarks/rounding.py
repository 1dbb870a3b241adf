"""Stochastic rounding of the 16-bit moments: its mean, what it leaves alone, and a mean that decays.

    python -m benchmarks.rounding --out benchmarks/results/rounding.json

mean: how far the mean of n roundings of a number lies from the number, in units of the format's last place, as the root of the
mean square over 64 numbers; and how far rounding to nearest does. exact: how many of all codes change when their value is rounded
with the smallest and the largest dither. decay: v = 0.9999 v, 20,000 times, rounded each time (256 copies, their mean).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from barellm.program.moments import FORMATS, decode, encode
from barellm.program.ops.pointwise.random import words

COUNTS = tuple(4**i for i in range(9))
NUMBERS, COPIES, STEPS, EVERY, BETA = 64, 256, 20_000, 500, 0.9999


def dither(seed: int, step: int, rows: int, columns: int, dtype: str) -> np.ndarray:
    """Random integers below 2^shift, from Threefry's words."""
    return words(seed, step, 0, 0, np.arange(rows), columns) >> np.uint32(32 - FORMATS[dtype].shift)


def mean_error(dtype: str) -> dict[str, Any]:
    x = np.random.default_rng(0).uniform(1, 2, NUMBERS).astype(np.float32)
    ulp = 2.0 ** -FORMATS[dtype].mantissa
    rounded = decode(encode(x[:, None], dtype, dither(1, 0, NUMBERS, COUNTS[-1], dtype)), dtype).astype(np.float64)
    away = [np.sqrt((((rounded[:, :n].mean(1) - x) / ulp) ** 2).mean()) for n in COUNTS]
    nearest = np.sqrt((((decode(encode(x, dtype), dtype) - x.astype(np.float64)) / ulp) ** 2).mean())
    return {"n": COUNTS, "stochastic": [float(v) for v in away], "nearest": float(nearest)}


def changed(dtype: str) -> int:
    """The codes that do not come back from their value under the smallest or the largest dither."""
    f = FORMATS[dtype]
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[(codes & 0x7FFF if f.signed else codes) != 0]  # 0x8000 stands for no number
    ends = [encode(decode(codes, dtype), dtype, d) for d in (0, (1 << f.shift) - 1)]
    return int(sum((end != codes).sum() for end in ends))


def decay(dtype: str = "ue6m10") -> dict[str, Any]:
    start = decode(encode(np.float32(1e-3), dtype), dtype)
    nearest, stochastic = np.full(1, start), np.full(COPIES, start)
    rows: dict[str, list[float]] = {"step": [], "exact": [], "nearest": [], "stochastic": []}
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            values = (step, float(start) * BETA**step, nearest[0], stochastic.mean(dtype=np.float64))
            for name, value in zip(rows, values, strict=True):
                rows[name].append(float(value))
        nearest = decode(encode(nearest * np.float32(BETA), dtype), dtype)
        bits = dither(2, step, 1, COPIES, dtype)[0]
        stochastic = decode(encode(stochastic * np.float32(BETA), dtype, bits), dtype)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        "kind": "rounding",
        "mean": {dtype: mean_error(dtype) for dtype in FORMATS},
        "exact": {dtype: changed(dtype) for dtype in FORMATS},
        "decay": decay(),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
