"""What a LayerNorm or RMSNorm is fused with, forward and backward: each row of the table means its sequence, and moves fewer
bytes."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cuda.fuse import FUSIONS
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.fusion import fuse
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.cuda.check import InterpretedSession, stored

RATE = 0.3
SHAPE = (Dim("batch", 3), Dim("seq", 11))


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def norm(p: Program, x, C: int, bias: bool):
    return p.layernorm(x, p.parameter("weight", (C,), std=0.5), p.parameter("bias", (C,), std=0.5) if bias else None)


def add_layernorm(p: Program, C: int, bias: bool) -> None:
    total = p.add(p.input("a", (*SHAPE, C), "fp32"), p.input("b", (*SHAPE, C), p.compute))
    p.output("y", norm(p, total, C, bias))
    p.output("total", total)


def dropout_add_layernorm(p: Program, C: int, bias: bool) -> None:
    total = p.add(p.input("a", (*SHAPE, C), "fp32"), p.dropout(p.input("b", (*SHAPE, C), p.compute), RATE))
    p.output("y", norm(p, total, C, bias))
    p.output("total", total)


def add_rmsnorm(p: Program, C: int, weighed: bool) -> None:
    total = p.add(p.input("a", (*SHAPE, C), "fp32"), p.input("b", (*SHAPE, C), p.compute))
    p.output("y", p.rmsnorm(total, p.parameter("weight", (C,), std=0.5) if weighed else None))
    p.output("total", total)


def backward(p: Program, C: int, bias: bool, mode: str, then: str) -> None:
    """Both gradients of a norm whose dx is stored or added, then the ops named in `then` that read it."""
    x, dy = p.input("x", (*SHAPE, C), "fp32"), p.input("dy", (*SHAPE, C), p.compute)
    weight = p.parameter("w", (C,), std=0.5)
    y = p.apply(ops.LayerNorm, x=x, weight=weight, eps=1e-5, dtype=p.compute)
    saved = {"dy": dy, "x": x, "mean": y.mean, "rstd": y.rstd}
    into = {"dx": (p.input("dx", (*SHAPE, C), "fp32"), "add")} if mode == "add" else {}
    dx = p.apply(ops.LayerNormDx, into=into, weight=weight, **saved).dx

    def gradient(name: str):
        return p.store.get(name, (C,), "fp32", "gradient"), "start"

    names = ["dweight", "dbias"] if bias else ["dweight"]
    p.apply(ops.LayerNormDparams, into={name: gradient(name) for name in names}, **saved)
    dnext = {"dbias": gradient("dnext")} if "bias" in then else {}
    if "dropout" in then:
        drop = p.apply(ops.DropoutBackward, dy=dx, rate=RATE, stream=2, dtype=p.compute).dx
        p.output("narrow", drop)
        if "bias" in then:
            p.apply(ops.BiasGrad, into=dnext, dy=drop)
    else:
        if "bias" in then:
            p.apply(ops.BiasGrad, into=dnext, dy=dx)
        if "cast" in then:
            p.output("narrow", p.apply(ops.Cast, x=dx, dtype="bf16").y)
    if mode == "store":
        p.output("dx", dx)


def rmsnorm_backward(p: Program, C: int, weighed: bool, mode: str, cast: bool) -> None:
    """The gradients of an RMSNorm whose dx is stored or added, and an operand of products made of it."""
    x, dy = p.input("x", (*SHAPE, C), "fp32"), p.input("dy", (*SHAPE, C), p.compute)
    weight = p.parameter("w", (C,), std=0.5) if weighed else None
    y = p.apply(ops.RMSNorm, x=x, weight=weight, eps=1e-5, dtype=p.compute)
    into = {"dx": (p.input("dx", (*SHAPE, C), "fp32"), "add")} if mode == "add" else {}
    dx = p.apply(ops.RMSNormDx, into=into, dy=dy, x=x, weight=weight, rstd=y.rstd).dx
    if weighed:
        gradient = p.store.get("dweight", (C,), "fp32", "gradient"), "start"
        p.apply(ops.RMSNormDweight, into={"dweight": gradient}, dy=dy, x=x, rstd=y.rstd)
    if cast:
        p.output("narrow", p.apply(ops.Cast, x=dx, dtype="bf16").y)
    if mode == "store":
        p.output("dx", dx)


def check(p: Program, fused: str, rounding: float) -> None:
    session, oracle = InterpretedSession({"op": p}), ReferenceSession({"op": p})
    assert fused in [op.name for op in session.lowered["op"].ops]
    for (batch, seq), seed in (((3, 11), 3), ((3, 11), 4), ((1, 1), 5)):
        for name, t in {**p.named, **p.store.tensors}.items():
            if t.role in ("input", "parameter"):
                shape = tuple({"batch": batch, "seq": seq}[n.name] if isinstance(n, Dim) else n for n in t.shape)
                for s in (session, oracle):
                    s.write(name, stored(normal(*shape, seed=seed + len(name)), t.dtype))
        scalars = {"batch": batch, "seq": seq, "accumulate": int(seed == 4), "seed": 7, "step": 2, "sample": 5}
        for s in (session, oracle):
            s.run("op", **scalars)
        for name, t in {**p.named, **p.store.tensors}.items():
            if t.role in ("output", "gradient") or name == "dx":
                got, want = session.read(name).astype(np.float64), oracle.read(name)
                limit = (2e-6 if t.dtype == "fp32" else rounding) * (1 + np.abs(want).max())
                assert np.abs(got - want).max() <= limit, (name, batch, seq)
    session.close()


each_compute = pytest.mark.parametrize("compute", ["fp32", "bf16"])
each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


@each_compute
@each_bias
@pytest.mark.parametrize("C", [1, 35, 128])
@pytest.mark.parametrize("program", [add_layernorm, dropout_add_layernorm])
def test_a_sum_and_its_norm(program, C, bias, compute):
    p = Program(Store(), compute=compute)
    program(p, C, bias)
    assert [op.name for op in fuse(p.ops, FUSIONS)] == [program.__name__]
    check(p, program.__name__, 2.0**-8)


@each_compute
@each_bias
@pytest.mark.parametrize("mode", ["store", "add"])
@pytest.mark.parametrize("then", ["", "bias", "cast", "bias cast", "dropout", "dropout bias"])
def test_the_backward_pass_of_a_norm(then, mode, bias, compute):
    p = Program(Store(), compute=compute)
    backward(p, 35, bias, mode, then)
    assert [op.name for op in fuse(p.ops, FUSIONS)] == ["layernorm", "layernorm_backward"]
    check(p, "layernorm_backward", 2.0**-8)


@each_compute
@pytest.mark.parametrize("weighed", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("C", [1, 35, 128])
def test_a_sum_and_its_rmsnorm(C, weighed, compute):
    p = Program(Store(), compute=compute)
    add_rmsnorm(p, C, weighed)
    assert [op.name for op in fuse(p.ops, FUSIONS)] == ["add_rmsnorm"]
    check(p, "add_rmsnorm", 2.0**-8)


@each_compute
@pytest.mark.parametrize("mode", ["store", "add"])
@pytest.mark.parametrize("C", [7, 35, 1030])
@pytest.mark.parametrize("weighed, cast", [(True, False), (True, True), (False, True)])
def test_the_backward_pass_of_an_rmsnorm(C, weighed, cast, mode, compute):
    p = Program(Store(), compute=compute)
    rmsnorm_backward(p, C, weighed, mode, cast)
    assert [op.name for op in fuse(p.ops, FUSIONS)] == ["rmsnorm", "rmsnorm_backward"]
    check(p, "rmsnorm_backward", 2.0**-8)


@pytest.mark.parametrize("C", [1, 200, 1030])
def test_the_backward_pass_of_rows_of_any_length(C):
    p = Program(Store(), compute="bf16")
    backward(p, C, True, "add", "bias cast")
    check(p, "layernorm_backward", 2.0**-8)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_every_sum_and_norm_of_a_model_is_fused(dropout, recompute):
    """Nothing else walks the residual stream of a bf16 GPT-2, but its first norm."""
    model = ModelConfig(layers=3, heads=2, d_model=32, vocab_size=61, padded_vocab=64, max_seq=16, dropout=dropout)
    _, programs = build(model, batch=2, seq=16, compute="bf16", optimizer=lambda p: None, recompute=recompute)
    before, after = programs["forward_backward"].ops, fuse(programs["forward_backward"].ops, FUSIONS)
    names = [op.name for op in after]
    assert names.count("layernorm_backward") == 7
    assert not {"add", "cast", "layernorm_dx", "layernorm_dparams", "dropout_backward"} & set(names)
    assert sum(op.bytes() for op in after) < sum(op.bytes() for op in before)
