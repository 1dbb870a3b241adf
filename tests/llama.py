"""A small model of Llama's kind, of the calls that a model makes: for tests of whole programs on every backend."""

from __future__ import annotations

from barellm.program.builder import Program
from barellm.program.tensor import Dim


def llama(
    p: Program, *, C: int = 24, F: int = 37, V: int = 53, heads: int = 4, kv_heads: int = 2, D: int = 6, layers: int = 2
) -> None:
    """Packed q, k and v, packed gate and up, an untied head; the norm before every second MLP has no weight."""
    shape = (Dim("batch", 3), Dim("seq", 11))
    token, target = p.input("tokens", shape), p.input("targets", shape)

    def matrix(name: str, N: int, K: int):
        return p.parameter(f"{name}.weight", (N, K), std=0.3)

    def norm(name: str):
        return p.parameter(f"{name}.weight", (C,), value=1.0)

    x = p.embedding(token, matrix("wte", V, C))
    tables = p.rope_tables(11, D, theta=500.0)
    widths = heads * D, kv_heads * D, kv_heads * D
    for i in range(layers):
        with p.segment(f"block{i}"):
            h = p.rmsnorm(x, norm(f"{i}.norm1"))
            qkv = p.linear(h, matrix(f"{i}.qkv", sum(widths), C))
            q, k, v = p.split(p.rope(qkv, tables, heads=heads + kv_heads), widths)
            out = p.attention(q, k, v, heads=heads, kv_heads=kv_heads)
            x = p.add(x, p.linear(out, matrix(f"{i}.out", C, heads * D)))
            h = p.rmsnorm(x, None if i % 2 else norm(f"{i}.norm2"))
            gate, up = p.split(p.linear(h, matrix(f"{i}.gate_up", 2 * F, C)), 2)
            x = p.add(x, p.linear(p.swiglu(gate, up), matrix(f"{i}.down", C, F)))
    h = p.rmsnorm(x, norm("norm"))
    p.output("loss", p.classifier(h, matrix("head", V, C), target, valid_vocab=V - 2))
