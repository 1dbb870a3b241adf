"""The array functions: formula in float64, and arguments of awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from barellm import kernels
from barellm.program import layouts, ops
from barellm.program.block_layouts import block_layout
from barellm.program.ops.convolution import pair

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
HALF_ULP = {FLOAT32: 2.0**-24, BFLOAT16: 2.0**-8}


@dataclass
class Case:
    """`function(*arguments, **options)` is `formula(*arguments, **options)`; `shapes` are those of the arguments, in sets."""

    function: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: list[tuple[tuple[int, ...], ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, dtype: np.dtype, which: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(which)
        return [rng.normal(size=shape).astype(dtype) for shape in self.shapes[which]]


def near(found: np.ndarray, wanted: np.ndarray, dtype: np.dtype) -> None:
    """Within what rounding to `dtype` costs a sum of numbers near one."""
    bound = (40 if dtype == FLOAT32 else 3) * HALF_ULP[dtype] * max(1.0, np.abs(wanted).max())
    assert np.abs(found.astype(np.float64) - wanted).max() <= bound


def layernorm(x, weight, bias=0.0, *, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def rmsnorm(x, weight=1.0, *, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def softmax(x, *, scale=1.0):
    e = np.exp(scale * (x - x.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def attention(q, k, v, relative=None, causal=True, layout=None):
    T, heads, D = q.shape[1:]
    k, v = (np.repeat(a, heads // a.shape[2], 2) for a in (k, v))
    s = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
    for m, row in enumerate(() if relative is None else relative):
        distance = m if causal else m - len(relative) // 2
        there = np.eye(T, k=-distance) / np.sqrt(D)
        s = s + np.einsum("bthd,hd,ts->bhts", q, row, there)
    dense = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
    seen = dense if layout is None else np.stack([layout.dense(h) for h in range(heads)])
    p = np.exp(np.where(seen, s, -np.inf))
    return np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)


def conv2d(x, w, **how):
    attrs = {"dilation": (1, 1), "groups": 1, "reflect": False, "flip_kernel": False, "algorithm": "auto"} | how
    attrs |= {name: pair(attrs[name]) for name in ("stride", "padding", "dilation")}
    return ops.Conv2d({}, attrs).reference(x, w)["y"]


CASES = {
    "conv2d": Case(
        kernels.conv2d,
        conv2d,
        [((2, 4, 7, 5), (6, 2, 3, 2)), ((1, 2, 1, 1), (2, 1, 1, 1)), ((3, 2, 5, 11), (4, 1, 2, 3))],
        {"groups": 2, "stride": (1, 2), "padding": 1},
    ),
    "matmul": Case(
        kernels.matmul, lambda a, b: a @ b, [((3, 7, 33), (33, 65)), ((1, 1), (1, 1)), ((13,), (13, 3)), ((131, 257), (257, 67))]
    ),
    "layernorm": Case(
        kernels.layernorm,
        layernorm,
        [((3, 5, 33), (33,), (33,)), ((7, 1), (1,)), ((257,), (257,), (257,)), ((2, 4099), (4099,))],
        {"eps": 1e-3},
    ),
    "rmsnorm": Case(kernels.rmsnorm, rmsnorm, [((3, 5, 33), (33,)), ((7, 1), (1,)), ((257,),), ((2, 4099),)], {"eps": 1e-3}),
    "softmax": Case(kernels.softmax, softmax, [((3, 5, 33),), ((7, 1),), ((257,),), ((2, 40_009),)], {"scale": 0.7}),
    "attention": Case(
        kernels.attention, attention, [((2, 7, 4, 5), (2, 7, 2, 5), (2, 7, 2, 5)), ((1, 1, 1, 1),) * 3, ((1, 67, 3, 16),) * 3]
    ),
    "attention over all keys": Case(
        kernels.attention,
        attention,
        [((2, 7, 4, 5), (2, 7, 2, 5), (2, 7, 2, 5)), ((1, 1, 1, 1),) * 3, ((1, 67, 3, 16),) * 3],
        {"causal": False},
    ),
    "blocksparse_matmul": Case(
        kernels.blocksparse_matmul,
        lambda x, blocks, layout: x @ layout.dense(blocks),
        [((3, 7, 32), (3, 16, 16))],
        {"layout": block_layout(np.array([[1, 0, 1], [0, 0, 1]]), 16)},
    ),
    "block-sparse attention": Case(
        kernels.attention,
        attention,
        [((2, 71, 2, 5), (2, 71, 1, 5), (2, 71, 1, 5))],
        {"layout": layouts.parse("local:9+strided:20, fixed:30:4", length=71, block=16, heads=2)},
    ),
    "attention with relative terms": Case(
        kernels.attention,
        attention,
        [((2, 71, 2, 5), (2, 71, 1, 5), (2, 71, 1, 5), (20, 2, 5)), (*((1, 71, 2, 3),) * 3, (90, 2, 3))],
        {"layout": layouts.parse("local:9+strided:20, fixed:30:4", length=71, block=16, heads=2)},
    ),
    "attention with relative terms of a layout that looks ahead": Case(
        kernels.attention,
        attention,
        [(*((1, 40, 2, 8),) * 3, (31, 2, 8))],
        {"layout": layouts.parse("spread:1:3+local:1", length=40, block=16, heads=2, causal=False), "causal": False},
    ),
    "attention by a layout that looks ahead": Case(
        kernels.attention,
        attention,
        [((1, 40, 2, 8),) * 3],
        {"layout": layouts.parse("spread:1:3+local:1", length=40, block=16, heads=2, causal=False), "causal": False},
    ),
}
