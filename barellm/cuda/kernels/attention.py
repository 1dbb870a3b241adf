"""Causal attention, forward and backward (Dao et al. 2022, Dao 2023): no T x T in memory, no block above the diagonal visited.

Shapes: qkv, dqkv (B, T, 3C), out, dout (B, T, C), lse (B, H, T) fp32; C = H * D, a head's D columns padded to DP, a power of
two. They are read and written where they lie. Scores are kept in units of ln 2, so that each probability is one fma and one exp2.

Over the P = T (T + 1) / 2 pairs of a head the forward pass does 4 P D operations; the backward pass 14 P D, of which 4 P D compute
scores again and 2 P D the products dout v^T a second time: keys and queries each have a kernel of their own, so that no sum meets
another program's. Moved are qkv, out and lse once, and keys and values from the second cache T / 128 times.
"""

from __future__ import annotations

from math import e, log2, sqrt
from typing import Any

from barellm.cuda import tuning
from barellm.cuda.choices import PIECE, WHOLE_HEAD, AttentionTile, padded
from barellm.cuda.kernel import Lowering, cdiv, lowering, mode
from barellm.cuda.kernels.common import SAMPLE, keep
from barellm.cuda.kernels.random import calls, sample_key, words
from barellm.cuda.lang import constant, device, tl
from barellm.program.ops.random import keep_scale, threshold
from barellm.runtime.lowering import packed

LN_2, LOG2_E = constant(1 / log2(e)), constant(log2(e))
STATS = constant(4)  # numbers a query in the backward pass's scratch, of which two are used


@device
def rows_of(base, first, count, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """(ROWS, DP) of a matrix from row `first` on, zeros beyond `count` rows and D columns."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DP)
    at = base + tl.cast(first, tl.int64) * STRIDE + row[:, None] * STRIDE + d[None, :]
    mask = (row < count - first)[:, None]
    if D < DP:
        mask = mask & (d < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@device
def columns_of(base, first, count, left, STRIDE: tl.constexpr, ROWS: tl.constexpr, DC: tl.constexpr):
    """As `rows_of`, of DC columns, of which a run-time number is `left`."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DC)
    at = base + tl.cast(first, tl.int64) * STRIDE + row[:, None] * STRIDE + d[None, :]
    return tl.load(at, mask=(row < count - first)[:, None] & (d < left)[None, :], other=0.0)


@device
def over_columns(
    a, b, n0, m0, count, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """(BN, BM): rows of a from n0 on times rows of b from m0 on, DC of their D columns at a time."""
    total = tl.zeros((BN, BM), tl.float32)
    for d0 in range(0, D, DC):
        left = columns_of(a + d0, n0, count, D - d0, A_STRIDE, BN, DC)
        right = columns_of(b + d0, m0, count, D - d0, B_STRIDE, BM, DC)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@device
def keep_rows(
    base, first, count, value, left, scalars, MODE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Write (ROWS, DP) where `rows_of` reads, of `left` columns."""
    row, d = tl.arange(0, ROWS), tl.arange(0, DP)
    at = base + tl.cast(first, tl.int64) * STRIDE + row[:, None] * STRIDE + d[None, :]
    keep(at, (row < count - first)[:, None] & (d < left)[None, :], value, scalars, MODE)


@device
def kept(key, head, m0, n0, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, THRESHOLD: tl.constexpr):
    """Which of the probabilities (BM, BN) from (m0, n0) dropout keeps."""
    k0, k1 = key
    row = (m0 + tl.arange(0, BM)) * H + head
    zeros = tl.zeros((BM,), tl.uint32)
    if BN == 16:  # one word of each call
        first, second = calls(k0 + zeros, k1 + zeros, row, n0 // 32 * 16, BM, BN)
        word = tl.where(n0 % 32 == 0, first, second)
    else:
        word = words(k0 + zeros, k1 + zeros, row, n0, BM, BN)
    return word >= THRESHOLD


@device
def visit(
    acc, total, top, q, base, m0, begin, end, count, key, head,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Softmax as it goes over the keys [begin, end): acc (BM, DP), total and top (BM)."""
    C: tl.constexpr = H * D
    for n0 in range(begin, end, BN):
        k = rows_of(base + C, n0, count, 3 * C, BN, D, DP)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAUSAL:
            s = tl.where(m0 + tl.arange(0, BM)[:, None] >= n0 + tl.arange(0, BN)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * UNIT)
        p = tl.math.exp2(s * UNIT - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            p = tl.where(kept(key, head, m0, n0, H, BM, BN, THRESHOLD), p * SCALE, 0.0)
        v = rows_of(base + 2 * C, n0, count, 3 * C, BN, D, DP)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@device
def attention_forward(
    out, lse, qkv, scalars, seq, stream,
    UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is a block of queries of one head; the last block has the most keys and starts first. Only keys from the block's
    first query on need the mask."""
    C: tl.constexpr = H * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token = sequence.to(tl.int64) * seq
    base = qkv + token * (3 * C) + head * D
    key = (0, 0)
    if THRESHOLD > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    q = rows_of(base, m0, seq, 3 * C, BM, D, DP)
    acc, total = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    acc, total, top = visit(
        acc, total, top, q, base, m0, 0, m0, seq, key, head, False, UNIT, THRESHOLD, SCALE, H, D, DP, BM, BN
    )
    acc, total, top = visit(
        acc, total, top, q, base, m0, m0, min(m0 + BM, seq), seq, key, head, True, UNIT, THRESHOLD, SCALE, H, D, DP, BM, BN
    )  # fmt: skip
    m = m0 + tl.arange(0, BM)
    tl.store(lse + tl.program_id(1).to(tl.int64) * seq + m, (top + tl.math.log2(total)) * LN_2, mask=m < seq)
    keep_rows(out + token * C + head * D, m0, seq, acc / total[:, None], D, scalars, 0, C, BM, DP)


@device
def attention_stats(stats, out, dout, lse, seq, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """Of each query lse in units of ln 2, and delta, the sum of dout * out over a head's columns."""
    C: tl.constexpr = H * D
    m0 = tl.program_id(0) * BM
    row = tl.program_id(1).to(tl.int64) * seq
    start = (tl.program_id(1) // H).to(tl.int64) * seq * C + tl.program_id(1) % H * D
    a, b = rows_of(out + start, m0, seq, C, BM, D, DP), rows_of(dout + start, m0, seq, C, BM, D, DP)
    m = m0 + tl.arange(0, BM)
    to = stats + STATS * (row + m)
    tl.store(to, tl.load(lse + row + m, mask=m < seq, other=0.0) * LOG2_E, mask=m < seq)
    tl.store(to + 1, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=m < seq)


@device
def stats_of(stats, m0, count, BM: tl.constexpr):
    """(BM,) each, zeros beyond `count`. In one load of as many elements as the program has threads; of fewer, Triton would have
    each thread load all that its scores need: 16 of a block of 64, and twice."""
    m, i = m0 + tl.arange(0, BM), tl.arange(0, STATS)
    both = tl.load(stats + STATS * m[:, None] + i[None, :], mask=(m < count)[:, None] & (i < 2)[None, :], other=0.0)
    tops, deltas = tl.split(tl.reshape(both, (BM, STATS // 2, 2)))
    return tl.split(tops)[0], tl.split(deltas)[0]


@device
def add_queries(
    dk, dv, k, v, base, dout, stats, n0, begin, end, count, first, key, head,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the queries [begin, end) give to the DC columns of dk and dv (BN, DC) from `first` on. Scores are transposed, (BN, BM):
    no product's operand is then one that must change its layout. Queries beyond `count` are zeros, and so is what they give."""
    C: tl.constexpr = H * D
    for m0 in range(begin, end, BM):
        m = m0 + tl.arange(0, BM)
        if DC == DP:
            q = rows_of(base, m0, count, 3 * C, BM, D, DP)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
        else:
            q = columns_of(base + first, m0, count, D - first, 3 * C, BM, DC)
            s = over_columns(base + C, base, n0, m0, count, 3 * C, 3 * C, BN, BM, D, DC)
        top, delta = stats_of(stats, m0, count, BM)
        p = tl.math.exp2(s * UNIT - top[None, :])
        if CAUSAL:
            p = tl.where(m[None, :] >= n0 + tl.arange(0, BN)[:, None], p, 0.0)
        if DC == DP:
            do = rows_of(dout, m0, count, C, BM, D, DP)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        else:
            do = columns_of(dout + first, m0, count, D - first, C, BM, DC)
            dp = over_columns(base + 2 * C, dout, n0, m0, count, 3 * C, C, BN, BM, D, DC)
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
    dqkv, qkv, dout, stats, scalars, seq, stream, UNIT: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ROOT: tl.constexpr, MODE: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is a block of BN keys of one head; it visits the queries from the block's first key on, with the mask those beside
    its keys. Of wide heads it does DC columns, axis 2 of the grid, and finds the scores anew: nothing DP wide is in registers."""
    C: tl.constexpr = H * D
    n0 = tl.program_id(0) * BN
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token, row = sequence.to(tl.int64) * seq, tl.program_id(1).to(tl.int64) * seq
    first = 0
    if DC < DP:
        first = tl.program_id(2) * DC
    base, to = qkv + token * (3 * C) + head * D, dqkv + token * (3 * C) + head * D + first
    dout += token * C + head * D
    stats += STATS * row
    key = (0, 0)
    if THRESHOLD > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    k, v = None, None
    if DC == DP:
        k, v = rows_of(base + C, n0, seq, 3 * C, BN, D, DP), rows_of(base + 2 * C, n0, seq, 3 * C, BN, D, DP)
    dk, dv = tl.zeros((BN, DC), tl.float32), tl.zeros((BN, DC), tl.float32)
    clear = min(tl.cdiv(n0 + BN, BM) * BM, seq)
    dk, dv = add_queries(
        dk, dv, k, v, base, dout, stats, n0, n0 // BM * BM, clear, seq, first, key, head,
        True, UNIT, THRESHOLD, SCALE, H, D, DP, DC, BM, BN,
    )  # fmt: skip
    dk, dv = add_queries(
        dk, dv, k, v, base, dout, stats, n0, clear, seq, seq, first, key, head,
        False, UNIT, THRESHOLD, SCALE, H, D, DP, DC, BM, BN,
    )  # fmt: skip
    keep_rows(to + C, n0, seq, dk * ROOT, D - first, scalars, MODE, 3 * C, BN, DC)
    keep_rows(to + 2 * C, n0, seq, dv, D - first, scalars, MODE, 3 * C, BN, DC)


@device
def add_keys(
    dq, q, do, base, top, delta, m0, begin, end, count, key, head,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the keys [begin, end) give to dq (BM, DP)."""
    C: tl.constexpr = H * D
    for n0 in range(begin, end, BN):
        k = rows_of(base + C, n0, count, 3 * C, BN, D, DP)
        v = rows_of(base + 2 * C, n0, count, 3 * C, BN, D, DP)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * UNIT - top[:, None])
        if CAUSAL:
            p = tl.where(m0 + tl.arange(0, BM)[:, None] >= n0 + tl.arange(0, BN)[None, :], p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if THRESHOLD > 0:
            dp = tl.where(kept(key, head, m0, n0, H, BM, BN, THRESHOLD), dp * SCALE, 0.0)
        dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    return dq


@device
def attention_dq(
    dqkv, qkv, dout, stats, scalars, seq, stream, UNIT: tl.constexpr,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ROOT: tl.constexpr, MODE: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program is a block of BM queries of one head, as in the forward pass."""
    C: tl.constexpr = H * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token, row = sequence.to(tl.int64) * seq, tl.program_id(1).to(tl.int64) * seq
    base = qkv + token * (3 * C) + head * D
    key = (0, 0)
    if THRESHOLD > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    q, do = rows_of(base, m0, seq, 3 * C, BM, D, DP), rows_of(dout + token * C + head * D, m0, seq, C, BM, D, DP)
    top, delta = stats_of(stats + STATS * row, m0, seq, BM)
    dq = tl.zeros((BM, DP), tl.float32)
    dq = add_keys(
        dq, q, do, base, top, delta, m0, 0, m0, seq, key, head, False, UNIT, THRESHOLD, SCALE, H, D, DP, BM, BN
    )
    dq = add_keys(
        dq, q, do, base, top, delta, m0, m0, min(m0 + BM, seq), seq, key, head, True, UNIT, THRESHOLD, SCALE, H, D, DP, BM, BN
    )  # fmt: skip
    keep_rows(dqkv + token * (3 * C) + head * D, m0, seq, dq * ROOT, D, scalars, MODE, 3 * C, BM, DP)


def head_constants(op: Any) -> dict[str, Any]:
    D = int(op.out.shape[-1]) // op.heads
    return {"H": op.heads, "D": D, "DP": padded(D)}


def constants_of(op: Any) -> dict[str, Any]:
    head = head_constants(op)
    rate = {"THRESHOLD": threshold(op.rate), "SCALE": keep_scale(op.rate)}
    return head | rate | {"UNIT": log2(e) / sqrt(head["D"])}


def blocks(op: Any, size: int, pieces: int = 1) -> Any:
    """The grid: blocks of a sequence, heads of all sequences, pieces of a head."""
    return lambda s: (cdiv(s.seq, size), s.batch * op.heads, pieces)


def seq(s: Any) -> int:
    return s.seq


def tile_of(op: Any, c: Lowering, role: str) -> AttentionTile:
    """How a kernel is cut: as it was tuned for these sizes, else by default."""
    batch, length, C = (int(n) for n in op.out.shape)
    dropout = threshold(op.rate) > 0
    subject = tuning.Attention(role, op.q.dtype, batch, length, op.heads, C // op.heads, dropout)
    return tuning.choose(c.target, subject)


def options(t: AttentionTile) -> dict[str, Any]:
    return {"warps": t.warps, "stages": t.stages}


@lowering("attention", views="q k v")
def lower_attention(op: Any, c: Lowering) -> None:
    constants = constants_of(op)
    t = tile_of(op, c, "forward")
    c.launch(
        attention_forward,
        {"out": op.out, "lse": op.lse, "qkv": packed(op.q, op.k, op.v), "seq": seq, "stream": int(op.stream)},
        constants | {"BM": t.queries, "BN": t.keys},
        grid=blocks(op, t.queries), writes="out lse", **options(t),
    )  # fmt: skip


@lowering("attention_backward", starts="dq dk dv", alike="dq dk dv", views="q k v dq dk dv")
def lower_attention_backward(op: Any, c: Lowering) -> None:
    constants = constants_of(op)
    head = head_constants(op)
    stats = c.scratch("stats", (*(int(n) for n in op.lse.shape), STATS.value))
    operands = {"stats": stats, "dout": op.dout, "seq": seq}
    c.launch(
        attention_stats, operands | {"out": op.out, "lse": op.lse}, head | {"BM": 64},
        grid=blocks(op, 64), writes="stats",
    )  # fmt: skip
    constants |= {"ROOT": 1 / sqrt(head["D"]), "MODE": mode(op, "dq")}
    operands |= {"dqkv": packed(op.dq, op.dk, op.dv), "qkv": packed(op.q, op.k, op.v), "stream": int(op.stream)}
    t = tile_of(op, c, "keys")
    DP = constants["DP"]
    DC = DP if WHOLE_HEAD[op.q.dtype] >= DP else PIECE
    c.launch(
        attention_dkv, operands, constants | {"BM": t.queries, "BN": t.keys, "DC": DC},
        grid=blocks(op, t.keys, cdiv(constants["D"], DC)), writes="dqkv", **options(t),
    )  # fmt: skip
    t = tile_of(op, c, "queries")
    c.launch(
        attention_dq, operands, constants | {"BM": t.queries, "BN": t.keys},
        grid=blocks(op, t.queries), writes="dqkv", **options(t),
    )  # fmt: skip
