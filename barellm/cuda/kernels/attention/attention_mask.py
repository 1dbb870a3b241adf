"""Attention masks: causal, sliding windows, documents. WINDOW: index of the run-time scalar that holds the window's width in keys
(-1: no window); `starts` (seq / FOLD,) i32: the first position of each token's document, or None. FOLD: positions of a token: 2 of
paired heads, else 1. A mask with a window or documents is called local."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernels.common import scalar_fp64
from barellm.cuda.lang import constant, device, tl
from barellm.program.scalars import SCALARS

MASK_NONE, MASK_CAUSAL, MASK_LENGTH = constant(0), constant(1), constant(2)  # the last hides keys beyond the sequence
LOWEST = constant(-1e30)  # where a running maximum begins if a block may hide all keys of a query
WIDEST = constant(1 << 30)


@device
def apply_mask(x, m, n, count, MASK: tl.constexpr, other: tl.constexpr):
    """Scores or probabilities x, with `other` where MASK hides the key. m, n: positions of queries and keys, which broadcast to the
    shape of x; `count`: keys of the sequence."""
    if MASK == MASK_CAUSAL:
        x = tl.where(m >= n, x, other)
    elif MASK == MASK_LENGTH:
        x = tl.where(n < count, x, other)
    return x


@device
def window_size(scalars, WINDOW: tl.constexpr):
    """The run's window in keys, i32; at most 2^30, so that sums with it do not overflow."""
    return tl.minimum(tl.load(scalars + WINDOW), WIDEST).to(tl.int32)


@device
def first_visible_key(starts, scalars, t, WINDOW: tl.constexpr, FOLD: tl.constexpr):
    """The first key that each of the queries t (any shape, positions in the sequence) sees under a local mask."""
    first = t * 0
    if WINDOW >= 0:
        first = tl.maximum(t - window_size(scalars, WINDOW), 0)
    if starts is not None:
        first = tl.maximum(tl.load(starts + t // FOLD) * FOLD, first)
    return first


@device
def visible_queries_end(starts, scalars, key, seq, WINDOW: tl.constexpr, FOLD: tl.constexpr):
    """The position behind the last query that sees `key` (a scalar) under a local mask. `starts` never decreases, so it is found by
    binary search: the first position whose document starts behind the key."""
    high = seq
    if WINDOW >= 0:
        high = tl.minimum(key + window_size(scalars, WINDOW) + 1, seq)
    if starts is not None:
        low = key + 1
        while low < high:
            middle = (low + high) // 2
            beyond = tl.load(starts + middle // FOLD) * FOLD > key
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, middle + 1)
    return high


@device
def softmax_scale_of(scalars, SCALE_AT: tl.constexpr, FACTOR: tl.constexpr):
    """The softmax scale that is run-time scalar number SCALE_AT, times FACTOR, as fp32."""
    return (scalar_fp64(scalars, SCALE_AT) * FACTOR).to(tl.float32)


def mask_constants(op: Any, scale_log2: float) -> dict[str, tuple[Any, ...]]:
    """The tuples SCALES and MASKING of an attention op (attention.py)."""
    window, scale = (SCALARS[scalar].index if scalar else -1 for scalar in (op.window, op.scale))
    local = int(op.window is not None or op.starts is not None)
    return {"SCALES": (scale_log2, scale), "MASKING": (int(op.causal), local, window, op.fold)}
