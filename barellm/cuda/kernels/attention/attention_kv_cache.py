"""Attention over a KV cache, for decoding (Flash-Decoding: Dao et al. 2023): T new tokens, split over the keys to fill the GPU.

Shapes: q, out (B, T, H * D), k and v (B, T, G * D), caches (B, L, G * D). The new tokens are at positions pos .. pos + T, pos a
run-time scalar: the grid covers all L positions, and programs beyond the last key return at once. A step moves 2 G D (pos + T)
elements of each sequence's caches and does 4 H D (pos + T) operations a token.

The GROUP_SIZE = H / G query heads of a KV head are rows of one block, so that its keys are read once for all of them:
row i of a sequence is head i % GROUP_SIZE of the group for token i // GROUP_SIZE."""

from dataclasses import dataclass
from math import e, log2
from typing import Any

from barellm.cuda.attention_config import select_attention_config
from barellm.cuda.kernel import Lowering, Sizes, lowering
from barellm.cuda.kernels.attention.attention import head_sizes
from barellm.cuda.kernels.attention.attention_mask import constant_scale, score_unit, soft_cap
from barellm.cuda.kernels.attention.attention_tiles import load_rows
from barellm.cuda.kernels.common import POS, axis_size
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div

SPLIT_TOKENS = 16  # new tokens up to which the keys are split
SPLIT_KEYS = 128  # keys of a split
COPY = 1024  # columns of a row that one program copies


@device
def append_to_caches(k_cache, v_cache, k, v, scalars, seq, C, K_STRIDE, V_STRIDE, L, BLOCK):
    """Rows pos .. pos + T of the caches (B, L, C) = k and v (B, T, C). Grid: tokens, blocks of their C = G * D columns."""
    token = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = (token // seq).to(tl.int64) * L + tl.load(scalars + POS) + token % seq
    source = token.to(tl.int64)  # row of k and v
    tl.store(k_cache + row * C + i, tl.load(k + source * K_STRIDE + i, mask=i < C), mask=i < C)
    tl.store(v_cache + row * C + i, tl.load(v + source * V_STRIDE + i, mask=i < C), mask=i < C)


@device
def query_rows(q, i, count, STRIDE, GROUP_SIZE, D, DP):
    """Load queries (BM, DP) of a KV head: rows `i` (BM,) of its group, zeros beyond `count` rows. `q`: the group's first head."""
    d = tl.arange(0, DP)
    at = q + (i // GROUP_SIZE * STRIDE + i % GROUP_SIZE * D)[:, None] + d[None, :]
    mask = (i < count)[:, None]
    if D < DP:
        mask = mask & (d < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@device
def visible_keys(pos, m0, seq, GROUP_SIZE, BM):
    """How many keys the block of BM rows from m0 on sees: those up to its last token."""
    return pos + min((m0 + BM - 1) // GROUP_SIZE + 1, seq)


@device
def attention_split_kv(
    partials, stats, q, k_cache, v_cache, scalars, seq, part, SCALE_LOG2, CAP, H, GROUP_SIZE, D, DP, Q_STRIDE, L, WINDOW, BM, BN
):
    """Flash-Decoding, first kernel: online softmax of BM rows of a KV head's group over one split of `part` keys of its cache.

    Reads q (B, T, H * D), rows Q_STRIDE apart, and the caches (B, L, G * D), to which append_to_caches has added the new tokens.
    Row i is head i % GROUP_SIZE of the group for token i // GROUP_SIZE, so each key is loaded once for all of them. Writes partials
    (splits, B, T, H, D) fp32 = sum p v, not yet divided by sum p, and stats (splits, B, T, H, 2): the maximum score times log2(e),
    and sum p. A token sees the last WINDOW keys up to its own (0: all); splits that see no key write nothing. Grid: blocks of rows,
    KV heads of all sequences, splits. BM, BN, DP: powers of two, 16 at least. CAP: soft cap of scores, or 0."""
    G: tl.constexpr = H // GROUP_SIZE
    C: tl.constexpr = G * D
    pos = tl.load(scalars + POS).to(tl.int32)
    m0 = tl.program_id(0) * BM
    sequence, group = tl.program_id(1) // G, tl.program_id(1) % G
    begin = tl.program_id(2) * part  # keys [begin, end) of the split
    end = min(begin + part, visible_keys(pos, m0, seq, GROUP_SIZE, BM))  # later keys are in no row's past
    if WINDOW > 0:
        first = tl.maximum(pos + m0 // GROUP_SIZE + 1 - WINDOW, 0)  # key of the first token's window
        end = tl.where(end > first, end, begin)
        begin = tl.where(begin < end, tl.maximum(begin, first // BN * BN), begin)
    if begin < end:
        i = m0 + tl.arange(0, BM)  # rows: (token, head of the group)
        m = i // GROUP_SIZE  # token of each row
        group_q = q + sequence.to(tl.int64) * seq * Q_STRIDE + group * (GROUP_SIZE * D)
        queries = query_rows(group_q, i, seq * GROUP_SIZE, Q_STRIDE, GROUP_SIZE, D, DP)
        start = sequence.to(tl.int64) * L * C + group * D  # of the head in the caches
        acc, row_sum = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
        row_max = tl.full((BM,), float("-inf"), tl.float32)
        for n0 in range(begin, end, BN):
            k = load_rows(k_cache + start, n0, end, C, BN, D, DP)
            n = n0 + tl.arange(0, BN)
            is_visible = (n < end)[None, :] & (n[None, :] <= pos + m[:, None])
            if WINDOW > 0:
                is_visible = is_visible & (n[None, :] > pos + m[:, None] - WINDOW)
            s = tl.dot(queries, tl.trans(k), input_precision="ieee")
            if CAP > 0:
                s = soft_cap(s, SCALE_LOG2, CAP)
            s = tl.where(is_visible, s * score_unit(SCALE_LOG2, CAP), float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A token may see none of these keys: its maximum stays -inf, and -inf - -inf would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.math.exp2(s - base[:, None])
            rescale = tl.math.exp2(row_max - base)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            v = load_rows(v_cache + start, n0, end, C, BN, D, DP)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max
        tokens = tl.num_programs(1) // G * seq  # of all sequences
        first_token = tl.program_id(2) * tokens + sequence * seq
        row = (first_token.to(tl.int64) + m) * H + group * GROUP_SIZE + i % GROUP_SIZE  # (split, sequence, token, head)
        d = tl.arange(0, DP)
        tl.store(partials + row[:, None] * D + d[None, :], acc, mask=(m < seq)[:, None] & (d < D)[None, :])
        tl.store(stats + 2 * row, row_max, mask=m < seq)
        tl.store(stats + 2 * row + 1, row_sum, mask=m < seq)


@device
def combine_split_kv(out, partials, stats, scalars, seq, part, BM, H, GROUP_SIZE, D, DP, WINDOW):
    """Flash-Decoding, second kernel: out (B, T, H, D) = sum over splits of partials exp2(max - common max), divided by the sum of
    their sum p so rescaled, in order. partials and stats: as attention_split_kv wrote them, fp32. `part`: keys of a split; BM: that
    of attention_split_kv, which decides how many splits a row has. Grid: tokens of all sequences, heads; one warp."""
    token, head, tokens = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    m0 = (token % seq * GROUP_SIZE + head % GROUP_SIZE) // BM * BM  # the block of rows that had this token and head
    last = visible_keys(tl.load(scalars + POS).to(tl.int32), m0, seq, GROUP_SIZE, BM)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.load(scalars + POS).to(tl.int32) + token % seq + 1 - WINDOW, 0) // part
    d = tl.arange(0, DP)
    acc, row_sum, row_max = tl.zeros((DP,), tl.float32), 0.0, float("-inf")
    for i in range(first, tl.cdiv(last, part)):
        row = ((i * tokens).to(tl.int64) + token) * H + head
        new, new_sum = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)  # maximum and sum of p of split i
        new_max = tl.maximum(row_max, new)
        old_scale, new_scale = tl.math.exp2(row_max - new_max), tl.math.exp2(new - new_max)
        acc = acc * old_scale + tl.load(partials + row * D + d, mask=d < D, other=0.0) * new_scale
        row_sum, row_max = row_sum * old_scale + new_sum * new_scale, new_max
    tl.store(out + (token.to(tl.int64) * H + head) * D + d, acc / row_sum, mask=d < D)


@dataclass(frozen=True)
class KeysPerSplit:
    """A function of the run's sizes: the keys of a split of a cache (L), SPLIT_KEYS if there are few new tokens, else all."""

    L: int

    def __call__(self, sizes: Sizes) -> int:
        return min(SPLIT_KEYS, self.L) if sizes.seq <= SPLIT_TOKENS else self.L

    def count(self, sizes: Sizes) -> int:
        """The number of splits."""
        return ceil_div(self.L, self(sizes))


@lowering("attention_cached", views="q k v")
def lower_attention_cached(op: Any, c: Lowering) -> None:
    """Plan five launches: append k and v to the caches; then twice attention_split_kv and combine_split_kv, with the configuration
    for few new tokens (up to SPLIT_TOKENS, keys split) and for many (unsplit): at run time one of the two pairs has empty grids."""
    H, D, DP = head_sizes(op)
    B, T, C = (int(n) for n in op.out.shape)
    L, width = (int(n) for n in op.k_cache.shape[1:])
    group_size = op.heads // op.kv_heads
    caches = {"k_cache": op.k_cache, "v_cache": op.v_cache, "seq": axis_size(op.q, 1)}
    c.launch(
        append_to_caches, caches | {"k": op.k, "v": op.v}, {"C": width, "L": L, "BLOCK": COPY},
        grid=lambda s: (s.tokens, ceil_div(width, COPY)), writes="k_cache v_cache",
    )  # fmt: skip
    # Scratch for the partial results of all splits: of all T tokens unsplit, or of the few that are split.
    part = KeysPerSplit(L)
    max_rows = max(part.count(Sizes(B, T)) * T, part.count(Sizes(B, 1)) * min(T, SPLIT_TOKENS)) * B
    results = {"partials": c.scratch("partials", (max_rows, C)), "stats": c.scratch("stats", (max_rows, H, 2))}
    window = 0 if op.keys_before(L) is None else op.sliding_window
    head = {"H": H, "GROUP_SIZE": group_size, "D": D, "DP": DP, "WINDOW": window}
    constants = head | {"SCALE_LOG2": constant_scale(op, D, log2(e)), "CAP": op.softcap, "L": L}
    for few in (True, False):
        t = select_attention_config("few" if few else "many", DP, op.q.dtype, c.target.arch)

        def tokens(s: Sizes, few: bool = few) -> int:
            """The new tokens of a sequence that this pair of launches does: all or none."""
            return s.seq if (s.seq <= SPLIT_TOKENS) == few else 0

        def split_grid(s: Sizes, tokens: Any = tokens, BM: int = t.queries) -> tuple[int, ...]:
            return (ceil_div(tokens(s) * group_size, BM), s.batch * op.kv_heads, part.count(s))

        c.launch(
            attention_split_kv, caches | results | {"q": op.q, "part": part}, constants | {"BM": t.queries, "BN": t.keys},
            grid=split_grid, writes="partials stats", warps=t.num_warps, stages=t.num_stages,
        )  # fmt: skip
        c.launch(
            combine_split_kv, {"out": op.out, **results, "seq": axis_size(op.q, 1), "part": part}, head | {"BM": t.queries},
            grid=lambda s, tokens=tokens: (s.batch * tokens(s), op.heads), writes="out", warps=1,
        )  # fmt: skip
