"""Operands and error bounds of block-sparse attention: what the tests of every backend share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from barellm.program import layouts, ops
from barellm.program.builder import Program
from barellm.program.layouts import Layout
from barellm.program.ops.base import Op
from barellm.program.tensor import Dim, Tensor
from tests.cases import Exact, attention_operands, join_heads, normal, packed_views
from tests.check import operand_of, persistent, stored, tokens

STORED = {"fp32": "fp32", "bf16": "bf16_i16"}  # vectors of relative terms, as a program of a dtype has its parameters


def layout_operands(shape: tuple[int, int, int, int], dtype: str, layout: Layout, groups: int, packed: bool, distances: int):
    """(q, k, v), `check_op`'s operands, views of them, the op's attributes, and exact values. `distances` have a relative term."""
    B, T, H, D = shape
    (q, k, v), given, views = attention_operands(B, T, H, groups, D, dtype, packed=packed)
    given |= {name: persistent(values, "i32", "constant") for name, values in layout.tables.items()}
    relative = None
    if distances:
        given["relative"] = persistent(normal(distances, H * D, seed=4), STORED[dtype])
        relative = operand_of(given["relative"].values, STORED[dtype])
    attrs = {"heads": H, "kv_heads": groups}
    exact = Exact(q, k, v, attrs | {"rate": 0.0, "stream": 0}, layout=layout, relative=relative)
    return given, views, attrs | {"layout": layout}, exact


def static(case: dict[str, Any]) -> dict[str, Any]:
    """The same of operands whose length is known when the code is made."""
    given = {name: replace(g, kind="state") if g.kind == "tokens" else g for name, g in case["given"].items()}
    return case | {"given": given, "plan": None}


def made(text: str, shape: tuple[int, int, int, int], *, length: int = 0, block: int, causal: bool = True) -> Layout:
    return layouts.parse(text, length=length or shape[1], block=block, heads=shape[2], causal=causal)


def forward_case(shape, dtype: str, layout: Layout, *, groups: int = 0, packed: bool = True, distances: int = 0) -> dict[str, Any]:
    """What `check_op` wants for an attention of (batch, length, heads, head size)."""
    given, views, attrs, exact = layout_operands(shape, dtype, layout, groups or shape[2], packed, distances)
    bounds = {"out": exact.out_bound(dtype), "lse": exact.lse_bound(dtype)}
    return {"given": given, "views": views, "bounds": bounds, "plan": (shape[0], layout.length), **attrs}


def backward_case(shape, dtype: str, layout: Layout, *, groups: int = 0, packed: bool = True, distances: int = 0) -> dict[str, Any]:
    B, T, H, D = shape
    given, views, attrs, exact = layout_operands(shape, dtype, layout, groups or H, packed, distances)
    dout = stored(normal(B, T, H * D, seed=2), dtype)
    out = stored(join_heads(exact.p @ exact.v), dtype)
    given |= {"out": tokens(out, dtype), "dout": tokens(dout, dtype), "lse": persistent(exact.lse, "fp32", "state")}
    if packed:
        views = views | packed_views(H, groups or H, D, "dqkv", "d")
    bounds = exact.gradient_bounds(dtype, dout, out, layout)
    return {"given": given, "views": views, "bounds": bounds, "plan": (B, layout.length), **attrs}


def layout_both(p: Program, dims: tuple[Dim, Dim], layout: Layout, *, D: int, dtype: str, distances: int = 0) -> tuple[Op, Tensor]:
    """Appends an attention of packed operands, and its backward pass into a packed gradient; gives (saved, dqkv)."""
    C = layout.heads * D
    qkv, dout = p.input("qkv", (*dims, 3 * C), dtype), p.input("dout", (*dims, C), dtype)
    operands = dict(zip("qkv", p.split(qkv, 3), strict=True))
    operands |= {name: p.constant(name, values, "i32") for name, values in layout.tables.items()}
    if distances:
        operands["relative"] = p.parameter("relative", (distances, C))
    attrs = {"heads": layout.heads, "kv_heads": layout.heads, "layout": layout}
    saved = p.apply(ops.BlockSparseAttention, **operands, **attrs)
    dqkv = p.activation("dqkv", qkv.shape, dtype)
    into = {name: (view, "store") for name, view in zip(("dq", "dk", "dv"), p.split(dqkv, 3), strict=True)}
    p.apply(ops.BlockSparseAttentionBackward, into=into, **operands, out=saved.out, dout=dout, lse=saved.lse, **attrs)
    return saved, dqkv


FORWARD, BACKWARD = ops.BlockSparseAttention, ops.BlockSparseAttentionBackward
