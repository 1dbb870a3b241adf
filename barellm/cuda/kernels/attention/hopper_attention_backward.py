"""Warp-specialized causal attention on Hopper, backward (FlashAttention-3): one kernel, for dk and dv (DKV) or for dq.

DKV_STRIDES: elements from a row to the next of dx and dy. Tuples of shared memory: tile_pipeline = (x_ring, y_ring, tile_full,
tile_empty), stream_pipeline = (a_ring, b_ring, stats_ring or None, full, empty). `i`, `t`, WG: as in hopper_attention.py.

Shapes as in attention_backward.py, whose sums it computes in the same order. A tile is BLOCK keys of one KV head (DKV), or as many
queries of a head, 64 for each of two consumer warpgroups; blocks of STREAM_ROWS rows of the other kind stream past it. With x, y
for the stationary and a, b for the streamed operands (k, v and q, dout; or q, dout and k, v), a step of a consumer is

    s = x a^T,  g = y b^T,  p = exp2(s scale - lse),  dv += p b (DKV only),  dk or dq += (p (g - delta)) a

with s, g, p and the sums (64, D) in registers (240 of a thread), and in shared memory, with mbarriers:

    x_ring, y_ring (2 x 2, 64, D)           tile_full[t]: a tile is loaded; tile_empty[t]: both consumers are done with it
    a_ring, b_ring (S, STREAM_ROWS, D)      full[s]: a block is loaded; empty[s]: both consumers' wgmma have read it; with DKV:
    stats_ring (S, STREAM_ROWS, 4)          lse and delta of the streamed queries

One producer warp (24 registers) issues all TMA loads. The softmax is recomputed while
g is multiplied, and ds while dv is. The last wgmma is waited for in its own step: it reads registers, and ptxas serializes all
wgmmas (C7512) if such a one is in flight across a loop. Streams go up, so that dq's last block has the mask and dk's first. Blocks
beyond the diagonal of one consumer only are released unread (`skip_block`). Tensor maps end with the batch and not with a sequence:
the next sequence's queries in a last, partial block get the probability zero, so they and their dout must be finite."""

from typing import Any

from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernel import Lowering, TensorMap
from barellm.cuda.kernels.attention import hopper_attention
from barellm.cuda.kernels.attention.attention_mask import constant_scale
from barellm.cuda.kernels.attention.hopper_attention import BLOCK, issue_qk, query_tile, register_operand, store_rows
from barellm.cuda.kernels.hopper_pipeline import WG_M, consumer_release, consumer_wait, mbarriers, producer_acquire, wgmma_layout
from barellm.cuda.lang import constant, gl, gluon, hopper
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part

STATS = constant(4)  # numbers of a query in the scratch, of which two are used, or three where queries are bounded
STREAM_ROWS = constant(64)  # rows that stream past a tile in one step


@gluon
def backward_producer_warp(
    x_map, y_map, a_map, b_map, stats_map, tile_pipeline, stream_pipeline, seq, items, DKV, H, GROUP_SIZE, D
):
    """The producer warp of the backward pass: for each tile, TMA loads of its stationary x and y (WG_M rows for each consumer),
    then of blocks of STREAM_ROWS rows of a and b, with DKV those of each query head of the group and their stats.

    DKV: x, y, a, b are k, v, q, dout; else q, dout, k, v; NAME_map: their tensor maps (B * T, heads * D). `stats_map`: of the
    scratch (queries of all heads, STATS) that attention_stats wrote. NAME_pipeline: of the module; `items`: tiles of all heads."""
    x_ring, y_ring, tile_full, tile_empty = tile_pipeline
    a_ring, b_ring, stats_ring, full, empty = stream_pipeline
    STAGES: gl.constexpr = a_ring.shape[0]
    TILE_HEADS: gl.constexpr = H // GROUP_SIZE if DKV else H
    # Bytes that a stage gets: a block of a, one of b, and with DKV their stats.
    NBYTES: gl.constexpr = 2 * a_map.block_type.nbytes + (stats_map.block_type.nbytes if DKV else 0)
    i, t = 0, 0  # blocks and tiles so far: stages and phases of the rings
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, tile_row = query_tile(w, seq)
        sequence, group = head // TILE_HEADS, head % TILE_HEADS
        row = sequence * seq  # the sequence's first row in x, y, a, b
        ready = tile_full.index(t % 2)
        producer_acquire(tile_empty, t)
        hopper.mbarrier.expect(ready, 4 * x_map.block_type.nbytes)  # two halves of x and of y
        for half in gl.static_range(2):
            at = [row + tile_row + half * WG_M, group * D]
            hopper.tma.async_copy_global_to_shared(x_map, at, ready, x_ring.index(2 * (t % 2) + half))
            hopper.tma.async_copy_global_to_shared(y_map, at, ready, y_ring.index(2 * (t % 2) + half))
        # Past a tile of keys (DKV) stream the queries from its first key on, past one of queries the keys up to its last query.
        begin, stop = (tile_row, seq) if DKV else (0, tile_row + BLOCK)
        for group_head in range(GROUP_SIZE if DKV else 1):
            other = group * GROUP_SIZE + group_head if DKV else group // GROUP_SIZE  # head of the streamed rows
            for n in range(begin, stop, STREAM_ROWS):
                s = i % STAGES
                loaded = full.index(s)
                producer_acquire(empty, i)
                hopper.mbarrier.expect(loaded, NBYTES)
                at = [row + n, other * D]
                hopper.tma.async_copy_global_to_shared(a_map, at, loaded, a_ring.index(s))
                hopper.tma.async_copy_global_to_shared(b_map, at, loaded, b_ring.index(s))
                if DKV:
                    at = [(sequence * H + other) * seq + n, 0]
                    hopper.tma.async_copy_global_to_shared(stats_map, at, loaded, stats_ring.index(s))
                i += 1
        t += 1  # noqa: SIM113


@gluon
def backward_consumer_warpgroup(
    dx, dy, stats, tile_pipeline, stream_pipeline, seq, items, WG, DKV, SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DKV_STRIDES
):
    """Consumer warpgroup WG (0 or 1) of the backward pass, for WG_M = 64 rows of each tile: of each streamed block p = exp(x a^T
    scale - lse), g = y b^T, then y_sum += p b (dv, with DKV) and x_sum += p (g - delta) a (dk or dq), (WG_M, D) fp32 in registers.

    DKV: x, y, a, b are k, v, q, dout, rows are keys, and the streamed queries' lse and delta come with them from shared memory;
    else q, dout, k, v, and those of this warpgroup's queries are loaded from `stats` (queries of all heads, STATS), once. Stores dx
    (dk or dq, times SOFTMAX_SCALE) and dy (dv). Only the blocks that hold the diagonal, or end the sequence, are masked."""
    x_ring, y_ring, tile_full, tile_empty = tile_pipeline
    a_ring, b_ring, stats_ring, full, empty = stream_pipeline
    STAGES: gl.constexpr = a_ring.shape[0]
    TILE_HEADS: gl.constexpr = H // GROUP_SIZE if DKV else H
    SCORES: gl.constexpr = wgmma_layout(STREAM_ROWS)
    SUMS: gl.constexpr = wgmma_layout(D)
    i, t = 0, 0  # as in the producer warp
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, tile_row = query_tile(w, seq)
        first = tile_row + WG * WG_M  # of this consumer's rows
        x = x_ring.index(2 * (t % 2) + WG)  # two tiles of two halves
        y = y_ring.index(2 * (t % 2) + WG)
        x_sum = gl.zeros((WG_M, D), gl.float32, SUMS)
        y_sum = gl.zeros((WG_M, D), gl.float32, SUMS)
        row = first + gl.arange(0, WG_M, layout=gl.SliceLayout(1, SCORES))
        if not DKV:
            query_stats = stats + STATS * (head * seq + row)
            lse_row = gl.expand_dims(gl.load(query_stats, mask=row < seq, other=0.0), 1)
            delta = gl.expand_dims(gl.load(query_stats + 1, mask=row < seq, other=0.0), 1)
        consumer_wait(tile_full, t)
        begin = first if DKV else 0  # of the rows that this consumer reads: `first` on the diagonal
        stop = seq if DKV else first + WG_M
        for _ in range(GROUP_SIZE if DKV else 1):
            if DKV and WG == 1:
                i = skip_block(full, empty, i)
            for n in range(begin, stop, STREAM_ROWS):
                s = i % STAGES
                consumer_wait(full, i)
                # Issue both wgmmas; p from the first one's scores, while g is multiplied.
                scores = issue_qk(x, a_ring.index(s), SCORES)
                g = issue_qk(y, b_ring.index(s), SCORES)
                scores = hopper.warpgroup_mma_wait(1, deps=(scores,))  # the older of the two
                if DKV:
                    lse_row = load_stat_in_score_columns(stats_ring.index(s), 0, SCORES)
                p = gl.exp2(scores * SCALE_LOG2 - lse_row)
                if n == first or (DKV and n + STREAM_ROWS > seq):
                    p = mask_probabilities(p, row, n, seq, DKV, SCORES)
                # dv += p b, with DKV; wait for g.
                if DKV:
                    weights = register_operand(p, b_ring.dtype, SUMS)
                    y_sum = hopper.warpgroup_mma(weights, b_ring.index(s), y_sum, is_async=True)
                    g = hopper.warpgroup_mma_wait(1, deps=(g,))
                    delta = load_stat_in_score_columns(stats_ring.index(s), 1, SCORES)
                else:
                    g, p = hopper.warpgroup_mma_wait(0, deps=(g, p))
                # dk or dq += (p (g - delta)) a.
                weights = register_operand(p * (g - delta), a_ring.dtype, SUMS)
                x_sum = hopper.warpgroup_mma(weights, a_ring.index(s), x_sum, is_async=True)
                if DKV:
                    x_sum, y_sum = hopper.warpgroup_mma_wait(0, deps=(x_sum, y_sum))
                else:
                    x_sum = hopper.warpgroup_mma_wait(0, deps=(x_sum,))
                consumer_release(empty, i)
                i += 1
            if not DKV and WG == 0:
                i = skip_block(full, empty, i)
        consumer_release(tile_empty, t)
        at = gl.cast(head // TILE_HEADS * seq, gl.int64)
        store_rows(dx + at * DKV_STRIDES[0] + head % TILE_HEADS * D, x_sum * SOFTMAX_SCALE, first, seq, D, DKV_STRIDES[0])
        if DKV:
            store_rows(dy + at * DKV_STRIDES[1] + head % TILE_HEADS * D, y_sum, first, seq, D, DKV_STRIDES[1])
        t += 1  # noqa: SIM113


@gluon
def mask_probabilities(p, row, n, seq, DKV, SCORES):
    """Probabilities p of this consumer's rows `row` (WG_M,) and the rows streamed from n on: zero where the key is after the query
    or, with DKV, where the query streamed is beyond the sequence."""
    tile_rows = gl.expand_dims(row, 1)
    streamed = gl.expand_dims(n + gl.arange(0, STREAM_ROWS, layout=gl.SliceLayout(0, SCORES)), 0)
    if DKV:
        p = gl.where((streamed >= tile_rows) & (streamed < seq), p, 0.0)
    else:
        p = gl.where(tile_rows >= streamed, p, 0.0)
    return p


@gluon
def skip_block(full, empty, i):
    """Release block i, which only the other consumer reads; returns i + 1. It waits until the block is full: then the other
    consumer has released the stage's previous block, and arrivals for the two blocks are not mixed."""
    consumer_wait(full, i)
    consumer_release(empty, i)
    return i + 1


@gluon
def load_stat_in_score_columns(block, WHICH, SCORES):
    """A statistic of each streamed query, lse (WHICH 0) or delta (1), as (1, STREAM_ROWS) in the layout of the scores. `block`
    (STREAM_ROWS, STATS) fp32 is in shared memory. STATS_LAYOUT loads each value into the threads whose scores have its column."""
    # Bits of the query's number: bit 0 and bits 3 to 5 count a thread's registers, bits 1 and 2 its lane's lowest two bits (of
    # wgmma_layout: lane 4 r + c has columns 2 c and 2 c + 1). The lane's other bits and the warp are rows, and count none.
    STATS_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [STREAM_ROWS, 1]
    )
    values = block.slice(WHICH, 1, dim=1).load(STATS_LAYOUT).reshape([STREAM_ROWS])
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(0, SCORES), assert_trivial=True), 0)


@gluon
def hopper_attention_backward(
    dx, dy, stats, x_map, y_map, a_map, b_map, stats_map, seq, heads,
    DKV, SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DKV_STRIDES, STAGES,
):  # fmt: skip
    """FlashAttention-3 backward: with DKV dx = dk = scale ds^T q and dy = dv = p^T dout (B, T, G * D), else dx = dq = scale ds k
    (B, T, H * D) and dy None, with p = exp(scale q k^T - lse), ds = p (dout v^T - delta). Persistent thread blocks, one per
    multiprocessor: allocates shared memory and mbarriers, and starts two consumer warpgroups and a producer warp.

    NAME_map: tensor maps of the bf16 or fp16 operands (with DKV x, y, a, b are k, v, q, dout; else q, dout, k, v); `stats` (dq) and
    `stats_map` (DKV) are of what attention_stats wrote, (queries of all heads, STATS) fp32. `heads`: of the tiles, of all
    sequences. STAGES: of the streamed blocks, 2 at least. D is 64 or 128."""
    x_ring = gl.allocate_shared_memory(x_map.dtype, [4, WG_M, D], x_map.layout)  # two tiles of two halves
    y_ring = gl.allocate_shared_memory(y_map.dtype, [4, WG_M, D], y_map.layout)
    a_ring = gl.allocate_shared_memory(a_map.dtype, [STAGES, STREAM_ROWS, D], a_map.layout)
    b_ring = gl.allocate_shared_memory(b_map.dtype, [STAGES, STREAM_ROWS, D], b_map.layout)
    tile_full, tile_empty = mbarriers(2), mbarriers(2)
    for s in gl.static_range(2):
        hopper.mbarrier.init(tile_full.index(s), count=1)  # the producer's expect
        hopper.mbarrier.init(tile_empty.index(s), count=2)  # both consumers
    full, empty = mbarriers(STAGES), mbarriers(STAGES)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=2)
    hopper.fence_async_shared()

    tile_pipeline = (x_ring, y_ring, tile_full, tile_empty)
    stream_pipeline = (a_ring, b_ring, None, full, empty)
    if DKV:
        stats_ring = gl.allocate_shared_memory(stats_map.dtype, [STAGES, STREAM_ROWS, STATS], stats_map.layout)
        stream_pipeline = (a_ring, b_ring, stats_ring, full, empty)
    items = heads * gl.cdiv(seq, BLOCK)  # tiles of all heads
    gl.warp_specialize([
        (backward_consumer_warpgroup, (dx, dy, stats, tile_pipeline, stream_pipeline, seq, items, 0,
                                       DKV, SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DKV_STRIDES)),
        (backward_consumer_warpgroup, (dx, dy, stats, tile_pipeline, stream_pipeline, seq, items, 1,
                                       DKV, SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DKV_STRIDES)),
        (backward_producer_warp, (x_map, y_map, a_map, b_map, stats_map, tile_pipeline, stream_pipeline, seq, items,
                                  DKV, H, GROUP_SIZE, D)),
    ], [4, 1], [240, 24])  # fmt: skip


def launch_hopper_backward(op: Any, c: Lowering, tile: AttentionConfig, stats: Tensor, scale_log2: float, *, keys: bool) -> None:
    """Plan one launch of hopper_attention_backward for `op`, for dk and dv (`keys`) or for dq, with a warp-specialized
    configuration `tile`: causal over complete sequences (`op.plain`), heads of D = 64 or 128 columns of 16-bit numbers, without
    dropout, results stored and not added. `stats` (B, H, T, STATS) fp32: those of attention_stats; `scale_log2`: softmax scale
    times log2(e). With `keys`, keys and values (x, y) are stationary and q, dout (a, b) stream; else the other way round. Grid: a
    thread block for each multiprocessor, or for each tile where those are fewer."""
    D = int(op.out.shape[-1]) // op.heads
    assert tile.warp_specialized and D in (64, 128) and op.plain and not op.rate, op
    sizes = (STREAM_ROWS.value, BLOCK.value)  # of queries and keys where keys are stationary
    assert (tile.queries, tile.keys) == (sizes if keys else sizes[::-1]), tile
    if keys:
        (x, y), (a, b) = (op.k, op.v), (op.q, op.dout)
        # A row for each query of all heads, which streams past the tile with the query.
        box = (STREAM_ROWS.value, STATS.value)
        stats_map = TensorMap(part(stats), stats.dtype, c.elements(op.lse), STATS.value, box, STATS.value)
        results = {"dx": op.dk, "dy": op.dv, "stats": None, "stats_map": stats_map}
        strides = (op.dk.row_stride, op.dv.row_stride)
        heads = op.kv_heads  # of a sequence's tiles
    else:
        (x, y), (a, b) = (op.q, op.dout), (op.k, op.v)
        results = {"dx": op.dq, "dy": None, "stats": stats, "stats_map": None}
        strides = (op.dq.row_stride, 0)
        heads = op.heads
    maps = {f"{name}_map": hopper_attention.head_tensor_map(c, t, WG_M.value, D) for name, t in (("x", x), ("y", y))}
    maps |= {f"{name}_map": hopper_attention.head_tensor_map(c, t, STREAM_ROWS.value, D) for name, t in (("a", a), ("b", b))}
    constants = {"DKV": keys, "SCALE_LOG2": scale_log2, "SOFTMAX_SCALE": constant_scale(op, D), "D": D, "DKV_STRIDES": strides}
    constants |= {"H": op.heads, "GROUP_SIZE": op.heads // op.kv_heads, "STAGES": tile.num_stages}
    c.launch(
        hopper_attention_backward, maps | results | {"seq": lambda s: s.seq, "heads": lambda s: s.batch * heads}, constants,
        grid=lambda s: (min(c.target.sms, ceil_div(s.seq, BLOCK.value) * s.batch * heads),),
        writes="dx dy" if keys else "dx", warps=tile.num_warps,
    )  # fmt: skip
