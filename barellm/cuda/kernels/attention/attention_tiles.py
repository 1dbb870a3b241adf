"""Blocks of a head's rows, as attention loads and stores them: D columns of a matrix whose rows lie STRIDE apart, padded to DP, a
power of two, or DC of them. Of paired heads two rows, APART from each other, share a STRIDE; such blocks begin at an even row."""

from __future__ import annotations

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.lang import device, tl


@device
def kv_pointer(q, x, AT: tl.constexpr):
    """The pointer to k or v: AT elements behind q if it is None."""
    if x is None:
        return q + AT
    else:
        return x


@device
def row_pointers(base, first, row, d, STRIDE: tl.constexpr, APART: tl.constexpr):
    """The offsets of columns d of the rows first + row."""
    if APART > 0:
        places = row // 2 * STRIDE + row % 2 * APART
        return base + tl.cast(first // 2, tl.int64) * STRIDE + places[:, None] + d[None, :]
    else:
        return base + tl.cast(first, tl.int64) * STRIDE + row[:, None] * STRIDE + d[None, :]


@device
def load_rows(
    base, first, count, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, APART: tl.constexpr = 0
):  # fmt: skip
    """(ROWS, DP) of a matrix from row `first` on, zeros beyond `count` rows and D columns."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DP)
    at = row_pointers(base, first, row, d, STRIDE, APART)
    mask = (row < count - first)[:, None]
    if D < DP:
        mask = mask & (d < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@device
def load_columns(
    base, first, count, left, STRIDE: tl.constexpr, ROWS: tl.constexpr, DC: tl.constexpr, APART: tl.constexpr = 0
):  # fmt: skip
    """The same as `rows_of`, for DC columns, of which a run-time number is `left`."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DC)
    at = row_pointers(base, first, row, d, STRIDE, APART)
    return tl.load(at, mask=(row < count - first)[:, None] & (d < left)[None, :], other=0.0)


@device
def dot_over_columns(
    a, b, n0, m0, count, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, A_APART: tl.constexpr, B_APART: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """(BN, BM): rows of a from n0 on times rows of b from m0 on, DC of their D columns at a time."""
    total = tl.zeros((BN, BM), tl.float32)
    for d0 in range(0, D, DC):
        left = load_columns(a + d0, n0, count, D - d0, A_STRIDE, BN, DC, A_APART)
        right = load_columns(b + d0, m0, count, D - d0, B_STRIDE, BM, DC, B_APART)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@device
def store_rows(
    base, first, count, value, left, scalars, MODE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
    APART: tl.constexpr = 0,
):  # fmt: skip
    """Write (ROWS, DP) where `rows_of` reads, of `left` columns."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DP)
    at = row_pointers(base, first, row, d, STRIDE, APART)
    store_or_add(at, (row < count - first)[:, None] & (d < left)[None, :], value, scalars, MODE)
