from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.cases import normal
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, persistent, run_fused, stored, tokens
from tests.head_norm_cases import each_heads, gradient_size, head_norms

SHAPES = [(1, 1, 1), (2, 3, 7), (1, 37, 65), (3, 43, 384), (1, 3, 1600)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_weight = pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no weight"])


def scale_of(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt((x**2).mean(-1) + 1e-5)


def weight_of(C: int, weighted: bool) -> dict:
    return {"weight": persistent(normal(C, seed=3))} if weighted else {}


@each_isa
@each_shape
@each_dtype
@each_weight
def test_rmsnorm(isa, shape, dtype, weighted):
    x = tokens(normal(*shape) + 0.5)
    given = {"x": x, **weight_of(shape[-1], weighted)}
    rstd = scale_of(x.values)
    c = EPS * (8 + np.sqrt(shape[-1]))
    n = np.abs(x.values) * rstd[..., None]
    bounds = {"y": c * n * (np.abs(given["weight"].values) if weighted else 1), "rstd": c * rstd}
    check_op(ops.RMSNorm, isa, given, eps=1e-5, dtype=dtype, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@each_shape
@each_dtype
@each_weight
@pytest.mark.parametrize("mode", ["store", "add"])
def test_rmsnorm_dx(isa, shape, dtype, weighted, mode):
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    rstd = tokens(scale_of(x.values))
    given = {"dy": dy, "x": x, "rstd": rstd, **weight_of(shape[-1], weighted)}
    size = gradient_size(dy.values, x.values, rstd.values, given["weight"].values if weighted else 1)
    bounds = {"dx": 8 * EPS * size + 4 * EPS}
    check_op(ops.RMSNormDx, isa, given, modes={"dx": mode}, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("mode", ["store", "start", "start again"])
def test_rmsnorm_dweight(isa, shape, dtype, mode):
    x, dy = tokens(normal(*shape) + 0.5), tokens(normal(*shape, seed=2), dtype)
    given = {"dy": dy, "x": x, "rstd": tokens(scale_of(x.values))}
    more = {"modes": {"dweight": mode.split()[0]}, "scalars": {"accumulate": int(mode == "start again")}}
    bounds = {"dweight": 16 * EPS * (4 + shape[0] * shape[1])}
    check_op(ops.RMSNormDweight, isa, given, **more, bounds=bounds, plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@each_weight
def test_inner_axes_are_rows(isa, weighted):
    """As a norm over each head's columns has them."""
    shape = (2, 3, 5, 24)
    x, dy = tokens(normal(*shape)), tokens(normal(*shape, seed=2))
    weight = weight_of(24, weighted)
    rstd = tokens(scale_of(x.values))
    check_op(ops.RMSNorm, isa, {"x": x, **weight}, eps=1e-5, dtype="fp32", bounds={"y": 1e-5, "rstd": 1e-5})
    check_op(ops.RMSNormDx, isa, {"dy": dy, "x": x, "rstd": rstd, **weight}, bounds={"dx": 1e-5}, plan=(3, 4))
    check_op(ops.RMSNormDweight, isa, {"dy": dy, "x": x, "rstd": rstd}, modes={"dweight": "store"}, bounds={"dweight": 1e-5})


def whole_backward(shape: tuple[int, ...], compute: str, *, weighted: bool) -> Program:
    """What reads an RMSNorm's dy, and what reads the residual stream's gradient next."""
    batch, seq, C = shape
    p = Program(Store(), compute=compute)
    rows = (Dim("batch", batch + 1), Dim("seq", seq + 2))
    of_rows = {"dy": p.input("dy", (*rows, C), compute), "x": p.input("x", (*rows, C), "fp32")}
    of_rows |= {"rstd": p.input("rstd", rows, "fp32")}
    stream = p.input("stream", (*rows, C), "fp32")
    weight = p.store.get("weight", (C,), "fp32", "parameter") if weighted else None
    p.apply(ops.RMSNormDx, into={"dx": (stream, "add")}, weight=weight, **of_rows)
    if weighted:
        dweight = p.store.get("dweight", (C,), "fp32", "gradient")
        p.apply(ops.RMSNormDweight, into={"dweight": (dweight, "start")}, **of_rows)
    if compute == "bf16":
        p.output("rounded", p.apply(ops.Cast, x=stream, dtype=compute).y)
    return p


@each_isa
@each_shape
@pytest.mark.parametrize("compute, weighted", [("bf16", True), ("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("past", [True, False], ids=["past the caches", "cached"])
def test_the_whole_backward_pass_at_once(isa, shape, compute, weighted, past, monkeypatch):
    """dx, added to the stream's gradient, its rounding, and the weight's gradient, by one kernel."""
    if past:
        changed(monkeypatch, loops, STREAM_BYTES=0)
    batch, seq, C = shape
    arrays = {"dy": stored(normal(*shape), compute), "x": stored(normal(*shape, seed=2) + 0.5, "fp32")}
    arrays["rstd"] = stored(scale_of(arrays["x"]), "fp32")
    before = {"dx": stored(normal(*shape, seed=5), "fp32")}
    if weighted:
        arrays["weight"] = stored(normal(C, seed=3), "fp32")
        before["dweight"] = stored(normal(C, seed=4), "fp32")
    given = arrays | {"stream": before["dx"]} | {name: v for name, v in before.items() if name != "dx"}
    sizes = {"batch": batch, "seq": seq, "accumulate": 1}
    made = partial(whole_backward, shape, compute, weighted=weighted)
    op, outputs = run_fused(made, isa, given, sizes, name="rmsnorm_backward")
    want = op.run(arrays, {"accumulate": 1}, before)
    size = np.abs(before["dx"]) + gradient_size(arrays["dy"], arrays["x"], arrays["rstd"], arrays.get("weight", 1))
    for name, got in outputs.items():
        bound = 8 * EPS * size + 4 * EPS if got.ndim == 3 else 16 * EPS * (4 + batch * seq) * (1 + size.max())
        rounding = 2.0**-8 * np.abs(want[name]) if name == "rounded" else 0.0
        assert got.shape == want[name].shape and np.all(np.abs(got - want[name]) <= bound + rounding), name


@each_isa
@each_dtype
@each_heads
def test_heads_are_normalised_one_by_one(isa, dtype, heads, D):
    for op_type, given, more in head_norms(dtype, heads, D):
        check_op(op_type, isa, given, **more)
