"""Shape rules, special cases of the references, costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.base import Op
from barellm.program.ops.pointwise.swiglu import GATED
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.indices import index_limits
from barellm.runtime.reference import ReferenceSession


def t(*shape: int, dtype: str = "fp32") -> Tensor:
    return Tensor("t", shape, dtype, "activation")


BAD = [
    (ops.Matmul, {"x": t(2, 3, 4), "weight": t(7, 5)}, {}, r"x \(2, 3, 4\) fp32, weight \(7, 5\) fp32"),
    (ops.MatmulDx, {"dy": t(2, 3, 4), "weight": t(7, 5)}, {}, r"\(2, 3, 4\).*\(7, 5\)"),
    (ops.MatmulDw, {"dy": t(2, 3, 4), "x": t(2, 4, 4)}, {}, r"\(2, 3, 4\).*\(2, 4, 4\)"),
    (ops.Bias, {"x": t(2, 3, 4), "bias": t(5)}, {}, r"\(2, 3, 4\).*\(5,\)"),
    (ops.Add, {"a": t(2, 3, 4), "b": t(2, 3)}, {}, r"\(2, 3, 4\).*\(2, 3\)"),
    (ops.ACTIVATIONS["gelu"].backward, {"dy": t(2, 3), "x": t(2, 4)}, {}, r"\(2, 3\).*\(2, 4\)"),
    (ops.LayerNorm, {"x": t(2, 3, 4), "weight": t(5)}, {"eps": 1e-5, "dtype": "fp32"}, r"\(2, 3, 4\).*\(5,\)"),
    (ops.LayerNormDx, {"dy": t(2, 3), "x": t(2, 4), "weight": t(4), "mean": t(2), "rstd": t(2)}, {}, r"\(2, 3\)"),
    (
        ops.Attention,
        {"q": t(2, 3, 20), "k": t(2, 3, 20), "v": t(2, 3, 20)},
        {"heads": 3, "kv_heads": 3, "rate": 0.0, "stream": 0},
        r"3 heads.*\(2, 3, 20\)",
    ),
    (
        ops.Attention,
        {"q": t(2, 3, 24), "k": t(2, 3, 12), "v": t(2, 3, 12)},
        {"heads": 4, "kv_heads": 3, "rate": 0.0, "stream": 0},
        r"4 heads \* D.*3 heads \* D",
    ),
    (
        ops.Attention,
        {name: t(2, 3, 24) for name in "qkv"} | {"starts": t(2, 4, dtype="i32")},
        {"heads": 4, "kv_heads": 4, "rate": 0.0, "stream": 0},
        r"starts \(B, T\) i32.*starts \(2, 4\) i32",
    ),
    (
        ops.Attention,
        {name: t(2, 3, 24) for name in "qkv"},
        {"heads": 3, "kv_heads": 3, "rate": 0.0, "stream": 0, "paired": True},
        "even numbers of heads: 3, 3 of keys",
    ),
    (ops.RMSNorm, {"x": t(2, 8), "weight": t(7)}, {"eps": 1e-5, "dtype": "fp32"}, r"rmsnorm.*\(7,\)"),
    (ops.HeadRMSNorm, {"x": t(2, 8), "weight": t(3)}, {"eps": 1e-5}, r"head_rmsnorm.*\(2, 8\).*\(3,\)"),
    (ops.SwiGLU, {"gate": t(2, 8), "up": t(2, 7)}, {}, r"swiglu.*\(2, 7\)"),
    (ops.Rope, {"x": t(2, 3, 8), "cos": t(4, 2), "sin": t(4, 2)}, {"heads": 3, "inverse": False}, r"W >= 3 heads.*\(2, 3, 8\)"),
    (ops.Rope, {"x": t(2, 5, 8), "cos": t(4, 2), "sin": t(4, 2)}, {"heads": 2, "inverse": False}, r"5 positions.*have 4"),
    (ops.QKRotary, {"x": t(2, 3, 24), "cos": t(4, 3), "sin": t(4, 3)}, {"heads": 2, "kv_heads": 1}, r"2 \+ 1 heads.*cos \(4, 3\)"),
    (
        ops.QKRotary,
        {"x": t(2, 3, 24), "cos": t(5, 2), "sin": t(5, 2)},
        {"heads": 2, "kv_heads": 1, "paired": True},
        "2 and 1 heads, expected even",
    ),
    (
        ops.QKRotary,
        {"x": t(2, 3, 32), "cos": t(5, 2), "sin": t(5, 2)},
        {"heads": 2, "kv_heads": 2, "paired": True},
        "6 positions.*have 5",
    ),
    (ops.BigramIds, {"tokens": t(2, 9)}, {"buckets": 9, "reserved": False}, r"i32: tokens \(2, 9\) fp32"),
    (ops.BigramIds, {"tokens": t(2, 9, dtype="i32")}, {"buckets": 1, "reserved": False}, "at least 2 buckets, found 1"),
    (ops.DocumentStarts, {"cu_seqlens": t(3, 4, dtype="i32"), "tokens": t(2, 9)}, {}, r"\(3, 4\) i32, tokens \(2, 9\)"),
    (ops.Transpose, {"x": t(2, 3, 4)}, {}, r"\(2, 3, 4\)"),
    (ops.Dropout, {"x": t(2, 3, 4)}, {"rate": 1.0, "stream": 0}, r"\(2, 3, 4\), rate 1.0"),
    (ops.Embedding, {"tokens": t(2, 9), "wte": t(5, 4), "wpe": t(8, 4)}, {}, "9 tokens, wpe has 8"),
    (ops.Embedding, {"tokens": t(2, 9), "wte": t(5, 4), "wpe": t(8, 3)}, {}, r"\(5, 4\).*\(8, 3\)"),
    (ops.EmbeddingDwte, {"tokens": t(2, 9), "dy": t(2, 8, 4)}, {"rows": 5}, r"\(2, 9\).*\(2, 8, 4\)"),
    (ops.CrossEntropy, {"logits": t(2, 3, 4), "targets": t(2, 3)}, {"valid_vocab": 5}, r"V >= 5.*\(2, 3, 4\)"),
    (
        ops.SoftcapCrossEntropy,
        {"logits": t(2, 3, 4), "targets": t(2, 2)},
        {"valid_vocab": 4, "predict": 1},
        r"V >= 4.*\(2, 3, 4\) fp32, targets \(2, 2\)",
    ),
    (
        ops.SoftcapCrossEntropy,
        {"logits": t(2, 3, 4), "targets": t(2, 3)},
        {"valid_vocab": 4, "predict": 4},
        "predict from 1 to 3, found 4",
    ),
    *(
        (
            ops.SoftcapCrossEntropy,
            {"logits": t(2, 3, 4), "targets": t(2, 3)},
            {"valid_vocab": 4, "predict": 1, "cap": cap},
            r"scale up to 70 and a width above 0, found \(",
        )
        for cap in ((71.0, 5.0, 7.5), (0.0, 5.0, 7.5), (23.0, 5.0, 0.0), (23.0, 5.0))
    ),
    (ops.LastRow, {"x": t(2, 3)}, {}, r"\(2, 3\)"),
]


@pytest.mark.parametrize("op_type, inputs, attrs, message", BAD, ids=lambda x: getattr(x, "name", None))
def test_wrong_shapes_are_refused_by_name(op_type, inputs, attrs, message):
    with pytest.raises(ValueError, match=message):
        Program(Store()).apply(op_type, **inputs, **attrs)


def test_every_op_has_a_name_a_reference_and_no_twin():
    classes = [getattr(ops, name) for name in ops.__all__ if name != "ACTIVATIONS"]
    classes += [op for a in ops.ACTIVATIONS.values() for op in (a.forward, a.backward)]
    classes += [op for gated in GATED.values() if gated is not ops.SwiGLU for op in (gated, gated.backward)]
    assert len({c.name for c in classes}) == len(classes)
    assert all(c.reference is not Op.reference and c.infer is not Op.infer for c in classes)


def test_ignored_targets_and_padded_columns_take_no_part():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 8))
    targets = np.array([[1, -1, 4], [-1, 0, 2]])
    op = ops.CrossEntropy({}, {"valid_vocab": 5})
    expected = op.reference(logits, targets, inv_targets=0.25)
    logits[..., 5:] = 1e9
    logits[0, 1] = 77
    found = op.reference(logits, targets, inv_targets=0.25)
    assert found["loss"] == expected["loss"]
    backward = ops.CrossEntropyBackward({}, {"valid_vocab": 5})
    dlogits = backward.reference(logits, targets, found["lse"], inv_targets=0.25)["dlogits"]
    assert (dlogits[..., 5:] == 0).all() and (dlogits[targets < 0] == 0).all()
    np.testing.assert_allclose(dlogits.sum(-1), 0, atol=1e-15)


def test_a_position_answers_for_the_next_targets_of_its_row():
    """Written out element by element: a sum over tokens, whose targets cross documents and end with the row."""
    rng = np.random.default_rng(0)
    logits, targets = 3 * rng.normal(size=(2, 4, 6)), np.array([[1, 1, -1, 4], [0, 3, 2, 2]])
    scalars = {"inv_targets": 0.25, "mtp_0": 1.0, "mtp_1": 0.5, "mtp_2": 0.125}
    z = 23 / (1 + np.exp(-(logits[..., :5] + 5) / 7.5))
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    expected = 0.0
    for b, t_, k in np.ndindex(2, 4, 3):
        if t_ + k < 4 and targets[b, t_ + k] >= 0:
            expected -= scalars[f"mtp_{k}"] * np.log(p[b, t_, targets[b, t_ + k]])
    op = ops.SoftcapCrossEntropy({}, {"valid_vocab": 5, "cap": (23.0, 5.0, 7.5), "predict": 3})
    found = op.reference(logits, targets, **scalars)
    assert found["loss"] == pytest.approx(0.25 * expected, rel=1e-12)
    alone = op.reference(logits, targets, inv_targets=0.25, mtp_0=1.0, mtp_1=0.0, mtp_2=0.0)["loss"]
    other = op.reference(logits, targets, **scalars | {"mtp_0": 0.5})["next_loss"]  # whatever the weight
    assert found["next_loss"] == alone == other


def test_one_target_without_a_cap_is_plain_cross_entropy():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 3, 8)), np.array([[1, -1, 4], [-1, 0, 2]])
    scalars = {"inv_targets": 0.25, "mtp_0": 1.0, "mtp_1": 7.0, "mtp_2": 7.0}
    plain, one = {"valid_vocab": 5}, {"valid_vocab": 5, "predict": 1}
    expected = ops.CrossEntropy({}, plain).reference(logits, targets, 0.25)
    found = ops.SoftcapCrossEntropy({}, one).reference(logits, targets, **scalars)
    assert found["loss"] == expected["loss"]
    backward = ops.CrossEntropyBackward({}, plain).reference(logits, targets, expected["lse"], 0.25)
    again = ops.SoftcapCrossEntropyBackward({}, one).reference(logits, targets, found["lse"], **scalars)
    np.testing.assert_allclose(again["dlogits"], backward["dlogits"], rtol=1e-12)


def test_a_run_that_names_no_weights_counts_the_next_token():
    p = Program(Store())
    logits, targets = p.input("logits", (2, 3, 5), "fp32"), p.input("targets", (2, 3))
    for predict in (1, 3):
        op = p.apply(ops.SoftcapCrossEntropy, logits=logits, targets=targets, valid_vocab=5, predict=predict)
        p.output(f"loss{predict}", op.loss)
    session = ReferenceSession({"eval": p})
    session.write("logits", np.random.default_rng(0).normal(size=(2, 3, 5)))
    session.write("targets", np.array([[0, 1, 4], [3, 3, -1]]))
    losses = []
    for weights in ({"mtp_1": 0.5, "mtp_2": 0.5}, {}):  # nothing of the run before is left
        session.run("eval", inv_targets=0.2, **weights)
        losses.append([float(session.read(f"loss{predict}")[0]) for predict in (1, 3)])
    assert losses[0][0] == losses[1][0] == losses[1][1] != losses[0][1]


def test_products_with_transposed_weights_name_their_shapes():
    p = Program(Store())
    with pytest.raises(ValueError, match=r"linear expects x \(\.\.\., K\) and a transposed weight \(K, N\): .*weight \(3, 5\)"):
        p.linear(t(2, 4), t(3, 5), transposed_weight=True)
    with pytest.raises(ValueError, match=r"softcapped_classifier expects x \(B, T, C\), head \(C, V\): .*head \(9, 5\)"):
        p.softcapped_classifier(t(2, 3, 4), t(9, 5), t(2, 3), valid_vocab=5)
    assert tuple(p.linear(t(2, 4), t(4, 5), transposed_weight=True).shape) == (2, 5)


def test_a_norm_that_is_not_finite_skips_and_counts():
    op = ops.ClipScale({}, {"clip": 1.0})
    for bad in (np.nan, np.inf):
        result = op.reference(skipped=np.array([3]), p0=np.array([1.0, bad]), p1=np.array([4.0]))
        assert np.isnan(result["clip"][1]) and result["skipped"] == 4
    good = op.reference(skipped=np.array([3]), p0=np.array([1.0, 4.0]), p1=np.array([4.0]))
    np.testing.assert_allclose(good["clip"], [3, 1 / 3])
    assert good["skipped"] == 3
    off = ops.ClipScale({}, {"clip": 0.0}).reference(skipped=np.array([0]), p0=np.array([400.0]))
    np.testing.assert_allclose(off["clip"], [20, 1])
    adamw = ops.AdamW({}, {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1})
    arrays = {name: np.ones(3) for name in ("param", "grad", "m", "v")}
    kept = adamw.reference(**arrays, clip=np.array([np.nan, np.nan]), lr=0.1, step=1)
    assert all((kept[name] == 1).all() for name in ("param", "m", "v"))


@pytest.mark.parametrize("more", [{}, {"sliding_window": 3, "scale": 0.9, "softcap": 0.8}, {"sliding_window": 9}], ids=str)
def test_the_cache_gives_what_whole_attention_gives(more):
    rng = np.random.default_rng(0)
    qkv = rng.normal(size=(2, 9, 24))
    attrs = {"heads": 2, "kv_heads": 2, **more}
    whole = ops.Attention({}, {**attrs, "rate": 0.0, "stream": 0}).reference(*np.split(qkv, 3, -1))["out"]
    op = ops.AttentionCached({}, attrs)
    k, v = rng.normal(size=(2, 3, 12, 8))  # stale contents, and a sequence more than is used
    for lo, hi in ((0, 4), (4, 5), (5, 9)):
        result = op.reference(*np.split(qkv[:, lo:hi], 3, -1), k, v, pos=lo)
        k, v = result["k_cache"], result["v_cache"]
        np.testing.assert_allclose(result["out"], whole[:, lo:hi], rtol=1e-12)


def test_positions_and_slots_are_inputs_that_fit():
    """i32, one for each token or text, and ids that a kernel may index by."""
    p = Program(Store())
    rows = (Dim("batch", 2), Dim("seq", 3))
    x, at = p.input("x", (*rows, 8), "fp32"), p.input("at", rows)
    tables = p.rope_tables(5, 4, theta=10.0)
    caches = [p.cache(name, (4, 7, 8), "fp32") for name in "kv"]
    slots = p.input("slots", rows[:1])
    p.embedding(p.input("tokens", rows), p.parameter("wte", (9, 8)), p.parameter("wpe", (6, 8)), positions=at)
    p.rope(x, tables, heads=2, positions=at)
    p.attention_cached(x, x, x, *caches, heads=2, positions=at, slots=slots)
    assert index_limits([p]) == {"tokens": (0, 8), "at": (0, 4), "slots": (0, 3)}  # of positions what all of them can take
    for wrong in (slots, p.input("reals", rows, "fp32")):
        with pytest.raises(ValueError, match=r"rope expects positions \(B, T\) i32"):
            p.rope(x, tables, heads=2, positions=wrong)
    with pytest.raises(ValueError, match=r"attention_cached expects slots \(B,\) i32"):
        p.attention_cached(x, x, x, *caches, heads=2, positions=at, slots=at)


ATTENTION: dict[str, Any] = {"heads": 4, "kv_heads": 4, "rate": 0.0, "stream": 0}


def attend(q, k, v, **more):
    """The reference's out of an attention of 4 heads; `more` are attributes, starts and scalars."""
    attrs = {
        name: more.pop(name)
        for name in ("heads", "kv_heads", "window", "scale", "paired", "sliding_window", "softcap")
        if name in more
    }
    return ops.Attention({}, ATTENTION | attrs).reference(q, k, v, **more)["out"]


def test_documents_and_windows_see_what_they_would_see_alone():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 9, 8))
    starts = np.array([[0, 0, 0, 3, 4, 4, 4, 4, 4]])
    documents = attend(q, k, v, starts=starts)
    for lo, hi in ((0, 3), (3, 4), (4, 9)):
        alone = attend(*(x[:, lo:hi] for x in (q, k, v)))
        np.testing.assert_allclose(documents[:, lo:hi], alone, rtol=1e-12)
    both = attend(q, k, v, starts=starts, window="w", scale="s", w=2, s=0.3)
    for i in range(9):
        lo = max(i - 2, starts[0, i])
        alone = attend(*(x[:, lo : i + 1] for x in (0.3 * np.sqrt(2) * q, k, v)))[:, -1]
        np.testing.assert_allclose(both[:, i], alone, rtol=1e-12)
    np.testing.assert_allclose(attend(q, k, v, window="w", w=0), v, rtol=1e-12)


def test_paired_heads_are_a_sequence_of_twice_the_length():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 5, 8))
    starts, twice = np.array([[0, 0, 2, 2, 2]]), np.array([[0, 0, 0, 0, 4, 4, 4, 4, 4, 4]])
    paired = attend(q, k, v, paired=True, starts=starts, window="w", w=3)
    folded = [x.reshape(1, 10, 4) for x in (q, k, v)]
    apart = attend(*folded, heads=2, kv_heads=2, starts=twice, window="w", w=3)
    np.testing.assert_array_equal(paired, apart.reshape(1, 5, 8))


def test_attention_counts_the_pairs_of_the_widest_window():
    x = {name: t(2, 7, 8) for name in "qkv"}
    p = Program(Store())
    for more, pairs in (
        ({}, 28),
        ({"window": "w"}, 28),
        ({"window": "w", "most_window": 2}, 1 + 2 + 5 * 3),
        ({"window": "w", "most_window": 50}, 28),
        ({"causal": False}, 49),
        ({"sliding_window": 3}, 1 + 2 + 5 * 3),
        ({"sliding_window": 50}, 28),
        ({"window": "w", "most_window": 2, "paired": True}, (1 + 2 + 12 * 3) / 2),
    ):
        op = p.apply(ops.Attention, **x, **ATTENTION, **more)
        assert op.flops() == 2 * 2 * 2 * pairs * 8


@pytest.mark.parametrize(
    "more, says",
    [({"window": "w"}, "window"), ({"sliding_window": 3}, "sliding_window"), ({"paired": True, "window": "w"}, "paired, window")],
)
def test_attention_over_all_keys_has_no_bounds(more, says):
    with pytest.raises(ValueError, match=f"attention that is not causal expects no {says}: q "):
        Program(Store()).apply(ops.Attention, **{name: t(2, 7, 8) for name in "qkv"}, **ATTENTION, causal=False, **more)


@pytest.mark.parametrize("more", [{"scale": -1.0}, {"softcap": -2.0}, {"sliding_window": -1}, {"window": "w", "sliding_window": 2}])
def test_numbers_that_no_attention_has(more):
    with pytest.raises(ValueError, match="attention expects scale > 0, softcap >= 0, sliding_window >= 0 or a window instead: "):
        Program(Store()).apply(ops.Attention, **{name: t(2, 7, 8) for name in "qkv"}, **ATTENTION, **more)


def test_a_window_shows_as_many_keys_as_it_says():
    """That of 3 keys is the run-time window of 2 before a query's own; scores are multiplied, then capped."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 9, 8))
    np.testing.assert_array_equal(attend(q, k, v, sliding_window=3), attend(q, k, v, window="w", w=2))
    one = {"heads": 1, "kv_heads": 1}
    s = np.tril(np.ones((9, 9)))[None] * np.exp(0.6 * np.tanh(0.9 * (q @ k.transpose(0, 2, 1)) / 0.6))
    np.testing.assert_allclose(attend(q, k, v, **one, scale=0.9, softcap=0.6), s / s.sum(-1, keepdims=True) @ v, rtol=1e-10)


def test_attention_over_all_keys_has_no_documents():
    x = {name: t(2, 7, 8) for name in "qkv"}
    with pytest.raises(ValueError, match="attention that is not causal expects no starts: q "):
        Program(Store()).apply(ops.Attention, **x, starts=t(2, 7), **ATTENTION, causal=False)


def test_a_scalar_of_another_kind_is_no_window():
    with pytest.raises(ValueError, match="attention expects a scalar of kind i64, lr is fp64"):
        Program(Store()).attention(*(t(2, 3, 8) for _ in "qkv"), heads=2, window="lr")


@pytest.mark.parametrize("name", ["gpt2-124m", "shakespeare-char"])
@pytest.mark.parametrize("recompute", [False, True])
def test_model_flops_have_one_definition(name, recompute):
    """6 x matmul weights x tokens + causal attention, recompute not counted."""
    model = preset(name).model
    B, T, C, L = 4, 64, model.d_model, model.layers
    _, programs = build(model, batch=B, seq=T, optimizer=lambda p: None, recompute=recompute)
    weights = L * 12 * C * C + model.padded_vocab * C
    attention = 3 * L * 2 * B * T * (T + 1) * C
    assert programs["forward_backward"].flops == 6 * weights * B * T + attention
    assert programs["eval"].flops == 2 * weights * B * T + attention // 3


def test_bytes_count_what_must_move():
    model = ModelConfig(layers=1, heads=2, d_model=8, vocab_size=32, padded_vocab=32, max_seq=6)
    _, programs = build(model, batch=2, seq=6, compute="bf16", optimizer=partial(adamw, config=OptimConfig()))
    micro, update = ({op.name: op for op in programs[name].ops} for name in ("forward_backward", "optimizer_step"))
    rows, C, V = 12, 8, 32
    assert micro["layernorm"].bytes() == rows * C * (4 + 2) + 2 * C * 4 + 2 * rows * 4
    assert micro["cross_entropy"].bytes() == rows * V * 2 + rows * 4 + 4 + rows * 4
    logits = next(op for op in programs["forward_backward"].ops if op.name == "matmul" and op.y.shape[-1] == V)
    assert logits.bytes() == 2 * (rows * C + V * C + rows * V)  # of a split weight only the bf16 plane
    assert micro["embedding"].bytes() == rows * 4 + 2 * rows * C * 4 + 6 * C * 4
    assert micro["embedding_dwte"].bytes() == rows * 4 + 3 * rows * C * 4  # it adds to the classifier's gradient
    few = replace(model, vocab_size=5, padded_vocab=5)  # fewer ids than tokens: each one's row moves once
    _, programs = build(few, batch=2, seq=6, compute="bf16", optimizer=partial(adamw, config=OptimConfig()))
    few_ids = {op.name: op for op in programs["forward_backward"].ops}
    assert few_ids["embedding"].bytes() == rows * 4 + (rows + 5 + 6) * C * 4
    assert few_ids["embedding_dwte"].bytes() == rows * 4 + (rows + 2 * 5) * C * 4
    assert micro["add"].bytes() == rows * C * (4 + 2 + 4)
    assert update["adamw"].bytes() == 7 * 4 * C + 8  # the last parameter: ln_f.bias


def test_the_tied_embedding_has_two_writers_in_order():
    model = ModelConfig(layers=1, heads=2, d_model=8, vocab_size=32, max_seq=6)
    store, programs = build(model, batch=2, seq=6, optimizer=lambda p: None)
    for t in store.of_role("gradient"):
        writers = [(op.name, op.modes[k]) for op in programs["forward_backward"].ops for k, x in op.outputs.items() if x is t]
        if t.name == "wte.grad":
            assert writers == [("matmul_dw", "start"), ("embedding_dwte", "add")]
        else:
            assert len(writers) == 1 and writers[0][1] == "start"


def test_dims_are_integers_with_the_name_of_their_scalar():
    _, programs = build(ModelConfig(layers=1, heads=1, d_model=4, vocab_size=5, max_seq=6), batch=2, seq=6)
    tokens = programs["eval"].named["tokens"]
    assert tokens.shape == (2, 6) and [d.name for d in tokens.dims] == ["batch", "seq"]
    assert isinstance(tokens.shape[0], Dim) and tokens.nbytes == 48
    assert programs["eval"].scalars == ("batch", "inv_targets", "pos", "seq")


def test_costs_of_rotary_heads_and_transposes():
    """Of tables that are longer than the text only its positions are read, two for each where heads are paired."""
    p = Program(Store())
    x, cos, sin = t(2, 8, 32), t(40, 2), t(40, 2)
    for paired, positions in ((False, 8), (True, 16)):
        op = p.apply(ops.QKRotary, x=x, cos=cos, sin=sin, heads=2, kv_heads=2, paired=paired, shift=False, eps=1e-5)
        assert op.bytes() == 4 * (2 * 2 * 8 * 32 + 2 * 2 * positions + 2 * 8 * 4)
        assert op.flops() == 2 * 8 * 32 * 9 // 2
    a, b = p.state("a", (3, 5)), p.state("b", (5, 3))
    p.transpose_copy(a, b)
    p.transpose_add(a, b)
    assert [(op.flops(), op.bytes()) for op in p.ops[-2:]] == [(0, 4 * 30), (15, 4 * 45)]
