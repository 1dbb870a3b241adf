"""Warp-specialized causal attention on Hopper, forward (FlashAttention-3: Shah et al. 2024).

Shapes: q, out (B, T, H * D), k, v (B, T, G * D), D 64 or 128; lse (B, H, T) fp32; GROUP_SIZE = H / G query heads share a KV head. A
tile is BLOCK queries of one head, 64 for each of two consumer warpgroups. A thread block is persistent: it does every (number of
blocks)-th tile, and the next tile's operands are loaded during this one's epilogue.

Tuples of shared memory that the functions pass on: queries = (q_ring, q_full, q_empty), keys and values alike. A work item w is a
tile of one head; `i` counts blocks of keys and `t` tiles of a thread block since its start: block i is in stage i % STAGES of its
ring (`producer_acquire`, `consumer_wait`, `consumer_release`). WG: the consumer, 0 or 1.

    warps                   registers  what they do
    2 consumer warpgroups   240        scores and output accumulators (64, D), row maxima and sums in registers
    1 producer warp         24         TMA loads of queries, keys and values into every free stage

In shared memory, with mbarriers:

    q_ring (2 x 2, 64, D)            q_full[t]: a tile's queries are loaded; q_empty[t]: both consumers are done with them
    k_ring, v_ring (S, BLOCK, D)     k_full, v_full[s]: a block is loaded; k_empty, v_empty[s]: both consumers' wgmma have read it
    pingpong[h]                      consumer h may issue its wgmmas: each arrives at the other's after issuing its own (FA3's
                                     pingpong scheduling), so that the softmax of one overlaps the matmuls of the other

Keys are visited from the diagonal back, so that the first block has the mask and no later one. In each step a consumer has Q K^T of
the next keys and P V of these keys in flight together, then computes the softmax of the next scores while P V is multiplied. Tensor
maps end with the batch and not with a sequence: behind a last, partial block lie the next sequence's keys, which must be finite.

It computes what attention.py does, with the online softmax rescaled at other blocks of keys, so that bits differ."""

from math import e, log2
from typing import Any

from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernel import Lowering, TensorMap
from barellm.cuda.kernels.hopper_pipeline import WG_M, consumer_release, consumer_wait, mbarriers, producer_acquire, wgmma_layout
from barellm.cuda.lang import constant, gl, gluon, hopper
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, view_stride

BLOCK = constant(128)  # queries of a tile, keys of a step
LN_2 = constant(1 / log2(e))
LOWEST = constant(-1e30)  # of a score that is not seen; every query sees a key of its first block


@gluon
def query_tile(w, seq):
    """The tile scheduler: (head, counted over all sequences; first query) of work item w. The heads of one sequence are done
    together, so that their keys stay in L2; each begins at another tile, or some thread blocks would have only long ones."""
    tiles = gl.cdiv(seq, BLOCK)
    head = w // tiles
    return head, (tiles - 1 - (w + head) % tiles) * BLOCK


@gluon
def attention_producer_warp(q_map, k_map, v_map, queries, keys, values, seq, items, H, GROUP_SIZE, D):
    """The producer warp of the forward pass: for each tile, TMA loads of its queries (a box of WG_M = 64 rows for each consumer),
    then of blocks of BLOCK keys and values from the diagonal back, into every free stage, so that it runs ahead into the next tile.

    q_map, k_map, v_map: tensor maps of q (B * T, H * D), k, v (B * T, G * D); queries, keys, values: the module's tuples. `items`:
    tiles of all heads, of which a thread block does every (number of blocks)-th."""
    q_ring, q_full, q_empty = queries
    k_ring, k_full, k_empty = keys
    v_ring, v_full, v_empty = values
    STAGES: gl.constexpr = k_ring.shape[0]
    i, t = 0, 0  # blocks of keys and tiles so far
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, m0 = query_tile(w, seq)
        row = head // H * seq  # the sequence's first row in q, k and v
        ready = q_full.index(t % 2)
        producer_acquire(q_empty, t)
        hopper.mbarrier.expect(ready, 2 * q_map.block_type.nbytes)
        for half in gl.static_range(2):  # of a tile, for each consumer
            at = [row + m0 + half * WG_M, head % H * D]
            hopper.tma.async_copy_global_to_shared(q_map, at, ready, q_ring.index(2 * (t % 2) + half))
        for n in range(0, m0 + BLOCK, BLOCK):
            s, phase = i % STAGES, (i // STAGES & 1) ^ 1  # as in `producer_acquire`, for both rings
            at = [row + m0 - n, head % H // GROUP_SIZE * D]
            hopper.mbarrier.wait(k_empty.index(s), phase)
            hopper.mbarrier.expect(k_full.index(s), k_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(k_map, at, k_full.index(s), k_ring.index(s))
            hopper.mbarrier.wait(v_empty.index(s), phase)
            hopper.mbarrier.expect(v_full.index(s), v_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(v_map, at, v_full.index(s), v_ring.index(s))
            i += 1
        t += 1  # noqa: SIM113


@gluon
def attention_consumer_warpgroup(out, lse, queries, keys, values, pingpong, seq, items, WG, SCALE_LOG2, H, D):
    """Consumer warpgroup WG (0 or 1) of the forward pass: out (B, T, H * D) = softmax(scale q k^T, causal) v and lse (B, H, T)
    fp32, of WG_M = 64 queries of each tile, with acc (WG_M, D), row_max and row_sum (WG_M,) fp32 in registers. Q K^T of block i + 1
    is issued before P V of block i, so the tensor cores work on P V during the softmax of block i + 1.

    `queries`, `keys`, `values`: rings of tiles in shared memory that the producer fills, their full and empty mbarriers;
    `pingpong`: the mbarriers by which the two consumers take turns to issue wgmmas; `items`: tiles of all heads; SCALE_LOG2:
    softmax scale times log2(e). The order of waits, wgmmas and arrivals is the protocol: tests run it in every order."""
    q_ring, q_full, q_empty = queries
    k_ring, k_full, k_empty = keys
    v_ring, v_full, v_empty = values
    STAGES: gl.constexpr = k_ring.shape[0]
    SCORES: gl.constexpr = wgmma_layout(BLOCK)
    SUMS: gl.constexpr = wgmma_layout(D)
    i, t = 0, 0  # blocks of keys and tiles so far
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, m0 = query_tile(w, seq)
        first = m0 + WG * WG_M  # of this consumer's queries
        q = q_ring.index(2 * (t % 2) + WG)  # two tiles of two halves
        # The block on the diagonal: its scores and their softmax, before anything overlaps.
        consumer_wait(q_full, t)
        consumer_wait(k_full, i)
        s = issue_qk(q, k_ring.index(i % STAGES), SCORES)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        consumer_release(k_empty, i)
        s = causal_mask(s, first, m0, SCORES)
        row_max = gl.max(s, 1) * SCALE_LOG2
        p = gl.exp2(s * SCALE_LOG2 - gl.expand_dims(row_max, 1))
        row_sum = gl.sum(p, 1)
        weights = register_operand(p, v_ring.dtype, SUMS)
        consumer_wait(v_full, i)
        acc = gl.zeros((WG_M, D), gl.float32, SUMS)
        # P V of block i beside the scores and the softmax of block i + 1.
        for _ in range(0, m0, BLOCK):
            next_i = i + 1
            # Turn number i - t of this consumer. Consumer 0 goes first: its phase is the opposite, as that of an empty stage.
            hopper.mbarrier.wait(pingpong.index(WG), (i - t & 1) ^ (1 - WG))
            consumer_wait(k_full, next_i)
            s = issue_qk(q, k_ring.index(next_i % STAGES), SCORES)
            sums = hopper.warpgroup_mma(weights, v_ring.index(i % STAGES), acc, is_async=True)
            hopper.mbarrier.arrive(pingpong.index(1 - WG))
            s = hopper.warpgroup_mma_wait(1, deps=(s,))  # the scores; P V goes on
            consumer_release(k_empty, next_i)
            new_max = gl.maximum(row_max, gl.max(s, 1) * SCALE_LOG2)
            p = gl.exp2(s * SCALE_LOG2 - gl.expand_dims(new_max, 1))
            rescale = gl.exp2(row_max - new_max)  # of what was summed so far
            row_sum = row_sum * rescale + gl.sum(p, 1)
            row_max = new_max
            # The next block of values. Here, since ptxas puts the wait for P V before all exponentials if nothing lies between,
            # and a wait for a barrier begins another basic block.
            consumer_wait(v_full, next_i)
            acc, p = hopper.warpgroup_mma_wait(0, deps=(sums, p))
            # Not before the wait: the last wgmma reads its operand, the old weights, from registers.
            weights = register_operand(p, v_ring.dtype, SUMS)
            consumer_release(v_empty, i)
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, SUMS), assert_trivial=True), 1)
            i += 1
        # P V of the last block, then the epilogue.
        consumer_release(q_empty, t)
        sums = hopper.warpgroup_mma(weights, v_ring.index(i % STAGES), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(sums,))
        consumer_release(v_empty, i)
        write_out_and_lse(out, lse, acc, row_sum, row_max, head, first, seq, SCORES, SUMS, H, D)
        i += 1
        t += 1  # noqa: SIM113


@gluon
def causal_mask(s, m0, n0, SCORES):
    """Scores s (64 queries from m0 on, BLOCK keys from n0 on), LOWEST where the key is after the query."""
    m = gl.expand_dims(m0 + gl.arange(0, WG_M, layout=gl.SliceLayout(1, SCORES)), 1)
    n = gl.expand_dims(n0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES)), 0)
    return gl.where(m >= n, s, LOWEST)


@gluon
def issue_qk(q, k, SCORES):
    """Issue the wgmma q (64, D) k^T, k (keys, D), both in shared memory. Returns the scores (64, keys), not yet waited for."""
    KEYS: gl.constexpr = k.shape[0]
    no_acc = gl.zeros((WG_M, KEYS), gl.float32, SCORES)
    return hopper.warpgroup_mma(q, k.permute((1, 0)), no_acc, use_acc=False, is_async=True)


@gluon
def register_operand(p, DTYPE, SUMS):
    """Probabilities p (64, keys) rounded to DTYPE, as a register operand of wgmma: no data moves: each thread has its elements."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon
def write_out_and_lse(out, lse, acc, row_sum, row_max, head, first, seq, SCORES, SUMS, H, D):
    """Epilogue: write out = acc / row_sum and lse of a consumer's queries from `first` on, those before `seq`."""
    m = first + gl.arange(0, WG_M, layout=gl.SliceLayout(1, SCORES))
    gl.store(lse + head * seq + m, (row_max + gl.log2(row_sum)) * LN_2, mask=m < seq)
    scale = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, SUMS), assert_trivial=True)
    out_rows = out + gl.cast(head // H * seq, gl.int64) * (H * D) + head % H * D
    store_rows(out_rows, acc * gl.expand_dims(scale, 1), first, seq, D, H * D)


@gluon
def store_rows(to, y, first, seq, D, STRIDE):
    """Store y (WG_M, D) to rows `first` onwards of `to`, those below seq; STRIDE: elements from a row to the next."""
    # 8 adjacent columns a thread: 16 bytes. D / 8 threads make a row, so a warp of 32 has 256 / D rows; 4 warps below one another.
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    y = gl.convert_layout(y.to(to.dtype.element_ty), STORE_LAYOUT)
    m = gl.expand_dims(first + gl.arange(0, WG_M, layout=gl.SliceLayout(1, STORE_LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, STORE_LAYOUT)), 0)
    gl.store(to + m * STRIDE + column, y, mask=(m < seq) & (column < D))


@gluon
def hopper_attention(out, lse, q_map, k_map, v_map, seq, heads, SCALE_LOG2, H, GROUP_SIZE, D, STAGES):
    """FlashAttention-3 forward: out (B, T, H * D) = softmax(scale q k^T, causal) v and lse (B, H, T) fp32, by persistent thread
    blocks, one per multiprocessor: allocates shared memory and mbarriers, and starts two consumer warpgroups and a producer warp.

    NAME_map: tensor maps of q (B * T, H * D), k, v (B * T, G * D), bf16 or fp16, as the projection and RoPE wrote them; `heads`: of
    all sequences; SCALE_LOG2: softmax scale times log2(e); STAGES: of keys and values, 2 at least. D is 64 or 128."""
    q_ring = gl.allocate_shared_memory(q_map.dtype, [4, WG_M, D], q_map.layout)  # two tiles of two halves
    k_ring = gl.allocate_shared_memory(k_map.dtype, [STAGES, BLOCK, D], k_map.layout)
    v_ring = gl.allocate_shared_memory(v_map.dtype, [STAGES, BLOCK, D], v_map.layout)
    q_full, q_empty, pingpong = mbarriers(2), mbarriers(2), mbarriers(2)
    for s in gl.static_range(2):
        hopper.mbarrier.init(q_full.index(s), count=1)
        hopper.mbarrier.init(q_empty.index(s), count=2)  # both consumers
        hopper.mbarrier.init(pingpong.index(s), count=1)
    k_full, k_empty = mbarriers(STAGES), mbarriers(STAGES)
    v_full, v_empty = mbarriers(STAGES), mbarriers(STAGES)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(s), count=1)
        hopper.mbarrier.init(k_empty.index(s), count=2)
        hopper.mbarrier.init(v_full.index(s), count=1)
        hopper.mbarrier.init(v_empty.index(s), count=2)
    hopper.fence_async_shared()

    queries = (q_ring, q_full, q_empty)
    keys = (k_ring, k_full, k_empty)
    values = (v_ring, v_full, v_empty)
    items = heads * gl.cdiv(seq, BLOCK)
    gl.warp_specialize([
        (attention_consumer_warpgroup, (out, lse, queries, keys, values, pingpong, seq, items, 0, SCALE_LOG2, H, D)),
        (attention_consumer_warpgroup, (out, lse, queries, keys, values, pingpong, seq, items, 1, SCALE_LOG2, H, D)),
        (attention_producer_warp, (q_map, k_map, v_map, queries, keys, values, seq, items, H, GROUP_SIZE, D)),
    ], [4, 1], [240, 24])  # fmt: skip


def launch_forward(op: Any, c: Lowering, tile: AttentionConfig, scale_log2: float) -> None:
    """Plan one launch of hopper_attention for an op with a warp-specialized configuration `tile`: causal over complete sequences,
    heads of 64 or 128 columns of 16-bit numbers, without dropout. `scale_log2`: softmax scale times log2(e)."""
    D, group_size = int(op.out.shape[-1]) // op.heads, op.heads // op.kv_heads
    assert tile.warp_specialized and D in (64, 128) and op.plain and not op.rate, op
    assert (tile.queries, tile.keys) == (BLOCK.value, BLOCK.value), tile
    maps = {f"{name}_map": head_tensor_map(c, op.inputs[name], WG_M.value if name == "q" else BLOCK.value, D) for name in "qkv"}
    c.launch(
        hopper_attention, maps | {"out": op.out, "lse": op.lse, "seq": lambda s: s.seq, "heads": lambda s: s.batch * op.heads},
        {"SCALE_LOG2": scale_log2, "H": op.heads, "GROUP_SIZE": group_size, "D": D, "STAGES": tile.num_stages},
        grid=lambda s: (min(c.target.sms, ceil_div(s.seq, BLOCK.value) * s.batch * op.heads),),
        writes="out lse", warps=tile.num_warps,
    )  # fmt: skip


def head_tensor_map(c: Lowering, x: Tensor, rows: int, D: int) -> TensorMap:
    """The tensor map of q, k or v (tokens, heads * D), maybe columns of a wider tensor, in boxes of `rows` x D, one head."""
    return TensorMap(part(x), x.dtype, c.rows(x), int(x.shape[-1]), (rows, D), view_stride(x) or int(x.shape[-1]))
