from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import pytest

from barellm.cpu.isa import ISA
from barellm.cpu.kernels import loops
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, persistent, run_fused, stored, tokens

SHAPES = [(1, 1, 1), (3, 1, 2), (2, 3, 7), (1, 37, 65), (3, 43, 384), (1, 5, 768), (1, 130, 131), (1, 3, 1600)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_mode = pytest.mark.parametrize("mode", ["store", "add"])


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-5)


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_layernorm(isa, shape, dtype, bias):
    C = shape[-1]
    given = {"x": tokens(normal(*shape) + 0.5), "weight": persistent(normal(C, seed=2))}
    if bias:
        given["bias"] = persistent(normal(C, seed=3))
    mean, rstd = statistics(given["x"].values)
    n = 1 + np.abs(given["x"].values - mean[..., None]) * rstd[..., None]
    c = EPS * (8 + np.sqrt(C)) * (1 + np.abs(given["x"].values).max(-1) * rstd)
    bounds = {"y": c[..., None] * n * (1 + np.abs(given["weight"].values)) + 2 * EPS, "mean": 16 * EPS, "rstd": c * rstd}
    check_op(ops.LayerNorm, isa, given, eps=1e-5, dtype=dtype, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@pytest.mark.parametrize("ratio", [10, 1000, 3000, 100000])
def test_layernorm_of_a_mean_far_above_the_deviation(isa, ratio):
    x = tokens(normal(1, 4, 768) + ratio)
    given = {"x": x, "weight": persistent(np.ones(768)), "bias": persistent(np.zeros(768))}
    check_op(ops.LayerNorm, isa, given, eps=1e-5, dtype="fp32", bounds={"y": 4e-6, "rstd": 2e-6, "mean": 1e-7 * ratio})


@each_isa
@each_shape
@each_dtype
@each_mode
def test_layernorm_dx(isa, shape, dtype, mode):
    x, dy, weight = (tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype), persistent(normal(shape[-1], seed=3)))
    mean, rstd = (tokens(v) for v in statistics(x.values))
    given = {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd}
    n = (x.values - mean.values[..., None]) * rstd.values[..., None]
    dn = np.abs(dy.values * weight.values)
    size = rstd.values[..., None] * (dn + dn.mean(-1, keepdims=True) + np.abs(n) * (dn * np.abs(n)).mean(-1, keepdims=True))
    bounds = {"dx": 8 * EPS * size + 4 * EPS}
    check_op(ops.LayerNormDx, isa, given, modes={"dx": mode}, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
def test_layernorm_dparams(isa, shape, dtype, mode):
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    mean, rstd = (tokens(v) for v in statistics(x.values))
    given = {"dy": dy, "x": x, "mean": mean, "rstd": rstd}
    rows = shape[0] * shape[1]
    bounds = dict.fromkeys(("dweight", "dbias"), 16 * EPS * (4 + rows))
    modes = dict.fromkeys(("dweight", "dbias"), mode.split()[0])
    scalars = {"accumulate": int(mode == "start again")}
    check_op(ops.LayerNormDparams, isa, given, modes=modes, scalars=scalars, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add", "start", "start again"])
def test_bias_grad(isa, shape, dtype, mode):
    scalars = {"accumulate": int(mode == "start again")}
    given = {"dy": tokens(normal(*shape), dtype)}
    bounds = {"dbias": 8 * EPS * (4 + shape[0] * shape[1])}
    check_op(
        ops.BiasGrad,
        isa,
        given,
        modes={"dbias": mode.split()[0]},
        scalars=scalars,
        bounds=bounds,
        plan=(shape[0] + 1, shape[1] + 2),
    )


@each_isa
def test_sums_over_more_rows_than_chunks_have(isa):
    """4099 rows: 64 chunks of 65 rows, the last one short."""
    given = {"dy": tokens(normal(1, 4099, 5))}
    check_op(ops.BiasGrad, isa, given, modes={"dbias": "store"}, bounds={"dbias": 1e-4}, plan=(1, 5000))


def whole_backward(shape: tuple[int, ...], compute: str, *, bias: bool) -> Program:
    """What reads a LayerNorm's dy, and what reads the residual stream's gradient next."""
    batch, seq, *inner, C = shape
    p = Program(Store(), compute=compute)
    rows = (Dim("batch", batch + 1), Dim("seq", seq + 2), *inner)
    of_rows = {"dy": p.input("dy", (*rows, C), compute), "x": p.input("x", (*rows, C), "fp32")}
    of_rows |= {name: p.input(name, rows, "fp32") for name in ("mean", "rstd")}
    stream = p.input("stream", (*rows, C), "fp32")
    into = {name: (p.store.get(name, (C,), "fp32", "gradient"), "start") for name in ("dweight", "dbias", "dx_sum")}
    weight = p.store.get("weight", (C,), "fp32", "parameter")
    p.apply(ops.LayerNormDx, into={"dx": (stream, "add")}, weight=weight, **of_rows)
    p.apply(ops.LayerNormDparams, into={name: into[name] for name in ("dweight", "dbias")}, **of_rows)
    if bias:
        p.apply(ops.BiasGrad, into={"dbias": into["dx_sum"]}, dy=stream)
    if compute == "bf16":
        p.output("rounded", p.apply(ops.Cast, x=stream, dtype=compute).y)
    return p


@each_isa
@each_shape
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("past", [True, False], ids=["past the caches", "cached"])
def test_the_whole_backward_pass_at_once(isa, shape, compute, bias, past, monkeypatch):
    """dx, added to the stream's gradient, its sum, its rounding, and both parameters' gradients, by one kernel."""
    if past:
        changed(monkeypatch, loops, STREAM_BYTES=0)
    check_whole_backward(isa, shape, compute, bias=bias)


def check_whole_backward(isa: ISA, shape: tuple[int, ...], compute: str, *, bias: bool) -> None:
    batch, seq, *inner, C = shape
    arrays = {"dy": stored(normal(*shape), compute), "x": stored(normal(*shape, seed=2) + 0.5, "fp32")}
    arrays |= {name: stored(v, "fp32") for name, v in zip(("mean", "rstd"), statistics(arrays["x"]), strict=True)}
    arrays["weight"] = stored(normal(C, seed=3), "fp32")
    before = {name: stored(normal(C, seed=4), "fp32") for name in ("dweight", "dbias", "dx_sum")}
    before["dx"] = stored(normal(*shape, seed=5), "fp32")
    given = arrays | {"stream": before["dx"]} | {name: v for name, v in before.items() if name != "dx"}
    sizes = {"batch": batch, "seq": seq, "accumulate": 1}
    op, outputs = run_fused(partial(whole_backward, shape, compute, bias=bias), isa, given, sizes, name="layernorm_backward")
    want = op.run(arrays, {"accumulate": 1}, before)
    n = np.abs(arrays["x"] - arrays["mean"][..., None]) * arrays["rstd"][..., None]
    dn = np.abs(arrays["dy"] * arrays["weight"])
    means = dn.mean(-1, keepdims=True) + n * (dn * n).mean(-1, keepdims=True)
    size = np.abs(before["dx"]) + arrays["rstd"][..., None] * (dn + means)
    sums = 16 * EPS * (4 + batch * seq * prod(inner)) * (1 + size.max())
    for name, got in outputs.items():
        bound = 8 * EPS * size + 4 * EPS if got.ndim == len(shape) else sums
        rounding = 2.0**-8 * np.abs(want[name]) if name == "rounded" else 0.0
        assert got.shape == want[name].shape and np.all(np.abs(got - want[name]) <= bound + rounding), name


@each_isa
def test_inner_axes_are_rows(isa):
    """As a norm over each head's columns has them."""
    shape = (2, 3, 5, 24)
    x, dy = tokens(normal(*shape)), tokens(normal(*shape, seed=2))
    mean, rstd = (tokens(v) for v in statistics(x.values))
    weight = {"weight": persistent(normal(24, seed=3))}
    near = {"y": 1e-5, "mean": 1e-6, "rstd": 1e-5}
    check_op(ops.LayerNorm, isa, {"x": x, **weight}, eps=1e-5, dtype="fp32", bounds=near, plan=(3, 4))
    of_rows = {"dy": dy, "x": x, "mean": mean, "rstd": rstd}
    check_op(ops.LayerNormDx, isa, {**of_rows, **weight}, bounds={"dx": 1e-5}, plan=(3, 4))
    bounds = {"dweight": 1e-4, "dbias": 1e-4}
    check_op(ops.LayerNormDparams, isa, of_rows, modes=dict.fromkeys(bounds, "store"), bounds=bounds, plan=(3, 4))
    check_whole_backward(isa, shape, "bf16", bias=True)
