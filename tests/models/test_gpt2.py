"""GPT-2 as a program: names, shapes, where dropout is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from barellm.assembly.programs import build
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig

SMALL = ModelConfig(layers=3, heads=2, d_model=64, vocab_size=90, padded_vocab=128, max_seq=40)


def test_names_and_shapes_are_those_of_gpt2():
    store, _ = build(preset("gpt2-124m").model)
    shapes = {t.name: tuple(t.shape) for t in store.of_role("parameter")}
    assert len(shapes) == 148
    assert shapes["wte"] == (50304, 768) and shapes["wpe"] == (1024, 768)
    assert shapes["h.11.attn.c_attn.weight"] == (2304, 768) and shapes["h.11.attn.c_attn.bias"] == (2304,)
    assert shapes["h.0.mlp.c_fc.weight"] == (3072, 768) and shapes["h.0.mlp.c_proj.weight"] == (768, 3072)
    assert shapes["h.0.ln_1.weight"] == shapes["h.0.ln_2.bias"] == shapes["ln_f.bias"] == (768,)


def test_without_bias_there_is_none():
    store, _ = build(replace(SMALL, bias=False))
    names = [t.name for t in store.of_role("parameter")]
    assert not any("bias" in name for name in names) and len(names) == 3 + 6 * 3


def test_dropout_is_where_nanogpt_has_it():
    """After the embedding, in attention, and at the end of both branches; nowhere in evaluation and decoding."""
    options = {"batch": 2, "seq": 8, "decode_batch": 1, "optimizer": lambda p: None}
    _, programs = build(replace(SMALL, dropout=0.2), **options)
    ops = programs["forward_backward"].ops
    counts = Counter(op.name for op in ops)
    assert counts["dropout"] == 1 + 2 * SMALL.layers == counts["dropout_backward"]
    streams = [op.stream for op in ops if op.name in ("dropout", "attention")]
    assert len(set(streams)) == len(streams) == 1 + 3 * SMALL.layers
    for forward, backward in (("dropout", "dropout_backward"), ("attention", "attention_backward")):
        pairs = [sorted((op.stream, op.rate) for op in ops if op.name == name) for name in (forward, backward)]
        assert pairs[0] == pairs[1]
    for name in ("eval", "decode"):
        assert all(op.attrs.get("rate", 0) == 0 for op in programs[name].ops)
        assert "dropout" not in {op.name for op in programs[name].ops}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_dtypes_follow_the_precision_rules(compute):
    """The residual stream, its gradient, statistics and parameter gradients are fp32; operands of products are `compute`."""
    store, programs = build(SMALL, batch=2, seq=8, compute=compute, optimizer=lambda p: None)
    for op in programs["forward_backward"].ops:
        if op.name in ("matmul", "matmul_dx", "matmul_dw"):
            assert {t.dtype for k, t in op.inputs.items() if k != "weight"} == {compute}, op
        if op.name in ("embedding", "add"):
            assert op.y.dtype == "fp32", op
        if op.name == "layernorm_dx":
            assert op.dx.dtype == "fp32", op
    assert {t.dtype for t in store.of_role("gradient")} == {"fp32"}
    matrix = {t.dtype for t in store.of_role("parameter") if len(t.shape) == 2}
    assert matrix == ({"bf16_i16"} if compute == "bf16" else {"fp32"})
