"""Attention masks: causal, sliding windows, documents. WINDOW: the place of a run-time scalar, the width in keys (-1: none);
`starts`: the first position of each token's document, or None. FOLD: positions of a token, 2 of paired heads."""

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
    """x, of queries m and keys n that broadcast to its shape, or `other` where MASK hides the key."""
    if MASK == MASK_CAUSAL:
        x = tl.where(m >= n, x, other)
    elif MASK == MASK_LENGTH:
        x = tl.where(n < count, x, other)
    return x


@device
def window_size(scalars, WINDOW: tl.constexpr):
    return tl.minimum(tl.load(scalars + WINDOW), WIDEST).to(tl.int32)


@device
def first_visible_key(starts, scalars, t, WINDOW: tl.constexpr, FOLD: tl.constexpr):
    """The first key that each of the queries t sees; all of them are in the sequence."""
    first = t * 0
    if WINDOW >= 0:
        first = tl.maximum(t - window_size(scalars, WINDOW), 0)
    if starts is not None:
        first = tl.maximum(tl.load(starts + t // FOLD) * FOLD, first)
    return first


@device
def visible_queries_end(starts, scalars, key, seq, WINDOW: tl.constexpr, FOLD: tl.constexpr):
    """The position behind the last query that sees `key`. Starts never decrease, so it is found by halving."""
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
    """A run-time scale, times FACTOR."""
    return (scalar_fp64(scalars, SCALE_AT) * FACTOR).to(tl.float32)


def mask_constants(op: Any, scale_log2: float) -> dict[str, tuple[Any, ...]]:
    """The groups SCALES and MASKING of an attention (attention.py)."""
    window, scale = (SCALARS[scalar].index if scalar else -1 for scalar in (op.window, op.scale))
    local = int(op.window is not None or op.starts is not None)
    return {"SCALES": (scale_log2, scale), "MASKING": (int(op.causal), local, window, op.fold)}
