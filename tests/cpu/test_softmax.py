"""Softmax and its gradient on every instruction set: rows in registers, kept in a cache, and streamed."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.cpu.kernels.norm import softmax
from barellm.program import ops
from tests.cases import normal
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, tokens

SHAPES = [(1, 1, 1), (2, 3, 7), (3, 1, 29), (1, 37, 65), (1, 3, 384), (1, 2, 4099)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def of(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    e = np.exp(scale * (x - x.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def bound(x: np.ndarray, scale: float) -> np.ndarray:
    """Of an exponential, whose argument is rounded once or twice, and of a sum in several chains."""
    depth = scale * (x.max(-1, keepdims=True) - x)
    return EPS * (12 + 2 * depth + np.sqrt(x.shape[-1])) * of(x, scale)


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "kept"])
def test_softmax(isa, shape, dtype, scale, streamed, monkeypatch):
    if streamed:
        changed(monkeypatch, softmax, KEPT=64, BLOCK=32)
        changed(monkeypatch, loops, STREAM_BYTES=0)
    x = tokens(6 * normal(*shape), dtype)
    bounds = {"y": bound(x.values, scale) + 1e-38}
    check_op(ops.Softmax, isa, {"x": x}, scale=scale, dtype=dtype, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@pytest.mark.parametrize("C", [5, 300, 1000])
def test_a_row_may_have_nothing_in_its_first_blocks_and_anything_in_the_others(isa, C, monkeypatch):
    changed(monkeypatch, softmax, KEPT=400, BLOCK=32)
    x = np.full((1, 4, C), -np.inf)
    x[0, 0, -1] = 3.0
    x[0, 1, C // 2] = 1e30
    x[0, 1, -1] = 1e30
    x[0, 2] = 80 * normal(C)
    x[0, 3, ::2] = -3e38
    check_op(ops.Softmax, isa, {"x": tokens(x)}, scale=1.0, dtype="fp32", bounds={"y": 1e-5 * of(x) + 1e-37})


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_softmax_dx(isa, shape, dtype, mode):
    y, dy = tokens(of(normal(*shape)), dtype), tokens(normal(*shape, seed=2), dtype)
    size = y.values * (np.abs(dy.values) + (np.abs(dy.values) * y.values).sum(-1, keepdims=True))
    given, plan = {"dy": dy, "y": y}, (shape[0] + 1, shape[1] + 2)
    more = {"modes": {"dx": mode}, "bounds": {"dx": 8 * EPS * size + 2 * EPS}, "plan": plan}
    check_op(ops.SoftmaxDx, isa, given, scale=0.5, dtype="fp32", **more)
