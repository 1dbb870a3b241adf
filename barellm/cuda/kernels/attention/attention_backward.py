"""Attention, causal or over all keys, backward (Dao 2023): shapes as in attention.py, and dq and dout like q, dk and dv like k.

Over the P pairs of a head that are seen it does 14 P D operations, of which 4 P D compute scores again and 2 P D the products
dout v^T a second time: keys and queries each have a kernel of their own, so that no sum meets another program's.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from barellm.cuda import choices
from barellm.cuda.choices import PIECE, WHOLE_HEAD, AttentionTile, padded
from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.attention.attention import (
    LOG2_E,
    blocks,
    constants_of,
    kept,
    operands_of,
    options,
    paired_constants,
    sequence_length,
    tile_of,
)
from barellm.cuda.kernels.attention.attention_mask import (
    MASK_CAUSAL,
    MASK_LENGTH,
    MASK_NONE,
    apply_mask,
    first_visible_key,
    softmax_scale_of,
    visible_queries_end,
)
from barellm.cuda.kernels.attention.attention_tiles import (
    dot_over_columns,
    kv_pointer,
    load_columns,
    load_rows,
    store_rows,
)
from barellm.cuda.kernels.attention.hopper_attention_backward import STATS, launch_backward
from barellm.cuda.kernels.common import SAMPLE, row_strides
from barellm.cuda.kernels.pointwise.random import sample_key
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def attention_stats(
    stats, out, dout, lse, starts, scalars, seq, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WINDOW: tl.constexpr, FOLD: tl.constexpr, BOUNDED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute for each query lse in units of ln 2, and delta, the sum of dout * out over a head's columns. For bounded queries
    also the first key that each sees: fp32 holds it exactly up to 2^24."""
    C: tl.constexpr = H * D
    m0 = tl.program_id(0) * BM
    row = tl.program_id(1).to(tl.int64) * seq
    start = (tl.program_id(1) // H).to(tl.int64) * seq * C + tl.program_id(1) % H * D
    a, b = load_rows(out + start, m0, seq, C, BM, D, DP), load_rows(dout + start, m0, seq, C, BM, D, DP)
    m = m0 + tl.arange(0, BM)
    to = stats + STATS * (row + m)
    tl.store(to, tl.load(lse + row + m, mask=m < seq, other=0.0) * LOG2_E, mask=m < seq)
    tl.store(to + 1, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=m < seq)
    if BOUNDED:
        if starts is not None:
            starts += (tl.program_id(1) // H).to(tl.int64) * (seq // FOLD)
        least = first_visible_key(starts, scalars, tl.minimum(m, seq - 1), WINDOW, FOLD)
        tl.store(to + 2, least.to(tl.float32), mask=m < seq)


@device
def stats_of(stats, m0, count, BOUNDED: tl.constexpr, BM: tl.constexpr):
    """(BM,) each, zeros beyond `count`: lse, delta, and the first key as i32, if BOUNDED. In one load of as many elements as the
    program has threads; of fewer, Triton would have each thread load all that its scores need: 16 of a block of 64, and twice."""
    m, i = m0 + tl.arange(0, BM), tl.arange(0, STATS)
    used = (m < count)[:, None] & (i < 2 + BOUNDED)[None, :]
    both = tl.load(stats + STATS * m[:, None] + i[None, :], mask=used, other=0.0)
    tops, deltas = tl.split(tl.reshape(both, (BM, STATS // 2, 2)))
    top, least = tl.split(tops)
    return top, tl.split(deltas)[0], least.to(tl.int32)


@device
def add_queries(
    dk, dv, k, v, q_rows, k_rows, v_rows, dout, stats, m0, n0, count, first, unit, key, head,
    CAUSAL: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, Q_APART: tl.constexpr, K_APART: tl.constexpr,
    BOUNDED: tl.constexpr, DC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the part of the queries from m0 on to the DC columns of dk and dv (BN, DC) from `first` on. Scores are transposed, (BN,
    BM), so no operand of a product must change its layout. Queries beyond `count` are zeros, and so is their part."""
    C: tl.constexpr = H * D
    m = m0 + tl.arange(0, BM)
    if DC == DP:
        q = load_rows(q_rows, m0, count, Q_ROW, BM, D, DP, Q_APART)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        q = load_columns(q_rows + first, m0, count, D - first, Q_ROW, BM, DC, Q_APART)
        s = dot_over_columns(k_rows, q_rows, n0, m0, count, K_ROW, Q_ROW, K_APART, Q_APART, BN, BM, D, DC)
    top, delta, least = stats_of(stats, m0, count, BOUNDED, BM)
    p = tl.math.exp2(s * unit - top[None, :])
    if CAUSAL:
        p = tl.where(m[None, :] >= n0 + tl.arange(0, BN)[:, None], p, 0.0)
    if BOUNDED:
        p = tl.where(least[None, :] <= n0 + tl.arange(0, BN)[:, None], p, 0.0)
    if DC == DP:
        do = load_rows(dout, m0, count, C, BM, D, DP)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    else:
        do = load_columns(dout + first, m0, count, D - first, C, BM, DC)
        dp = dot_over_columns(v_rows, dout, n0, m0, count, V_ROW, C, K_APART, 0, BN, BM, D, DC)
    weighed = p
    if THRESHOLD > 0:
        keeps = tl.trans(kept(key, head, m0, n0, H, BM, BN, THRESHOLD))
        weighed, dp = tl.where(keeps, p * SCALE, 0.0), tl.where(keeps, dp * SCALE, 0.0)
    dv = tl.dot(weighed.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@device
def attention_dkv(
    dk, dv, q, k, v, dout, stats, starts, scalars, seq, stream, UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    ROOT: tl.constexpr, DK_MODE: tl.constexpr, DV_MODE: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    DK_ROW: tl.constexpr, DV_ROW: tl.constexpr, WINDOW: tl.constexpr, HEAT: tl.constexpr, CAUSAL: tl.constexpr,
    FOLD: tl.constexpr, BOUNDED: tl.constexpr, DC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is a block of BN keys of one head; it visits the queries from the block's first key on, with the mask those beside
    its keys, or all queries with no mask: what keys beyond the last one get is not written. Of wide heads it does DC columns, axis
    2 of the grid, and finds the scores anew: nothing DP wide is in registers.

    Of several heads that it serves the sum is one chain, in their order, in one loop with the mask everywhere: a loop in a loop
    would keep the addresses of both of its parts in registers, which heads of 128 columns do not have. So is what windows and
    documents leave: it is short."""
    C: tl.constexpr = H * D
    G: tl.constexpr = H // SHARE
    n0 = tl.program_id(0) * BN
    sequence, group = tl.program_id(1) // G, tl.program_id(1) % G
    Q_APART: tl.constexpr = (FOLD - 1) * C
    K_APART: tl.constexpr = (FOLD - 1) * G * D
    token = sequence.to(tl.int64) * (seq // FOLD)
    first = 0
    if DC < DP:
        first = tl.program_id(2) * DC
    k = kv_pointer(q, k, K_AT) + token * K_ROW + group * D
    v = kv_pointer(q, v, V_AT) + token * V_ROW + group * D
    q += token * Q_ROW + group * (SHARE * D)
    dout += sequence.to(tl.int64) * seq * C + group * (SHARE * D)
    stats += STATS * (tl.program_id(1).to(tl.int64) * SHARE * seq)
    key = (0, 0)
    if THRESHOLD > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    unit = UNIT
    if HEAT >= 0:
        unit = softmax_scale_of(scalars, HEAT, LOG2_E)
    keys, values = None, None
    if DC == DP:
        keys, values = (
            load_rows(k, n0, seq, K_ROW, BN, D, DP, K_APART),
            load_rows(v, n0, seq, V_ROW, BN, D, DP, K_APART),
        )
    k_sum, v_sum = tl.zeros((BN, DC), tl.float32), tl.zeros((BN, DC), tl.float32)
    begin, stop = 0, seq
    if CAUSAL:
        begin = n0 // BM * BM
    if BOUNDED:
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        stop = visible_queries_end(starts, scalars, tl.minimum(n0 + BN, seq) - 1, seq, WINDOW, FOLD)
    if BOUNDED and SHARE == 1:
        for m0 in range(begin, stop, BM):
            k_sum, v_sum = add_queries(
                k_sum, v_sum, keys, values, q, k, v, dout, stats, m0, n0, seq, first, unit, key, group,
                True, THRESHOLD, SCALE, H, D, DP, Q_ROW, K_ROW, V_ROW, Q_APART, K_APART, BOUNDED, DC, BM, BN,
            )  # fmt: skip
    elif SHARE == 1:
        clear = 0
        if CAUSAL:
            clear = min(tl.cdiv(n0 + BN, BM) * BM, seq)
            for m0 in range(begin, clear, BM):
                k_sum, v_sum = add_queries(
                    k_sum, v_sum, keys, values, q, k, v, dout, stats, m0, n0, seq, first, unit, key, group,
                    True, THRESHOLD, SCALE, H, D, DP, Q_ROW, K_ROW, V_ROW, Q_APART, K_APART, BOUNDED, DC, BM, BN,
                )  # fmt: skip
        for m0 in range(clear, seq, BM):
            k_sum, v_sum = add_queries(
                k_sum, v_sum, keys, values, q, k, v, dout, stats, m0, n0, seq, first, unit, key, group,
                False, THRESHOLD, SCALE, H, D, DP, Q_ROW, K_ROW, V_ROW, Q_APART, K_APART, BOUNDED, DC, BM, BN,
            )  # fmt: skip
    else:
        count = tl.cdiv(stop - begin, BM)
        for i in range(0, SHARE * count):
            served, m0 = i // count, begin + i % count * BM
            k_sum, v_sum = add_queries(
                k_sum, v_sum, keys, values, q + served * D, k, v, dout + served * D, stats + STATS * (served * seq),
                m0, n0, seq, first, unit, key, group * SHARE + served,
                CAUSAL, THRESHOLD, SCALE, H, D, DP, Q_ROW, K_ROW, V_ROW, Q_APART, K_APART, BOUNDED, DC, BM, BN,
            )  # fmt: skip
    root = ROOT
    if HEAT >= 0:
        root = softmax_scale_of(scalars, HEAT, 1.0)
    at = group * D + first
    store_rows(dk + token * DK_ROW + at, n0, seq, k_sum * root, D - first, scalars, DK_MODE, DK_ROW, BN, DC, K_APART)
    store_rows(dv + token * DV_ROW + at, n0, seq, v_sum, D - first, scalars, DV_MODE, DV_ROW, BN, DC, K_APART)


@device
def add_keys(
    dq, q, do, k_rows, v_rows, top, delta, m0, begin, end, count, least, unit, key, head,
    MASK: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the part of the keys [begin, end) to dq (BM, DP)."""
    for n0 in range(begin, end, BN):
        k = load_rows(k_rows, n0, count, K_ROW, BN, D, DP, APART)
        v = load_rows(v_rows, n0, count, V_ROW, BN, D, DP, APART)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * unit - top[:, None])
        p = apply_mask(p, m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :], count, MASK, 0.0)
        if least is not None:
            p = tl.where(least[:, None] <= n0 + tl.arange(0, BN)[None, :], p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if THRESHOLD > 0:
            dp = tl.where(kept(key, head, m0, n0, H, BM, BN, THRESHOLD), dp * SCALE, 0.0)
        dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    return dq


@device
def attention_dq(
    dq, q, k, v, dout, stats, starts, scalars, seq, stream, UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    ROOT: tl.constexpr, DQ_MODE: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, DQ_ROW: tl.constexpr,
    WINDOW: tl.constexpr, HEAT: tl.constexpr, CAUSAL: tl.constexpr, FOLD: tl.constexpr, BOUNDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """A program is a block of BM queries of one head, as in the forward pass."""
    C: tl.constexpr = H * D
    Q_APART: tl.constexpr = (FOLD - 1) * C
    APART: tl.constexpr = (FOLD - 1) * (H // SHARE) * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token, row = sequence.to(tl.int64) * (seq // FOLD), tl.program_id(1).to(tl.int64) * seq
    shared = head // SHARE * D
    k = kv_pointer(q, k, K_AT) + token * K_ROW + shared
    v = kv_pointer(q, v, V_AT) + token * V_ROW + shared
    key = (0, 0)
    if THRESHOLD > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    unit = UNIT
    if HEAT >= 0:
        unit = softmax_scale_of(scalars, HEAT, LOG2_E)
    queries = load_rows(q + token * Q_ROW + head * D, m0, seq, Q_ROW, BM, D, DP, Q_APART)
    do = load_rows(dout + sequence.to(tl.int64) * seq * C + head * D, m0, seq, C, BM, D, DP)
    top, delta, first = stats_of(stats + STATS * row, m0, seq, BOUNDED, BM)
    total = tl.zeros((BM, DP), tl.float32)
    begin, least = 0, None
    if BOUNDED:
        least = first
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        begin = first_visible_key(starts, scalars, m0, WINDOW, FOLD) // BN * BN
    stop = seq
    if CAUSAL:
        total = add_keys(
            total, queries, do, k, v, top, delta, m0, begin, m0, seq, least, unit, key, head,
            MASK_NONE, THRESHOLD, SCALE, H, D, DP, K_ROW, V_ROW, APART, BM, BN,
        )  # fmt: skip
        begin, stop = m0, min(m0 + BM, seq)
    total = add_keys(
        total, queries, do, k, v, top, delta, m0, begin, stop, seq, least, unit, key, head,
        MASK_CAUSAL if CAUSAL else MASK_LENGTH, THRESHOLD, SCALE, H, D, DP, K_ROW, V_ROW, APART, BM, BN,
    )  # fmt: skip
    root = ROOT
    if HEAT >= 0:
        root = softmax_scale_of(scalars, HEAT, 1.0)
    store_rows(dq + token * DQ_ROW + head * D, m0, seq, total * root, D, scalars, DQ_MODE, DQ_ROW, BM, DP, Q_APART)


@lowering("attention_backward", starts="dq dk dv", views="q k v dq dk dv", also={"starts": "i32"})
def lower_attention_backward(op: Any, c: Lowering) -> None:
    constants = constants_of(op)
    head = paired_constants(op)
    stats = c.scratch("stats", (*(int(n) for n in op.lse.shape), STATS.value))
    rows = 32 if constants["BOUNDED"] else 64  # of 64 with a first key each, the addresses spill on sm_100
    operands = {"stats": stats, "dout": op.dout, "seq": sequence_length(op)}
    c.launch(
        attention_stats,
        operands | {"out": op.out, "lse": op.lse, "starts": op.starts},
        head | {name: constants[name] for name in ("WINDOW", "FOLD", "BOUNDED")} | {"BM": rows},
        grid=blocks(op, op.heads, rows), writes="stats",
    )  # fmt: skip
    constants |= {"ROOT": 1 / sqrt(head["D"])}
    operands |= operands_of(op) | {"stream": int(op.stream)}
    t = cut(op, c, "keys", "dk", "dv")
    if t.roles:
        launch_backward(op, c, t, stats, constants["UNIT"], keys=True)
    else:
        launch_keys(op, c, t, operands, constants)
    t = cut(op, c, "queries", "dq")
    if t.roles:
        return launch_backward(op, c, t, stats, constants["UNIT"], keys=False)
    written = {"DQ_MODE": mode(op, "dq"), **row_strides(dq=op.dq)}
    c.launch(
        attention_dq,
        operands | {"dq": op.dq},
        constants | written | {"BM": t.queries, "BN": t.keys},
        grid=blocks(op, op.heads, t.queries), writes="dq", **options(t),
    )  # fmt: skip


def cut(op: Any, c: Lowering, role: str, *results: str) -> AttentionTile:
    """How dk and dv, or dq, are cut. Warps with roles only store: where a result is added to, it is as by default."""
    t = tile_of(op, c, role)
    if t.roles and any(op.modes[name] != "store" for name in results):
        shared = role == "keys" and op.heads != op.kv_heads
        D = int(op.out.shape[-1]) // op.heads
        return choices.attention_tile(f"shared {role}" if shared else role, padded(D), op.q.dtype, c.target.arch)
    return t


def launch_keys(op: Any, c: Lowering, t: AttentionTile, operands: dict[str, Any], constants: dict[str, Any]) -> None:
    """Append dk and dv by warps that all do the same."""
    DP = constants["DP"]
    DC = DP if WHOLE_HEAD[op.q.dtype] >= DP else PIECE
    written = {"DK_MODE": mode(op, "dk"), "DV_MODE": mode(op, "dv"), **row_strides(dk=op.dk, dv=op.dv)}
    c.launch(
        attention_dkv,
        operands | {"dk": op.dk, "dv": op.dv},
        constants | written | {"BM": t.queries, "BN": t.keys, "DC": DC},
        grid=blocks(op, op.kv_heads, t.keys, ceil_div(constants["D"], DC)), writes="dk dv", **options(t),
    )  # fmt: skip
