"""Causal attention. Shapes: qkv (B, T, 3C), columns q | k | v, head h owning h*D .. (h+1)*D of each; out (B, T, C);
lse (B, H, T) fp32. C = H * D, scale = 1 / sqrt(D). T x T exists in the references only."""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar

import numpy as np

from barellm.program.ops.base import Op, Spec
from barellm.program.ops.random import keep
from barellm.program.tensor import Tensor, describe


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, C) -> (B, H, T, D)."""
    B, T, C = x.shape
    return x.reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)


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
    """Attributes heads; rate and stream of the attention dropout. At rate 0 no random scalars are needed."""

    scalars = ("seed", "step", "sample")

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        if attrs["rate"] == 0:
            self.scalars = ()


class Attention(WithDropout):
    """out = dropout(softmax(causal(q k^T / sqrt(D)))) v per head (Vaswani et al. 2017); lse: log of the denominator."""

    name = "attention"
    product = True

    def infer(self, qkv: Tensor) -> dict[str, Spec]:
        heads = self.attrs["heads"]
        if len(qkv.shape) != 3 or qkv.shape[2] % (3 * heads):
            raise ValueError(f"attention expects qkv (B, T, 3 * {heads} heads * D): {describe(qkv=qkv)}")
        B, T, C3 = qkv.shape
        return {"out": ((B, T, C3 // 3), qkv.dtype), "lse": ((B, heads, T), "fp32")}

    def reference(self, qkv, seed=0, step=0, sample=0):
        q, k, v = (split_heads(x, self.heads) for x in np.split(qkv, 3, -1))
        s = scores(q, k)
        lse = log_sum_exp(s)
        p = np.exp(s - lse[..., None]) * keep_probabilities(q, self, seed, step, sample)
        return {"out": join_heads(p @ v), "lse": lse}

    def gradient(self, g, out, lse):
        assert lse is None, "lse is a saved value, not a differentiable output"
        operands = {"qkv": self.qkv, "out": self.out, "dout": g.cast(out, self.out.dtype), "lse": self.lse}
        g.write(AttentionBackward, {"dqkv": self.qkv}, **operands, **self.attrs)

    def flops(self) -> int:
        """Two products over the causal half, T (T + 1) / 2 pairs."""
        B, T, C = self.out.shape
        return 2 * int(B) * int(T) * (int(T) + 1) * int(C)


class AttentionBackward(WithDropout):
    """dqkv from dout. With P = exp(s - lse), M the dropout multipliers and delta = sum(dout * out):

    dv = (P * M)^T dout,  ds = P * (M * (dout v^T) - delta),  dq = ds k / sqrt(D),  dk = ds^T q / sqrt(D).
    """

    name = "attention_backward"
    product = True

    def infer(self, qkv: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> dict[str, Spec]:
        if out.shape != dout.shape or lse.shape != (out.shape[0], self.attrs["heads"], out.shape[1]):
            raise ValueError(f"attention_backward expects dout like out: {describe(out=out, dout=dout, lse=lse)}")
        return {"dqkv": (qkv.shape, qkv.dtype)}

    def reference(self, qkv, out, dout, lse, seed=0, step=0, sample=0):
        q, k, v = (split_heads(x, self.heads) for x in np.split(qkv, 3, -1))
        do, o = split_heads(dout, self.heads), split_heads(out, self.heads)
        p = np.exp(scores(q, k) - lse[..., None])
        m = keep_probabilities(q, self, seed, step, sample)
        ds = p * (m * (do @ v.transpose(0, 1, 3, 2)) - (do * o).sum(-1)[..., None])
        scale = 1 / sqrt(q.shape[-1])
        dq, dk = ds @ k * scale, ds.transpose(0, 1, 3, 2) @ q * scale
        dv = (p * m).transpose(0, 1, 3, 2) @ do
        return {"dqkv": np.concatenate([join_heads(x) for x in (dq, dk, dv)], -1)}

    def flops(self) -> int:
        """Four products over the causal half; the recomputed q k^T is not the model's."""
        B, T, C = self.out.shape
        return 4 * int(B) * int(T) * (int(T) + 1) * int(C)


class AttentionCached(Op):
    """Decoding: k and v of positions pos .. pos + T go into caches (B, maxT, C); query t attends to 0 .. pos + t."""

    name = "attention_cached"
    scalars = ("pos",)
    inplace: ClassVar[dict[str, str]] = {"k_cache": "k_cache", "v_cache": "v_cache"}
    product = True

    def infer(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> dict[str, Spec]:
        heads = self.attrs["heads"]
        B, T, C3 = qkv.shape
        fits = int(k_cache.shape[0]) >= int(B) and int(k_cache.shape[1]) >= int(T) and 3 * k_cache.shape[2] == C3
        if not fits or C3 % (3 * heads) or k_cache.shape != v_cache.shape:
            found = describe(qkv=qkv, k_cache=k_cache, v_cache=v_cache)
            raise ValueError(f"attention_cached expects qkv (B, T, 3C), caches (B, maxT, C), {heads} heads: {found}")
        cache = (k_cache.shape, k_cache.dtype)
        return {"out": ((B, T, C3 // 3), qkv.dtype), "k_cache": cache, "v_cache": cache}

    def reference(self, qkv, k_cache, v_cache, pos):
        B, T, _ = qkv.shape
        q, k, v = np.split(qkv, 3, -1)
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        k_cache[:B, pos : pos + T] = k
        v_cache[:B, pos : pos + T] = v
        q, k, v = (split_heads(x, self.heads) for x in (q, k_cache[:B, : pos + T], v_cache[:B, : pos + T]))
        s = scores(q, k, pos)
        p = np.exp(s - log_sum_exp(s)[..., None])
        return {"out": join_heads(p @ v), "k_cache": k_cache, "v_cache": v_cache}

    def bytes(self) -> int:
        """At the planned maximum: the caches read once, the new rows written."""
        return self.qkv.nbytes + self.out.nbytes + self.k_cache.nbytes + self.v_cache.nbytes + 2 * self.out.nbytes

    def flops(self) -> int:
        """At the planned maximum: as many cached positions as the caches hold, one new row each."""
        B, T, C = self.out.shape
        return 4 * int(B) * int(T) * int(self.k_cache.shape[1]) * int(C)
