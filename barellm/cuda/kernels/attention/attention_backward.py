"""Attention, backward (Dao 2023): dq, dk and dv from recomputed scores. Shapes and constants as in attention.py.

DKV_MODES, DKV_STRIDES, DQ_MODE, DQ_STRIDE: how results are written, and elements from a row to the next. SCALE_LOG2, SCALE_AT, CAP:
softmax scale times log2(e), the scalar that has it or -1, soft cap or 0; STRIDES, OFFSETS: of q, k, v; LOCAL, WINDOW, FOLD: windows
or documents, paired heads; DROPOUT: (threshold, scale); `starts`, `stream`: documents' first positions, dropout's random stream.

Three kernels. attention_stats has lse and delta = sum(dout * out) of each query, which both others read. attention_dkv keeps a
block of keys and values and their gradients (BN, DC) in registers and streams blocks of queries past them; attention_dq keeps a
block of queries and streams keys. No program adds to another's sums, so no atomics and one order of additions. Streamed blocks are
loaded with cp.async, `num_stages` in flight; Triton places the waits and barriers.

Over the P visible pairs of a head it does 14 P D operations: 4 P D compute scores again, and 2 P D dout v^T."""

from typing import Any

from barellm.cuda import attention_config
from barellm.cuda.attention_config import HEAD_SIZE_CHUNK, MAX_HEAD_SIZE_DKV, AttentionConfig
from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.attention import attention
from barellm.cuda.kernels.attention.attention import dropout_key, dropout_mask
from barellm.cuda.kernels.attention.attention_mask import (
    LOG2_E,
    apply_mask,
    constant_scale,
    first_visible_key,
    score_unit,
    soft_cap,
    softmax_scale,
    visible_queries_end,
)
from barellm.cuda.kernels.attention.attention_tiles import dot_by_chunks, kv_pointer, kv_rows, load_columns, load_rows, store_rows
from barellm.cuda.kernels.attention.hopper_attention_backward import STATS, launch_hopper_backward
from barellm.cuda.kernels.common import axis_size
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def attention_stats(stats, out, dout, lse, starts, scalars, seq, H, D, DP, LOCAL, WINDOW, FOLD, BM):
    """stats (B, H, T, STATS) fp32 of BM queries of a head: lse * log2(e), delta = sum(dout * out) over the head's D columns (which
    the softmax's gradient subtracts), and with a LOCAL mask the first visible key, which fp32 holds exactly up to 2^24.

    Reads out (B, T, H * D) and lse (B, H, T) of the forward pass, and dout, out's gradient. Grid: blocks of queries, heads."""
    C: tl.constexpr = H * D
    m0 = tl.program_id(0) * BM
    first_row = tl.program_id(1).to(tl.int64) * seq
    sequence = tl.program_id(1) // H
    head_offset = sequence.to(tl.int64) * seq * C + tl.program_id(1) % H * D
    out_block = load_rows(out + head_offset, m0, seq, C, BM, D, DP)
    dout_block = load_rows(dout + head_offset, m0, seq, C, BM, D, DP)
    m = m0 + tl.arange(0, BM)  # the program's queries
    stats_ptrs = stats + STATS * (first_row + m)
    tl.store(stats_ptrs, tl.load(lse + first_row + m, mask=m < seq, other=0.0) * LOG2_E, mask=m < seq)
    tl.store(stats_ptrs + 1, tl.sum(out_block.to(tl.float32) * dout_block.to(tl.float32), 1), mask=m < seq)
    if LOCAL:
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        first_key = first_visible_key(starts, scalars, tl.minimum(m, seq - 1), WINDOW, FOLD)
        tl.store(stats_ptrs + 2, first_key.to(tl.float32), mask=m < seq)


@device
def load_query_stats(stats, m0, count, LOCAL, BM):
    """Load (lse / ln 2, delta, first visible key as i32; 0 unless LOCAL) of the queries from m0 on, (BM,) each, zeros beyond
    `count`. One load of as many elements as the program has threads: with fewer, each thread would load all that it needs."""
    m, i = m0 + tl.arange(0, BM), tl.arange(0, STATS)  # queries, fields of their stats
    used = (m < count)[:, None] & (i < 2 + LOCAL)[None, :]
    both = tl.load(stats + STATS * m[:, None] + i[None, :], mask=used, other=0.0)
    tops, deltas = tl.split(tl.reshape(both, (BM, STATS // 2, 2)))
    top, first_key = tl.split(tops)
    return top, tl.split(deltas)[0], first_key.to(tl.int32)


@device
def add_dkv_of_queries(
    dk, dv, keys, values, rows, m0, n0, count, first, scale_log2, key, head,
    CAUSAL, LOCAL, CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDES, DC, BM, BN,
):  # fmt: skip
    """Add the part of BM queries (from m0 on) to the gradients of BN keys (from n0 on): dv += p dout and dk += ds q, with p =
    exp(k q^T - lse), dp = v dout^T, ds = p (dp - delta). Scores are transposed, (BN, BM), so no operand of a matmul must change its
    layout. Returns dk, dv (BN, DC) fp32, in registers: the DC of D columns from `first` on.

    keys, values: blocks (BN, DP) in registers; None where DC < DP, and the dot products load k_rows and v_rows again in steps of
    DC columns. rows = (q_rows, k_rows, v_rows, dout, stats): pointers to the head's rows in the sequence. Queries beyond `count`
    are zeros and add nothing."""
    q_rows, k_rows, v_rows, dout, stats = rows
    C: tl.constexpr = H * D
    m = m0 + tl.arange(0, BM)  # queries
    # Scores s, from blocks of DP columns, or in steps of DC.
    if DC == DP:
        q = load_rows(q_rows, m0, count, STRIDES[0], BM, D, DP, PAIR_STRIDES[0])
        s = tl.dot(keys, tl.trans(q), input_precision="ieee")
    else:
        q = load_columns(q_rows + first, m0, count, D - first, STRIDES[0], BM, DC, PAIR_STRIDES[0])
        s = dot_by_chunks(k_rows, q_rows, n0, m0, count, STRIDES[1], STRIDES[0], PAIR_STRIDES[1], PAIR_STRIDES[0], BN, BM, D, DC)
    # p, masked.
    lse, delta, first_key = load_query_stats(stats, m0, count, LOCAL, BM)
    if CAP > 0:
        s = soft_cap(s, scale_log2, CAP)
    p = tl.math.exp2(s * score_unit(scale_log2, CAP) - lse[None, :])
    n = n0 + tl.arange(0, BN)[:, None]  # keys
    if CAUSAL:
        p = tl.where(m[None, :] >= n, p, 0.0)
    if LOCAL:
        p = tl.where(first_key[None, :] <= n, p, 0.0)
    # Their gradient dp, and both with dropout.
    if DC == DP:
        dout_block = load_rows(dout, m0, count, C, BM, D, DP)
        dp = tl.dot(values, tl.trans(dout_block), input_precision="ieee")
    else:
        dout_block = load_columns(dout + first, m0, count, D - first, C, BM, DC)
        dp = dot_by_chunks(v_rows, dout, n0, m0, count, STRIDES[2], C, PAIR_STRIDES[1], 0, BN, BM, D, DC)
    p_dropped = p  # what v was multiplied by
    if DROPOUT[0] > 0:
        kept = tl.trans(dropout_mask(key, head, m0, n0, H, BM, BN, DROPOUT[0]))
        p_dropped = tl.where(kept, p * DROPOUT[1], 0.0)
        dp = tl.where(kept, dp * DROPOUT[1], 0.0)
    dv = tl.dot(p_dropped.to(dout_block.dtype), dout_block, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])  # of p before dropout: its multipliers are in dp
    if CAP > 0:
        ds = ds * (1.0 - s * s)  # the slope of tanh
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@device
def attention_dkv(
    dk, dv, q, k, v, dout, stats, starts, scalars, seq, stream,
    SCALE_LOG2, SCALE_AT, CAP, DROPOUT, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, CAUSAL, LOCAL, WINDOW, FOLD, SOFTMAX_SCALE,
    DKV_MODES, DKV_STRIDES, DC, BM, BN,
):  # fmt: skip
    """dv = p^T dout and dk = scale ds^T q of BN keys of one KV head, summed over the queries of its GROUP_SIZE query heads.

    Reads q, k, v (as attention_forward), dout (B, T, H * D) and stats (attention_stats wrote them). Stores or adds dk, dv (B, T, G
    * D). Grid: blocks of BN keys, KV heads of all sequences, chunks of DC columns: of wide heads a program has DC < DP columns and
    computes the scores again, so that nothing DP wide is in registers. BM, BN, DC, DP: powers of two.

    Causal: it visits the queries from the block's first key on, those of the diagonal with the mask; else all queries without one:
    gradients of keys beyond the last are not written. Over a group of query heads the sum is one chain, in their order, in one loop
    with the mask everywhere: nested loops would keep the addresses of both of their parts in registers, which wide heads lack."""
    C: tl.constexpr = H * D
    G: tl.constexpr = H // GROUP_SIZE
    n0 = tl.program_id(0) * BN
    sequence, group = tl.program_id(1) // G, tl.program_id(1) % G
    K_PAIR_STRIDE: tl.constexpr = (FOLD - 1) * G * D
    PAIR_STRIDES: tl.constexpr = ((FOLD - 1) * C, K_PAIR_STRIDE)
    token0 = sequence.to(tl.int64) * (seq // FOLD)
    # Pointers to the sequence's rows of the group, and its keys and values in registers.
    first = 0  # column of the program's chunk
    if DC < DP:
        first = tl.program_id(2) * DC
    k_rows = kv_pointer(q, k, OFFSETS[0]) + token0 * STRIDES[1] + group * D
    v_rows = kv_pointer(q, v, OFFSETS[1]) + token0 * STRIDES[2] + group * D
    q += token0 * STRIDES[0] + group * (GROUP_SIZE * D)
    dout += sequence.to(tl.int64) * seq * C + group * (GROUP_SIZE * D)
    stats += STATS * (tl.program_id(1).to(tl.int64) * GROUP_SIZE * seq)  # of the group's first query head
    key = dropout_key(scalars, sequence, stream, DROPOUT)
    scale_log2 = softmax_scale(scalars, SCALE_LOG2, SCALE_AT, LOG2_E)
    keys, values = None, None
    if DC == DP:
        keys = load_rows(k_rows, n0, seq, STRIDES[1], BN, D, DP, K_PAIR_STRIDE)
        values = load_rows(v_rows, n0, seq, STRIDES[2], BN, D, DP, K_PAIR_STRIDE)
    k_sum, v_sum = tl.zeros((BN, DC), tl.float32), tl.zeros((BN, DC), tl.float32)
    # The queries that see any of the keys: [begin, stop).
    begin, stop = 0, seq
    if CAUSAL:
        begin = n0 // BM * BM  # queries before the first key do not see it
    if LOCAL:
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        stop = visible_queries_end(starts, scalars, tl.minimum(n0 + BN, seq) - 1, seq, WINDOW, FOLD)
    if GROUP_SIZE == 1:
        rows = (q, k_rows, v_rows, dout, stats)
        masked_end = 0  # where the queries begin that see all of these keys
        if CAUSAL:
            masked_end = stop if LOCAL else min(tl.cdiv(n0 + BN, BM) * BM, seq)
            for m0 in range(begin, masked_end, BM):
                k_sum, v_sum = add_dkv_of_queries(
                    k_sum, v_sum, keys, values, rows, m0, n0, seq, first, scale_log2, key, group,
                    True, LOCAL, CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDES, DC, BM, BN,
                )  # fmt: skip
        if not LOCAL:
            for m0 in range(masked_end, seq, BM):
                k_sum, v_sum = add_dkv_of_queries(
                    k_sum, v_sum, keys, values, rows, m0, n0, seq, first, scale_log2, key, group,
                    False, LOCAL, CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDES, DC, BM, BN,
                )  # fmt: skip
    else:
        count = tl.cdiv(stop - begin, BM)  # blocks of queries of one head
        for i in range(0, GROUP_SIZE * count):
            group_head = i // count  # query head of the group
            m0 = begin + i % count * BM
            head_rows = (q + group_head * D, k_rows, v_rows, dout + group_head * D, stats + STATS * (group_head * seq))
            k_sum, v_sum = add_dkv_of_queries(
                k_sum, v_sum, keys, values, head_rows, m0, n0, seq, first, scale_log2, key, group * GROUP_SIZE + group_head,
                CAUSAL, LOCAL, CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDES, DC, BM, BN,
            )  # fmt: skip
    # Both gradients, to this chunk of columns.
    scale = softmax_scale(scalars, SOFTMAX_SCALE, SCALE_AT, 1.0)
    column = group * D + first
    dk = dk + token0 * DKV_STRIDES[0] + column
    store_rows(dk, n0, seq, k_sum * scale, D - first, scalars, DKV_MODES[0], DKV_STRIDES[0], BN, DC, K_PAIR_STRIDE)
    dv = dv + token0 * DKV_STRIDES[1] + column
    store_rows(dv, n0, seq, v_sum, D - first, scalars, DKV_MODES[1], DKV_STRIDES[1], BN, DC, K_PAIR_STRIDE)


@device
def add_dq_of_keys(
    dq, q, do, k_rows, v_rows, lse, delta, m0, begin, end, count, first_key, scale_log2, key, head,
    MASK, CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDE, BM, BN,
):  # fmt: skip
    """The inner loop of dq: dq += ds k over the keys [begin, end), BN at a time, with p = exp(q k^T - lse), dp = do v^T and ds = p
    (dp - delta). Returns dq (BM, DP) fp32 without the softmax scale.

    In registers: q and do (of dout), blocks (BM, DP); lse, delta (BM,) fp32, of `load_query_stats`; `first_key` (BM,) of a local
    mask, else None. In memory: k_rows, v_rows, the head's keys and values. MASK: of attention_mask.py."""
    for n0 in range(begin, end, BN):
        k = load_rows(k_rows, n0, count, STRIDES[1], BN, D, DP, PAIR_STRIDE)
        v = load_rows(v_rows, n0, count, STRIDES[2], BN, D, DP, PAIR_STRIDE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP > 0:
            s = soft_cap(s, scale_log2, CAP)
        p = tl.math.exp2(s * score_unit(scale_log2, CAP) - lse[:, None])
        query, key_position = m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :]
        p = apply_mask(p, query, key_position, count, MASK, 0.0)
        if first_key is not None:
            p = tl.where(first_key[:, None] <= n0 + tl.arange(0, BN)[None, :], p, 0.0)  # key_position gives sm_80 other code
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if DROPOUT[0] > 0:
            dp = tl.where(dropout_mask(key, head, m0, n0, H, BM, BN, DROPOUT[0]), dp * DROPOUT[1], 0.0)
        ds = p * (dp - delta[:, None])
        if CAP > 0:
            ds = ds * (1.0 - s * s)  # the slope of tanh
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@device
def attention_dq(
    dq, q, k, v, dout, stats, starts, scalars, seq, stream,
    SCALE_LOG2, SCALE_AT, CAP, DROPOUT, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, CAUSAL, LOCAL, WINDOW, FOLD, SOFTMAX_SCALE, DQ_MODE,
    DQ_STRIDE, BM, BN,
):  # fmt: skip
    """dq = scale ds k of BM queries of one head, with the loops over keys of the forward pass.

    Reads q, k, v (as attention_forward), dout (B, T, H * D) and stats (attention_stats wrote them). Stores or adds dq (B, T, H *
    D), rows DQ_STRIDE apart. Grid: blocks of BM queries, the last one first, heads of all sequences. BM, BN, DP: powers of two."""
    C: tl.constexpr = H * D
    Q_PAIR_STRIDE: tl.constexpr = (FOLD - 1) * C
    PAIR_STRIDE: tl.constexpr = (FOLD - 1) * (H // GROUP_SIZE) * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the last block of queries first
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token0 = sequence.to(tl.int64) * (seq // FOLD)  # row of the sequence's first token in q, k, v
    first_row = tl.program_id(1).to(tl.int64) * seq  # and of the head's first query in stats
    kv_column = head // GROUP_SIZE * D
    k_rows, v_rows = kv_rows(q, k, v, token0, kv_column, STRIDES, OFFSETS)
    key = dropout_key(scalars, sequence, stream, DROPOUT)
    scale_log2 = softmax_scale(scalars, SCALE_LOG2, SCALE_AT, LOG2_E)
    queries = load_rows(q + token0 * STRIDES[0] + head * D, m0, seq, STRIDES[0], BM, D, DP, Q_PAIR_STRIDE)
    do = load_rows(dout + sequence.to(tl.int64) * seq * C + head * D, m0, seq, C, BM, D, DP)
    lse, delta, first = load_query_stats(stats + STATS * first_row, m0, seq, LOCAL, BM)
    total = tl.zeros((BM, DP), tl.float32)
    # The keys that the queries see: without a mask those before the block's first query, if causal, then the others.
    begin, first_key = 0, None
    if LOCAL:
        first_key = first
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        begin = first_visible_key(starts, scalars, m0, WINDOW, FOLD) // BN * BN
    stop = seq  # keys [begin, stop) of the second loop
    if CAUSAL:
        total = add_dq_of_keys(
            total, queries, do, k_rows, v_rows, lse, delta, m0, begin, m0, seq, first_key, scale_log2, key, head,
            "none", CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDE, BM, BN,
        )  # fmt: skip
        begin, stop = m0, min(m0 + BM, seq)
    total = add_dq_of_keys(
        total, queries, do, k_rows, v_rows, lse, delta, m0, begin, stop, seq, first_key, scale_log2, key, head,
        "causal" if CAUSAL else "length", CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDE, BM, BN,
    )  # fmt: skip
    scale = softmax_scale(scalars, SOFTMAX_SCALE, SCALE_AT, 1.0)
    dq = dq + token0 * DQ_STRIDE + head * D
    store_rows(dq, m0, seq, total * scale, D, scalars, DQ_MODE, DQ_STRIDE, BM, DP, Q_PAIR_STRIDE)


@lowering("attention_backward", starts="dq dk dv", views="q k v dq dk dv", also={"starts": "i32"})
def lower_attention_backward(op: Any, c: Lowering) -> None:
    """Plan three launches: attention_stats into scratch, then dk and dv, then dq, both from it, warp-specialized if configured."""
    constants = attention.constants_of(op)
    stats = c.scratch("stats", (*(int(n) for n in op.lse.shape), STATS.value))
    rows = 32 if op.bounded else 64  # of 64 with a first key each, the addresses spill on sm_100
    operands = {"stats": stats, "seq": axis_size(op.q, 1, op.fold)}
    c.launch(
        attention_stats, operands, {name: constants[name] for name in ("H", "D", "DP", "LOCAL", "WINDOW", "FOLD")} | {"BM": rows},
        grid=attention.grid_of(op, op.heads, rows), writes="stats",
    )  # fmt: skip
    constants |= {"SOFTMAX_SCALE": constant_scale(op, constants["D"])}
    operands |= attention.operands_of(op) | {"stream": int(op.stream)}
    t = select_backward_config(op, c, "keys", "dk", "dv")
    if t.warp_specialized:
        launch_hopper_backward(op, c, t, stats, constants["SCALE_LOG2"], keys=True)
    else:
        D, DP = constants["D"], constants["DP"]
        DC = DP if MAX_HEAD_SIZE_DKV[op.q.dtype] >= DP else HEAD_SIZE_CHUNK  # columns of a program
        written = {"DKV_MODES": (mode(op, "dk"), mode(op, "dv")), "DKV_STRIDES": (op.dk.row_stride, op.dv.row_stride)}
        c.launch(
            attention_dkv, operands, constants | written | {"BM": t.queries, "BN": t.keys, "DC": DC},
            grid=attention.grid_of(op, op.kv_heads, t.keys, ceil_div(D, DC)), **attention.options_of(t),
        )  # fmt: skip
    t = select_backward_config(op, c, "queries", "dq")
    if t.warp_specialized:
        return launch_hopper_backward(op, c, t, stats, constants["SCALE_LOG2"], keys=False)
    c.launch(
        attention_dq, operands, constants | {"BM": t.queries, "BN": t.keys},
        grid=attention.grid_of(op, op.heads, t.queries), **attention.options_of(t),
    )  # fmt: skip


def select_backward_config(op: Any, c: Lowering, operation: str, *results: str) -> AttentionConfig:
    """The configuration of dk and dv (`operation` "keys") or of dq ("queries"). The warp-specialized kernel only stores: if one of
    the `results` is added to, the default without it."""
    t = attention.config_of(op, c, operation)
    if t.warp_specialized and any(op.modes[name] != "store" for name in results):
        operation = "shared keys" if operation == "keys" and op.heads != op.kv_heads else operation
        return attention_config.select_attention_config(operation, attention.head_sizes(op)[2], op.q.dtype, c.target.arch)
    return t
