"""Attention masks: causal, sliding windows, documents. WINDOW: index of the run-time scalar that holds the window's width in keys,
-1 for no window, or -2 - n for n keys before a query's own; `starts` (seq / FOLD,) i32: the first position of each token's
document, or None. FOLD: positions of a token, 2 with paired heads, else 1. A mask with a window or documents is called local."""

from math import e, log2, sqrt
from typing import Any

from barellm.cuda.kernels.common import scalar_fp64
from barellm.cuda.lang import constant, device, tl
from barellm.program.scalars import SCALARS

LOWEST = constant(-1e30)  # where a running maximum begins if a block may hide all keys of a query
WIDEST = constant(1 << 30)
LOG2_E = constant(log2(e))


@device
def apply_mask(x, m, n, count, MASK, OTHER):
    """Scores or probabilities x, replaced by OTHER where MASK hides the key: "causal", "length" (keys beyond the sequence's
    `count`) or "none". m, n: positions of queries and keys, which broadcast to the shape of x."""
    if MASK == "causal":
        x = tl.where(m >= n, x, OTHER)
    elif MASK == "length":
        x = tl.where(n < count, x, OTHER)
    return x


@device
def window_size(scalars, WINDOW):
    """The window in keys before a query's own, i32; at most 2^30, so that sums with it do not overflow."""
    if WINDOW < -1:
        return -2 - WINDOW
    return tl.minimum(tl.load(scalars + WINDOW), WIDEST).to(tl.int32)


@device
def first_visible_key(starts, scalars, t, WINDOW, FOLD):
    """The first key that each query sees under a local mask; t: the queries' positions in the sequence, of any shape."""
    first = t * 0
    if WINDOW != -1:
        first = tl.maximum(t - window_size(scalars, WINDOW), 0)
    if starts is not None:
        first = tl.maximum(tl.load(starts + t // FOLD) * FOLD, first)
    return first


@device
def visible_queries_end(starts, scalars, key, seq, WINDOW, FOLD):
    """The end (exclusive) of the queries that see `key` (a scalar) under a local mask: at most key + window + 1, and the first
    position whose document starts after the key, by binary search in `starts` (of the sequence), which never decreases."""
    high = seq
    if WINDOW != -1:
        high = tl.minimum(key + window_size(scalars, WINDOW) + 1, seq)
    if starts is not None:
        low = key + 1
        while low < high:
            middle = (low + high) // 2
            starts_later = tl.load(starts + middle // FOLD) * FOLD > key
            high = tl.where(starts_later, middle, high)
            low = tl.where(starts_later, low, middle + 1)
    return high


@device
def softmax_scale(scalars, SCALE, SCALE_AT, FACTOR):
    """What multiplies scores: run-time scalar number SCALE_AT times FACTOR, as fp32; or where SCALE_AT is -1 the constant SCALE."""
    if SCALE_AT >= 0:
        return (scalar_fp64(scalars, SCALE_AT) * FACTOR).to(tl.float32)
    else:
        return SCALE


@device
def soft_cap(s, scale_log2, CAP):
    """tanh of the scaled scores over CAP: with a soft cap (Gemma 2), CAP times it are the scores. 1 - tanh^2 is its slope."""
    return 1.0 - 2.0 / (tl.math.exp2(s * (scale_log2 * (2.0 / CAP))) + 1.0)


@device
def score_unit(scale_log2, CAP):
    """What scores, or with a soft cap what `soft_cap` makes of them, are multiplied by before exp2."""
    if CAP > 0:
        return CAP * LOG2_E
    else:
        return scale_log2


def mask_constants(op: Any, D: int) -> dict[str, Any]:
    """The constants SCALE_LOG2, SCALE_AT, CAP, CAUSAL, LOCAL, WINDOW and FOLD of an attention op with heads of D columns."""
    window, scale_at = (SCALARS[scalar].index if isinstance(scalar, str) else -1 for scalar in (op.window, op.scale))
    before = op.keys_before(op.fold * int(op.q.shape[1]))
    window = -2 - before if before is not None else window
    masks = {"CAUSAL": int(op.causal), "LOCAL": int(op.bounded), "WINDOW": window, "FOLD": op.fold}
    return {"SCALE_LOG2": constant_scale(op, D, log2(e)), "SCALE_AT": scale_at, "CAP": op.softcap, **masks}


def constant_scale(op: Any, D: int, factor: float = 1.0) -> float:
    """The softmax scale of an attention op without a run-time scale, times `factor`."""
    return op.scale * factor if isinstance(op.scale, float) else factor / sqrt(D)
