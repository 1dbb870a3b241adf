from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cpu.test_softmax import of
from tests.cuda.check import EPS, check_op, tokens
from tests.cuda.test_layernorm import each_dtype, each_mode, each_walk, normal, walk_blocks


@each_walk
@each_dtype
def test_softmax(shape, dtype, long, monkeypatch):
    if long:
        walk_blocks(monkeypatch)
    x = tokens(6 * normal(*shape), dtype)
    depth = x.values.max(-1, keepdims=True) - x.values
    bounds = {"y": EPS * (12 + 2 * depth + np.sqrt(shape[-1])) * of(x.values, 0.7) + 1e-37}
    check_op(ops.Softmax, {"x": x}, scale=0.7, dtype=dtype, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@pytest.mark.parametrize("long", [False, True], ids=["in registers", "in blocks"])
def test_columns_of_minus_infinity_are_zero(long, monkeypatch):
    if long:
        walk_blocks(monkeypatch)
    x = np.full((1, 2, 200), -np.inf)
    x[0, 0, 150], x[0, 1, 3::7] = 5.0, -3e30
    check_op(ops.Softmax, {"x": tokens(x)}, scale=1.0, dtype="fp32", bounds={"y": 4 * EPS})


@each_walk
@each_dtype
@each_mode
def test_softmax_dx(shape, dtype, mode, long, monkeypatch):
    if long:
        walk_blocks(monkeypatch)
    y, dy = tokens(of(normal(*shape)), dtype), tokens(normal(*shape, seed=2), dtype)
    size = y.values * (np.abs(dy.values) + (np.abs(dy.values) * y.values).sum(-1, keepdims=True))
    bounds = {"dx": 8 * EPS * size + 2 * EPS}
    more = {"modes": {"dx": mode}, "bounds": bounds, "plan": (shape[0] + 1, shape[1] + 2)}
    check_op(ops.SoftmaxDx, {"dy": dy, "y": y}, scale=0.5, dtype="fp32", **more)
