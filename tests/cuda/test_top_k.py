from __future__ import annotations

import numpy as np
import pytest

from barellm.cuda.kernels.pointwise import top_k as kernels
from barellm.program import ops
from tests.cpu.test_top_k import rows_of
from tests.cuda.check import Given, check_op, tokens

SHAPES = [((1, 1, 1), 1), ((2, 3, 7), 7), ((1, 2, 300), 33)]
each_shape = pytest.mark.parametrize("shape, K", SHAPES, ids=str)


@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["normals", "ties", "extremes"])
@pytest.mark.extended
def test_top_k(shape, K, dtype, kind, monkeypatch):
    monkeypatch.setattr(kernels, "LONG_BLOCK", 128)  # the row takes several blocks, and so do the ranks
    monkeypatch.setattr(kernels, "RANKED", 16)
    x = tokens(rows_of(shape, kind), dtype)
    found = check_op(ops.TopK, {"x": x}, K=K, plan=(shape[0] + 1, shape[1] + 2))
    order = np.argsort(-x.values, -1, kind="stable")[..., :K]
    assert np.array_equal(found["indices"], order)
    assert np.array_equal(found["values"], np.take_along_axis(x.values, order, -1))


def test_nan_counts_as_infinity():
    x = Given(np.array([[[1.0, np.nan, np.inf, -np.nan, -1.0]]]), "fp32", "tokens")
    found = check_op(ops.TopK, {"x": x}, K=4, bounds={"values": np.inf})
    assert found["indices"].tolist() == [[[1, 2, 3, 0]]]


@each_shape
@pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
def test_top_k_dx(shape, K, mode):
    order = np.argsort(-rows_of(shape, "normals"), -1)[..., :K].astype(np.int32)
    given = {"dvalues": tokens(rows_of((*shape[:2], K), "normals")), "indices": tokens(order, "i32")}
    more = {"modes": {"dx": mode.split()[0]}, "scalars": {"accumulate": int(mode == "start again")}}
    check_op(ops.TopKDx, given, C=shape[-1], bounds={"dx": 1e-6}, plan=(shape[0] + 1, shape[1] + 2), **more)
