"""Decoding: attention of T new tokens over a cache of keys and values, split over the keys so that one token fills the card.

Shapes: q, out (B, T, H * D), k and v (B, T, G * D), caches (B, L, G * D). The new tokens are at positions pos .. pos + T, pos a
run-time scalar: the grid covers all L positions, and programs beyond the last key return at once. A step moves 2 G D (pos + T)
elements of each sequence's caches and does 4 H D (pos + T) operations a token.

The SHARE = H / G heads of queries that share a head of keys are rows of one block, so that its keys are read once for all of them:
row i of a sequence is head i % SHARE of the group for token i // SHARE.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2, sqrt
from typing import Any

from barellm.cuda.choices import attention_tile
from barellm.cuda.kernel import Lowering, Sizes, lowering
from barellm.cuda.kernels.attention.attention import head_constants, seq
from barellm.cuda.kernels.attention.attention_tiles import load_rows
from barellm.cuda.kernels.common import POS, row_strides
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div

FEW = 16  # new tokens up to which the keys are split
PART = 128  # keys of a program where there are so few tokens
COPY = 1024


@device
def append_to_caches(
    k_cache, v_cache, k, v, scalars, seq,
    C: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows pos .. pos + T of the caches = k and v. Axis 0 of the grid: tokens; axis 1: blocks of their C columns."""
    token = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = (token // seq).to(tl.int64) * L + tl.load(scalars + POS) + token % seq
    source = token.to(tl.int64)
    tl.store(k_cache + row * C + i, tl.load(k + source * K_ROW + i, mask=i < C), mask=i < C)
    tl.store(v_cache + row * C + i, tl.load(v + source * V_ROW + i, mask=i < C), mask=i < C)


@device
def query_rows(q, i, count, ROW: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """(BM, DP) of a group's rows `i` (BM,), zeros beyond `count` rows and D columns."""
    d = tl.arange(0, DP)
    at = q + (i // SHARE * ROW + i % SHARE * D)[:, None] + d[None, :]
    mask = (i < count)[:, None]
    if D < DP:
        mask = mask & (d < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@device
def seen(pos, m0, seq, SHARE: tl.constexpr, BM: tl.constexpr):
    """How many keys the block of rows from m0 on sees: those up to its last token."""
    return pos + min((m0 + BM - 1) // SHARE + 1, seq)


@device
def attention_split_kv(
    partials, stats, q, k_cache, v_cache, scalars, seq, part,
    UNIT: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, Q_ROW: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM rows of a group over the keys of one part: partials (parts, B, T, H, D) not yet divided, stats (parts, B, T, H, 2) the
    greatest score, in units of ln 2, and the sum. Grid: blocks of rows, groups of all sequences, parts."""
    G: tl.constexpr = H // SHARE
    C: tl.constexpr = G * D
    pos = tl.load(scalars + POS).to(tl.int32)
    m0 = tl.program_id(0) * BM
    sequence, group = tl.program_id(1) // G, tl.program_id(1) % G
    begin = tl.program_id(2) * part
    end = min(begin + part, seen(pos, m0, seq, SHARE, BM))
    if begin < end:
        i = m0 + tl.arange(0, BM)
        m = i // SHARE
        queries = query_rows(
            q + sequence.to(tl.int64) * seq * Q_ROW + group * (SHARE * D), i, seq * SHARE, Q_ROW, SHARE, D, DP
        )
        start = sequence.to(tl.int64) * L * C + group * D
        acc, total = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
        top = tl.full((BM,), float("-inf"), tl.float32)
        for n0 in range(begin, end, BN):
            k = load_rows(k_cache + start, n0, end, C, BN, D, DP)
            n = n0 + tl.arange(0, BN)
            sees = (n < end)[None, :] & (n[None, :] <= pos + m[:, None])
            s = tl.where(sees, tl.dot(queries, tl.trans(k), input_precision="ieee") * UNIT, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # of a token that sees none of these keys
            p = tl.math.exp2(s - base[:, None])
            shrink = tl.math.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            v = load_rows(v_cache + start, n0, end, C, BN, D, DP)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = higher
        tokens = tl.num_programs(1) // G * seq
        row = ((tl.program_id(2) * tokens + sequence * seq).to(tl.int64) + m) * H + group * SHARE + i % SHARE
        d = tl.arange(0, DP)
        tl.store(partials + row[:, None] * D + d[None, :], acc, mask=(m < seq)[:, None] & (d < D)[None, :])
        tl.store(stats + 2 * row, top, mask=m < seq)
        tl.store(stats + 2 * row + 1, total, mask=m < seq)


@device
def combine_split_kv(
    out, partials, stats, scalars, seq, part,
    BM: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """out = what the parts found, in their order. Grid: tokens, heads."""
    token, head, tokens = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    m0 = (token % seq * SHARE + head % SHARE) // BM * BM
    last = seen(tl.load(scalars + POS).to(tl.int32), m0, seq, SHARE, BM)
    d = tl.arange(0, DP)
    acc, total, top = tl.zeros((DP,), tl.float32), 0.0, float("-inf")
    for i in range(tl.cdiv(last, part)):
        row = ((i * tokens).to(tl.int64) + token) * H + head
        new, sum_ = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)
        higher = tl.maximum(top, new)
        before, now = tl.math.exp2(top - higher), tl.math.exp2(new - higher)
        acc = acc * before + tl.load(partials + row * D + d, mask=d < D, other=0.0) * now
        total, top = total * before + sum_ * now, higher
    tl.store(out + (token.to(tl.int64) * H + head) * D + d, acc / total, mask=d < D)


@dataclass(frozen=True)
class Part:
    """Keys of one program: few where there are few tokens, else all."""

    L: int

    def __call__(self, sizes: Sizes) -> int:
        return min(PART, self.L) if sizes.seq <= FEW else self.L

    def count(self, sizes: Sizes) -> int:
        return ceil_div(self.L, self(sizes))


@lowering("attention_cached", views="q k v")
def lower_attention_cached(op: Any, c: Lowering) -> None:
    """The second launch is for a few tokens, the third for many: at run time one of them has an empty grid."""
    head, (B, T, C), L = head_constants(op), (int(n) for n in op.out.shape), int(op.k_cache.shape[1])
    share, width = op.heads // op.kv_heads, int(op.k.shape[-1])
    caches = {"k_cache": op.k_cache, "v_cache": op.v_cache, "seq": seq}
    c.launch(
        append_to_caches, caches | {"k": op.k, "v": op.v},
        {"C": width, "L": L, "BLOCK": COPY, **row_strides(k=op.k, v=op.v)},
        grid=lambda s: (s.tokens, ceil_div(width, COPY)), writes="k_cache v_cache",
    )  # fmt: skip
    part = Part(L)
    most = max(part.count(Sizes(B, T)) * T, part.count(Sizes(B, 1)) * min(T, FEW)) * B
    found = {"partials": c.scratch("partials", (most, C)), "stats": c.scratch("stats", (most, head["H"], 2))}
    head |= {"SHARE": share}
    constants = head | {"UNIT": log2(e) / sqrt(head["D"]), "L": L, **row_strides(q=op.q)}
    for few in (True, False):
        t = attention_tile("few" if few else "many", head["DP"], op.q.dtype, c.target.arch)

        def grid(s: Sizes, few: bool = few, BM: int = t.queries) -> tuple[int, ...]:
            rows = s.seq * share if (s.seq <= FEW) == few else 0
            return (ceil_div(rows, BM), s.batch * op.kv_heads, part.count(s))

        c.launch(
            attention_split_kv, caches | found | {"q": op.q, "part": part}, constants | {"BM": t.queries, "BN": t.keys},
            grid=grid, writes="partials stats", warps=t.warps, stages=t.stages,
        )  # fmt: skip
        c.launch(
            combine_split_kv, {"out": op.out, **found, "seq": seq, "part": part}, head | {"BM": t.queries},
            grid=lambda s, few=few: (s.tokens if (s.seq <= FEW) == few else 0, op.heads), writes="out", warps=1,
        )  # fmt: skip
