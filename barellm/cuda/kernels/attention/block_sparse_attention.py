"""Block-sparse attention, forward: only the blocks of keys that a layout lists for each block of queries (a block mask;
`program/layouts.py` has the tables). Also what the backward pass shares with it. Shapes and groups of constants as in attention.py.

A program is BM queries of one row of the layout, and loops over the entries of its list. BM and BN divide the layout's BLOCK, so a
tile lies in one block and has one kind: all of kind 0 is visible, of kind n > 0 the bits of mask n - 1 are looked up.

`rows` (in backward `columns` too), a table of i32: for each list (a row or column of blocks of one head) its first entry, and the
number of entries behind the last; then for each entry the block of keys (of queries), then each entry's kind. `masks` (kinds,
BLOCK, WORDS): one bit for each (key, query). LISTS, ENTRIES: how many there are. TERMS: the first distance that has
a relative term, and how many have one (0: no terms; relative_position_bias.py); `relative`: their vectors."""

from math import e, log2, sqrt
from typing import Any

from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.attention import attention
from barellm.cuda.kernels.attention.attention import LN_2, online_softmax
from barellm.cuda.kernels.attention.attention_mask import LOWEST
from barellm.cuda.kernels.attention.attention_tiles import kv_rows, load_rows, store_rows
from barellm.cuda.kernels.attention.relative_position_bias import add_terms
from barellm.cuda.kernels.common import axis_size
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div


@device
def block_of(table, i, BLOCK, LISTS, ENTRIES, PART):
    """(first position in the sequence, offset in its block, the block's kind) of tile i (PART positions) of the listed blocks."""
    entry, offset = i // (BLOCK // PART), i % (BLOCK // PART) * PART
    entry_ptr = table + LISTS + 1 + entry  # of the entry's block; its kind is ENTRIES on
    return tl.load(entry_ptr) * BLOCK + offset, offset, tl.load(entry_ptr + ENTRIES)


@device
def block_range(table, row, BLOCK, PART):
    """[begin, end) of the tiles, of PART positions each, of the blocks in list `row`: arguments of `block_of`."""
    return tl.load(table + row) * (BLOCK // PART), tl.load(table + row + 1) * (BLOCK // PART)


@device
def is_visible(masks, kind, query, key, BLOCK):
    """Which of the queries see which of the keys of a block of this `kind`. query, key: offsets in the block, which broadcast to a
    tile. For kind 0 nothing is loaded and all is visible: a branch would make each wgmma wait for the one before."""
    WORDS: tl.constexpr = (BLOCK + 31) // 32  # of 32 query bits, for a key
    pointers = masks + ((kind - 1) * BLOCK + key) * WORDS + query // 32
    return (tl.load(pointers, mask=(query >= 0) & (key >= 0) & (kind > 0), other=-1) >> (query % 32)) & 1 != 0


@device
def block_sparse_attention_forward(
    out, lse, q, k, v, rows, masks, relative, seq,
    SCALE_LOG2, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, BLOCK, LISTS, ENTRIES, TERMS, BM, BN,
):  # fmt: skip
    """out = softmax(scale q k^T + relative terms) v and lse of BM queries of one head, over the blocks of keys that `rows` lists.

    Reads q, k, v and writes out, lse as attention_forward; rows, masks (i32): the layout's tables, of the host. Grid: blocks of
    queries, heads of all sequences; the last queries, whose lists are the longest if any are, start first. BM, BN divide BLOCK."""
    C: tl.constexpr = H * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the last block of queries first
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token0 = sequence.to(tl.int64) * seq
    kv_column = head // GROUP_SIZE * D
    k_rows, v_rows = kv_rows(q, k, v, token0, kv_column, STRIDES, OFFSETS)
    queries = load_rows(q + token0 * STRIDES[0] + head * D, m0, seq, STRIDES[0], BM, D, DP)
    acc, row_sum = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    row_max = tl.full((BM,), LOWEST, tl.float32)
    query = m0 % BLOCK + tl.arange(0, BM)  # in its block of the layout
    begin, end = block_range(rows, head * (LISTS // H) + m0 // BLOCK, BLOCK, BN)
    for i in range(begin, end):
        n0, offset, kind = block_of(rows, i, BLOCK, LISTS, ENTRIES, BN)
        keys = load_rows(k_rows, n0, seq, STRIDES[1], BN, D, DP)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if TERMS[1] > 0:
            s = add_terms(s, queries, relative + head * D, m0, n0, False, BN, TERMS, C, D, DP)
        visible = is_visible(masks, kind, query[:, None], (offset + tl.arange(0, BN))[None, :], BLOCK)
        s = tl.where(visible, s, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax(s, row_max, row_sum, SCALE_LOG2)
        values = load_rows(v_rows, n0, seq, STRIDES[2], BN, D, DP)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    m = m0 + tl.arange(0, BM)
    tl.store(lse + tl.program_id(1).to(tl.int64) * seq + m, (row_max + tl.math.log2(row_sum)) * LN_2, mask=m < seq)
    store_rows(out + token0 * C + head * D, m0, seq, acc / row_sum[:, None], D, None, 0, C, BM, DP)


def block_sparse_constants(op: Any) -> dict[str, Any]:
    """The constants of an op: those of its heads and scale, of the layout, and TERMS."""
    layout, (first, last) = op.layout, op.distances
    tables = {"BLOCK": layout.block, "LISTS": layout.heads * layout.rows, "ENTRIES": len(layout.keys)}
    heads = attention.head_constants(op)
    return heads | tables | {"SCALE_LOG2": log2(e) / sqrt(heads["D"]), "TERMS": (first, last + 1 - first)}


def select_block_sparse_config(op: Any, c: Lowering, operation: str) -> AttentionConfig:
    """The configuration of attention with a local mask, with tiles at most as large as the largest power of two that divides the
    layout's block. With relative terms tiles are squares of 32, or in fp32 of 16 with four warps: larger ones spill."""
    t = attention.masked_config_of(op, c, operation)
    max_size, warps = op.layout.block & -op.layout.block, t.num_warps
    if op.relative is not None:
        size, warps = (16, 4) if op.q.dtype == "fp32" else (32, t.num_warps)
        max_size = min(max_size, t.queries, t.keys, size)
    return AttentionConfig(min(t.queries, max_size), min(t.keys, max_size), warps, t.num_stages)


def block_sparse_grid(op: Any, heads: int, size: int) -> Any:
    """The grid: blocks of `size` positions of a sequence, `heads` of all sequences."""
    batch, length = axis_size(op.q, 0), axis_size(op.q, 1)
    return lambda s: (ceil_div(length(s), size), batch(s) * heads)


TABLES = {"rows": "i32", "columns": "i32", "masks": "i32", "relative": PLANES}


@lowering("block_sparse_attention", views="q k v", also=TABLES)
def lower_block_sparse_attention(op: Any, c: Lowering) -> None:
    t = select_block_sparse_config(op, c, "forward")
    c.launch(
        block_sparse_attention_forward, attention.operands_of(op) | {"seq": axis_size(op.q, 1)},
        block_sparse_constants(op) | {"BM": t.queries, "BN": t.keys},
        grid=block_sparse_grid(op, op.heads, t.queries), **attention.options_of(t),
    )  # fmt: skip
