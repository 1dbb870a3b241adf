"""What queries of attention see: CAUSAL 1 no later key, 0 all keys; and how far back, at run time: windows of WINDOW keys (a
run-time scalar, by its place; -1 for none) and documents (`starts`, of the sequence's tokens, or None). FOLD: positions of a token,
2 of paired heads."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernels.common import scalar_fp64
from barellm.cuda.lang import constant, device, tl
from barellm.program.scalars import SCALARS

MASK_NONE, MASK_CAUSAL, MASK_LENGTH = (
    constant(0),
    constant(1),
    constant(2),
)  # what a mask hides: keys later than the query, or than the last
LOWEST = constant(-1e30)  # where a maximum begins if the first keys of a block may be none of a query's
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
def softmax_scale_of(scalars, HEAT: tl.constexpr, FACTOR: tl.constexpr):
    """A run-time scale, times FACTOR."""
    return (scalar_fp64(scalars, HEAT) * FACTOR).to(tl.float32)


def mask_constants(op: Any) -> dict[str, int]:
    """The constants of an attention's bounds. HEAT: the place of its scale, -1 for the usual one."""
    at = {"WINDOW": op.window, "HEAT": op.scale}
    places = {name: SCALARS[scalar].index if scalar else -1 for name, scalar in at.items()}
    return places | {
        "CAUSAL": int(op.causal),
        "FOLD": op.fold,
        "BOUNDED": int(op.window is not None or op.starts is not None),
    }
