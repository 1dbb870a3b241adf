"""The largest elements of rows, ties among them, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cases import normal
from tests.cpu.check import ISAS, Given, check_op, isa_named, tokens

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
SHAPES = [((1, 1, 1), 1), ((2, 3, 7), 7), ((1, 5, 65), 3), ((3, 7, 1000), 17), ((1, 2, 4099), 64)]


def rows_of(shape: tuple[int, ...], kind: str, dtype: str = "fp32") -> np.ndarray:
    x = normal(*shape)
    if kind == "ties":
        return np.round(2 * x) / 2
    if kind == "extremes":
        flat = x.reshape(-1, shape[-1])
        flat[:, ::3] = -np.inf
        flat[:, 1::5] = np.inf
        flat[0] = 0.0
        flat[0, ::2] = -0.0
        flat[-1] *= 1e-36 if dtype == "bf16" else 1e-40  # AVX512-BF16's conversion makes zeros of denormals
    return x


@each_isa
@each_dtype
@pytest.mark.parametrize("shape, K", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normals", "ties", "extremes"])
def test_top_k(isa, dtype, shape, K, kind):
    x = tokens(rows_of(shape, kind, dtype), dtype)
    found = check_op(ops.TopK, isa, {"x": x}, K=K, plan=(shape[0] + 1, shape[1] + 2))
    order = np.argsort(-x.values, -1, kind="stable")[..., :K]
    assert np.array_equal(found["indices"], order)
    assert np.array_equal(found["values"], np.take_along_axis(x.values, order, -1))


@each_isa
def test_nan_counts_as_infinity(isa):
    x = np.array([[[1.0, np.nan, np.inf, -np.nan, -1.0]]])
    given = {"x": Given(x, "fp32", "tokens")}
    found = check_op(ops.TopK, isa, given, K=4, bounds={"values": np.inf})
    assert found["indices"].tolist() == [[[1, 2, 3, 0]]]


@each_isa
@each_dtype
@pytest.mark.parametrize("shape, K", SHAPES, ids=str)
@pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
def test_top_k_dx(isa, dtype, shape, K, mode):
    order = np.argsort(-normal(*shape), -1)[..., :K].astype(np.int32)
    given = {"dvalues": tokens(normal(*shape[:2], K, seed=2), dtype), "indices": tokens(order, "i32")}
    more = {
        "modes": {"dx": mode.split()[0]},
        "scalars": {"accumulate": int(mode == "start again")},
        "plan": (shape[0] + 1, shape[1] + 2),
    }
    check_op(ops.TopKDx, isa, given, C=shape[-1], bounds={"dx": 1e-6}, **more)
