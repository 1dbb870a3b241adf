"""Attention, causal or over all keys, forward (Dao et al. 2022, Dao 2023), and what its backward pass (attention_backward.py)
shares with it: no T x T in memory, no block above the diagonal visited if it is causal.

Shapes: q, out (B, T, H * D), k, v (B, T, G * D), lse (B, H, T) fp32; a head's D columns are padded to DP, a power of two. Each of
the G heads of keys and values serves SHARE = H / G heads of queries that follow one another. Rows of a tensor lie as many elements
apart as its constant (Q_ROW and so on) says: they are read and written where they are, packed side by side or not. Scores are kept
in units of ln 2, so that each probability is one fma and one exp2.

Where windows or documents bound what queries see (attention_mask.py), blocks that none of a program's queries sees are not
visited. Paired heads are a sequence of twice the length: H, T and C are then of that one, rows of a tensor come in twos.

Over the P = T (T + 1) / 2 pairs of a head, or T^2, the forward pass does 4 P D operations. Moved are q, k, v, out and lse once, and
keys and values from the second cache T / 128 times."""

from __future__ import annotations

from math import e, log2, sqrt
from typing import Any

from barellm.cuda import choices, tuning
from barellm.cuda.choices import AttentionTile, padded
from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.attention import hopper_attention
from barellm.cuda.kernels.attention.attention_mask import (
    LOWEST,
    MASK_CAUSAL,
    MASK_LENGTH,
    MASK_NONE,
    apply_mask,
    first_visible_key,
    mask_constants,
    softmax_scale_of,
)
from barellm.cuda.kernels.attention.attention_tiles import kv_pointer, load_rows, store_rows
from barellm.cuda.kernels.common import SAMPLE, row_strides
from barellm.cuda.kernels.pointwise.random import calls, sample_key, words
from barellm.cuda.lang import constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.random import keep_scale, threshold
from barellm.program.tensor import Tensor

LN_2, LOG2_E = constant(1 / log2(e)), constant(log2(e))


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
def attend_keys(
    acc, total, top, q, k_rows, v_rows, m0, begin, end, count, least, unit, key, head,
    MASK: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Do the softmax as it goes over the keys [begin, end): acc (BM, DP), total and top (BM). `least` (BM,), where there is one,
    has the first key of each query."""
    for n0 in range(begin, end, BN):
        k = load_rows(k_rows, n0, count, K_ROW, BN, D, DP, APART)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = apply_mask(s, m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :], count, MASK, float("-inf"))
        if least is not None:
            s = tl.where(least[:, None] <= n0 + tl.arange(0, BN)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * unit)
        p = tl.math.exp2(s * unit - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if THRESHOLD > 0:
            p = tl.where(kept(key, head, m0, n0, H, BM, BN, THRESHOLD), p * SCALE, 0.0)
        v = load_rows(v_rows, n0, count, V_ROW, BN, D, DP, APART)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@device
def attention_forward(
    out, lse, q, k, v, starts, scalars, seq, stream,
    UNIT: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    WINDOW: tl.constexpr, HEAT: tl.constexpr, CAUSAL: tl.constexpr, FOLD: tl.constexpr, BOUNDED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """A program is a block of queries of one head; the last block has the most keys and starts first. Only keys from the block's
    first query on need the mask. Where all keys are seen every block has one, for keys beyond the last: ptxas waits for each
    product of a loop over whole blocks with a second one for the rest."""
    C: tl.constexpr = H * D
    APART: tl.constexpr = (FOLD - 1) * (H // SHARE) * D
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    token, shared = sequence.to(tl.int64) * (seq // FOLD), head // SHARE * D
    k = kv_pointer(q, k, K_AT) + token * K_ROW + shared
    v = kv_pointer(q, v, V_AT) + token * V_ROW + shared
    key = (0, 0)
    if THRESHOLD > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    unit = UNIT
    if HEAT >= 0:
        unit = softmax_scale_of(scalars, HEAT, LOG2_E)
    queries = load_rows(q + token * Q_ROW + head * D, m0, seq, Q_ROW, BM, D, DP, (FOLD - 1) * C)
    acc, total = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    begin, least = 0, None
    if BOUNDED:
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        begin = first_visible_key(starts, scalars, m0, WINDOW, FOLD) // BN * BN
        least = first_visible_key(starts, scalars, tl.minimum(m0 + tl.arange(0, BM), seq - 1), WINDOW, FOLD)
        top = tl.full((BM,), LOWEST, tl.float32)
    else:
        top = tl.full((BM,), float("-inf"), tl.float32)
    stop = seq
    if CAUSAL:
        acc, total, top = attend_keys(
            acc, total, top, queries, k, v, m0, begin, m0, seq, least, unit, key, head,
            MASK_NONE, THRESHOLD, SCALE, H, D, DP, K_ROW, V_ROW, APART, BM, BN,
        )  # fmt: skip
        begin, stop = m0, min(m0 + BM, seq)
    acc, total, top = attend_keys(
        acc, total, top, queries, k, v, m0, begin, stop, seq, least, unit, key, head,
        MASK_CAUSAL if CAUSAL else MASK_LENGTH, THRESHOLD, SCALE, H, D, DP, K_ROW, V_ROW, APART, BM, BN,
    )  # fmt: skip
    m = m0 + tl.arange(0, BM)
    tl.store(lse + tl.program_id(1).to(tl.int64) * seq + m, (top + tl.math.log2(total)) * LN_2, mask=m < seq)
    to = out + sequence.to(tl.int64) * seq * C + head * D
    store_rows(to, m0, seq, acc / total[:, None], D, scalars, 0, C, BM, DP)


def head_constants(op: Any) -> dict[str, Any]:
    D = int(op.out.shape[-1]) // op.heads
    return {"H": op.heads, "D": D, "DP": padded(D)}


def constants_of(op: Any) -> dict[str, Any]:
    head = paired_constants(op)
    rate = {"THRESHOLD": threshold(op.rate), "SCALE": keep_scale(op.rate)}
    share = {"SHARE": op.heads // op.kv_heads, "UNIT": log2(e) / sqrt(head["D"])}
    places = {f"{name.upper()}_AT": offset_from_q(op.q, op.inputs[name]) for name in ("k", "v")}
    return head | rate | share | row_strides(q=op.q, k=op.k, v=op.v) | places | mask_constants(op)


def paired_constants(op: Any) -> dict[str, Any]:
    """The constants of `head_constants`, where paired heads are half as many."""
    head = head_constants(op)
    return head | {"H": head["H"] // op.fold}


def offset_from_q(q: Tensor, x: Tensor) -> int | None:
    """How many elements behind q's columns those of k or v begin, if they are of one tensor. Then one pointer serves all three, and
    their addresses share registers, of which wide heads have none to spare."""
    return x.first_column - q.first_column if x.base is q.base and x.first_column >= q.first_column else None


def operands_of(op: Any) -> dict[str, Any]:
    """q, k and v, of which those that lie behind q are absent, and the starts of documents."""
    three = {"q": op.q} | {
        name: t if offset_from_q(op.q, t) is None else None for name, t in (("k", op.k), ("v", op.v))
    }
    return three | {"starts": op.starts}


def blocks(op: Any, heads: int, size: int, pieces: int = 1) -> Any:
    """The grid: blocks of a sequence, heads of all sequences, pieces of a head."""
    fold = op.fold
    return lambda s: (ceil_div(s.seq * fold, size), s.batch * (heads // fold), pieces)


def sequence_length(op: Any) -> Any:
    """The length of a sequence, as a size."""
    return twice if op.paired else seq


def twice(s: Any) -> int:
    return 2 * s.seq


def seq(s: Any) -> int:
    return s.seq


def tile_of(op: Any, c: Lowering, role: str) -> AttentionTile:
    """How a kernel is cut: as it was tuned for these sizes, else by default. Bounded ones are not tuned: their windows change."""
    batch, length, C = (int(n) for n in op.out.shape)
    if op.window is not None or op.starts is not None:
        return choices.bounded_tile(role, padded(C // op.heads), op.q.dtype, c.target.arch)
    heads, kv_heads = op.heads // op.fold, op.kv_heads // op.fold if op.kv_heads != op.heads else 0
    sizes = op.fold * length, heads, C // op.heads, threshold(op.rate) > 0, kv_heads
    subject = tuning.AttentionKey(role, op.q.dtype, batch, *sizes)
    t = tuning.choose(c.target, subject)
    if t.roles and not op.causal:  # the kernel of warps with roles stops at the diagonal
        return choices.attention_tile(role, padded(C // op.heads), op.q.dtype, c.target.arch)
    return t


def options(t: AttentionTile) -> dict[str, Any]:
    return {"warps": t.warps, "stages": t.stages, "registers": t.registers}


@lowering("attention", views="q k v", also={"starts": "i32"})
def lower_attention(op: Any, c: Lowering) -> None:
    constants = constants_of(op)
    t = tile_of(op, c, "forward")
    if t.roles:
        return hopper_attention.launch_forward(op, c, t, constants["UNIT"])
    c.launch(
        attention_forward,
        operands_of(op) | {"out": op.out, "lse": op.lse, "seq": sequence_length(op), "stream": int(op.stream)},
        constants | {"BM": t.queries, "BN": t.keys},
        grid=blocks(op, op.heads, t.queries), writes="out lse", **options(t),
    )  # fmt: skip
