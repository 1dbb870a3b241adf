"""Block-sparse attention, backward (Dao 2023): names as in attention_backward.py, tables as in block_sparse_attention.py.

dk and dv have a kernel whose program is BN keys of one column of the layout, dq one whose program is BM queries of one row, so that
no program adds to another's sums. They do 8 and 6 BLOCK^2 D operations for each listed block.

SCALE_LOG2: softmax scale times log2(e); STRIDES, OFFSETS: of q, k, v; LISTS, ENTRIES: of a table; TERMS: (first distance with a
relative term, how many have one), `relative` their vectors; `scalars`: the run's, for DKV_MODES, DQ_MODE; NAME_STRIDE: of rows."""

from math import sqrt
from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.attention import block_sparse_attention
from barellm.cuda.kernels.attention.attention import operands_of, options_of
from barellm.cuda.kernels.attention.attention_backward import STATS, attention_stats, load_query_stats
from barellm.cuda.kernels.attention.attention_tiles import kv_pointer, kv_rows, load_rows, store_rows
from barellm.cuda.kernels.attention.block_sparse_attention import TABLES, block_of, block_range, is_visible
from barellm.cuda.kernels.attention.relative_position_bias import add_terms, add_terms_dq
from barellm.cuda.kernels.attention.relative_position_bias_backward import append_drelative
from barellm.cuda.kernels.common import axis_size
from barellm.cuda.lang import device, tl


@device
def block_sparse_attention_dkv(
    dk, dv, q, k, v, dout, stats, columns, masks, relative, scalars, seq,
    SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, BLOCK, LISTS, ENTRIES, TERMS, DKV_MODES, DKV_STRIDES, BM, BN,
):  # fmt: skip
    """dv = p^T dout and dk = scale ds^T q of BN keys of one KV head, over the blocks of queries that `columns` lists for them, one
    head of the group after the other; p = exp(k q^T - lse), ds = p (v dout^T - delta), transposed: (BN, BM).

    Reads q, k, v, dout and stats as attention_dkv; columns, masks (i32): the layout's tables (module). Stores or adds dk, dv (B, T,
    G * D). Grid: blocks of keys, KV heads of all sequences. BM and BN are powers of two that divide BLOCK."""
    C: tl.constexpr = H * D
    G: tl.constexpr = H // GROUP_SIZE
    n0 = tl.program_id(0) * BN
    sequence, group = tl.program_id(1) // G, tl.program_id(1) % G
    token0 = sequence.to(tl.int64) * seq
    k_rows = kv_pointer(q, k, OFFSETS[0]) + token0 * STRIDES[1] + group * D
    v_rows = kv_pointer(q, v, OFFSETS[1]) + token0 * STRIDES[2] + group * D
    keys = load_rows(k_rows, n0, seq, STRIDES[1], BN, D, DP)
    values = load_rows(v_rows, n0, seq, STRIDES[2], BN, D, DP)
    k_sum, v_sum = tl.zeros((BN, DP), tl.float32), tl.zeros((BN, DP), tl.float32)
    key = n0 % BLOCK + tl.arange(0, BN)  # in its block of the layout
    for group_head in range(0, GROUP_SIZE):  # query heads of the group
        head = group * GROUP_SIZE + group_head
        begin, end = block_range(columns, head * (LISTS // H) + n0 // BLOCK, BLOCK, BM)
        for i in range(begin, end):
            m0, offset, kind = block_of(columns, i, BLOCK, LISTS, ENTRIES, BM)
            queries = load_rows(q + token0 * STRIDES[0] + head * D, m0, seq, STRIDES[0], BM, D, DP)
            s = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            if TERMS[1] > 0:
                s = add_terms(s, queries, relative + head * D, m0, n0, True, BN, TERMS, C, D, DP)
            lse, delta, _ = load_query_stats(stats + STATS * ((sequence * H + head).to(tl.int64) * seq), m0, seq, False, BM)
            visible = is_visible(masks, kind, (offset + tl.arange(0, BM))[None, :], key[:, None], BLOCK)
            p = tl.where(visible, tl.math.exp2(s * SCALE_LOG2 - lse[None, :]), 0.0)
            do = load_rows(dout + token0 * C + head * D, m0, seq, C, BM, D, DP)
            dp = tl.dot(values, tl.trans(do), input_precision="ieee")
            v_sum = tl.dot(p.to(do.dtype), do, v_sum, input_precision="ieee")
            k_sum = tl.dot((p * (dp - delta[None, :])).to(queries.dtype), queries, k_sum, input_precision="ieee")
    store_rows(
        dk + token0 * DKV_STRIDES[0] + group * D, n0, seq, k_sum * SOFTMAX_SCALE, D, scalars, DKV_MODES[0], DKV_STRIDES[0], BN, DP
    )  # fmt: skip
    store_rows(dv + token0 * DKV_STRIDES[1] + group * D, n0, seq, v_sum, D, scalars, DKV_MODES[1], DKV_STRIDES[1], BN, DP)


@device
def block_sparse_attention_dq(
    dq, q, k, v, dout, stats, rows, masks, relative, scalars, seq,
    SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, BLOCK, LISTS, ENTRIES, TERMS, DQ_MODE, DQ_STRIDE, BM, BN,
):  # fmt: skip
    """dq = scale ds k (plus the relative terms' part) of BM queries of one head, over the blocks of keys that `rows` lists for
    them, with p = exp(q k^T - lse), ds = p (dout v^T - delta). Operands as those of block_sparse_attention_dkv; stores or adds dq
    (B, T, H * D). Grid: blocks of queries, heads of all sequences."""
    C: tl.constexpr = H * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token0 = sequence.to(tl.int64) * seq
    kv_column = head // GROUP_SIZE * D
    k_rows, v_rows = kv_rows(q, k, v, token0, kv_column, STRIDES, OFFSETS)
    queries = load_rows(q + token0 * STRIDES[0] + head * D, m0, seq, STRIDES[0], BM, D, DP)
    do = load_rows(dout + token0 * C + head * D, m0, seq, C, BM, D, DP)
    lse, delta, _ = load_query_stats(stats + STATS * (tl.program_id(1).to(tl.int64) * seq), m0, seq, False, BM)
    total = tl.zeros((BM, DP), tl.float32)
    query = m0 % BLOCK + tl.arange(0, BM)  # in its block of the layout
    begin, end = block_range(rows, head * (LISTS // H) + m0 // BLOCK, BLOCK, BN)
    for i in range(begin, end):
        n0, offset, kind = block_of(rows, i, BLOCK, LISTS, ENTRIES, BN)
        keys = load_rows(k_rows, n0, seq, STRIDES[1], BN, D, DP)
        values = load_rows(v_rows, n0, seq, STRIDES[2], BN, D, DP)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if TERMS[1] > 0:
            s = add_terms(s, queries, relative + head * D, m0, n0, False, BN, TERMS, C, D, DP)
        p = tl.math.exp2(s * SCALE_LOG2 - lse[:, None])
        visible = is_visible(masks, kind, query[:, None], (offset + tl.arange(0, BN))[None, :], BLOCK)
        p = tl.where(visible, p, 0.0)
        dp = tl.dot(do, tl.trans(values), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total, input_precision="ieee")
        if TERMS[1] > 0:
            total = add_terms_dq(total, ds, relative + head * D, m0, n0, BN, TERMS, C, D, DP)
    store_rows(dq + token0 * DQ_STRIDE + head * D, m0, seq, total * SOFTMAX_SCALE, D, scalars, DQ_MODE, DQ_STRIDE, BM, DP)


@lowering("block_sparse_attention_backward", starts="dq dk dv drelative", views="q k v dq dk dv", also=TABLES)
def lower_block_sparse_attention_backward(op: Any, c: Lowering) -> None:
    """Plan the launches of attention_stats (lse, delta of each query, into scratch), then dk and dv, dq, and the relative terms."""
    constants, operands = block_sparse_attention.block_sparse_constants(op), operands_of(op) | {"seq": axis_size(op.q, 1)}
    stats = c.scratch("stats", (*(int(n) for n in op.lse.shape), STATS.value))
    operands |= {"stats": stats}
    c.launch(
        attention_stats, {"stats": stats, "seq": operands["seq"], "starts": None},
        {name: constants[name] for name in ("H", "D", "DP")} | {"LOCAL": 0, "WINDOW": -1, "FOLD": 1, "BM": 64},
        grid=block_sparse_attention.block_sparse_grid(op, op.heads, 64), writes="stats",
    )  # fmt: skip
    constants |= {"SOFTMAX_SCALE": 1 / sqrt(constants["D"])}
    t = block_sparse_attention.select_block_sparse_config(op, c, "keys")
    written = {"DKV_MODES": (mode(op, "dk"), mode(op, "dv")), "DKV_STRIDES": (op.dk.row_stride, op.dv.row_stride)}
    c.launch(
        block_sparse_attention_dkv, operands, constants | written | {"BM": t.queries, "BN": t.keys},
        grid=block_sparse_attention.block_sparse_grid(op, op.kv_heads, t.keys), **options_of(t),
    )  # fmt: skip
    t = block_sparse_attention.select_block_sparse_config(op, c, "queries")
    c.launch(
        block_sparse_attention_dq, operands, constants | {"BM": t.queries, "BN": t.keys},
        grid=block_sparse_attention.block_sparse_grid(op, op.heads, t.queries), **options_of(t),
    )  # fmt: skip
    if op.relative is not None:
        append_drelative(c, op, t, operands, constants)
