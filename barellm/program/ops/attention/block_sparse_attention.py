"""Attention over the blocks of keys that a layout lists, for each head its own (`program.layouts`).

Shapes as in attention.py: q, out (B, T, H*D); k, v (B, T, G*D); lse (B, H, T) fp32. `rows`, `columns` and `masks` are the layout's
tables. Work and memory go with the number of listed blocks; T x T exists in the references only.

`relative` (M, H*D), if there is one, has a vector for each head and distance (Shaw et al. 2018; Huang et al. 2018): query i and
key j score q_i (k_j + r_(i-j)) / sqrt(D). Row m is distance m, and in a layout that looks ahead, where M is odd, m - (M - 1) / 2.
A pair whose distance has no row has no term. In a causal layout that is as general as one vector for all farther keys: softmax
does not see what all scores of a query have in common, so that vector could as well be subtracted from the others."""

from math import sqrt

import numpy as np

from barellm.program import dtypes, layouts
from barellm.program.graph import Graph
from barellm.program.ops.attention.attention import check_heads, gathered, join_heads, log_sum_exp, shared, split_heads
from barellm.program.ops.base import Dim, Op, Spec, Tensor, describe


class Listed(Op):
    """The part that the forward op and its gradients share. Attributes: heads, kv_heads, layout."""

    product = True
    optional = ("relative",)
    rounded = ("relative",)

    def check(self, q: Tensor, k: Tensor, v: Tensor, relative: Tensor | None) -> None:
        """ValueError unless q, k, v and `relative` have the shapes above and the layout is of their heads and length."""
        layout: layouts.Layout = self.layout
        check_heads(self.name, self.heads, self.kv_heads, q, k, v)
        T = q.shape[1]
        if layout.heads != self.heads or layout.length != int(T):
            found = f"a layout of {layout.heads} heads and {layout.length} positions, {describe(q=q)}"
            raise ValueError(f"{self.name} expects a layout of {self.heads} heads and {int(T)} positions: {found}")
        if isinstance(T, Dim) and not layout.causal:
            raise ValueError(f"{self.name} expects a causal layout where the length is known at run time: {describe(q=q)}")
        if relative is None:
            return
        fits = len(relative.shape) == 2 and relative.shape[1] == q.shape[2]
        if not fits or dtypes.FORMATS[relative.dtype].operand != q.dtype or (not layout.causal and relative.shape[0] % 2 == 0):
            rows = "M" if layout.causal else "an odd number"
            found = describe(q=q, relative=relative)
            raise ValueError(f"{self.name} expects relative ({rows}, {int(q.shape[2])}) {q.dtype}: {found}")

    @property
    def distances(self) -> tuple[int, int]:
        """The distances, query less key, of the first row of `relative` and of the last; without it there are none."""
        count = 0 if self.relative is None else int(self.relative.shape[0])
        first = 0 if self.layout.causal else -(count // 2)
        return first, first + count - 1

    def probabilities(
        self, q: np.ndarray, k: np.ndarray, relative: np.ndarray | None, lse: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(P, lse): the softmax (B, H, T, T) of the scores that the layout shows, of q and k (B, H, T, D), and lse (B, H, T),
        computed where it is not given."""
        T = q.shape[2]
        seen = np.stack([self.layout.dense(h)[:T, :T] for h in range(self.heads)])
        s = q @ k.transpose(0, 1, 3, 2)
        if relative is not None:
            terms = q @ split_heads(relative[None], self.heads).transpose(0, 1, 3, 2)  # (B, H, T, M)
            s = s + along_diagonals(terms, T, self.distances[0])
        s = np.where(seen, s / sqrt(q.shape[-1]), -np.inf)
        lse = log_sum_exp(s) if lse is None else lse
        return np.exp(s - lse[..., None]), lse

    def operands(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        H, G = self.heads, self.kv_heads
        return [shared(split_heads(x, n), H) for x, n in ((q, H), (k, G), (v, G))]

    def products(self, count: int, with_terms: int) -> int:
        """Operations of `count` matmuls over the pairs that are seen, and of `with_terms` over those that have a relative term."""
        B, _, C = (int(n) for n in self.out.shape)
        pairs = count * self.layout.pairs + with_terms * self.layout.pairs_within(*self.distances)
        return B * 2 * pairs * (C // self.heads)


def along_diagonals(x: np.ndarray, count: int, first: int) -> np.ndarray:
    """(B, H, T, n) -> (B, H, T, count): element j of row i is x[i, i - j - first], or 0 where x has no such column. It takes
    distances to keys, and, as i - j - first is its own inverse, keys to distances."""
    T, n = x.shape[2:]
    column = np.arange(T)[:, None] - np.arange(count)[None] - first
    found = np.take_along_axis(x, np.clip(column, 0, n - 1)[None, None], 3)
    return np.where((column >= 0) & (column < n), found, 0.0)


class BlockSparseAttention(Listed):
    """out = softmax(q (k + r)^T / sqrt(D), of the keys that the layout shows) v per head; lse: log of the denominator."""

    name = "block_sparse_attention"

    def infer(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, masks: Tensor, relative: Tensor | None = None
    ) -> dict[str, Spec]:  # fmt: skip
        self.check(q, k, v, relative)
        return {"out": (q.shape, q.dtype), "lse": ((q.shape[0], self.heads, q.shape[1]), "fp32")}

    def reference(self, q, k, v, rows, columns, masks, relative=None):
        q, k, v = self.operands(q, k, v)
        p, lse = self.probabilities(q, k, relative, None)
        return {"out": join_heads(p @ v), "lse": lse}

    def gradient(self, g, out, lse):
        assert lse is None, "lse is a saved value, not a differentiable output"
        operands = self.inputs | {"out": self.out, "lse": self.lse}
        targets = {f"d{name}": self.inputs[name] for name in ("q", "k", "v", "relative") if name in self.inputs}
        g.write(BlockSparseAttentionBackward, targets, **operands, dout=g.cast(out, self.out.dtype), **self.attrs)

    def flops(self) -> int:
        return self.products(2, 1)


class BlockSparseAttentionBackward(Listed):
    """dq, dk, dv from dout, as `AttentionBackward` has them. Relative terms add ds_ij r_(i-j) to dq_i, and drelative_d is
    the sum of ds_ij q_i over the pairs of distance d, of all sequences."""

    name = "block_sparse_attention_backward"
    optional = ("relative", "drelative")

    def infer(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
        rows: Tensor, columns: Tensor, masks: Tensor, relative: Tensor | None = None,
    ) -> dict[str, Spec]:  # fmt: skip
        self.check(q, k, v, relative)
        if not q.shape == out.shape == dout.shape or lse.shape != (q.shape[0], self.heads, q.shape[1]):
            raise ValueError(f"{self.name} expects dout like out: {describe(out=out, dout=dout, lse=lse)}")
        found = {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}
        return found if relative is None else found | {"drelative": (relative.shape, "fp32")}

    def reference(self, q, k, v, out, dout, lse, rows, columns, masks, relative=None):
        """`AttentionBackward`'s formulas on the listed pairs; relative terms are indexed by distance (`along_diagonals`)."""
        q, k, v = self.operands(q, k, v)
        do, o = split_heads(dout, self.heads), split_heads(out, self.heads)
        p, _ = self.probabilities(q, k, relative, lse)
        ds = p * (do @ v.transpose(0, 1, 3, 2) - (do * o).sum(-1)[..., None]) / sqrt(q.shape[-1])
        dk, dv = (gathered(x, self.kv_heads) for x in (ds.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ do))
        found = {"dq": join_heads(ds @ k), "dk": join_heads(dk), "dv": join_heads(dv)}
        if relative is not None:
            of_distances = along_diagonals(ds, len(relative), self.distances[0])
            found["dq"] = found["dq"] + join_heads(of_distances @ split_heads(relative[None], self.heads))
            found["drelative"] = join_heads(of_distances.transpose(0, 1, 3, 2) @ q).sum(0)
        return found

    def flops(self) -> int:
        return self.products(4, 2)


class Calls(Graph):
    def block_sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, relative: Tensor | None = None,
        *, layout: layouts.Layout, heads: int, kv_heads: int = 0,
    ) -> Tensor:  # fmt: skip
        """Self-attention over the blocks of a layout: q (B, T, heads * D), k and v (B, T, kv_heads * D) -> (B, T, heads * D).
        `relative` (M, heads * D) has a vector for each distance, which is added to the keys at that distance."""
        tables = {name: self.constant(f"layout.{layout.digest}.{name}", x, "i32") for name, x in layout.tables.items()}
        attrs = {"heads": heads, "kv_heads": kv_heads or heads, "layout": layout}
        return self.apply(BlockSparseAttention, q=q, k=k, v=v, relative=relative, **tables, **attrs).out
