"""Attention on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.errors import WrongType
from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec
from barellm.kernels.options import boolean

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.builder import Program
    from barellm.program.layouts import Layout
    from barellm.program.tensor import Tensor


_ATTENTION = FunctionSpec("attention", {"q": "B T (H D)", "k": "B T (G D)", "v": "B T (G D)"}, ("B T H D",))


def _block_sparse(p: Program, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, kv_heads: int, **tables: Tensor) -> Tensor:
    from barellm.program.ops import BlockSparseAttention

    attrs = {"heads": layout.heads, "kv_heads": kv_heads, "layout": layout}
    return p.apply(BlockSparseAttention, q=q, k=k, v=v, **tables, **attrs).out


_BLOCK_SPARSE = FunctionSpec(
    "attention",
    {"q": "B L (H D)", "k": "B L (G D)", "v": "B L (G D)", "relative": "M (H D)", "rows": "R", "columns": "R", "masks": "W"},
    ("B L H D",), _block_sparse, dict.fromkeys(("rows", "columns", "masks"), ("i32",)), optional=("relative",),
)  # fmt: skip


def attention(
    q: Array, k: Array, v: Array, relative: Array | None = None, *, causal: bool = True, layout: Layout | None = None,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Self-attention (Vaswani et al. 2017), with grouped queries where G < H (GQA, Ainslie et al. 2023): causal, full, or
    block-sparse over the blocks that a layout lists for each head (Child et al. 2019), where it may have a relative position bias
    (Shaw et al. 2018).

    Shapes: q (B, T, H, D), k and v (B, T, G, D), H a multiple of G -> (B, T, H, D). Head h reads the keys of head h G / H.
    relative (M, H, D), with a layout only: a vector for each head and distance. Row m is the distance m from a query back to its
    key; in a layout that looks ahead M is odd and row m is the distance m - (M - 1) / 2.
    Formula: out = softmax(q k^T / sqrt(D)) v for each head, over the keys that are not later than the query, with `causal` False
    over all T keys, or over those that `layout` shows, which may look ahead where `causal` is False. With `relative` query i scores
    key j by q_i (k_j + r_(i-j)) / sqrt(D), where r is 0 for distances without a row.
    Dtypes: float32 or bfloat16, the same for all. Sums and softmax are fp32. T x T scores are never stored.
    Source: `barellm/cpu/kernels/attention/attention_forward.py`, `attention_backward.py`,
    `block_sparse_attention.py`, `relative_position_bias.py`.

        near = layouts.parse("local:256", length=T, block=64, heads=H)  # barellm.program.layouts
        y = kernels.attention(q, k, v, layout=near)
        out, vjp_fn = kernels.vjp(kernels.attention, q, k, v)
        dq, dk, dv = vjp_fn(dout)
        y = kernels.attention(q, k, v, causal=False)  # as encoders do
        out, vjp_fn = kernels.vjp(kernels.attention, q, k, v, relative, layout=near)
        dq, dk, dv, drelative = vjp_fn(dout)"""
    causal = boolean("attention", "causal", causal)
    heads = [a.shape[2] if getattr(a, "ndim", 0) == 4 else 1 for a in (q, k)]
    if layout is not None:
        from barellm.program.layouts import Layout

        if not isinstance(layout, Layout):
            raise WrongType(f"attention expects a Layout, layout is of type {type(layout).__name__}")
        if causal and not layout.causal:
            raise ValueError("attention is given a layout that looks ahead and causal True, expected causal=False")
        given = {"q": q, "k": k, "v": v, "relative": relative, **layout.tables}
        return call(_BLOCK_SPARSE, given, out, layout=layout, kv_heads=heads[1])[0]
    if relative is not None:
        raise ValueError("attention is given relative terms and no layout, expected a layout")
    if getattr(q, "ndim", 0) == getattr(k, "ndim", 0) == 4 and q.shape[1] != k.shape[1]:
        found = f"{q.shape[1]} queries and {k.shape[1]} keys"
        raise ValueError(f"attention is given {found}, expected as many: it is of a sequence to itself")
    return call(_ATTENTION, {"q": q, "k": k, "v": v}, out, heads=heads[0], kv_heads=heads[1], causal=causal)[0]
