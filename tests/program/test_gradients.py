"""Gradient rules and the reverse walk against finite differences of the references, in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barellm.program import layouts, ops
from barellm.program.block_layouts import block_layout
from barellm.program.builder import Program, Store
from barellm.program.ops.attention.qk_rotary import Yarn
from barellm.program.ops.base import Op
from barellm.program.ops.pointwise.swiglu import GATED
from barellm.program.scalars import declare
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.program.graphs import Leaf, Weigh, random_graph, run_graph

EPS = 1e-6
B, T, C = 2, 5, 6

QK_ROTARY = {"paired": False, "shift": False, "eps": 1e-3}
CONVOLUTION = {
    "stride": (1, 1), "padding": (1, 2), "dilation": (1, 1), "groups": 1, "reflect": False, "flip_kernel": False,
    "algorithm": "direct",
}  # fmt: skip

# op -> its differentiable operands' shapes, its other operands, its attributes
CASES = {
    "matmul": (ops.Matmul, {"x": (B, T, C), "weight": (7, C)}, {}),
    "matmul_dx": (ops.MatmulDx, {"dy": (B, T, C), "weight": (C, 7)}, {}),
    "bias": (ops.Bias, {"x": (B, T, C), "bias": (C,)}, {}),
    "add": (ops.Add, {"a": (B, T, C), "b": (B, T, C)}, {}),
    "cast": (ops.Cast, {"x": (B, T, C)}, {"dtype": "fp64"}),
    "rescale": (ops.Rescale, {"x": (B, T, C)}, {"forward": 0.3, "backward": 0.3}),
    **{name: (a.forward, {"x": (B, T, C)}, {}) for name, a in ops.ACTIVATIONS.items()},
    "layernorm": (ops.LayerNorm, {"x": (B, T, C), "weight": (C,), "bias": (C,)}, {"eps": 1e-5, "dtype": "fp32"}),
    "layernorm without bias": (ops.LayerNorm, {"x": (B, T, C), "weight": (C,)}, {"eps": 1e-5, "dtype": "fp32"}),
    "attention": (ops.Attention, dict.fromkeys("qkv", (B, T, C)), {"heads": 2, "kv_heads": 2, "rate": 0.0, "stream": 0}),
    "attention with dropout": (
        ops.Attention,
        dict.fromkeys("qkv", (B, T, C)),
        {"heads": 3, "kv_heads": 3, "rate": 0.3, "stream": 4},
    ),
    "attention over all keys": (
        ops.Attention,
        {"q": (B, T, 2 * C), "k": (B, T, C), "v": (B, T, C)},
        {"heads": 4, "kv_heads": 2, "rate": 0.2, "stream": 1, "causal": False},
    ),
    "attention of groups": (
        ops.Attention,
        {"q": (B, T, 2 * C), "k": (B, T, C // 2), "v": (B, T, C // 2)},
        {"heads": 4, "kv_heads": 1, "rate": 0.0, "stream": 0},
    ),
    "attention of two groups": (
        ops.Attention,
        {"q": (B, T, 2 * C), "k": (B, T, C), "v": (B, T, C)},
        {"heads": 4, "kv_heads": 2, "rate": 0.2, "stream": 1},
    ),
    "attention in windows of documents": (
        ops.Attention,
        dict.fromkeys("qkv", (B, T, C)),
        {"heads": 2, "kv_heads": 2, "rate": 0.0, "stream": 0, "window": "reach", "scale": "heat"},
    ),
    "attention of a constant window, scale and cap": (
        ops.Attention,
        {"q": (B, T, 2 * C), "k": (B, T, C), "v": (B, T, C)},
        {"heads": 4, "kv_heads": 2, "rate": 0.2, "stream": 1, "sliding_window": 2, "scale": 0.7, "softcap": 1.3},
    ),
    "attention of paired heads": (
        ops.Attention,
        {"q": (B, T, 2 * C), "k": (B, T, C), "v": (B, T, C)},
        {"heads": 4, "kv_heads": 2, "rate": 0.2, "stream": 0, "window": "reach", "paired": True},
    ),
    "block-sparse attention": (
        ops.BlockSparseAttention,
        {"q": (B, T, 2 * C), "k": (B, T, C), "v": (B, T, C)},
        {"heads": 2, "kv_heads": 1, "layout": layouts.parse("local:2, fixed:3:1", length=T, block=16, heads=2)},
    ),
    "block-sparse attention with relative terms": (
        ops.BlockSparseAttention,
        {"q": (B, T, 2 * C), "k": (B, T, C), "v": (B, T, C), "relative": (3, 2 * C)},
        {"heads": 2, "kv_heads": 1, "layout": layouts.parse("local:2, all", length=T, block=16, heads=2)},
    ),
    "block-sparse attention with relative terms on both sides": (
        ops.BlockSparseAttention,
        {**dict.fromkeys("qkv", (B, T, C)), "relative": (5, C)},
        {"heads": 2, "kv_heads": 2, "layout": layouts.parse("all", length=T, block=16, heads=2, causal=False)},
    ),
    "block-sparse product": (
        ops.BlockMatmul,
        {"x": (B, T, 16), "weight": (24, 8)},
        {"layout": block_layout(np.array([[1, 0, 1], [0, 0, 1]]), 8)},
    ),
    "rmsnorm": (ops.RMSNorm, {"x": (B, T, C), "weight": (C,)}, {"eps": 1e-3, "dtype": "fp32"}),
    "rmsnorm without weight": (ops.RMSNorm, {"x": (B, T, C)}, {"eps": 1e-3, "dtype": "fp32"}),
    "rope": (ops.Rope, {"x": (B, T, 3 * 4 + 2)}, {"heads": 3, "inverse": False}),
    "rope at positions": (ops.Rope, {"x": (B, T, 3 * 4 + 2)}, {"heads": 3, "inverse": False, "positions": T + 1}),
    "qk_rotary": (ops.QKRotary, {"x": (B, T, 3 * 8)}, QK_ROTARY | {"heads": 2, "kv_heads": 1}),
    "qk_rotary of pairs": (ops.QKRotary, {"x": (B, T, 6 * 4)}, QK_ROTARY | {"heads": 4, "kv_heads": 2, "paired": True}),
    "qk_rotary with shifted keys": (ops.QKRotary, {"x": (B, T, 3 * 8)}, QK_ROTARY | {"heads": 1, "kv_heads": 2, "shift": True}),
    "low rank update": (
        ops.LowRankUpdate,
        {"y": (B, T, 2 * C + 3), "u": (B, T, 5), "b0": (C, 2), "b1": (C, 3)},
        {"firsts": (0, C + 3)},
    ),
    "softmax": (ops.Softmax, {"x": (B, T, C)}, {"scale": 0.7, "dtype": "fp32"}),
    **{gated.name: (gated, {"gate": (B, T, C), "up": (B, T, C)}, {}) for gated in GATED.values()},
    "head_rmsnorm": (ops.HeadRMSNorm, {"x": (B, T, 2 * C), "weight": (C,)}, {"eps": 1e-3}),
    "top_k": (ops.TopK, {"x": (B, T, C)}, {"K": 4}),
    "dropout": (ops.Dropout, {"x": (B, T, C)}, {"rate": 0.4, "stream": 2}),
    "dropout by streams": (ops.TauswortheDropout, {"x": (B, T, C)}, {"rate": 0.4, "stream": 2, "bits": "taus88"}),
    "mix": (
        ops.Mix,
        {"x0": (B, T, C), "x1": (B, T, C), "x2": (B, T, C), "k1": (1,)},
        {"numbers": (1.0, None, 0.5), "dtype": "fp32"},
    ),
    "gate logits": (ops.GateLogits, {"x": (B, T, 3), "weight": (2, 3)}, {}),
    "gate logits of two": (ops.GateLogits, {"x": (B, T, 3), "weight": (2, 7), "extra": (B, T, 4)}, {}),
    "gated": (ops.Gated, {"x": (B, T, C), "z": (B, T, 3)}, {"scale": 2.0, "squash": False, "shift": 0}),
    "gated with a base": (
        ops.Gated,
        {"x": (B, T, C), "z": (B, T, 1), "base": (B, T, C), "factor": (1,)},
        {"scale": 2.0, "squash": True, "shift": 0},
    ),
    "gated by what was before": (
        ops.Gated,
        {"x": (B, T, C), "z": (B, T, 2), "base": (B, T, C), "factor": (1,)},
        {"scale": 0.7, "squash": False, "shift": 2},
    ),
    "convolution": (ops.Conv2d, {"x": (2, 4, 6, 5), "w": (6, 2, 3, 2)}, CONVOLUTION | {"groups": 2, "stride": (2, 1)}),
    "reflected convolution": (
        ops.Conv2d,
        {"x": (2, 2, 5, 4), "w": (3, 2, 2, 3)},
        CONVOLUTION | {"reflect": True, "flip_kernel": True, "padding": (2, 3), "dilation": (2, 1), "stride": (1, 3)},
    ),
    "group norm": (ops.GroupNorm, {"x": (2, 6, 2, 3), "weight": (6,), "bias": (6,)}, {"groups": 2, "eps": 1e-3}),
    "mean over pixels": (ops.MeanPixels, {"x": (2, 3, 4, 5)}, {}),
    "embedding": (ops.Embedding, {"wte": (9, C), "wpe": (T + 2, C)}, {}),
    "embedding at positions": (ops.Embedding, {"wte": (9, C), "wpe": (T - 1, C)}, {"positions": T - 1}),
    "cross entropy": (ops.CrossEntropy, {"logits": (B, T, 9)}, {"valid_vocab": 7}),
    "softcapped cross entropy": (
        ops.SoftcapCrossEntropy,
        {"logits": (B, T, 9)},
        {"valid_vocab": 7, "cap": (3.0, 0.5, 0.7), "predict": 3},
    ),
    "cross entropy of two tokens": (ops.SoftcapCrossEntropy, {"logits": (B, T, 9)}, {"valid_vocab": 7, "cap": None, "predict": 2}),
}


def test_every_gradient_rule_has_a_case():
    found = [
        *(getattr(ops, n) for n in ops.__all__ if n != "ACTIVATIONS"),
        *(a.forward for a in ops.ACTIVATIONS.values()),
        *GATED.values(),
    ]
    with_rule = {c for c in found if c.gradient is not Op.gradient}
    # The gradients of a sign and of rounding are not their derivatives: tests/program/test_binary.py, test_fp8.py.
    through = {ops.PackSigns, ops.BinaryMatmul, ops.ScaledMatmul}
    assert with_rule - through == {op for op, _, _ in CASES.values()}


def program_of(op_type, shapes, attrs) -> Program:
    """The op on parameters (through leaves where a row axis makes them activations), its first output weighed."""
    p = Program(Store())
    rows = (Dim("batch", B), Dim("seq", T))
    operands = {}
    for name, shape in shapes.items():
        t = p.parameter(name, shape)
        operands[name] = p.apply(Leaf, x=t).y if len(shape) == 3 else t
    losses = (ops.CrossEntropy, ops.SoftcapCrossEntropy)
    for name in {ops.Embedding: ["tokens"]}.get(op_type, ["targets"] if op_type in losses else []):
        operands[name] = p.input(name, rows)
    if op_type is ops.Rope:
        operands |= dict(zip(("cos", "sin"), p.rope_tables(T + 1, 4, theta=10.0), strict=True))
    if "positions" in attrs:
        operands["positions"] = p.input("positions", rows)
    if layout := attrs.get("layout"):
        operands |= {name: p.constant(name, values, "i32") for name, values in layout.tables.items()}
    if attrs.get("window"):
        operands["starts"] = p.input("starts", rows)
        declare("reach")
        declare("heat", "fp64")
    if op_type is ops.QKRotary:
        width = int(operands["x"].shape[-1]) // (attrs["heads"] + attrs["kv_heads"])
        operands |= dict(zip(("cos", "sin"), p.yarn_tables(Yarn.of_head(width), 2 * T + 1), strict=True))
    op = p.apply(op_type, **attrs | operands)
    if op_type in losses:
        loss = op.loss
    else:
        loss = p.apply(Weigh, x=next(iter(op.outputs.values())), seed=1).loss
    p.output("loss", loss)
    p.backward(loss)
    return p


def directional(session, name: str, value: np.ndarray, direction: np.ndarray, **scalars) -> float:
    sides = []
    for sign in (1, -1):
        session.write(name, value + sign * EPS * direction)
        session.run("forward_backward", **scalars)
        sides.append(session.read("loss")[0])
    session.write(name, value)
    return (sides[0] - sides[1]) / (2 * EPS)


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_finite_difference(case):
    op_type, shapes, attrs = CASES[case]
    p = program_of(op_type, shapes, attrs)
    session = ReferenceSession({"forward_backward": p})
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    for name, value in values.items():
        session.write(name, value)
    for name, low, high in (("tokens", 0, 9), ("targets", -1, 7), ("positions", 0, attrs.get("positions"))):
        if name in p.named:
            session.write(name, rng.integers(low, high, (B, T)))
    if "starts" in p.named:
        session.write("starts", [[0, 0, 0, 3, 3], [0, 1, 1, 1, 1]])
    scalars = {"seed": 3, "step": 2, "sample": 5, "inv_targets": 0.3, "mtp_0": 1.0, "mtp_1": 0.5, "mtp_2": 0.3}
    scalars |= {"reach": 2, "heat": 0.7} if attrs.get("window") else {}
    session.run("forward_backward", **scalars)
    gradients = {name: session.read(f"{name}.grad") for name in shapes}
    for name, value in values.items():
        for _ in range(3):
            direction = rng.normal(size=value.shape)
            found = (gradients[name] * direction).sum()
            assert found == pytest.approx(directional(session, name, value, direction, **scalars), rel=1e-6, abs=1e-8)


@settings(max_examples=90, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 9))
def test_random_graphs_equal_finite_differences(seed, length):
    """Values that fan out, meet again, and pass one gradient tensor on to several places."""
    p = random_graph(seed, length=length)
    p.backward(p.named["loss"])
    p_gradients = run_graph(p, seed=seed)
    session = ReferenceSession({"forward_backward": p})
    rng = np.random.default_rng(seed)
    values = {t.name: rng.normal(size=t.shape) * 0.5 for t in p.store.of_role("parameter")}
    session.write("tokens", rng.integers(0, 5, tuple(int(n) for n in p.named["tokens"].shape)))
    for name, value in values.items():
        session.write(name, value)
    for t in p.store.of_role("parameter"):
        if f"{t.name}.grad" not in p_gradients:
            continue
        direction = rng.normal(size=values[t.name].shape)
        found = (p_gradients[f"{t.name}.grad"] * direction).sum()
        numeric = directional(session, t.name, values[t.name], direction, seed=7, step=3, sample=11)
        assert found == pytest.approx(numeric, rel=2e-5, abs=2e-6), (t.name, p.ops)


@settings(max_examples=90, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 12))
def test_recompute_gives_the_same_bits(seed, length):
    plain, again = (random_graph(2 * seed + 1, length=length) for _ in range(2))
    plain.backward(plain.named["loss"])
    again.backward(again.named["loss"], recompute=True)
    expected, found = run_graph(plain), run_graph(again)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_gradient_is_not_added_into_while_it_is_read():
    """x and linear(x) of y = x + linear(x) share one gradient tensor; matmul_dx must not add into what matmul_dw reads."""
    p = Program(Store())
    x = p.apply(Leaf, x=p.parameter("x", (B, T, C))).y
    p.output("loss", p.apply(Weigh, x=p.add(x, p.linear(x, p.parameter("w", (C, C)))), seed=0).loss)
    p.backward(p.named["loss"])
    for op in p.ops:
        added = {t for name, t in op.outputs.items() if op.modes[name] == "add"}
        assert not added & set(op.inputs.values()), op


def test_a_loss_without_parameters_is_refused():
    p = Program(Store())
    x = p.input("x", (B, T, C), "fp32")
    with pytest.raises(ValueError, match="depends on no parameter"):
        p.backward(p.apply(Weigh, x=x, seed=0).loss)


def test_a_tensor_that_is_no_loss_is_refused():
    p = Program(Store())
    x = p.embedding(p.input("tokens", (2, 3)), p.parameter("wte", (5, 4)), p.parameter("wpe", (3, 4)))
    with pytest.raises(ValueError, match=r"backward starts from a loss of shape \(1,\): loss \(2, 3, 4\) fp32"):
        p.backward(x)
