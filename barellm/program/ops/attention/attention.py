"""Attention of each query to the keys up to its own (causal), or to all of them. Shapes: q, out (B, T, H*D); k, v (B, T, G*D), head
h owning columns h*D .. (h+1)*D; lse (B, H, T) fp32.

Each of the G heads of k and v serves H / G heads of q, one after the other (grouped queries, Ainslie et al. 2023); G = H is plain
attention. q, k and v may be views of one packed tensor. The scale is 1 / sqrt(D), a constant, or a run-time scalar above 0. With a
`softcap` c a scaled score s counts as c tanh(s / c) (Gemma Team 2024). T x T exists in the references only.

How far back a query at position t of causal attention sees can be bounded. With a constant `sliding_window` W it sees W keys, its
own among them (Beltagy et al. 2020). By numbers that each run passes: with a `window` w its keys are t - w .. t, and with `starts`
(B, T) none lies before starts[b, t], the first position of its document. Starts do not decrease along a row, nor pass the position.

Paired heads (modded-nanogpt, 2026) share keys: the row of a token is read as two positions, 2t with the first half of its heads
and 2t + 1 with the second. So the sequence has 2T positions and H / 2 heads, lse is (B, H / 2, T, 2), starts count tokens and the
window counts positions."""

from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np

from barellm.program import scalars
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, check_rows, describe
from barellm.program.ops.pointwise.random import keep


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
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
    B, H, T, D = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)


def scores(
    q: np.ndarray, k: np.ndarray, pos: int = 0,
    *, scale: float | None = None, softcap: float = 0.0, first: np.ndarray | int = 0, causal: bool = True,
) -> np.ndarray:  # fmt: skip
    """Scaled, softcapped (unless `softcap` is 0) and masked scores q k^T, (B, H, T, S). In causal attention they are -inf where the
    key is later than the query (query t has position pos + t) or before `first` (B, 1, T, 1), the first key that the query sees."""
    s = q @ k.transpose(0, 1, 3, 2)
    s = s / sqrt(q.shape[-1]) if scale is None else s * scale
    s = softcap * np.tanh(s / softcap) if softcap else s
    if not causal:
        return s
    key = np.arange(k.shape[2])[None, :]
    return np.where((key > pos + np.arange(q.shape[2])[:, None]) | (key < first), -np.inf, s)


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


class Scored(Op):
    """Attributes of every attention: heads, kv_heads; `causal`, whether a query sees no later key (True), or all keys; `scale`, a
    number, the name of a run-time scalar or None; `softcap`, 0 for none; `sliding_window`, 0 for none; `window`, the name of a
    run-time scalar or None."""

    fold = 1

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, {"causal": True, "window": None, "sliding_window": 0, "scale": None, "softcap": 0.0} | attrs)

    def check(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> None:
        """ValueError unless q, k and v fit, and the numbers are what they can be."""
        check_heads(self.name, self.heads, self.kv_heads, q, k, v)
        scale = 1.0 if self.scale is None or isinstance(self.scale, str) else self.scale
        if not (scale > 0 and self.softcap >= 0 and self.sliding_window >= 0) or (self.window and self.sliding_window):
            found = f"{self.scale}, {self.softcap}, {self.sliding_window}, {self.window}"
            raise ValueError(f"{self.name} expects scale > 0, softcap >= 0, sliding_window >= 0 or a window instead: {found}")

    def keys_before(self, length: int) -> int | None:
        """How many keys before its own a query sees by the constant window; None: all of a sequence of `length`."""
        return self.sliding_window - 1 if 0 < self.sliding_window < length else None

    def scale_of(self, named: dict[str, Any]) -> float | None:
        """What multiplies scores; None: 1 / sqrt(D)."""
        return named[self.scale] if isinstance(self.scale, str) else self.scale


class Dense(Scored):
    """Attributes besides those of `Scored`: `rate` and `stream` of the attention dropout; `most_window`, the widest run-time window
    that is planned for, 0 for the whole sequence; `paired`. Only scalars that are used are asked for."""

    optional = ("starts",)

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, {"most_window": 0, "paired": False} | attrs)
        random = ("seed", "step", "sample") if self.rate else ()
        self.scalars = (*random, *(name for name in (self.window, self.scale) if isinstance(name, str)))

    @property
    def fold(self) -> int:
        """Positions of a token."""
        return 2 if self.paired else 1

    @property
    def bounded(self) -> bool:
        """Whether a query may see less than all keys before its own."""
        return bool(self.window) or self.starts is not None or self.keys_before(self.fold * int(self.q.shape[1])) is not None

    @property
    def plain(self) -> bool:
        """Whether every query sees all keys before its own, in the usual heads, with a constant scale."""
        return self.causal and not (self.bounded or isinstance(self.scale, str) or self.softcap or self.paired)

    def check(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> None:
        super().check(q, k, v)
        if self.paired and (self.heads % 2 or self.kv_heads % 2):
            raise ValueError(f"paired {self.name} expects even numbers of heads: {self.heads}, {self.kv_heads} of keys")
        found = [name for name in ("paired", "window", "sliding_window", "starts") if getattr(self, name)]
        if not self.causal and found:
            raise ValueError(f"{self.name} that is not causal expects no {', '.join(found)}: {describe(q=q)}")
        if starts is not None and (starts.shape != q.shape[:2] or starts.dtype != "i32"):
            raise ValueError(f"{self.name} expects starts (B, T) i32: {describe(q=q, starts=starts)}")

    def lse_shape(self, q: Tensor) -> tuple[int, ...]:
        """(B, H, T), or of paired heads (B, H / 2, T, 2)."""
        return (q.shape[0], self.heads // self.fold, q.shape[1]) + (2,) * self.paired

    def index_limits(self) -> dict[str, tuple[int, int]]:
        return {"starts": (0, int(self.q.shape[1]) - 1)} if "starts" in self.inputs else {}

    def split(self, x: np.ndarray, heads: int) -> np.ndarray:
        """(B, T, heads * D) -> (B, heads, T, D), of paired heads (B, heads / 2, 2T, D)."""
        B, T, C = x.shape
        return split_heads(x.reshape(B, self.fold * T, C // self.fold), heads // self.fold)

    def operands(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        """q, k and v as heads, with those of k and v repeated as often as they serve."""
        H, G = self.heads, self.kv_heads
        return [shared(self.split(x, n), H // self.fold) for x, n in ((q, H), (k, G), (v, G))]

    def join(self, x: np.ndarray) -> np.ndarray:
        joined = join_heads(x)
        B, T, C = joined.shape
        return joined.reshape(B, T // self.fold, C * self.fold)

    def first_seen(self, length: int, starts: np.ndarray | None, window: int | None) -> np.ndarray | int:
        """The first key that each of `length` positions sees, (B, 1, T, 1) or (1, 1, T, 1)."""
        first = np.zeros((1, length), np.int64)
        window = self.keys_before(length) if window is None else window
        if window is not None:
            first = np.maximum(first, np.arange(length)[None, :] - window)
        if starts is not None:
            first = np.maximum(first, np.repeat(starts * self.fold, self.fold, 1))
        return first[:, None, :, None]

    def scores(self, q: np.ndarray, k: np.ndarray, starts: np.ndarray | None, named: dict[str, Any]) -> np.ndarray:
        first = self.first_seen(q.shape[2], starts, named.get(self.window))
        return scores(q, k, scale=self.scale_of(named), softcap=self.softcap, first=first, causal=self.causal)

    def keep(self, q: np.ndarray, named: dict[str, Any]) -> np.ndarray | float:
        return keep_probabilities(q, self, *(named.get(name, 0) for name in ("seed", "step", "sample")))

    def products(self, count: int) -> int:
        """FLOPs of `count` matmuls over all (query, key) pairs within the widest window; document boundaries are not counted."""
        B, T, C = (int(n) for n in self.out.shape)
        length = self.fold * T
        if not self.causal:
            return count * B * 2 * length**2 * C
        window = self.most_window or None if self.window else self.keys_before(length)
        longest = length if window is None else min(length, window + 1)
        pairs = longest * (longest + 1) // 2 + (length - longest) * longest
        return count * B * 2 * pairs * (C // self.fold)


class Attention(Dense):
    """out = dropout(softmax(masked(q k^T * scale))) v per head (Vaswani et al. 2017); lse: log of the denominator."""

    name = "attention"
    product = True

    def infer(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> dict[str, Spec]:
        self.check(q, k, v, starts)
        return {"out": (q.shape, q.dtype), "lse": (self.lse_shape(q), "fp32")}

    def reference(self, q, k, v, starts=None, **named):
        B, T, _ = q.shape
        q, k, v = self.operands(q, k, v)
        s = self.scores(q, k, starts, named)
        lse = log_sum_exp(s)
        p = np.exp(s - lse[..., None]) * self.keep(q, named)
        return {"out": self.join(p @ v), "lse": lse.reshape(B, -1, T, *[2] * self.paired)}

    def gradient(self, g, out, lse):
        assert lse is None, "lse is a saved value, not a differentiable output"
        operands = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "lse": self.lse, "starts": self.starts}
        targets = {"dq": self.q, "dk": self.k, "dv": self.v}
        g.write(AttentionBackward, targets, **operands, dout=g.cast(out, self.out.dtype), **self.attrs)

    def flops(self) -> int:
        """Two matmuls over T^2 pairs, of causal attention T (T + 1) / 2 or what the widest window leaves of them."""
        return self.products(2)


class AttentionBackward(Dense):
    """dq, dk, dv from dout. With P = exp(s - lse), M the dropout multipliers and delta = sum(dout * out):

    dv = (P * M)^T dout,  ds = P * (M * (dout v^T) - delta),  dq = ds k * scale,  dk = ds^T q * scale;
    dk and dv are summed over the heads that shared a head of k and v. With a softcap c, ds is also times 1 - (s / c)^2."""

    name = "attention_backward"
    product = True

    def infer(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, starts: Tensor | None = None
    ) -> dict[str, Spec]:
        self.check(q, k, v, starts)
        if not q.shape == out.shape == dout.shape or lse.shape != self.lse_shape(q):
            raise ValueError(f"attention_backward expects dout like out: {describe(out=out, dout=dout, lse=lse)}")
        return {"dq": (q.shape, q.dtype), "dk": (k.shape, k.dtype), "dv": (v.shape, v.dtype)}

    def reference(self, q, k, v, out, dout, lse, starts=None, **named):
        """The formulas of the class's docstring; p, m, ds are P, M, dS (B, H, T, T). `gathered` sums over query heads that share a
        key head; `fold` is 2 for paired heads, else 1."""
        G = self.kv_heads // self.fold
        q, k, v = self.operands(q, k, v)
        do, o = self.split(dout, self.heads), self.split(out, self.heads)
        s = self.scores(q, k, starts, named)
        p = np.exp(s - lse.reshape(*q.shape[:3], 1))
        m = self.keep(q, named)
        ds = p * (m * (do @ v.transpose(0, 1, 3, 2)) - (do * o).sum(-1)[..., None])
        # Derivative of c tanh(s / c); masked s is -inf
        ds = ds * (1 - np.where(p > 0, s / self.softcap, 0) ** 2) if self.softcap else ds
        scale = self.scale_of(named) or 1 / sqrt(q.shape[-1])
        dq, dk = ds @ k * scale, ds.transpose(0, 1, 3, 2) @ q * scale
        dv = (p * m).transpose(0, 1, 3, 2) @ do
        return {"dq": self.join(dq), "dk": self.join(gathered(dk, G)), "dv": self.join(gathered(dv, G))}

    def flops(self) -> int:
        """Four matmuls over what the forward pass sees; the recomputed q k^T is not the model's."""
        return self.products(4)


class AttentionCached(Scored):
    """Decoding: k and v of positions pos .. pos + T go into caches (B, maxT, G*D); query t attends to 0 .. pos + t, or to the last
    `sliding_window` of these. With `positions` (B, T) i32, which are consecutive, text b begins at positions[b, 0], at maxT - T at
    most; with `slots` (B,) i32 it has row slots[b] of the caches, which no other has (continuous batching).
    `exact`: one query has the bits that it has among several, where a backend can."""

    name = "attention_cached"
    optional = ("positions", "slots")
    scalars = ("pos",)
    inplace: ClassVar[dict[str, str]] = {"k_cache": "k_cache", "v_cache": "v_cache"}
    product = True

    def infer(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, **indices: Tensor) -> dict[str, Spec]:
        """Check the shapes of the class's docstring; the caches keep theirs (they are updated in place)."""
        self.check(q, k, v)
        check_rows("attention_cached", indices.get("positions"), q)
        (B, T, _), slots = q.shape, indices.get("slots")
        if slots is not None and (slots.shape != (B,) or slots.dtype != "i32"):
            raise ValueError(f"attention_cached expects slots (B,) i32: {describe(q=q, slots=slots)}")
        fits = k_cache.shape[0] >= (B if slots is None else 1) and k_cache.shape[1] >= T and k_cache.shape[2] == k.shape[2]
        if not fits or k_cache.shape != v_cache.shape or not k.dtype == k_cache.dtype == v_cache.dtype:
            found = describe(k=k, k_cache=k_cache, v_cache=v_cache)
            raise ValueError(f"attention_cached expects k (B, T, C) and caches (B, maxT, C): {found}")
        cache = (k_cache.shape, k_cache.dtype)
        return {"out": (q.shape, q.dtype), "k_cache": cache, "v_cache": cache}

    def index_limits(self) -> dict[str, tuple[int, int]]:
        return {"slots": (0, int(self.k_cache.shape[0]) - 1), "positions": (0, int(self.k_cache.shape[1]) - 1)}

    def reference(self, q, k, v, k_cache, v_cache, positions=None, slots=None, pos=0):
        """For each text b: write k and v into its cache row at its position, then attend to all cached keys within the window."""
        B, T, _ = q.shape
        k_cache, v_cache, out = k_cache.copy(), v_cache.copy(), np.empty_like(q)
        for b in range(B):
            start = pos if positions is None else min(int(positions[b, 0]), k_cache.shape[1] - T)
            row = b if slots is None else int(slots[b])
            k_cache[row, start : start + T] = k[b]
            v_cache[row, start : start + T] = v[b]
            keys, values = (shared(split_heads(x[[row], : start + T], self.kv_heads), self.heads) for x in (k_cache, v_cache))
            window = self.keys_before(start + T)
            first = 0 if window is None else start + np.arange(T)[:, None] - window
            s = scores(split_heads(q[[b]], self.heads), keys, start, scale=self.scale, softcap=self.softcap, first=first)
            out[b] = join_heads(np.exp(s - log_sum_exp(s)[..., None]) @ values)[0]
        return {"out": out, "k_cache": k_cache, "v_cache": v_cache}

    def bytes(self) -> int:
        """The bytes at the planned maximum: what is seen of the caches is read once, the new rows are read and written."""
        new, length = self.q.nbytes + 2 * (self.k.nbytes + self.v.nbytes), int(self.k_cache.shape[1])
        seen = min(length, self.seen + int(self.q.shape[1]) - 1)
        return new + self.out.nbytes + (self.k_cache.nbytes + self.v_cache.nbytes) * seen // length

    @property
    def seen(self) -> int:
        """How many positions of the caches a query sees at most."""
        return min(int(self.k_cache.shape[1]), self.sliding_window or int(self.k_cache.shape[1]))

    def flops(self) -> int:
        """The operations at the planned maximum: as many cached positions as a query sees, and one new row each."""
        B, T, C = self.out.shape
        return 4 * int(B) * int(T) * self.seen * int(C)


class Calls(Graph):
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, heads: int, kv_heads: int = 0, causal: bool = True, dropout: float = 0.0,
        window: str | None = None, most_window: int = 0, sliding_window: int = 0, scale: str | float | None = None,
        softcap: float = 0.0, starts: Tensor | None = None, paired: bool = False,
    ) -> Tensor:  # fmt: skip
        """Self-attention: q (B, T, heads * D), k and v (B, T, kv_heads * D) -> (B, T, heads * D). They may be views of one matmul
        (`split`); `kv_heads` 0 means as many as `heads`. With `causal` False each query sees all keys; it has neither window nor
        starts nor paired heads then.

        A query sees the last `sliding_window` keys, its own among them (0: all). Scores are multiplied by `scale` (None: 1 /
        sqrt(D)); with a `softcap` c > 0 they are then c tanh(s / c). `window` and a `scale` that is a text name run-time scalars:
        how many keys before its own a query sees (`most_window` says for how many to plan, 0 for all), and what multiplies the
        scores. `starts` (B, T) has the first position of each token's document."""
        kinds: tuple[tuple[str | float | None, Literal["i64", "fp64"], str], ...] = (
            (window, "i64", "keys before its own that a query sees"),
            (scale, "fp64", "what multiplies attention's scores"),
        )
        for name, kind, says in kinds:
            if isinstance(name, str):
                scalars.declare(name, kind, says)
                if scalars.SCALARS[name].kind != kind:
                    raise ValueError(f"attention expects a scalar of kind {kind}, {name} is {scalars.SCALARS[name].kind}")
        attrs = {"heads": heads, "kv_heads": kv_heads or heads, "rate": dropout, "stream": self.random_stream(dropout)}
        attrs |= {"causal": causal, "window": window, "most_window": most_window, "scale": scale, "paired": paired}
        attrs |= {"sliding_window": sliding_window, "softcap": softcap}
        return self.apply(Attention, q=q, k=k, v=v, starts=starts, **attrs).out

    def attention_cached(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, heads: int, kv_heads: int = 0,
        sliding_window: int = 0, scale: float | None = None, softcap: float = 0.0, **places: Any,
    ) -> Tensor:  # fmt: skip
        """Decoding: q, k, v of positions pos .. pos + T, caches (B, maxT, kv_heads * D) -> (B, T, heads * D). `sliding_window`,
        `scale` and `softcap` as in `attention`. `positions` (B, T) and `slots` (B,), i32: where each text begins, and its row of
        the caches, if texts differ in it."""
        caches = {"k_cache": k_cache, "v_cache": v_cache, **places}
        attrs = {"heads": heads, "kv_heads": kv_heads or heads}
        attrs |= {"sliding_window": sliding_window, "scale": scale, "softcap": softcap, "exact": self.store.one_arithmetic}
        return self.apply(AttentionCached, into=None, q=q, k=k, v=v, **caches, **attrs).out
