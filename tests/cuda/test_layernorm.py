from __future__ import annotations

import numpy as np
import pytest

from barellm.cuda.kernels.norm import layernorm as kernels
from barellm.program import ops
from tests.cuda.check import EPS, check_op, persistent, tokens

SHAPES = [(1, 1, 1), (3, 1, 2), (2, 3, 7), (1, 37, 65), (3, 13, 384), (1, 5, 768), (1, 3, 1600)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_mode = pytest.mark.parametrize("mode", ["store", "add"])
each_parameter_mode = pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
# Rows of more than some IN_REGISTERS columns are walked in blocks; here, of more than 32.
LONG = [(1, 3, 65), (2, 1, 384)]
each_walk = pytest.mark.parametrize(
    "shape, long", [(s, False) for s in SHAPES] + [(s, True) for s in LONG], ids=lambda v: "in blocks" if v is True else str(v)
)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-5)


def walk_blocks(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "IN_REGISTERS", 8)
    monkeypatch.setattr(kernels, "LONG_BLOCK", 64)


def forward_bounds(x: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    mean, rstd = statistics(x)
    n = 1 + np.abs(x - mean[..., None]) * rstd[..., None]
    c = EPS * (8 + np.sqrt(x.shape[-1])) * (1 + np.abs(x).max(-1) * rstd)
    return {"y": c[..., None] * n * (1 + np.abs(weight)) + 2 * EPS, "mean": 16 * EPS, "rstd": c * rstd}


@each_walk
@each_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_layernorm(shape, dtype, bias, long, monkeypatch):
    C = shape[-1]
    if long:
        walk_blocks(monkeypatch)
    given = {"x": tokens(normal(*shape) + 0.5), "weight": persistent(normal(C, seed=2))}
    if bias:
        given["bias"] = persistent(normal(C, seed=3))
    bounds = forward_bounds(given["x"].values, given["weight"].values)
    check_op(ops.LayerNorm, given, eps=1e-5, dtype=dtype, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@pytest.mark.parametrize("long", [False, True], ids=["in registers", "in blocks"])
@pytest.mark.parametrize("ratio", [10, 1000, 3000, 100000])
def test_layernorm_of_a_mean_far_above_the_deviation(ratio, long, monkeypatch):
    if long:
        walk_blocks(monkeypatch)
    x = tokens(normal(1, 4, 768) + ratio)
    given = {"x": x, "weight": persistent(np.ones(768)), "bias": persistent(np.zeros(768))}
    check_op(ops.LayerNorm, given, eps=1e-5, dtype="fp32", bounds={"y": 4e-6, "rstd": 2e-6, "mean": 1e-7 * ratio})


@each_walk
@each_dtype
@each_mode
def test_layernorm_dx(shape, dtype, mode, long, monkeypatch):
    if long:
        walk_blocks(monkeypatch)
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    weight = persistent(normal(shape[-1], seed=3))
    mean, rstd = (tokens(v) for v in statistics(x.values))
    given = {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd}
    n = (x.values - mean.values[..., None]) * rstd.values[..., None]
    dn = np.abs(dy.values * weight.values)
    size = rstd.values[..., None] * (dn + dn.mean(-1, keepdims=True) + np.abs(n) * (dn * np.abs(n)).mean(-1, keepdims=True))
    bounds = {"dx": 8 * EPS * size + 4 * EPS}
    check_op(ops.LayerNormDx, given, modes={"dx": mode}, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_shape
@each_dtype
@each_parameter_mode
@pytest.mark.extended
def test_layernorm_dparams(shape, dtype, mode):
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    mean, rstd = (tokens(v) for v in statistics(x.values))
    given = {"dy": dy, "x": x, "mean": mean, "rstd": rstd}
    bounds = dict.fromkeys(("dweight", "dbias"), 16 * EPS * (4 + shape[0] * shape[1]))
    modes = dict.fromkeys(("dweight", "dbias"), mode.split()[0])
    scalars = {"accumulate": int(mode == "start again")}
    plan = (shape[0] + 1, shape[1] + 2)
    check_op(ops.LayerNormDparams, given, modes=modes, scalars=scalars, bounds=bounds, plan=plan)


@each_shape
@each_dtype
@each_parameter_mode
def test_bias_grad(shape, dtype, mode):
    scalars = {"accumulate": int(mode == "start again")}
    given = {"dy": tokens(normal(*shape), dtype)}
    bounds = {"dbias": 8 * EPS * (4 + shape[0] * shape[1])}
    modes, plan = {"dbias": mode.split()[0]}, (shape[0] + 1, shape[1] + 2)
    check_op(ops.BiasGrad, given, modes=modes, scalars=scalars, bounds=bounds, plan=plan)


def test_sums_over_more_rows_than_chunks_have():
    """8707 rows: 256 chunks of 35 rows, more than one block each, the last ones short."""
    given = {"dy": tokens(normal(1, 8707, 5))}
    check_op(ops.BiasGrad, given, modes={"dbias": "store"}, bounds={"dbias": 1e-4}, plan=(1, 9000))
