"""Causal attention. Shapes: q, out (B, T, H*D); k, v (B, T, G*D), head h owning columns h*D .. (h+1)*D; lse (B, H, T) fp32.

Each of the G heads of k and v serves H / G heads of q, one after the other (grouped queries, Ainslie et al. 2023); G = H is plain
attention. q, k and v may be views of one packed tensor. The scale is 1 / sqrt(D). T x T exists in the references only.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec
from barellm.program.ops.random import keep
from barellm.program.tensor import Tensor, describe


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, C) -> (B, H, T, D)."""
    B, T, C = x.shape
    return x.reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)


def shared(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, G, T, D) -> (B, H, T, D): each head as often as it serves."""
    return np.repeat(x, heads // x.shape[1], 1)


def gathered(dx: np.ndarray, groups: int) -> np.ndarray:
    """(B, H, T, D) -> (B, G, T, D): the gradient of `shared`, a sum over the heads that were served."""
    B, H, T, D = dx.shape
    return dx.reshape(B, groups, H // groups, T, D).sum(2)


def check_heads(name: str, heads: int, kv_heads: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError unless q has `heads` heads, and k and v have `kv_heads` of the same size."""
    fits = len(q.shape) == 3 and 0 < kv_heads <= heads and heads % kv_heads == 0 and q.shape[2] % heads == 0
    if not fits or k.shape != v.shape or k.shape != (*q.shape[:2], q.shape[2] // heads * kv_heads):
        found = describe(q=q, k=k, v=v)
        raise ValueError(f"{name} expects q (B, T, {heads} heads * D), k and v (B, T, {kv_heads} heads * D): {found}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name} expects q, k and v of one dtype: {describe(q=q, k=k, v=v)}")


def join_heads(x: np.ndarray) -> np.ndarray:
    """(B, H, T, D) -> (B, T, C)."""
    B, H, T, D = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)


def scores(q: np.ndarray, k: np.ndarray, pos: int = 0) -> np.ndarray:
    """Scaled q k^T (B, H, T, S), -inf where the key is later than the query, query t being at position pos + t."""
    s = q @ k.transpose(0, 1, 3, 2) / sqrt(q.shape[-1])
    later = np.arange(k.shape[2])[None, :] > pos + np.arange(q.shape[2])[:, None]
    return np.where(later, -np.inf, s)


def log_sum_exp(s: np.ndarray) -> np.ndarray:
    top = s.max(-1)
    return top + np.log(np.exp(s - top[..., None]).sum(-1))


def keep_probabilities(q: np.ndarray, op: Op, seed: int, step: int, sample: int) -> np.ndarray | float:
    """(B, H, T, T) for q (B, H, T, D): 0 or 1 / (1 - rate). The row of random words is t * H + h, its column the key's position."""
    if op.rate == 0:
        return 1.0
    B, H, T, _ = q.shape
    mask = [keep(seed, step, sample + b, op.stream, np.arange(T * H), T, op.rate) for b in range(B)]
    return np.stack(mask).reshape(B, T, H, T).transpose(0, 2, 1, 3)


class WithDropout(Op):
    """Attributes heads, kv_heads; rate and stream of the attention dropout. At rate 0 no random scalars are needed."""

    scalars = ("seed", "step", "sample")

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        if attrs["rate"] == 0:
            self.scalars = ()


class Attention(WithDropout):
    """out = dropout(softmax(causal(q k^T / sqrt(D)))) v per head (Vaswani et al. 2017); lse: log of the denominator."""

    name = "attention"
    product = True

    def infer(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Spec]:
        check_heads(self.name, self.heads, self.kv_heads, q, k, v)
        return {"out": (q.shape, q.dtype), "lse": ((q.shape[0], self.heads, q.shape[1]), "fp32")}

    def reference(self, q, k, v, seed=0, step=0, sample=0):
        H, G = self.heads, self.kv_heads
        q, k, v = (shared(split_heads(x, n), H) for x, n in ((q, H), (k, G), (v, G)))
        s = scores(q, k)
        lse = log_sum_exp(s)
        p = np.exp(s - lse[..., None]) * keep_probabilities(q, self, seed, step, sample)
        return {"out": join_heads(p @ v), "lse": lse}

    def gradient(self, g, out, lse):
        assert lse is None, "lse is a saved value, not a differentiable output"
        operands = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "lse": self.lse}
        targets = {"dq": self.q, "dk": self.k, "dv": self.v}
        g.write(AttentionBackward, targets, **operands, dout=g.cast(out, self.out.dtype), **self.attrs)

    def flops(self) -> int:
        """Two products over the causal half, T (T + 1) / 2 pairs."""
        B, T, C = self.out.shape
        return 2 * int(B) * int(T) * (int(T) + 1) * int(C)


class AttentionBackward(WithDropout):
    """dq, dk, dv from dout. With P = exp(s - lse), M the dropout multipliers and delta = sum(dout * out):

    dv = (P * M)^T dout,  ds = P * (M * (dout v^T) - delta),  dq = ds k / sqrt(D),  dk = ds^T q / sqrt(D);
    dk and dv are summed over the heads that shared a head of k and v.
    """

    name = "attention_backward"
    product = True

    def infer(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> dict[str, Spec]:
        check_heads(self.name, self.heads, self.kv_heads, q, k, v)
        if not q.shape == out.shape == dout.shape or lse.shape != (out.shape[0], self.heads, out.shape[1]):
            raise ValueError(f"attention_backward expects dout like out: {describe(out=out, dout=dout, lse=lse)}")
        return {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}

    def reference(self, q, k, v, out, dout, lse, seed=0, step=0, sample=0):
        H, G = self.heads, self.kv_heads
        q, k, v = (shared(split_heads(x, n), H) for x, n in ((q, H), (k, G), (v, G)))
        do, o = split_heads(dout, H), split_heads(out, H)
        p = np.exp(scores(q, k) - lse[..., None])
        m = keep_probabilities(q, self, seed, step, sample)
        ds = p * (m * (do @ v.transpose(0, 1, 3, 2)) - (do * o).sum(-1)[..., None])
        scale = 1 / sqrt(q.shape[-1])
        dq, dk = ds @ k * scale, ds.transpose(0, 1, 3, 2) @ q * scale
        dv = (p * m).transpose(0, 1, 3, 2) @ do
        return {"dq": join_heads(dq), "dk": join_heads(gathered(dk, G)), "dv": join_heads(gathered(dv, G))}

    def flops(self) -> int:
        """Four products over the causal half; the recomputed q k^T is not the model's."""
        B, T, C = self.out.shape
        return 4 * int(B) * int(T) * (int(T) + 1) * int(C)


class AttentionCached(Op):
    """Decoding: k and v of positions pos .. pos + T go into caches (B, maxT, G*D); query t attends to 0 .. pos + t."""

    name = "attention_cached"
    scalars = ("pos",)
    inplace: ClassVar[dict[str, str]] = {"k_cache": "k_cache", "v_cache": "v_cache"}
    product = True

    def infer(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> dict[str, Spec]:
        check_heads(self.name, self.heads, self.kv_heads, q, k, v)
        B, T, _ = q.shape
        fits = int(k_cache.shape[0]) >= int(B) and int(k_cache.shape[1]) >= int(T) and k_cache.shape[2] == k.shape[2]
        if not fits or k_cache.shape != v_cache.shape or not k.dtype == k_cache.dtype == v_cache.dtype:
            found = describe(k=k, k_cache=k_cache, v_cache=v_cache)
            raise ValueError(f"attention_cached expects k (B, T, C) and caches (B, maxT, C): {found}")
        cache = (k_cache.shape, k_cache.dtype)
        return {"out": (q.shape, q.dtype), "k_cache": cache, "v_cache": cache}

    def reference(self, q, k, v, k_cache, v_cache, pos):
        B, T, _ = q.shape
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        k_cache[:B, pos : pos + T] = k
        v_cache[:B, pos : pos + T] = v
        q = split_heads(q, self.heads)
        k, v = (shared(split_heads(x[:B, : pos + T], self.kv_heads), self.heads) for x in (k_cache, v_cache))
        s = scores(q, k, pos)
        p = np.exp(s - log_sum_exp(s)[..., None])
        return {"out": join_heads(p @ v), "k_cache": k_cache, "v_cache": v_cache}

    def bytes(self) -> int:
        """At the planned maximum: the caches read once, the new rows read and written."""
        new = self.q.nbytes + 2 * (self.k.nbytes + self.v.nbytes)
        return new + self.out.nbytes + self.k_cache.nbytes + self.v_cache.nbytes

    def flops(self) -> int:
        """At the planned maximum: as many cached positions as the caches hold, one new row each."""
        B, T, C = self.out.shape
        return 4 * int(B) * int(T) * int(self.k_cache.shape[1]) * int(C)


class Calls(Graph):
    """What a model calls."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, kv_heads: int = 0, dropout: float = 0.0
    ) -> Tensor:
        """Causal self-attention: q (B, T, heads * D), k and v (B, T, kv_heads * D) -> (B, T, heads * D). They may be views of one
        product (`split`); `kv_heads` 0 means as many as `heads`."""
        stream, kv_heads = self.random_stream(dropout), kv_heads or heads
        return self.apply(Attention, q=q, k=k, v=v, heads=heads, kv_heads=kv_heads, rate=dropout, stream=stream).out

    def attention_cached(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, heads: int, kv_heads: int = 0
    ) -> Tensor:
        """Decoding: q, k, v of positions pos .. pos + T, caches (B, maxT, kv_heads * D) -> (B, T, heads * D)."""
        caches = {"k_cache": k_cache, "v_cache": v_cache}
        kv_heads = kv_heads or heads
        return self.apply(AttentionCached, into=None, q=q, k=k, v=v, heads=heads, kv_heads=kv_heads, **caches).out
