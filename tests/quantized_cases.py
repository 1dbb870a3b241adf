"""Operands of products with weights of few bits, for the tests of every backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from barellm.program.quantization import pack, packed_matrix, quantize, scheme
from tests.cases import chain_bound, normal
from tests.check import persistent, tokens

# scheme, dtype of x, (batch, seq, N, K): one element; few rows and many; columns and depths that are no whole tile or block.
CASES = [
    ("int4", "fp32", (1, 1, 1, 1)),
    ("int4", "fp32", (1, 2, 37, 200)),
    ("int4/64", "bf16", (1, 3, 17, 135)),
    ("nf4", "fp32", (3, 3, 33, 97)),
    ("nf4", "bf16", (1, 1, 40, 64)),
    ("int8", "fp32", (1, 4, 19, 9)),
    ("int8/32", "bf16", (2, 5, 16, 74)),
    ("int4", "fp16", (2, 5, 48, 40)),
    ("int4", "fp16", (1, 8, 37, 1096)),
    ("int4/64", "bf16", (2, 2, 17, 136)),
    ("int4/128", "bf16", (1, 1, 16, 1032)),
    ("nf4/32", "fp16", (1, 3, 33, 96)),
    ("nf4-v1", "bf16", (1, 3, 17, 72)),
]
# Of a matrix's rows, in turn. What 16 bits cannot hold would tell nothing: there only the scales of some rows need an exponent.
MAGNITUDES = {"fp32": (1, 1e-6, 1e30, 0, 1e-30, 1), "bf16": (1, 1e-6, 1e30, 0, 1e-30, 1), "fp16": (1, 2.0**-6)}


def case(weights: str, dtype: str, shape: tuple[int, int, int, int], magnitudes: tuple[float, ...] = ()) -> dict[str, Any]:
    """What `check_op` wants: `given`, `bounds` and attributes."""
    batch, seq, N, K = shape
    how = scheme(weights)
    of_rows = np.resize(magnitudes or MAGNITUDES[dtype], (N, 1))
    codes, scales = pack(*quantize(of_rows * normal(N, K, seed=3), how), how)
    x = tokens(normal(batch, seq, K), dtype)
    w_NK = packed_matrix(codes, scales.astype(np.float64), how, N, K)
    # With many rows each weight is rounded once, to the dtype that is multiplied, before the product.
    rounding = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}[dtype] * (np.abs(x.values) @ np.abs(w_NK).T)
    return {
        "given": {"x": x, "codes": persistent(codes, how.codes), "scales": persistent(scales, "fp16")},
        "bounds": {"y": chain_bound(x.values, w_NK.T) + rounding},
        "weights": weights,
        "columns": N,
        "plan": (batch, seq + 3),
    }
