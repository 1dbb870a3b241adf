"""Attention on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from barellm.kernels.call import call
from barellm.kernels.rule import Rule

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


def _attention(p: Program, q: Tensor, k: Tensor, v: Tensor, *, heads: int, kv_heads: int) -> Tensor:
    return p.attention(q, k, v, heads=heads, kv_heads=kv_heads)


_ATTENTION = Rule(
    "attention",
    {"q": "B T (H D)", "k": "B T (G D)", "v": "B T (G D)"},
    ("B T H D",),
    _attention,
)


def attention(q: Array, k: Array, v: Array, *, causal: Literal[True] = True, out: Array | None = None) -> Array:
    """Causal self-attention (Vaswani et al. 2017), with shared keys where G < H (grouped queries, Ainslie et al. 2023).

    Shapes: q (B, T, H, D), k and v (B, T, G, D), H a multiple of G -> (B, T, H, D). Head h reads the keys of head h G / H.
    Formula: out = softmax(q k^T / sqrt(D)) v for each head, over the keys that are not later than the query.
    Dtypes: float32 or bfloat16, the same for all. Sums and softmax are fp32. T x T scores are never stored.
    Source: `barellm/cpu/kernels/attention_forward.py`, `attention_backward.py`.

        out, pull = kernels.vjp(kernels.attention, q, k, v)
        dq, dk, dv = pull(dout)
    """
    if causal is not True:
        raise ValueError(f"attention is causal: causal is {causal!r}, expected True")
    heads = [a.shape[2] if getattr(a, "ndim", 0) == 4 else 1 for a in (q, k)]
    return call(_ATTENTION, {"q": q, "k": k, "v": v}, out, heads=heads[0], kv_heads=heads[1])[0]
