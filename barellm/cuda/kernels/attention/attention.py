"""Attention, forward (FlashAttention: Dao et al. 2022, Dao 2023): causal or over all keys, with an online softmax. No T x T matrix
is in memory, no block above the diagonal of a causal mask is visited. With what the backward pass shares.

Shapes: q, out (B, T, H * D), k, v (B, T, G * D), lse (B, H, T) fp32; the head size D is padded to DP, a power of two. Grouped-query
attention: GROUP_SIZE = H / G adjacent query heads share a KV head. q, k and v are three tensors, or columns of one.

Constants of all kernels of attention: STRIDES, elements from a row to the next of q, k, v; OFFSETS, from q's columns to k's and
v's if all are in one tensor, else None; SCALE_LOG2, softmax scale times log2(e), so that a probability is one fma and one exp2, and
SCALE_AT, the index of a run-time scale's scalar, or -1; CAP, the soft cap of scores, or 0; DROPOUT = (threshold of a random word,
1 / (1 - rate)). Of the mask (attention_mask.py): CAUSAL; LOCAL, whether there are windows or documents; WINDOW; FOLD.

Operands and names that recur: `starts`: first positions of documents; `seq`: positions of a sequence; `stream`: number of dropout's
random stream, `key` its Threefry key; m0, n0: first query and key of a block, BM and BN its size; `count`: keys of the sequence.

Sliding windows and document masks (attention_mask.py) skip blocks of keys that none of a program's queries sees. Paired heads
(modded-nanogpt) are one sequence of twice the length, FOLD = 2 positions for each token: T, H and C are those of that one.

Protocol of a program: a block of BM queries stays in registers (in shared memory where tensor cores want it there), as do its
accumulators (BM, DP) and the running maximum and sum of each row. Blocks of BN keys and values are loaded by all warps with
cp.async, `num_stages` in flight; Triton places the waits and two barriers for each block.

Over the P = T (T + 1) / 2 pairs of a head, or T^2, it does 4 P D operations. It moves operands once, keys T / BM times from L2."""

from math import e, log2
from typing import Any

from barellm.cuda import attention_config, tuning
from barellm.cuda.attention_config import AttentionConfig, padded_head_size
from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.attention import hopper_attention
from barellm.cuda.kernels.attention.attention_mask import (
    LOG2_E,
    LOWEST,
    apply_mask,
    first_visible_key,
    mask_constants,
    score_unit,
    soft_cap,
    softmax_scale,
)
from barellm.cuda.kernels.attention.attention_tiles import kv_rows, load_rows, store_rows
from barellm.cuda.kernels.common import SAMPLE, axis_size
from barellm.cuda.kernels.pointwise.random import calls, sample_key, words
from barellm.cuda.lang import constant, device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.pointwise.random import keep_scale, threshold
from barellm.program.tensor import Tensor
from barellm.runtime.tuner.problem import given_config

LN_2 = constant(1 / log2(e))


@device
def dropout_mask(key, head, m0, n0, H, BM, BN, THRESHOLD):
    """True (BM, BN) where dropout keeps the probability of query m0 + i and key n0 + j: where the random word of row (query, head)
    and column (key) is at least THRESHOLD = rate * 2^32. `key`: Threefry's, of the sequence. BN: 16 or a multiple of 32."""
    k0, k1 = key
    row = (m0 + tl.arange(0, BM)) * H + head  # number of (query, head), as on the CPU
    zeros = tl.zeros((BM,), tl.uint32)
    if BN == 16:  # a Threefry call has two words, for columns 16 apart: a block of 16 keys needs one of them
        first, second = calls(k0 + zeros, k1 + zeros, row, n0 // 32 * 16, BM, BN)
        word = tl.where(n0 % 32 == 0, first, second)
    else:
        word = words(k0 + zeros, k1 + zeros, row, n0, BM, BN)
    return word >= THRESHOLD


@device
def dropout_key(scalars, sequence, stream, DROPOUT):
    """The Threefry key of a sequence's dropout, from the run's seed and step; (0, 0), which nobody reads, without dropout."""
    key = (0, 0)
    if DROPOUT[0] > 0:
        key = sample_key(scalars, tl.load(scalars + SAMPLE) + sequence, stream)
    return key


@device
def online_softmax(s, row_max, row_sum, unit):
    """One step of the online softmax: (p, rescale, new maximum, new sum) of a block of scores s (BM, BN). p = exp2(s unit - new
    maximum); what was summed with the old maximum, rows of a block of outputs too, is to be multiplied by `rescale` (BM,)."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * unit)
    p = tl.math.exp2(s * unit - new_max[:, None])
    rescale = tl.math.exp2(row_max - new_max)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, 1)


@device
def online_softmax_loop(
    acc, row_sum, row_max, q, k_rows, v_rows, m0, begin, end, count, first_key, scale_log2, key, head,
    MASK, CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDE, BM, BN,
):  # fmt: skip
    """FlashAttention's inner loop. For each block of BN keys in [begin, end): s = q k^T, p = exp2(s - row_max), acc = acc * rescale
    + p v, row_sum = row_sum * rescale + sum p, with rescale = exp2(old row_max - new row_max).

    In registers: q (BM, DP); acc (BM, DP), row_sum (BM,) and row_max (BM,) fp32, which it returns; row_max is a score times
    log2(e). In memory: k_rows, v_rows, the head's keys and values in the sequence. MASK: of attention_mask.py; `first_key` (BM,):
    the first key that each query sees under a local mask, else None. BM, BN, DP: powers of two from 16 on."""
    unit = score_unit(scale_log2, CAP)
    for n0 in range(begin, end, BN):
        k = load_rows(k_rows, n0, count, STRIDES[1], BN, D, DP, PAIR_STRIDE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BM, BN) fp32, not yet scaled
        if CAP > 0:
            s = soft_cap(s, scale_log2, CAP)
        query, key_position = m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :]
        s = apply_mask(s, query, key_position, count, MASK, float("-inf"))
        if first_key is not None:
            s = tl.where(first_key[:, None] <= key_position, s, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax(s, row_max, row_sum, unit)
        if DROPOUT[0] > 0:
            p = tl.where(dropout_mask(key, head, m0, n0, H, BM, BN, DROPOUT[0]), p * DROPOUT[1], 0.0)
        v = load_rows(v_rows, n0, count, STRIDES[2], BN, D, DP, PAIR_STRIDE)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_sum, row_max


@device
def attention_forward(
    out, lse, q, k, v, starts, scalars, seq, stream,
    SCALE_LOG2, SCALE_AT, CAP, DROPOUT, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, CAUSAL, LOCAL, WINDOW, FOLD, BM, BN,
):  # fmt: skip
    """out = dropout(softmax(scale q k^T, masked)) v and lse = log(sum(exp(scores))) for BM queries of one head.

    Reads q (B, T, H * D), k and v (B, T, G * D), rows STRIDES apart, as the projection and RoPE wrote them, in fp32, bf16 or fp16
    (None: at OFFSETS in q's tensor), and with documents `starts` (B, T) i32. Writes out (B, T, H * D) and, for the backward pass,
    lse (B, H, T) fp32. Grid: blocks of BM queries, heads of all sequences; the last block, which sees the most keys, starts first.

    Causal: keys before the block's first query need no mask, so there are two loops. Full: one loop, which masks every block for
    keys beyond the last, because with a second loop ptxas waits for each matmul of the first."""
    C: tl.constexpr = H * D  # elements of a token's row of out
    PAIR_STRIDE: tl.constexpr = (FOLD - 1) * (H // GROUP_SIZE) * D  # of k and v
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the last block of queries first
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    # The sequence's rows of this head, and the block of queries, which stays in registers.
    token0 = sequence.to(tl.int64) * (seq // FOLD)
    kv_column = head // GROUP_SIZE * D
    k_rows, v_rows = kv_rows(q, k, v, token0, kv_column, STRIDES, OFFSETS)
    key = dropout_key(scalars, sequence, stream, DROPOUT)
    scale_log2 = softmax_scale(scalars, SCALE_LOG2, SCALE_AT, LOG2_E)
    queries = load_rows(q + token0 * STRIDES[0] + head * D, m0, seq, STRIDES[0], BM, D, DP, (FOLD - 1) * C)
    acc, row_sum = tl.zeros((BM, DP), tl.float32), tl.zeros((BM,), tl.float32)
    # The first key that the block of queries sees, and that each query sees (None: all from 0 on).
    begin, first_key = 0, None
    if LOCAL:
        if starts is not None:
            starts += sequence.to(tl.int64) * (seq // FOLD)
        begin = first_visible_key(starts, scalars, m0, WINDOW, FOLD) // BN * BN
        first_key = first_visible_key(starts, scalars, tl.minimum(m0 + tl.arange(0, BM), seq - 1), WINDOW, FOLD)
        row_max = tl.full((BM,), LOWEST, tl.float32)
    else:
        row_max = tl.full((BM,), float("-inf"), tl.float32)
    # Keys before the block's first query, if causal, without a mask; then keys [begin, stop) with one.
    stop = seq
    if CAUSAL:
        acc, row_sum, row_max = online_softmax_loop(
            acc, row_sum, row_max, queries, k_rows, v_rows, m0, begin, m0, seq, first_key, scale_log2, key, head,
            "none", CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDE, BM, BN,
        )  # fmt: skip
        begin, stop = m0, min(m0 + BM, seq)
    acc, row_sum, row_max = online_softmax_loop(
        acc, row_sum, row_max, queries, k_rows, v_rows, m0, begin, stop, seq, first_key, scale_log2, key, head,
        "causal" if CAUSAL else "length", CAP, DROPOUT, H, D, DP, STRIDES, PAIR_STRIDE, BM, BN,
    )  # fmt: skip
    # Write lse and out.
    m = m0 + tl.arange(0, BM)
    tl.store(lse + tl.program_id(1).to(tl.int64) * seq + m, (row_max + tl.math.log2(row_sum)) * LN_2, mask=m < seq)
    out_rows = out + sequence.to(tl.int64) * seq * C + head * D
    store_rows(out_rows, m0, seq, acc / row_sum[:, None], D, scalars, 0, C, BM, DP)


def head_sizes(op: Any) -> tuple[int, int, int]:
    """(H, D, DP) of an op: heads, head size, padded head size. Two paired heads count as one."""
    D = int(op.out.shape[-1]) // op.heads
    return op.heads // getattr(op, "fold", 1), D, padded_head_size(D)


def head_constants(op: Any) -> dict[str, Any]:
    """The constants of any attention op's heads: H, GROUP_SIZE, D, DP, and where q, k and v are: STRIDES, OFFSETS."""
    H, D, DP = head_sizes(op)
    strides, offsets = (x.row_stride for x in (op.q, op.k, op.v)), (offset_from_q(op.q, x) for x in (op.k, op.v))
    sizes = {"H": H, "GROUP_SIZE": op.heads // op.kv_heads, "D": D, "DP": DP}
    return sizes | {"STRIDES": tuple(strides), "OFFSETS": tuple(offsets)}


def constants_of(op: Any) -> dict[str, Any]:
    """The constants of an attention op: those of its heads, of the scale and the mask, DROPOUT."""
    dropout = {"DROPOUT": (threshold(op.rate), keep_scale(op.rate))}
    return head_constants(op) | mask_constants(op, head_sizes(op)[1]) | dropout


def offset_from_q(q: Tensor, x: Tensor) -> int | None:
    """Elements from q's columns to those of k or v (`x`) if they are in one tensor, else None. Then one pointer serves all three,
    and their addresses share registers, of which wide heads have none to spare."""
    return x.first_column - q.first_column if x.base is q.base and x.first_column >= q.first_column else None


def operands_of(op: Any) -> dict[str, Any]:
    """Operands k and v; None where OFFSETS finds them in q's tensor."""
    return {name: t if offset_from_q(op.q, t) is None else None for name, t in (("k", op.k), ("v", op.v))}


def grid_of(op: Any, heads: int, size: int, chunks: int = 1) -> Any:
    """The grid: blocks of `size` positions of a sequence, `heads` of all sequences, `chunks` of the head size's columns."""
    fold = op.fold
    return lambda s: (ceil_div(s.seq * fold, size), s.batch * (heads // fold), chunks)


def masked_config_of(op: Any, c: Lowering, operation: str) -> AttentionConfig:
    """The given or the default configuration of a kernel whose queries see some of the keys only."""
    head = padded_head_size(int(op.out.shape[-1]) // op.heads)
    given = given_config(c.target.config, operation, AttentionConfig)
    return given or attention_config.select_masked_config(operation, head, op.q.dtype, c.target.arch)


def config_of(op: Any, c: Lowering, operation: str) -> AttentionConfig:
    """The tile sizes, warps and stages of a kernel (`operation`: "forward", "keys" for dk and dv, "queries" for dq): those given to
    the target, tuned for these sizes, or the default. Local masks are not tuned, as windows change, nor are soft caps."""
    batch, length, C = (int(n) for n in op.out.shape)
    if op.bounded or op.softcap:
        return masked_config_of(op, c, operation)
    heads, kv_heads = op.heads // op.fold, op.kv_heads // op.fold if op.kv_heads != op.heads else 0  # 0: as many as heads
    sizes = op.fold * length, heads, C // op.heads, threshold(op.rate) > 0, kv_heads
    t = tuning.select_config(c.target, tuning.AttentionProblem(operation, op.q.dtype, batch, *sizes))
    if t.warp_specialized and not op.plain:  # that kernel is causal, with the usual scale
        return attention_config.select_attention_config(operation, padded_head_size(C // op.heads), op.q.dtype, c.target.arch)
    return t


def options_of(t: AttentionConfig) -> dict[str, Any]:
    """The compiler's options of a configuration, as `Lowering.launch` takes them."""
    return {"warps": t.num_warps, "stages": t.num_stages, "registers": t.max_registers}


@lowering("attention", views="q k v", also={"starts": "i32"})
def lower_attention(op: Any, c: Lowering) -> None:
    """Launch the forward pass, by the warp-specialized kernel if the configuration says so."""
    constants = constants_of(op)
    t = config_of(op, c, "forward")
    if t.warp_specialized:
        return hopper_attention.launch_forward(op, c, t, constants["SCALE_LOG2"])
    c.launch(
        attention_forward, operands_of(op) | {"seq": axis_size(op.q, 1, op.fold), "stream": int(op.stream)},
        constants | {"BM": t.queries, "BN": t.keys}, grid=grid_of(op, op.heads, t.queries), **options_of(t),
    )  # fmt: skip
