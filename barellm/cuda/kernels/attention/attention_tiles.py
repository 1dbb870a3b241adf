"""Loads and stores of blocks of rows of one head: D columns of a matrix whose rows are STRIDE elements apart, padded to DP, a power
of two, or DC of these columns. `base` points to column 0 of the head in row 0 of the sequence; `first`: the block's first row,
`count`: rows of the sequence. With paired heads two rows, PAIR_STRIDE elements apart, share a STRIDE; blocks begin at even rows."""

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.lang import device, tl


@device
def kv_pointer(q, x, AT):
    """The pointer to k or v: `x`, or if x is None AT elements after q's first column, in the same tensor."""
    if x is None:
        return q + AT
    else:
        return x


@device
def kv_rows(q, k, v, token0, column, STRIDES, OFFSETS):
    """Pointers to a KV head's rows of k and v in a sequence: token0 is the sequence's first token, `column` the head's first."""
    k_rows = kv_pointer(q, k, OFFSETS[0]) + token0 * STRIDES[1] + column
    v_rows = kv_pointer(q, v, OFFSETS[1]) + token0 * STRIDES[2] + column
    return k_rows, v_rows


@device
def row_pointers(base, first, row, d, STRIDE, PAIR_STRIDE):
    """Pointers (rows, columns) to the columns `d` of the rows first + row."""
    if PAIR_STRIDE > 0:
        row_offsets = row // 2 * STRIDE + row % 2 * PAIR_STRIDE  # paired heads: two rows share a STRIDE
        return base + tl.cast(first // 2, tl.int64) * STRIDE + row_offsets[:, None] + d[None, :]
    else:
        return base + tl.cast(first, tl.int64) * STRIDE + row[:, None] * STRIDE + d[None, :]


@device
def load_rows(base, first, count, STRIDE, ROWS, D, DP, PAIR_STRIDE=0):
    """Load a block (ROWS, DP) from row `first` on, zeros beyond `count` rows and D columns."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DP)
    pointers = row_pointers(base, first, row, d, STRIDE, PAIR_STRIDE)
    mask = (row < count - first)[:, None]
    if D < DP:
        mask = mask & (d < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@device
def load_columns(base, first, count, left, STRIDE, ROWS, DC, PAIR_STRIDE=0):
    """Load a block (ROWS, DC) from row `first` on, zeros beyond `count` rows and `left` columns. `base`: its first column."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DC)
    pointers = row_pointers(base, first, row, d, STRIDE, PAIR_STRIDE)
    return tl.load(pointers, mask=(row < count - first)[:, None] & (d < left)[None, :], other=0.0)


@device
def dot_by_chunks(a, b, n0, m0, count, A_STRIDE, B_STRIDE, A_PAIR_STRIDE, B_PAIR_STRIDE, BN, BM, D, DC):
    """a b^T (BN, BM) of BN rows of a from n0 on and BM rows of b from m0 on, zeros beyond `count` rows: in steps of DC columns."""
    total = tl.zeros((BN, BM), tl.float32)
    for d0 in range(0, D, DC):
        left = load_columns(a + d0, n0, count, D - d0, A_STRIDE, BN, DC, A_PAIR_STRIDE)
        right = load_columns(b + d0, m0, count, D - d0, B_STRIDE, BM, DC, B_PAIR_STRIDE)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@device
def store_rows(base, first, count, value, left, scalars, MODE, STRIDE, ROWS, DP, PAIR_STRIDE=0):
    """Store or add (MODE) a block `value` (ROWS, DP) from row `first` on: its rows below `count` and its columns below `left`."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DP)
    pointers = row_pointers(base, first, row, d, STRIDE, PAIR_STRIDE)
    store_or_add(pointers, (row < count - first)[:, None] & (d < left)[None, :], value, scalars, MODE)
