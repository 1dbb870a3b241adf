"""Attention over the blocks of keys that a layout lists, backward (Dao 2023): shapes as in attention_backward.py.

dk and dv have a kernel whose program is BN keys of one column of the layout, dq one whose program is BM queries of one row, so that
no sum meets another program's. For each block that is listed they do 8 and 6 BLOCK^2 D operations.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.attention.attention import head_constants, options
from barellm.cuda.kernels.attention.attention_backward import STATS, attention_stats, stats_of
from barellm.cuda.kernels.attention.attention_tiles import kv_pointer, load_rows, store_rows
from barellm.cuda.kernels.attention.block_sparse_attention import (
    TABLES,
    block_of,
    block_range,
    constants_of,
    grid_of,
    operands_of,
    seen,
    tile_of,
)
from barellm.cuda.kernels.attention.relative_position_bias import add_terms, add_terms_dq
from barellm.cuda.kernels.attention.relative_position_bias_backward import append_gradient
from barellm.cuda.kernels.common import row_strides
from barellm.cuda.lang import device, tl


@device
def layout_attention_dkv(
    dk, dv, q, k, v, dout, stats, columns, masks, relative, scalars, seq,
    UNIT: tl.constexpr, ROOT: tl.constexpr, DK_MODE: tl.constexpr, DV_MODE: tl.constexpr, H: tl.constexpr,
    SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, DK_ROW: tl.constexpr, DV_ROW: tl.constexpr, BLOCK: tl.constexpr,
    LISTS: tl.constexpr, ENTRIES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is BN keys of one head; the queries of the heads that it serves come one head after the other. Scores are
    transposed, (BN, BM)."""
    C: tl.constexpr = H * D
    G: tl.constexpr = H // SHARE
    n0 = tl.program_id(0) * BN
    sequence, group = tl.program_id(1) // G, tl.program_id(1) % G
    token = sequence.to(tl.int64) * seq
    keys = load_rows(kv_pointer(q, k, K_AT) + token * K_ROW + group * D, n0, seq, K_ROW, BN, D, DP)
    values = load_rows(kv_pointer(q, v, V_AT) + token * V_ROW + group * D, n0, seq, V_ROW, BN, D, DP)
    k_sum, v_sum = tl.zeros((BN, DP), tl.float32), tl.zeros((BN, DP), tl.float32)
    key = n0 % BLOCK + tl.arange(0, BN)
    for served in range(0, SHARE):
        head = group * SHARE + served
        begin, end = block_range(columns, head * (LISTS // H) + n0 // BLOCK, BLOCK, BM)
        for i in range(begin, end):
            m0, place, kind = block_of(columns, i, LISTS, ENTRIES, BLOCK, BM)
            queries = load_rows(q + token * Q_ROW + head * D, m0, seq, Q_ROW, BM, D, DP)
            s = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            if COUNT > 0:
                s = add_terms(s, queries, relative + head * D, m0, n0, True, BN, FIRST, COUNT, C, D, DP)
            top, delta, _ = stats_of(stats + STATS * ((sequence * H + head).to(tl.int64) * seq), m0, seq, False, BM)
            sees = seen(masks, kind, (place + tl.arange(0, BM))[None, :], key[:, None], BLOCK)
            p = tl.where(sees, tl.math.exp2(s * UNIT - top[None, :]), 0.0)
            do = load_rows(dout + token * C + head * D, m0, seq, C, BM, D, DP)
            dp = tl.dot(values, tl.trans(do), input_precision="ieee")
            v_sum = tl.dot(p.to(do.dtype), do, v_sum, input_precision="ieee")
            k_sum = tl.dot((p * (dp - delta[None, :])).to(queries.dtype), queries, k_sum, input_precision="ieee")
    store_rows(dk + token * DK_ROW + group * D, n0, seq, k_sum * ROOT, D, scalars, DK_MODE, DK_ROW, BN, DP)
    store_rows(dv + token * DV_ROW + group * D, n0, seq, v_sum, D, scalars, DV_MODE, DV_ROW, BN, DP)


@device
def layout_attention_dq(
    dq, q, k, v, dout, stats, rows, masks, relative, scalars, seq,
    UNIT: tl.constexpr, ROOT: tl.constexpr, DQ_MODE: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    DQ_ROW: tl.constexpr, BLOCK: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is BM queries of one head, as in the forward pass."""
    C: tl.constexpr = H * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token, shared = sequence.to(tl.int64) * seq, head // SHARE * D
    k = kv_pointer(q, k, K_AT) + token * K_ROW + shared
    v = kv_pointer(q, v, V_AT) + token * V_ROW + shared
    queries = load_rows(q + token * Q_ROW + head * D, m0, seq, Q_ROW, BM, D, DP)
    do = load_rows(dout + token * C + head * D, m0, seq, C, BM, D, DP)
    top, delta, _ = stats_of(stats + STATS * (tl.program_id(1).to(tl.int64) * seq), m0, seq, False, BM)
    total = tl.zeros((BM, DP), tl.float32)
    query = m0 % BLOCK + tl.arange(0, BM)
    begin, end = block_range(rows, head * (LISTS // H) + m0 // BLOCK, BLOCK, BN)
    for i in range(begin, end):
        n0, place, kind = block_of(rows, i, LISTS, ENTRIES, BLOCK, BN)
        keys, values = load_rows(k, n0, seq, K_ROW, BN, D, DP), load_rows(v, n0, seq, V_ROW, BN, D, DP)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if COUNT > 0:
            s = add_terms(s, queries, relative + head * D, m0, n0, False, BN, FIRST, COUNT, C, D, DP)
        p = tl.math.exp2(s * UNIT - top[:, None])
        sees = seen(masks, kind, query[:, None], (place + tl.arange(0, BN))[None, :], BLOCK)
        p = tl.where(sees, p, 0.0)
        dp = tl.dot(do, tl.trans(values), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total, input_precision="ieee")
        if COUNT > 0:
            total = add_terms_dq(total, ds, relative + head * D, m0, n0, BN, FIRST, COUNT, C, D, DP)
    store_rows(dq + token * DQ_ROW + head * D, m0, seq, total * ROOT, D, scalars, DQ_MODE, DQ_ROW, BM, DP)


@lowering("layout_attention_backward", starts="dq dk dv drelative", views="q k v dq dk dv", also=TABLES)
def lower_layout_attention_backward(op: Any, c: Lowering) -> None:
    head, constants, operands = head_constants(op), constants_of(op), operands_of(op)
    stats = c.scratch("stats", (*(int(n) for n in op.lse.shape), STATS.value))
    saved = {"stats": stats, "dout": op.dout, "seq": operands["seq"]}
    c.launch(
        attention_stats,
        saved | {"out": op.out, "lse": op.lse, "starts": None},
        head | {"WINDOW": -1, "FOLD": 1, "BOUNDED": 0, "BM": 64},
        grid=grid_of(op, op.heads, 64), writes="stats",
    )  # fmt: skip
    constants |= {"ROOT": 1 / sqrt(head["D"])}
    t = tile_of(op, c, "keys")
    written = {"DK_MODE": mode(op, "dk"), "DV_MODE": mode(op, "dv"), **row_strides(dk=op.dk, dv=op.dv)}
    c.launch(
        layout_attention_dkv,
        operands | saved | {"columns": op.columns, "dk": op.dk, "dv": op.dv},
        constants | written | {"BM": t.queries, "BN": t.keys},
        grid=grid_of(op, op.kv_heads, t.keys), writes="dk dv", **options(t),
    )  # fmt: skip
    t = tile_of(op, c, "queries")
    c.launch(
        layout_attention_dq,
        operands | saved | {"rows": op.rows, "dq": op.dq},
        constants | {"DQ_MODE": mode(op, "dq"), **row_strides(dq=op.dq)} | {"BM": t.queries, "BN": t.keys},
        grid=grid_of(op, op.heads, t.queries), writes="dq", **options(t),
    )  # fmt: skip
    if op.relative is not None:
        append_gradient(c, op, t, operands | {"stats": stats, "dout": op.dout, "rows": op.rows}, constants)
