"""Kernels of adapters and of frozen weights, beside the references: the update of columns, and gradients through codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.quantization import pack, packed_matrix, quantize, scheme
from tests.cases import chain_bound, normal
from tests.check import persistent, tokens
from tests.cpu.check import ISAS, check_op, isa_named

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)

# scheme, dtype of dy, (batch, seq, N, K): one element; depths N and columns K that are no whole tile, block or panel; several KC.
CODED = [
    ("int4", "fp32", (1, 1, 1, 1)),
    ("int4", "fp32", (1, 2, 37, 200)),
    ("int4/64", "bf16", (1, 3, 17, 135)),
    ("nf4", "fp32", (3, 3, 33, 97)),
    ("nf4", "bf16", (2, 9, 40, 64)),
    ("int8", "fp32", (1, 4, 19, 9)),
    ("int8", "bf16", (2, 5, 16, 74)),
    ("int4", "fp16", (2, 5, 48, 40)),
    ("nf4", "fp32", (1, 70, 1530, 52)),
    ("int4", "bf16", (1, 70, 3403, 100)),
]


@each_isa
@pytest.mark.parametrize("weights, dtype, shape", CODED, ids=str)
def test_gradient_through_codes(isa, weights, dtype, shape):
    batch, seq, N, K = shape
    how = scheme(weights)
    codes, scales = pack(*quantize(normal(N, K, seed=3), how), how)
    dy, w_NK = tokens(normal(batch, seq, N), dtype), packed_matrix(codes, scales.astype(np.float64), how, N, K)
    rounding = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}[dtype] * (np.abs(dy.values) @ np.abs(w_NK))
    given = {"dy": dy, "codes": persistent(codes, how.codes), "scales": persistent(scales, "fp16")}
    bounds = {"dx": chain_bound(dy.values, w_NK) + rounding}
    check_op(ops.QuantizedMatmulDx, isa, given, bounds=bounds, weights=weights, columns=N, depth=K, plan=(batch, seq + 3))


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "firsts, rows, ranks, N", [((0,), (7,), (2,), 7), ((0, 40), (33, 5), (4, 1), 47), ((3, 9, 30), (5, 16, 9), (3, 3, 3), 40)]
)
def test_update_of_columns(isa, firsts, rows, ranks, N, dtype):
    y, u = (tokens(normal(2, 5, width, seed=width), dtype) for width in (N, sum(ranks)))
    matrices: dict[str, Any] = {
        f"b{i}": persistent(normal(n, r, seed=i).astype(np.float32), {"fp32": "fp32", "bf16": "bf16_i16"}[dtype])
        for i, (n, r) in enumerate(zip(rows, ranks, strict=True))
    }
    bound = 2.0**-6 if dtype == "bf16" else 2.0**-20
    given, bounds = {"y": y, "u": u, **matrices}, {"y": bound * (np.abs(y.values) + 8 * np.abs(u.values).max())}
    check_op(ops.LowRankUpdate, isa, given, bounds=bounds, firsts=firsts, plan=(2, 8))
