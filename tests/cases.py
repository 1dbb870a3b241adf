"""Operands and error bounds of products, attention and the classifier's loss: what the tests of every backend share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import pytest

from barellm.assembly.quantized import Quantizing, quantize_programs
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS, round_to_bf16
from barellm.program.layouts import Layout
from barellm.program.ops.attention.attention import gathered, join_heads, log_sum_exp, scores, shared, split_heads
from barellm.program.ops.pointwise.elementwise import SLOPES
from barellm.program.scalars import declare
from barellm.program.tensor import Dim, Tensor, View
from barellm.runtime.reference import ReferenceSession
from tests.check import EPS, Given, persistent, stored, tokens

SCALARS = {"seed": 5, "step": 2, "sample": 9}  # of attention with dropout
BOUNDS: dict[str, Any] = {}  # window and scale of the attention that `bounded` describes
# Relative error of rounding a probability to the operands of the next product.
HALF_ULP = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
POLYNOMIAL = {"fp32": 0.0, "bf16": 3e-6, "fp16": 3e-6}


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def chain_bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One fp32 accumulation chain of a @ b: rounding errors walk at random over the partial sums."""
    K = a.shape[-1]
    return 6 * EPS * np.sqrt(K) * np.sqrt((a**2) @ (b**2)) + 1e-30


def operands(shape, dtype):
    batch, seq, N, K = shape
    weight_dtype = PRECISIONS[dtype].weights
    x, dy = tokens(normal(batch, seq, K), dtype), tokens(normal(batch, seq, N, seed=2), dtype)
    return x, dy, persistent(normal(N, K, seed=3), weight_dtype)


# Axes before the last, and whether none of them is a run-time size: constant axes behind run-time ones, and static shapes.
LEADING = [((2, 5, 3), False), ((3, 7, 2, 2), False), ((5,), True), ((2, 3, 7), True), ((), True)]
each_leading = pytest.mark.parametrize("leading", LEADING, ids=str)


def leading_case(op_type, leading, dtype, N=33, K=19) -> dict:
    """What `check_op` wants for a product over operands with such axes."""
    axes, static = leading
    kind = (lambda values: persistent(values, dtype, "state")) if static else (lambda values: tokens(values, dtype))
    _, _, weight = operands((1, 1, N, K), dtype)
    x, dy = kind(normal(*axes, K)), kind(normal(*axes, N, seed=2))
    plan = None if static else (axes[0] + 1, axes[1] + 2)
    values = as_operand(weight, dtype)
    flat = [v.values.reshape(-1, v.values.shape[-1]) for v in (dy, x)]
    given, bounds = {
        ops.Matmul: ({"x": x, "weight": weight}, {"y": chain_bound(x.values, values.T)}),
        ops.MatmulDx: ({"dy": dy, "weight": weight}, {"dx": chain_bound(dy.values, values)}),
        ops.MatmulDw: ({"dy": dy, "x": x}, {"dweight": chain_bound(flat[0].T, flat[1])}),
    }[op_type]
    return {"given": given, "bounds": bounds, "plan": plan}


# (axes before the last, whether they are static, N, K), for operands with rows further apart than they are long: widths beyond and
# below vectors and panels, of which some are whole ones, a depth of whole tiles; axes of every kind.
VIEWED = [((2, 5, 3), False, 33, 19), ((1, 77), False, 96, 64), ((7,), True, 20, 5)]


def viewed_case(op_type, viewed, dtype, mode: str = "store", *, unit: int = 1) -> dict:
    """What `check_op` wants for a product whose activations, and its result if that is one, are columns of wider tensors. There are
    other columns before and behind them, a multiple of `unit` in number."""
    *leading, N, K = viewed
    case = leading_case(op_type, leading, dtype, N, K)
    given, views = dict(case["given"]), {}
    for i, name in enumerate(n for n in ("x", "dy") if n in given):
        x = given.pop(name)
        first, width = (3 + i) * unit, x.values.shape[-1]
        wide = np.full((*x.values.shape[:-1], width + 8 * unit), np.nan)
        wide[..., first : first + width] = x.values
        given[f"{name}_base"] = Given(wide, x.dtype, x.kind)
        views[name] = (f"{name}_base", first, width)
    for name, width in {"y": N, "dx": K}.items():
        if name in case["bounds"]:
            views[name] = ("result", 5 * unit, width, width + 11 * unit)
            case["bounds"][name] = case["bounds"][name] + 2 * EPS
            case["modes"] = {name: mode}
    return case | {"given": given, "views": views}


def as_operand(weight, dtype) -> np.ndarray:
    """What a product reads of a weight: of a split one, the nearest bf16."""
    return stored(weight.values, dtype)


COMMON = ("gelu", "relu", "relu2")  # activations that every backend has
COMMON_SLOPES = {f"{name}_backward": SLOPES[f"{name}_backward"] for name in COMMON}
each_activation = pytest.mark.parametrize("activation", COMMON)


def network(p: Program, *, bias: bool, C: int, F: int, V: int, activation: str = "gelu") -> None:
    """A model in which every row of the tables finds its match, but for those of other activations."""
    shape = (Dim("batch", 3), Dim("seq", 11))
    token, target = p.input("tokens", shape), p.input("targets", shape)
    wte, wpe = p.parameter("wte", (V, C), std=0.5), p.parameter("wpe", (11, C), std=0.5)

    def affine(name: str, N: int, K: int):
        return p.parameter(f"{name}.weight", (N, K), std=0.3), p.parameter(f"{name}.bias", (N,), value=0.5) if bias else None

    x = p.embedding(token, wte, wpe)
    h = p.linear(p.layernorm(x, p.parameter("n1", (C,), value=1.0)), *affine("in", C, C))
    x = p.add(x, p.linear(p.activate(p.linear(h, *affine("fc", F, C)), activation), *affine("proj", C, F)))
    loss = p.classifier(p.layernorm(x, p.parameter("n2", (C,), value=1.0)), wte, target, valid_vocab=V - 2)
    p.output("loss", loss)


def scaled_network(p: Program, *, C: int, F: int, V: int, activation: str) -> None:
    """A model whose products are times numbers, others on the way back."""
    shape = (Dim("batch", 3), Dim("seq", 11))
    token, target = p.input("tokens", shape), p.input("targets", shape)
    wte, wpe = p.parameter("wte", (V, C), std=0.5), p.parameter("wpe", (11, C), std=0.5)
    x = p.embedding(token, wte, wpe)
    h = p.layernorm(x, p.parameter("n1", (C,), value=1.0))
    h = p.scaled_linear(h, p.parameter("fc", (F, C), std=0.3), forward=0.7, backward=0.4)
    h = p.activate(h, activation)
    h = p.scaled_linear(h, p.parameter("proj", (C, F), std=0.3), forward=1.3, backward=-0.6)
    x = p.mix((x, 0.8), (h, 1.0))
    loss = p.classifier(p.layernorm(x, p.parameter("n2", (C,), value=1.0)), wte, target, valid_vocab=V - 2)
    p.output("loss", loss)


def expected_rows(table, activation: str) -> set[str]:
    """The rows of a backend's table that a `network` with this activation uses: no other activation's, none of scores, nor of
    products with a weight that is frozen, stored transposed or in few bits."""
    others = [name for name in ops.ACTIVATIONS if name != activation]
    others += ["rescale", "rmsnorm", "softcap", "quantized", "scores", "frozen", *(f"matmul_{name}" for name in SLOPES)]
    return {row.name for row in table if not any(other in row.name for other in others)}


class Exact:
    """The reference's intermediate values in float64, and bounds of the error that fp32 sums in any order may have."""

    def __init__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, attrs: dict, starts: np.ndarray | None = None,
        layout: Layout | None = None, relative: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.op = op = ops.Attention({}, attrs)
        self.groups = op.kv_heads // op.fold
        self.q, self.k, self.v = op.operands(q, k, v)
        self.D = self.q.shape[-1]
        self.scale = op.scale_of(BOUNDS) or 1 / sqrt(self.D)
        self.s = op.scores(self.q, self.k, starts, BOUNDS)
        size = np.abs(self.q) @ np.abs(self.k).transpose(0, 1, 3, 2) * self.scale
        self.slope = 1 - np.where(np.isinf(self.s), 0, self.s / op.softcap) ** 2 if op.softcap else 1.0
        self.relative = relative
        if layout is not None:
            T, scores = q.shape[1], self.q @ self.k.transpose(0, 1, 3, 2) * self.scale
            for query, key, row in self.distances(layout, T):
                scores[:, :, query, key] += np.einsum("bhid,hd->bhi", self.q[:, :, query], row) * self.scale
                size[:, :, query, key] += np.einsum("bhid,hd->bhi", abs(self.q[:, :, query]), abs(row)) * self.scale
            seen = np.stack([layout.dense(h)[:T, :T] for h in range(layout.heads)])
            self.s = np.where(seen, scores, -np.inf)
        self.lse = log_sum_exp(self.s)
        self.p = np.exp(self.s - self.lse[..., None])
        self.m = op.keep(self.q, SCALARS)
        # |error of s| <= eps sqrt(D) |q| |k| / sqrt(D), with a factor 4 for what the square root leaves to chance.
        self.score_error = 4 * EPS * (sqrt(self.D) * size + np.abs(np.where(np.isinf(self.s), 0, self.s)))
        self.p_error = self.score_error.max(-1, keepdims=True) + 4 * EPS * (2 + np.abs(self.lse[..., None]))

    def distances(self, layout: Layout, T: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each row of the relative terms' vectors the pairs that are at its distance, and its vectors (H, D)."""
        rows = [] if self.relative is None else self.relative.reshape(len(self.relative), -1, self.D)
        first = 0 if layout.causal else -(len(rows) // 2)
        for distance, row in enumerate(rows, first):
            query = np.arange(max(distance, 0), T + min(distance, 0))
            yield query, query - distance, row

    @property
    def saved(self) -> np.ndarray:
        """lse as the op has it."""
        B, H, T = self.lse.shape
        return self.lse.reshape(B, H, T // self.op.fold, *[2] * self.op.paired)

    def out_bound(self, dtype: str) -> np.ndarray:
        T = self.p.shape[2]
        relative = 2 * self.p_error + 4 * EPS * sqrt(T) + HALF_ULP[dtype] + POLYNOMIAL[dtype]
        return self.op.join((relative * self.p * self.m) @ np.abs(self.v))

    def lse_bound(self, dtype: str) -> np.ndarray:
        T = self.p.shape[2]
        bound = self.p_error[..., 0] + 4 * EPS * sqrt(T) + 2 * EPS * np.abs(self.lse) + POLYNOMIAL[dtype]
        return bound.reshape(self.saved.shape)

    def gradient_bounds(self, dtype: str, dout: np.ndarray, out: np.ndarray, layout: Layout | None = None) -> dict[str, np.ndarray]:
        T, op = self.p.shape[2], self.op
        do, o = op.split(dout, op.heads), op.split(out, op.heads)
        relative = self.p_error + POLYNOMIAL[dtype]
        dp, delta = do @ self.v.transpose(0, 1, 3, 2), (do * o).sum(-1, keepdims=True)
        ds = self.p * (self.m * dp - delta) * self.slope
        dp_size = self.m * (np.abs(do) @ np.abs(self.v).transpose(0, 1, 3, 2)) + np.abs(do * o).sum(-1, keepdims=True)
        ds_error = relative * np.abs(ds) + 4 * EPS * sqrt(self.D) * self.p * dp_size
        ds_error = ds_error + (4 * EPS + 2 * self.score_error / (op.softcap or np.inf)) * self.p * dp_size
        ds_error = ds_error + (HALF_ULP[dtype] + 4 * EPS * sqrt(T)) * np.abs(ds)
        pm_error = (relative + HALF_ULP[dtype] + 4 * EPS * sqrt(T)) * self.p * self.m
        dq = ds_error @ np.abs(self.k) * self.scale
        dk, dv = (ds_error.transpose(0, 1, 3, 2) @ np.abs(self.q) * self.scale, pm_error.transpose(0, 1, 3, 2) @ np.abs(do))
        found = {}
        if layout is not None and self.relative is not None:
            drelative = []
            for query, key, row in self.distances(layout, T):
                errors = ds_error[:, :, query, key] * self.scale
                dq[:, :, query] += errors[..., None] * abs(row)[:, None]
                drelative.append(np.einsum("bhi,bhid->hd", errors, abs(self.q[:, :, query])).reshape(-1))
            found["drelative"] = np.stack(drelative)
        found |= {"dq": op.join(dq)} | {n: op.join(gathered(x, self.groups)) for n, x in (("dk", dk), ("dv", dv))}
        return found


def packed_views(H: int, G: int, D: int, tensor: str = "qkv", prefix: str = "") -> dict[str, tuple[str, int, int]]:
    """q, k and v as columns of one tensor."""
    widths = {"q": H * D, "k": G * D, "v": G * D}
    firsts = {"q": 0, "k": H * D, "v": (H + G) * D}
    return {prefix + name: (tensor, firsts[name], widths[name]) for name in widths}


def attention_operands(B: int, T: int, H: int, G: int, D: int, dtype: str, *, packed: bool, size: float = 1.0, below: float = 0.0):
    """(q, k, v), `check_op`'s operands and views of them. Scores are some `below` 0."""
    qkv = size * normal(B, T, (H + 2 * G) * D)
    if below:
        far = sqrt(below * sqrt(D))
        qkv[..., : H * D : D], qkv[..., H * D : (H + G) * D : D] = far, -far
    qkv = stored(qkv, dtype)
    views = packed_views(H, G, D)
    three = {name: qkv[..., first : first + width] for name, (_, first, width) in views.items()}
    if packed:
        return tuple(three.values()), {"qkv": tokens(qkv, dtype)}, views
    return tuple(three.values()), {name: tokens(x.copy(), dtype) for name, x in three.items()}, {}


def bounded(window: int | None = None, *, scale: float | None = None, starts: Sequence[int] = (), paired: bool = False) -> dict:
    """Attributes of an attention with a window and a scale, which are run-time scalars; `starts` are those of its documents."""
    for name, kind, value in (("reach", "i64", window), ("heat", "fp64", scale)):
        declare(name, kind)
        BOUNDS[name] = value
    names = {"window": "reach" if window is not None else None, "scale": "heat" if scale is not None else None}
    return {**names, "paired": paired, "documents": tuple(starts)}


# (batch, length, heads, head size), heads of keys, constants of scores and mask, starts of documents: windows of one key, beside
# the edges of tiles and blocks, as wide as the sequence; caps that scores reach; wide heads
SCORED: list[tuple[tuple[int, int, int, int], int, dict[str, Any]]] = [
    ((1, 67, 2, 32), 2, {"sliding_window": 1}),
    ((2, 131, 4, 20), 2, {"sliding_window": 6, "scale": 0.4}),
    ((1, 300, 2, 16), 1, {"softcap": 2.0, "scale": 0.7}),
    ((2, 97, 3, 5), 3, {"softcap": 1.5, "sliding_window": 65, "documents": (40, 64)}),
    ((2, 48, 2, 64), 1, {"softcap": 3.0, "sliding_window": 48}),
    ((1, 45, 2, 256), 1, {"softcap": 50.0, "sliding_window": 33, "scale": 0.0625}),
]
each_scored = pytest.mark.parametrize("shape, groups, scored", SCORED, ids=str)
# pos, new tokens, constants, of caches of 113 positions
CACHED_SCORED: list[tuple[int, int, dict[str, Any]]] = [
    (37, 1, {"sliding_window": 1}), (3, 1, {"sliding_window": 6, "softcap": 1.5, "scale": 0.9}), (70, 1, {"sliding_window": 65}),
    (0, 40, {"sliding_window": 6}), (70, 40, {"sliding_window": 33, "softcap": 2.0}), (30, 3, {"softcap": 1.5}),
    (60, 17, {"sliding_window": 113, "scale": 0.4}),
]  # fmt: skip
each_cached_scored = pytest.mark.parametrize("pos, T, scored", CACHED_SCORED, ids=str)


def first_positions(documents: Sequence[int], B: int, T: int) -> np.ndarray:
    """(B, T): where each token's document starts. The second row of a batch has a document more, which starts at 1."""
    at = [np.array([0, *documents, *[1] * (b % 2)]) for b in range(B)]
    return np.stack([[max(s for s in row if s <= t) for t in range(T)] for row in at])


def forward_case(shape, dtype, rate=0.0, size=1.0, groups=0, packed=True, below=0.0, **more) -> dict:
    """What `check_op` wants for an attention of (batch, length, heads, head size); `more`: as `bounded` gives it."""
    B, T, H, D = shape
    groups = groups or H
    three, given, views = attention_operands(B, T, H, groups, D, dtype, packed=packed, size=size, below=below)
    attrs, starts = attention_attrs(H, groups, rate, shape, given, more)
    exact = Exact(*three, attrs, starts)
    bounds = {"out": exact.out_bound(dtype), "lse": exact.lse_bound(dtype)}
    return {"given": given, "views": views, "bounds": bounds, "scalars": SCALARS | used(attrs), **attrs}


def attention_attrs(H: int, groups: int, rate: float, shape, given: dict, more: dict) -> tuple[dict, np.ndarray | None]:
    """The op's attributes, and the starts of its documents, which are put beside the operands `given`."""
    documents = more.pop("documents", ())
    starts = first_positions(documents, *shape[:2]) if documents else None
    if starts is not None:
        given["starts"] = tokens(starts, "i32")
    return {"heads": H, "kv_heads": groups, "rate": rate, "stream": 3, **more}, starts


def used(attrs: dict) -> dict:
    return {name: BOUNDS[name] for name in (attrs.get("window"), attrs.get("scale")) if isinstance(name, str)}


def backward_case(shape, dtype, rate=0.0, groups=0, packed=True, below=0.0, **more) -> dict:
    B, T, H, D = shape
    groups = groups or H
    three, given, views = attention_operands(B, T, H, groups, D, dtype, packed=packed, below=below)
    dout = stored(normal(B, T, H * D, seed=2), dtype)
    attrs, starts = attention_attrs(H, groups, rate, shape, given, more)
    exact = Exact(*three, attrs, starts)
    out = stored(exact.op.join((exact.p * exact.m) @ exact.v), dtype)
    given |= {"out": tokens(out, dtype), "dout": tokens(dout, dtype), "lse": persistent(exact.saved, "fp32", "state")}
    if packed:
        views = views | packed_views(H, groups, D, "dqkv", "d")
    bounds = exact.gradient_bounds(dtype, dout, out)
    return {"given": given, "views": views, "bounds": bounds, "scalars": SCALARS | used(attrs), **attrs}


def attention_both(
    p: Program, dims: tuple[Dim, Dim], *, heads: int, D: int, kv_heads: int = 0, rate: float = 0.0, dtype: str = "bf16", **more
):
    """Appends an attention of packed operands, and its backward pass into a packed gradient; gives (saved, dqkv). `more`: as
    `bounded` gives it."""
    kv_heads = kv_heads or heads
    widths = heads * D, kv_heads * D, kv_heads * D
    qkv, dout = p.input("qkv", (*dims, sum(widths)), dtype), p.input("dout", (*dims, heads * D), dtype)
    q, k, v = p.split(qkv, widths)
    starts = p.input("starts", dims) if more.pop("documents", ()) else None
    attrs: dict = {"heads": heads, "kv_heads": kv_heads, "rate": rate, "stream": 3, "starts": starts, **more}
    saved = p.apply(ops.Attention, q=q, k=k, v=v, **attrs)
    dqkv = p.activation("dqkv", qkv.shape, dtype)
    into = {name: (view, "store") for name, view in zip(("dq", "dk", "dv"), p.split(dqkv, widths), strict=True)}
    back = {"q": q, "k": k, "v": v, "out": saved.out, "dout": dout, "lse": saved.lse}
    p.apply(ops.AttentionBackward, into=into, **back, **attrs)
    return saved, dqkv


def cached_case(dtype, *, pos, T, heads, D, length, batch=2, groups=0, packed=True, **more) -> dict:
    groups = groups or heads
    C = groups * D
    caches = {name: normal(batch, length, C, seed=i) for i, name in enumerate(("k_cache", "v_cache"), 5)}
    (q, new_k, new_v), given, views = attention_operands(batch, T, heads, groups, D, dtype, packed=packed)
    k, v = (stored(c, dtype) for c in caches.values())
    k[:, pos : pos + T], v[:, pos : pos + T] = new_k, new_v
    q = split_heads(q, heads)
    k, v = (shared(split_heads(x[:, : pos + T], groups), heads) for x in (k, v))
    window = more.get("sliding_window", 0)
    first = pos + np.arange(T)[:, None] - (window - 1 if window else pos + T)
    s = scores(q, k, pos, scale=more.get("scale"), softcap=more.get("softcap", 0.0), first=first)
    p = np.exp(s - log_sum_exp(s)[..., None])
    bound = join_heads(p @ np.abs(v)) * (HALF_ULP[dtype] + POLYNOMIAL[dtype] + 64 * EPS * (sqrt(D) + sqrt(length)))
    given |= {n: persistent(c, dtype, "cache") for n, c in caches.items()}
    attrs = {"heads": heads, "kv_heads": groups, **more}
    return {"given": given, "views": views, "bounds": {"out": bound}, "scalars": {"pos": pos}, **attrs}


def loss_operands(shape, dtype, scale=3.0):
    B, T, V, valid = shape
    r = np.random.default_rng(5)
    logits = scale * r.standard_normal((B, T, V))
    logits[..., valid:] = 1e4  # padding must not be seen
    targets = r.integers(0, valid, (B, T), dtype=np.int32)
    targets.reshape(-1)[:: max(3, B * T)] = -1 if B * T > 1 else 0
    return {"logits": tokens(logits, dtype), "targets": tokens(targets, "i32")}


def loss_case(shape, dtype) -> dict:
    """What `check_op` wants for a loss over (batch, length, columns, valid columns)."""
    B, T, _, valid = shape
    bounds = {"lse": 16 * EPS * 20, "loss": 32 * EPS * 20 * B * T}
    more = {"valid_vocab": valid, "scalars": {"inv_targets": 1 / 7}, "plan": (B + 1, T + 2)}
    return {"given": loss_operands(shape, dtype), "bounds": bounds, **more}


def token_losses_case(shape, dtype) -> dict:
    """The same for the loss and the margin of each target."""
    case = loss_case(shape, dtype)
    given = case["given"]
    logits, targets = given["logits"].values, given["targets"].values
    best = logits[0, :1, : case["valid_vocab"]].argmax(-1)
    targets[0, :1] = best  # a target with a margin of zero
    del case["scalars"]
    return case | {"bounds": {"losses": 32 * EPS * 20, "margins": 4 * EPS * np.abs(logits).max()}}


def check_scores(open_session, *, compute: str, limit: float, quantized: bool = False) -> None:
    """The losses and margins of a classifier's targets against the primitive ops' references, at several run-time sizes. One of
    the ops that ran does all of it. `quantized`: the head's weights are codes."""
    shape, C, V = (Dim("batch", 3), Dim("seq", 11)), 24, 53
    p = Program(Store(), compute=compute)
    x = p.embedding(p.input("tokens", shape), p.parameter("wte", (V, C)), p.parameter("wpe", (11, C)))
    x = p.layernorm(x, p.parameter("norm", (C,)))
    p.classifier(x, p.parameter("head", (V, C)), p.input("targets", shape), valid_vocab=V - 2)
    for name, t in zip(("losses", "margins"), p.score_tokens(), strict=True):
        p.output(name, t)
    parameters = dict(p.store.tensors)
    matrices = quantize_programs({"score": p}, "int8") if quantized else {}
    session, oracle, r = open_session({"score": p}), ReferenceSession({"score": p}), np.random.default_rng(3)
    assert f"{'quantized_' * quantized}classifier_scores" in [op.name for op in session.lowered["score"].ops]
    for name, t in parameters.items():
        values = r.standard_normal(t.shape).astype(np.float32)
        for s in (session, oracle):
            Quantizing(s, matrices).write_rows(name, 0, values)
    for batch, seq in ((3, 11), (1, 1), (2, 7)):
        ids = r.integers(0, V - 2, (2, batch, seq)).astype(np.int32)
        ids[1, 0, 0] = -1
        for s in (session, oracle):
            s.write("tokens", ids[0])
            s.write("targets", ids[1])
            s.run("score", batch=batch, seq=seq)
        for name in ("losses", "margins"):
            got, want = session.read(name), oracle.read(name)
            assert got.shape == (batch, seq) and np.linalg.norm(got - want) <= limit * np.linalg.norm(want), name
            assert got[0, 0] == 0


def loss_of_scale_case(scale, dtype) -> dict:
    bounds = {"lse": 8 * EPS * 4 * (scale + 4), "loss": 16 * EPS * 12 * (scale + 4)}
    return {"given": loss_operands((1, 3, 65, 60), dtype, scale), "bounds": bounds, "valid_vocab": 60}


def loss_gradient_case(shape, dtype, mode, roundings=1) -> dict:
    """`roundings` of the exponent: 1 in base e, 3 where it becomes one of base 2."""
    B, T, V, valid = shape
    given = loss_operands(shape, dtype)
    logits, targets = given["logits"].values, given["targets"].values
    lse = ops.CrossEntropy({}, {"valid_vocab": valid}).reference(logits, targets, 1.0)["lse"]
    given["lse"] = tokens(lse)
    # The rounding of x - lse, of exp and of the product, in units of the probability; at the target that of p - 1.
    distance = np.where(np.arange(V) < valid, logits - given["lse"].values[..., None], -np.inf)
    p = np.exp(distance)
    bound = EPS / 7 * (8 + roundings * np.where(p > 0, np.abs(distance), 0)) * p
    np.put_along_axis(bound, np.maximum(targets, 0)[..., None], 8 * EPS / 7, -1)
    bounds = {"dlogits": np.where(targets[..., None] >= 0, bound, 0) + (2 * EPS if mode == "add" else 0)}
    more = {"valid_vocab": valid, "scalars": {"inv_targets": 1 / 7}, "plan": (B + 1, T + 2)}
    return {"given": given, "bounds": bounds, "modes": {"dlogits": mode}, **more}


def check_network(
    open_session, *, compute: str, limit: float, bias: bool, sizes: tuple[int, int, int], activation: str = "gelu"
) -> set[str]:
    """`check_model` of `network`."""
    C, F, V = sizes
    return check_model(
        open_session, partial(network, bias=bias, C=C, F=F, V=V, activation=activation), compute=compute, limit=limit, ids=V - 2
    )


def check_model(
    open_session, declare: Callable[[Program], None], *, compute: str, limit: float, ids: int, recompute: bool = False,
    scalars: dict[str, float] | None = None,
) -> set[str]:  # fmt: skip
    """Losses and gradients of what `declare` appends (inputs "tokens" and "targets" of 3 x 11 ids, an output "loss") at several
    run-time sizes, twice in a row with accumulation, against the primitive ops' references; gives the names of the ops that ran."""
    scalars = {"inv_targets": 0.1, "pos": 0, **(scalars or {})}
    store = Store()
    programs = {"train": Program(store, compute=compute), "eval": Program(store, compute=compute)}
    for p in programs.values():
        declare(p)
    programs["train"].backward(programs["train"].named["loss"], recompute=recompute)
    session = open_session(programs)
    oracle = ReferenceSession(programs)
    r = np.random.default_rng(5)
    for name, t in store.tensors.items():
        if t.role == "parameter":
            session.write(name, r.normal(size=t.shape) * 0.3)
            oracle.write(name, session.read(name))
    try:
        for batch, seq in ((3, 11), (2, 5), (1, 1)):
            data = r.integers(0, ids, (2, batch, seq)).astype(np.int32)
            data[1, 0, seq // 2 :: 7] = -1
            for accumulate in (0, 1):
                for s in (session, oracle):
                    s.write("tokens", data[0])
                    s.write("targets", data[1])
                    s.run("train", batch=batch, seq=seq, accumulate=accumulate, **scalars)
            for name, t in store.tensors.items():
                if t.role == "gradient":
                    a, b = session.read(name).astype(np.float64), oracle.read(name)
                    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6)
                    assert error <= limit, (name, batch, seq, error)
            found = {name: session.read(name)[0] for name, t in programs["train"].named.items() if t.role == "output"}
            for name, value in found.items():
                assert value == pytest.approx(oracle.read(name)[0], rel=limit, abs=limit), name
            session.run("eval", batch=batch, seq=seq, **scalars)
            for name, value in found.items():
                assert session.read(name)[0] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    finally:
        session.close()
    return {op.name for low in session.lowered.values() for op in low.ops}


def check_classifier_of_inner_axes(open_session, *, compute: str, limit: float) -> None:
    """Loss and gradients of a classifier over three rows for each token against the primitive ops' references."""
    C, V, inner = 19, 23, 3
    p = Program(Store(), compute=compute)
    shape = (Dim("batch", 3), Dim("seq", 11), inner)
    h = p.linear(p.input("x", (*shape, C), compute), p.parameter("w", (C, C)))
    loss = p.classifier(h, p.parameter("head", (V, C)), p.input("targets", shape), valid_vocab=V - 2)
    p.output("loss", loss)
    p.backward(loss)
    session, oracle = open_session({"op": p}), ReferenceSession({"op": p})
    try:
        assert "classifier" in [op.name for op in session.lowered["op"].ops]
        for batch, seq in ((3, 11), (2, 5), (1, 1)):
            targets = np.random.default_rng(seq).integers(-1, V - 2, (batch, seq, inner)).astype(np.int32)
            for s in (session, oracle):
                s.write("x", stored(normal(batch, seq, inner, C), compute))
                s.write("targets", targets)
                for name, rows in (("w", C), ("head", V)):
                    s.write(name, stored(0.3 * normal(rows, C, seed=rows), compute))
                s.run("op", batch=batch, seq=seq, accumulate=0, inv_targets=0.1)
            for name in ("loss", "w.grad", "head.grad"):
                got, want = session.read(name).astype(np.float64), oracle.read(name)
                assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want) + 1e-9, (name, batch, seq)
    finally:
        session.close()


def check_products_that_add(open_session, *, compute: str, limit: float) -> None:
    """Fused products whose result is added to what is there, each at the place of its own."""
    C, F, shape = 19, 35, (Dim("batch", 3), Dim("seq", 11))
    p = Program(Store(), compute=compute)
    x, w, b = p.input("x", (*shape, C), compute), p.parameter("w", (F, C)), p.parameter("b", (F,))
    for name in ("linear", "residual", *COMMON):
        into = {"y": (p.input(name, (*shape, F), "fp32" if name == "residual" else compute), "add")}
        y = p.apply(ops.Matmul, x=x, weight=w).y
        if name == "linear":
            p.apply(ops.Bias, into=into, x=y, bias=b)
            continue
        y = p.apply(ops.Bias, x=y, bias=b).y
        if name == "residual":
            p.apply(ops.Add, into=into, a=p.input("stream", (*shape, F), "fp32"), b=y)
        else:
            p.apply(ops.ACTIVATIONS[name].forward, into=into, x=y)
    dy = p.input("dy", (*shape, F), compute)
    for name, slope in COMMON_SLOPES.items():
        dx = p.apply(ops.MatmulDx, dy=dy, weight=w).dx
        p.apply(slope.backward, into={"dx": (p.input(name, (*shape, C), compute), "add")}, dy=dx, x=x)
    session, oracle = open_session({"op": p}), ReferenceSession({"op": p})
    names = ["linear", "linear_residual", *(f"linear_{name}" for name in COMMON)]
    try:
        assert [op.name for op in session.lowered["op"].ops] == names + [f"matmul_dx_{name}" for name in COMMON]
        for s in (session, oracle):
            for i, (name, t) in enumerate({**p.named, **p.store.tensors}.items()):
                sizes = tuple({"batch": 2, "seq": 7}[n.name] if isinstance(n, Dim) else n for n in t.shape)
                s.write(name, stored(normal(*sizes, seed=i), t.dtype))
            s.run("op", batch=2, seq=7)
        for name in ("linear", "residual", *COMMON, *COMMON_SLOPES):
            got, want = session.read(name).astype(np.float64), oracle.read(name)
            assert np.abs(got - want).max() <= limit * np.abs(want).max(), name
    finally:
        session.close()


def check_products_of_views(
    open_session, *, compute: str, limit: float, C: int, F: int, mode: str = "add", plan: tuple[int, int] = (3, 11)
) -> list[Any]:
    """Fused products whose activations are all columns of wider tensors: each reads and writes its own columns and no others. Those
    that have something to read in their epilogue are written in `mode`. Gives what the ops were lowered to."""
    shape, run = (Dim("batch", plan[0]), Dim("seq", plan[1])), (plan[0] - 1, plan[1] - 1)
    p = Program(Store(), compute=compute)
    w, b = p.parameter("w", (F, C)), p.parameter("b", (F,))

    def columns(name: str, width: int, dtype: str = compute) -> View:
        """What an op reads or writes, 8 columns before it and another number behind each."""
        return View(p.input(name, (*shape, width + 16 + 8 * len(p.named)), dtype), 8, width)

    x, dy = columns("x", C), columns("dy", F)
    for name in ("linear", "residual", *COMMON):
        residual = name == "residual"
        into = {"y": (columns(f"{name}.y", F, "fp32" if residual else compute), mode if residual else "store")}
        y = p.apply(ops.Matmul, x=x, weight=w).y
        if name == "linear":
            p.apply(ops.Bias, into=into, x=y, bias=b)
        elif residual:
            p.apply(ops.Add, into=into, a=columns("stream", F, "fp32"), b=p.apply(ops.Bias, x=y, bias=b).y)
        else:
            y = p.apply(ops.Bias, into={"y": (columns(f"{name}.pre", F), "store")}, x=y, bias=b).y
            p.apply(ops.ACTIVATIONS[name].forward, into=into, x=y)
    for name, slope in COMMON_SLOPES.items():
        dx = p.apply(ops.MatmulDx, dy=dy, weight=w).dx
        p.apply(slope.backward, into={"dx": (columns(name, C), mode)}, dy=dx, x=x)
    session, oracle = open_session({"op": p}), ReferenceSession({"op": p})
    try:
        found = [op.kernel for op in session.lowered["op"].ops]
        assert found == ["product"] * (2 + 2 * len(COMMON))
        for s in (session, oracle):
            for i, (name, t) in enumerate({**p.named, **p.store.tensors}.items()):
                sizes = (*run, *t.shape[2:]) if t.dims else t.shape
                s.write(name, stored(normal(*sizes, seed=i), t.dtype))
            s.run("op", batch=run[0], seq=run[1])
        for name in p.named:
            got, want = session.read(name).astype(np.float64), oracle.read(name)
            assert np.abs(got - want).max() <= limit * np.abs(want).max(), name
            own = slice(8, 8 + (C if name in ("x", *COMMON_SLOPES) else F))
            got[..., own] = want[..., own] = 0
            assert np.array_equal(got, want), f"other columns of {name} changed"
    finally:
        session.close()
    return [session.lowered["op"].of[op] for op in session.lowered["op"].ops]


def network_of_views(p: Program, *, C: int, V: int) -> None:
    """Products of columns, some of which are read twice, so that their gradients are added to."""
    shape = (Dim("batch", 3), Dim("seq", 11))
    token, target = p.input("tokens", shape), p.input("targets", shape)
    wte, wpe = p.parameter("wte", (V, C), std=0.5), p.parameter("wpe", (11, C), std=0.5)

    def linear(name: str, x: Tensor, N: int) -> Tensor:
        return p.linear(x, p.parameter(name, (N, int(x.shape[-1])), std=0.3), p.parameter(f"{name}.b", (N,), value=0.5))

    x = p.embedding(token, wte, wpe)
    h = linear("in", p.layernorm(x, p.parameter("n1", (C,), value=1.0)), 4 * C)
    left, middle, right = p.split(h, (C - 8, 2 * C, C + 8))
    x = p.add(p.add(x, linear("left", left, C)), linear("right", right, C))
    x = p.add(x, linear("proj", p.gelu(linear("middle", middle, 2 * C)), C))
    x = p.add(x, linear("again", left, C))
    some, _ = p.split(p.layernorm(x, p.parameter("n2", (C,), value=1.0)), (C - 8, 8))
    loss = p.classifier(some, p.parameter("head", (V, C - 8), std=0.5), target, valid_vocab=V - 2)
    p.output("loss", loss)


MOMENTS = {"fp32": ("fp32", "fp32", None), "16bit": ("e6m9", "ue6m10", None), "16bit-stochastic": ("e6m9", "ue6m10", 65536)}
each_moments = pytest.mark.parametrize("moments", MOMENTS)


def adamw_case(
    shape, dtype, *, moments="fp32", scale=0.5, step=1, weight_decay=0.1, beta2=0.95, lr_scale=1.0, eps=1e-8,
    op_type=ops.AdamW,
):  # fmt: skip
    """(operands, bounds, attributes). Moments rounded stochastically may be a whole unit off, those to nearest half of one."""
    dtype_m, dtype_v, stream = MOMENTS[moments]
    given = {
        "param": persistent(normal(*shape), dtype),
        "grad": persistent(normal(*shape, seed=2), role="gradient"),
        "m": persistent(0.1 * normal(*shape, seed=3), dtype_m, "state"),
        "v": persistent(0.01 * normal(*shape, seed=4) ** 2, dtype_v, "state"),
        "clip": persistent(np.array([2.0, scale]), role="state"),
    }
    for name in ("grad", "m"):
        given[name].values.flat[::5] = 0.0  # a step of nothing, with which nothing decays cautiously
    attrs = {"beta1": 0.9, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "stream": stream}
    attrs["lr_scale"] = lr_scale
    # The update without the cancellation between m and the gradient.
    sizes = {name: np.abs(g.values) for name, g in given.items()} | {"param": np.zeros(shape)}
    fp32 = {name: Tensor(name, shape, "fp32", "state") for name in ("m", "v")}
    reference: Callable[..., dict[str, np.ndarray]] = op_type(dict(fp32), attrs).reference
    large = reference(**sizes, lr=3e-3, step=step)
    bounds = {"param": 4 * EPS * np.abs(given["param"].values) + 12 * EPS * -large["param"], "m": 2 * EPS, "v": 2 * EPS}
    if moments != "fp32":  # where fp32 and float64 lie on two sides of a boundary, the roundings are a unit apart
        bounds |= {"m": 2.0**-9 * large["m"], "v": 2.0**-10 * large["v"]}
    return given, bounds, attrs


def check_bf16_update(check: Callable[..., dict[str, np.ndarray]], op_type, dtype: str) -> None:
    """A weight that is to hold bf16 gets what the same update makes without that, rounded; the moments are the same. `check`:
    a backend's `check_op`."""
    given, bounds, attrs = adamw_case((67, 131), dtype, step=3, op_type=op_type)
    scalars = {"step": 3, "lr": 3e-3}
    plain = check(op_type, given=given, scalars=scalars, bounds=bounds, **attrs)
    found = check(op_type, given=given, scalars=scalars, bounds=bounds | {"param": None}, bf16=True, **attrs)
    assert (found["param"] == round_to_bf16(plain["param"])).all() and (found["param"] != plain["param"]).mean() > 0.9
    assert all((found[name] == plain[name]).all() for name in ("m", "v"))


def check_bf16_init(check: Callable[..., dict[str, np.ndarray]], op_type, dtype: str, **size: float) -> None:
    """The same of what a parameter begins with."""
    given, attrs = {"param": persistent(np.zeros((37, 131)), dtype)}, {**size, "stream": 5, "valid_rows": 36}
    plain = check(op_type, given=given, scalars={"seed": 3}, bounds={"param": None}, **attrs)["param"]
    found = check(op_type, given=given, scalars={"seed": 3}, bounds={"param": None}, bf16=True, **attrs)["param"]
    assert (found == round_to_bf16(plain)).all() and (found != plain).mean() > 0.9 and (found[36:] == 0).all()


def assert_like_the_reference(p: Program, session, oracle, *, batch: int, seq: int, seed: int, limit: float) -> None:
    """One run of program "op" on both, with the same random inputs and parameters: no output is further off than `limit` of its
    largest element."""
    for name, t in {**p.named, **p.store.tensors}.items():
        if t.role in ("input", "parameter"):
            shape = tuple({"batch": batch, "seq": seq}[n.name] if isinstance(n, Dim) else n for n in t.shape)
            for s in (session, oracle):
                s.write(name, stored(normal(*shape, seed=seed), p.compute))
    for s in (session, oracle):
        s.run("op", batch=batch, seq=seq)
    for name, t in p.named.items():
        if t.role == "output":
            got, want = session.read(name).astype(np.float64), oracle.read(name)
            assert np.abs(got - want).max() <= limit * np.abs(want).max(), name


def elementwise_cases(dtype: str) -> dict[str, tuple]:
    """(op, operands, attributes, bounds) of every op that works element by element or row by row, for what is asked of each."""
    x, other, bias = normal(3, 5, 65), normal(3, 5, 65, seed=2), persistent(normal(65, seed=3))
    a, b = tokens(x, dtype), tokens(other, dtype)
    random = {"rate": 0.3, "stream": 2}
    overflows = np.where(normal(3, 5, 65, seed=9) > 1, np.inf, x) + np.where(normal(3, 5, 65, seed=8) > 1, np.nan, 0)
    states = {name: persistent(np.array([power, 7]), "i32", "state") for name, power in (("given", -5), ("wanted", -2))}
    scaled = {"x": tokens(overflows, dtype), **states}
    slope_bound = {"dx": 24 * EPS * (1 + abs(other)) * (4 + abs(x))}
    return {
        "add": (ops.Add, {"a": a, "b": b}, {}, {"y": 2 * EPS * (abs(x) + abs(other) + 4)}),
        "rescale": (ops.Rescale, {"x": a}, {"forward": -0.3, "backward": 7.0}, {"y": 2 * EPS * (abs(x) + 4)}),
        "gradient_scale": (ops.GradientScale, scaled, {"filtered": True}, {"y": 8 * EPS * (abs(x) * 8 + 4)}),
        "cast": (ops.Cast, {"x": a}, {"dtype": "bf16"}, {"y": 2 * EPS * (abs(x) + 4)}),
        **{name: (ops.ACTIVATIONS[name].forward, {"x": a}, {}, {"y": 8 * EPS * (abs(x) + 4)}) for name in COMMON},
        **{name: (f.backward, {"dy": b, "x": a}, {}, slope_bound) for name, f in COMMON_SLOPES.items()},
        "bias": (ops.Bias, {"x": a, "bias": bias}, {}, {"y": 2 * EPS * (abs(x) + 8)}),
        "last_row": (ops.LastRow, {"x": a}, {}, {"y": 2 * EPS * (abs(x[:, -1:]) + 4)}),
        "dropout": (ops.Dropout, {"x": a}, random, {"y": 4 * EPS * (abs(x) + 4)}),
        "dropout_backward": (ops.DropoutBackward, {"dy": b}, random | {"dtype": dtype}, {"dx": 4 * EPS * (abs(other) + 4)}),
        "layernorm_dx": (ops.LayerNormDx, norm_gradient(x, other, dtype), {}, {"dx": 1e-4}),
    }


# Generator, shape and mode of dropout's result: rows within a draw, beyond one, and beyond a block of columns.
STREAM_CASES = [
    ("taus88", (2, 3, 7), "store"),
    ("taus88", (1, 2, 530), "add"),
    ("lfsr113", (2, 3, 33), "start"),
    ("lfsr113", (1, 1, 513), "store"),
]


def stream_case(case: tuple[str, tuple[int, ...], str], dtype: str) -> tuple[type[ops.Dropout], dict[str, Given], dict]:
    """The op, its operands and what else `check_op` wants: the forward op where it stores, else the backward one."""
    bits, shape, mode = case
    attrs = {"rate": 0.3, "stream": 3, "bits": bits, "scalars": {"seed": (1 << 40) + 11, "step": 3, "sample": (1 << 33) + 5}}
    x = tokens(normal(*shape), dtype)
    if mode == "store":
        return ops.TauswortheDropout, {"x": x}, attrs | {"bounds": {"y": EPS * abs(x.values)}}
    attrs["scalars"]["accumulate"] = 1
    bounds = {"dx": 4 * EPS * (abs(x.values) + 4)}
    attrs |= {"modes": {"dx": mode}, "dtype": dtype, "plan": (shape[0] + 1, shape[1] + 2), "bounds": bounds}
    return ops.TauswortheDropoutBackward, {"dy": x}, attrs


def norm_gradient(x: np.ndarray, dy: np.ndarray, dtype: str) -> dict:
    """Operands of LayerNorm's gradient."""
    mean, rstd = x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-5)
    weight = persistent(normal(x.shape[-1], seed=4))
    return {"dy": tokens(dy, dtype), "x": tokens(x), "weight": weight, "mean": tokens(mean), "rstd": tokens(rstd)}


MODES = [("add", 0), ("start", 0), ("start", 1)]  # and the run's `accumulate`
