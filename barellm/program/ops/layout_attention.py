"""Attention over the blocks of keys that a layout lists, for each head its own (`program.layouts`).

Shapes as in attention.py: q, out (B, T, H*D); k, v (B, T, G*D); lse (B, H, T) fp32. `rows`, `columns` and `masks` are the layout's
tables. Work and memory go with the number of listed blocks; T x T exists in the references only.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from barellm.program.graph import Graph
from barellm.program.layouts import Layout
from barellm.program.ops.attention import check_heads, gathered, join_heads, log_sum_exp, shared, split_heads
from barellm.program.ops.base import Op, Spec
from barellm.program.tensor import Dim, Tensor, describe


class Listed(Op):
    """Attributes: heads, kv_heads, layout."""

    product = True

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        layout: Layout = self.layout
        check_heads(self.name, self.heads, self.kv_heads, q, k, v)
        T = q.shape[1]
        if layout.heads != self.heads or layout.length != int(T):
            found = f"a layout of {layout.heads} heads and {layout.length} positions, {describe(q=q)}"
            raise ValueError(f"{self.name} expects a layout of {self.heads} heads and {int(T)} positions: {found}")
        if isinstance(T, Dim) and not layout.causal:
            raise ValueError(
                f"{self.name} expects a causal layout where the length is known at run time: {describe(q=q)}"
            )

    def probabilities(self, q: np.ndarray, k: np.ndarray, lse: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Softmax of the scores that the layout shows, and lse, by heads (B, H, T, T)."""
        T = q.shape[2]
        seen = np.stack([self.layout.dense(h)[:T, :T] for h in range(self.heads)])
        s = np.where(seen, q @ k.transpose(0, 1, 3, 2) / sqrt(q.shape[-1]), -np.inf)
        lse = log_sum_exp(s) if lse is None else lse
        return np.exp(s - lse[..., None]), lse

    def operands(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        H, G = self.heads, self.kv_heads
        return [shared(split_heads(x, n), H) for x, n in ((q, H), (k, G), (v, G))]

    def products(self, count: int) -> int:
        """Operations of `count` products over the pairs that are seen."""
        B, _, C = (int(n) for n in self.out.shape)
        return count * B * 2 * self.layout.pairs * (C // self.heads)


class LayoutAttention(Listed):
    """out = softmax(q k^T / sqrt(D), of the keys that the layout shows) v per head; lse: log of the denominator."""

    name = "layout_attention"

    def infer(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, masks: Tensor) -> dict[str, Spec]:
        self.check(q, k, v)
        return {"out": (q.shape, q.dtype), "lse": ((q.shape[0], self.heads, q.shape[1]), "fp32")}

    def reference(self, q, k, v, rows, columns, masks):
        q, k, v = self.operands(q, k, v)
        p, lse = self.probabilities(q, k, None)
        return {"out": join_heads(p @ v), "lse": lse}

    def gradient(self, g, out, lse):
        assert lse is None, "lse is a saved value, not a differentiable output"
        names = ("q", "k", "v", "rows", "columns", "masks")
        operands = {name: self.inputs[name] for name in names} | {"out": self.out, "lse": self.lse}
        targets = {"dq": self.q, "dk": self.k, "dv": self.v}
        g.write(LayoutAttentionBackward, targets, **operands, dout=g.cast(out, self.out.dtype), **self.attrs)

    def flops(self) -> int:
        return self.products(2)


class LayoutAttentionBackward(Listed):
    """dq, dk, dv from dout, as `AttentionBackward` has them."""

    name = "layout_attention_backward"

    def infer(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
        rows: Tensor, columns: Tensor, masks: Tensor,
    ) -> dict[str, Spec]:  # fmt: skip
        self.check(q, k, v)
        if not q.shape == out.shape == dout.shape or lse.shape != (q.shape[0], self.heads, q.shape[1]):
            raise ValueError(f"{self.name} expects dout like out: {describe(out=out, dout=dout, lse=lse)}")
        return {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}

    def reference(self, q, k, v, out, dout, lse, rows, columns, masks):
        q, k, v = self.operands(q, k, v)
        do, o = split_heads(dout, self.heads), split_heads(out, self.heads)
        p, _ = self.probabilities(q, k, lse)
        ds = p * (do @ v.transpose(0, 1, 3, 2) - (do * o).sum(-1)[..., None]) / sqrt(q.shape[-1])
        dk, dv = (gathered(x, self.kv_heads) for x in (ds.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ do))
        return {"dq": join_heads(ds @ k), "dk": join_heads(dk), "dv": join_heads(dv)}

    def flops(self) -> int:
        return self.products(4)


class Calls(Graph):
    """The method of Program that appends these ops."""

    def layout_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, heads: int, kv_heads: int = 0
    ) -> Tensor:
        """Self-attention over the blocks of a layout: q (B, T, heads * D), k and v (B, T, kv_heads * D) -> (B, T, heads * D)."""
        tables = {name: self.constant(f"layout.{layout.digest}.{name}", x, "i32") for name, x in layout.tables.items()}
        attrs = {"heads": heads, "kv_heads": kv_heads or heads, "layout": layout}
        return self.apply(LayoutAttention, q=q, k=k, v=v, **tables, **attrs).out
