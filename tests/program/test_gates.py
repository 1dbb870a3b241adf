"""What gates and mixes refuse, and what they cost."""

from __future__ import annotations

import re

import pytest

from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim

ROWS = (Dim("batch", 2), Dim("seq", 5))


def operands(p: Program, **columns: int):
    return [p.input(name, (*ROWS, n), "fp32") for name, n in columns.items()]


def refused(message: str):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


def test_what_gates_refuse():
    p = Program(Store())
    x, z, narrow = operands(p, x=12, z=5, narrow=3)
    with refused("gated expects x and base (B, T, C) and z (B, T, N) where N divides C: x (batch<=2, seq<=5, 12) fp32, z"):
        p.gated(x, z)
    with refused("gated expects x and base (B, T, C)"):
        p.gated(x, narrow, base=narrow)
    with refused("gated expects a factor (1,): factor (2,) fp32"):
        p.gated(x, narrow, factor=p.parameter("two", (2,)))
    with refused("gated expects a shift of 0 or more, found -1"):
        p.gated(x, narrow, shift=-1)
    with refused("gate_logits reads 4 columns: x (batch<=2, seq<=5, 3) fp32"):
        p.gate_logits(narrow, p.parameter("w4", (2, 4)))
    with refused("gate_logits with extra expects an even number of weights a gate: weight (2, 3) fp32"):
        p.gate_logits(x, p.parameter("w3", (2, 3)), extra=z)
    with refused("gate_logits expects x (..., k), extra (..., K - k) or none, weight (N, K)"):
        p.gate_logits(x, p.parameter("w2", (2, 4)), extra=p.input("other", (3, 9), "fp32"))


def test_what_gates_and_mixes_cost():
    """Products of logits; a multiplication and an addition for each element that passes; what is read and written once."""
    p = Program(Store())
    x, z, other = operands(p, x=12, z=3, other=12)
    n = 2 * 5 * 12
    p.output("loss", p.mix((x, 1.0), (other, p.parameter("k", (1,))), (x, 0.5)))
    p.gate_logits(x, p.parameter("w", (3, 4)))
    p.gated(x, z, base=other)
    mix, logits, gated = p.ops
    assert (mix.flops(), mix.bytes()) == (5 * n, 4 * (3 * n + 1))
    assert (logits.flops(), logits.bytes()) == (2 * 2 * 5 * 3 * 4, 4 * (2 * 5 * (4 + 3) + 3 * 4))
    assert (gated.flops(), gated.bytes()) == (2 * n + 12 * z.size, 4 * (3 * n + z.size))


def test_what_their_gradients_cost():
    p = Program(Store())
    e = p.embedding(p.input("tokens", ROWS), p.parameter("wte", (7, 12)))
    z = p.gate_logits(e, p.parameter("w", (3, 4)))
    y = p.mix((p.gated(e, z), 2.0), (e, p.parameter("k", (1,))), (e, 1.0))
    p.output("loss", p.classifier(y, p.parameter("head", (7, 12)), p.input("targets", ROWS), valid_vocab=7))
    p.backward(p.named["loss"])
    flops = {op.name: op.flops() for op in p.ops}
    n = e.size
    assert flops["mix_backward"] == (1 + 3) * n
    assert flops["gated_backward"] == 3 * n + 16 * z.size
    assert flops["gate_logits_backward"] == 4 * z.size * 4
