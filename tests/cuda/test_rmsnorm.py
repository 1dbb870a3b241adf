from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cuda.check import EPS, check_op, persistent, tokens
from tests.cuda.test_layernorm import each_dtype, each_mode, each_parameter_mode, each_shape, each_walk, normal, walk_blocks
from tests.head_norm_cases import each_heads, head_norms

each_weight = pytest.mark.parametrize("weighed", [True, False], ids=["weight", "no weight"])


def rstd_of(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt((x**2).mean(-1) + 1e-5)


@each_dtype
@each_heads
def test_heads_are_normalised_one_by_one(dtype, heads, D):
    for op_type, given, more in head_norms(dtype, heads, D):
        check_op(op_type, given, **more)


@each_walk
@each_dtype
@each_weight
def test_rmsnorm(shape, dtype, weighed, long, monkeypatch):
    C = shape[-1]
    if long:
        walk_blocks(monkeypatch)
    x = tokens(normal(*shape) + 0.5)
    given = {"x": x} | ({"weight": persistent(normal(C, seed=2))} if weighed else {})
    rstd, weight = rstd_of(x.values), given["weight"].values if weighed else np.ones(C)
    c = EPS * (8 + np.sqrt(C))
    bounds = {"y": c * np.abs(x.values * rstd[..., None] * weight) + EPS, "rstd": c * rstd}
    check_op(ops.RMSNorm, given, eps=1e-5, dtype=dtype, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


def test_rows_of_zeros_are_zeros():
    bounds = {"y": 0.0, "rstd": 1e-4}
    check_op(ops.RMSNorm, {"x": tokens(np.zeros((1, 3, 70)))}, eps=1e-5, dtype="fp32", bounds=bounds)


@each_walk
@each_dtype
@each_mode
@each_weight
def test_rmsnorm_dx(shape, dtype, mode, weighed, long, monkeypatch):
    if long:
        walk_blocks(monkeypatch)
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    rstd = tokens(rstd_of(x.values))
    given = {"dy": dy, "x": x, "rstd": rstd} | ({"weight": persistent(normal(shape[-1], seed=3))} if weighed else {})
    n = np.abs(x.values) * rstd.values[..., None]
    dn = np.abs(dy.values * (given["weight"].values if weighed else 1.0))
    size = rstd.values[..., None] * (dn + n * (dn * n).mean(-1, keepdims=True))
    bounds = {"dx": 8 * EPS * size + 4 * EPS}
    check_op(ops.RMSNormDx, given, modes={"dx": mode}, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_shape
@each_dtype
@each_parameter_mode
@pytest.mark.extended
def test_rmsnorm_dweight(shape, dtype, mode):
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    given = {"dy": dy, "x": x, "rstd": tokens(rstd_of(x.values))}
    check_op(
        ops.RMSNormDweight,
        given,
        modes={"dweight": mode.split()[0]},
        scalars={"accumulate": int(mode == "start again")},
        bounds={"dweight": 16 * EPS * (4 + shape[0] * shape[1])},
        plan=(shape[0] + 1, shape[1] + 2),
    )
