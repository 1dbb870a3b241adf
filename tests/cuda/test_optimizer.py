from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.tensor import Tensor
from tests.cuda.check import EPS, check_op, persistent

SHAPES = [(1,), (7,), (65,), (3, 131), (17, 257)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@each_shape
def test_sum_squares(shape):
    x = normal(*shape)
    check_op(ops.SumSquares, {"x": persistent(x, role="gradient")}, bounds={"partials": 16 * EPS * (x**2).sum()})


def test_sum_squares_of_more_than_one_chunk():
    x = normal(259, 257)
    check_op(ops.SumSquares, {"x": persistent(x, role="gradient")}, bounds={"partials": 16 * EPS * (x**2).sum()})


def clip(partials, limit, skipped=4):
    given = {"skipped": persistent(np.array([skipped]), "i32", "state")}
    given |= {f"p{i}": persistent(p, role="gradient") for i, p in enumerate(partials)}
    return check_op(ops.ClipScale, given, clip=limit, bounds={"clip": 0.0})


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("counts", [(1,), (3, 1, 70), (1,) * 40], ids=str)
def test_clip_scale(limit, counts):
    clip([normal(n, seed=i) ** 2 for i, n in enumerate(counts)], limit)


def test_clip_scale_of_zero_gradients():
    clip([np.zeros(3)], 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_norm_that_is_not_finite_is_counted(bad):
    got = clip([np.ones(2), np.array([1.0, bad])], 1.0)
    assert np.isnan(got["clip"][1])


MOMENTS = {
    "fp32": ("fp32", "fp32", None),
    "16bit": ("e6m9", "ue6m10", None),
    "16bit-stochastic": ("e6m9", "ue6m10", 65536),
}
each_moments = pytest.mark.parametrize("moments", MOMENTS)


def adamw(shape, dtype, *, moments="fp32", scale=0.5, step=1, weight_decay=0.1, beta2=0.95):
    """Moments that are rounded stochastically may be a whole unit off, those to nearest half of one."""
    dtype_m, dtype_v, stream = MOMENTS[moments]
    given = {
        "param": persistent(normal(*shape), dtype),
        "grad": persistent(normal(*shape, seed=2), role="gradient"),
        "m": persistent(0.1 * normal(*shape, seed=3), dtype_m, "state"),
        "v": persistent(0.01 * normal(*shape, seed=4) ** 2, dtype_v, "state"),
        "clip": persistent(np.array([2.0, scale]), role="state"),
    }
    attrs = {"beta1": 0.9, "beta2": beta2, "eps": 1e-8, "weight_decay": weight_decay, "stream": stream}
    # The update without the cancellation between m and the gradient.
    sizes = {name: np.abs(g.values) for name, g in given.items()} | {"param": np.zeros(shape)}
    fp32 = {name: Tensor(name, shape, "fp32", "state") for name in ("m", "v")}
    large = ops.AdamW(dict(fp32), attrs).reference(**sizes, lr=3e-3, step=step)
    bounds = {"param": 4 * EPS * np.abs(given["param"].values) + 12 * EPS * -large["param"], "m": 2 * EPS, "v": 2 * EPS}
    if moments != "fp32":  # where fp32 and float64 lie on two sides of a boundary, the roundings are a unit apart
        bounds |= {"m": 2.0**-9 * large["m"], "v": 2.0**-10 * large["v"]}
    return given, check_op(ops.AdamW, given, scalars={"step": step, "lr": 3e-3, "seed": 9}, bounds=bounds, **attrs)


@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "split"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@each_moments
def test_adamw(shape, dtype, weight_decay, moments):
    adamw(shape, dtype, moments=moments, weight_decay=weight_decay)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adamw_at_any_step(step, beta2):
    adamw((65,), "fp32", step=step, beta2=beta2)


@pytest.mark.parametrize("dtype", ["fp32", "split"])
@each_moments
def test_adamw_changes_nothing_where_the_norm_is_not_finite(dtype, moments):
    given, got = adamw((3, 131), dtype, scale=np.nan, moments=moments)
    for name in ("param", "m", "v"):
        assert np.array_equal(got[name], given[name].values)
