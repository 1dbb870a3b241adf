"""Causal attention on Hopper, forward, by warps with roles: one fills rings of queries, keys and values through the tensor memory
accelerator, two warpgroups multiply and do the softmax (Shah et al. 2024, FlashAttention-3).

Shapes: q, out (B, T, H * D), k, v (B, T, G * D), D 64 or 128; lse (B, H, T) fp32; each of the G heads of keys and values serves
SHARE = H / G heads of queries. A tile is BLOCK queries of one head, 64 for each warpgroup. A block of threads stays: it does every
(number of blocks)-th tile, and the next tile's operands arrive while this one's result goes out. Rings in shared memory:

    q_ring (2 x 2, 64, D)            asked[t]: a tile's queries have arrived, answered[t]: both halves are done with them
    k_ring, v_ring (S, BLOCK, D)     keys, values: arrived; keys_free, values_free: both halves have multiplied them

Keys are visited from the diagonal back, so that the first block has the mask and no later one. A turn of a half: the scores of the
next keys and the sums of these keys' values are both under way, then come the exponentials of the next scores while the sums are
multiplied, and the other half's products (`turn`) before its own next ones. Tensor maps end with the batch and not with a sequence:
beyond a last, partial block lie the next sequence's keys, whose probability is zero, so they must be finite.

It computes what attention.py does, scaled at other blocks of keys, so that bits differ.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

from barellm.cuda.choices import AttentionTile
from barellm.cuda.kernel import Lowering, TensorMap
from barellm.cuda.kernels.gemm.hopper_warp_specialized import HALF
from barellm.cuda.lang import constant, gl, gluon, hopper
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, view_stride

BLOCK = constant(128)  # queries of a tile, keys of a turn
LN_2 = constant(1 / log2(e))
LOWEST = constant(-1e30)  # of a score that is not seen; every query sees a key of its first block


@gluon
def place(w, seq):
    """Work item w: its head, of all sequences', and its first query. The heads of one sequence are done together, so that their
    keys stay in the second cache; each begins at another tile, or some blocks of threads would have only long ones."""
    tiles = gl.cdiv(seq, BLOCK)
    head = w // tiles
    return head, (tiles - 1 - (w + head) % tiles) * BLOCK


@gluon
def feed(q_map, k_map, v_map, queries, keys, values, seq, items, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr):
    """Fill the rings as far ahead as they have room: also with the next tile's."""
    q_ring, asked, answered = queries
    k_ring, k_arrived, k_free = keys
    v_ring, v_arrived, v_free = values
    STAGES: gl.constexpr = k_ring.shape[0]
    i, t = 0, 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, m0 = place(w, seq)
        row = head // H * seq
        ready = asked.index(t % 2)
        hopper.mbarrier.wait(answered.index(t % 2), (t // 2 & 1) ^ 1)
        hopper.mbarrier.expect(ready, 2 * q_map.block_type.nbytes)
        for half in gl.static_range(2):
            at = [row + m0 + half * HALF, head % H * D]
            hopper.tma.async_copy_global_to_shared(q_map, at, ready, q_ring.index(2 * (t % 2) + half))
        for n in range(0, m0 + BLOCK, BLOCK):
            s, phase = i % STAGES, (i // STAGES & 1) ^ 1
            at = [row + m0 - n, head % H // SHARE * D]
            hopper.mbarrier.wait(k_free.index(s), phase)
            hopper.mbarrier.expect(k_arrived.index(s), k_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(k_map, at, k_arrived.index(s), k_ring.index(s))
            hopper.mbarrier.wait(v_free.index(s), phase)
            hopper.mbarrier.expect(v_arrived.index(s), v_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(v_map, at, v_arrived.index(s), v_ring.index(s))
            i += 1
        t += 1  # noqa: SIM113


@gluon
def attend(
    out, lse, queries, keys, values, turn, seq, items,
    HALF_OF: gl.constexpr, UNIT: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One half of each tile. `i` counts blocks of keys, `t` tiles."""
    q_ring, asked, answered = queries
    k_ring, k_arrived, k_free = keys
    v_ring, v_arrived, v_free = values
    STAGES: gl.constexpr = k_ring.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    i, t = 0, 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, m0 = place(w, seq)
        first = m0 + HALF_OF * HALF
        q = q_ring.index(2 * (t % 2) + HALF_OF)
        hopper.mbarrier.wait(asked.index(t % 2), t // 2 & 1)
        hopper.mbarrier.wait(k_arrived.index(i % STAGES), i // STAGES & 1)
        s = scores(q, k_ring.index(i % STAGES), SCORES)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        hopper.mbarrier.arrive(k_free.index(i % STAGES))
        m = gl.expand_dims(first + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES)), 1)
        n = gl.expand_dims(m0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES)), 0)
        s = gl.where(m >= n, s, LOWEST)
        top = gl.max(s, 1) * UNIT
        p = gl.exp2(s * UNIT - gl.expand_dims(top, 1))
        total = gl.sum(p, 1)
        weights = operand(p, v_ring.dtype, SUMS)
        hopper.mbarrier.wait(v_arrived.index(i % STAGES), i // STAGES & 1)
        acc = gl.zeros((HALF, D), gl.float32, SUMS)
        for _ in range(0, m0, BLOCK):
            after = i + 1
            hopper.mbarrier.wait(turn.index(HALF_OF), (i - t & 1) ^ (1 - HALF_OF))
            hopper.mbarrier.wait(k_arrived.index(after % STAGES), after // STAGES & 1)
            s = scores(q, k_ring.index(after % STAGES), SCORES)
            sums = hopper.warpgroup_mma(weights, v_ring.index(i % STAGES), acc, is_async=True)
            hopper.mbarrier.arrive(turn.index(1 - HALF_OF))
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
            hopper.mbarrier.arrive(k_free.index(after % STAGES))
            higher = gl.maximum(top, gl.max(s, 1) * UNIT)
            p = gl.exp2(s * UNIT - gl.expand_dims(higher, 1))
            shrink = gl.exp2(top - higher)
            total = total * shrink + gl.sum(p, 1)
            top = higher
            # The values that come next. Here, since ptxas puts the wait for the sums before all exponentials if nothing lies
            # between, and a wait for a barrier begins another block of its code.
            hopper.mbarrier.wait(v_arrived.index(after % STAGES), after // STAGES & 1)
            acc, p = hopper.warpgroup_mma_wait(0, deps=(sums, p))
            weights = operand(p, v_ring.dtype, SUMS)  # not before: the product reads the last ones from registers
            hopper.mbarrier.arrive(v_free.index(i % STAGES))
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, SUMS), assert_trivial=True), 1)
            i += 1
        hopper.mbarrier.arrive(answered.index(t % 2))
        sums = hopper.warpgroup_mma(weights, v_ring.index(i % STAGES), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(sums,))
        hopper.mbarrier.arrive(v_free.index(i % STAGES))
        finish(out, lse, acc, total, top, head, first, seq, SCORES, SUMS, H, D)
        i += 1
        t += 1  # noqa: SIM113


@gluon
def scores(q, k, SCORES: gl.constexpr):
    """Start q (64, D) times k, transposed."""
    KEYS: gl.constexpr = k.shape[0]
    none = gl.zeros((HALF, KEYS), gl.float32, SCORES)
    return hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon
def operand(p, dtype: gl.constexpr, SUMS: gl.constexpr):
    """Probabilities as a product takes them from registers; in these layouts they are there already."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon
def finish(
    out,
    lse,
    acc,
    total,
    top,
    head,
    first,
    seq,
    SCORES: gl.constexpr,
    SUMS: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
):
    """Write the queries of a half that are in the sequence."""
    m = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    gl.store(lse + head * seq + m, (top + gl.log2(total)) * LN_2, mask=m < seq)
    scale = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS), assert_trivial=True)
    to = out + gl.cast(head // H * seq, gl.int64) * (H * D) + head % H * D
    put_rows(to, acc * gl.expand_dims(scale, 1), first, seq, D, H * D)


@gluon
def put_rows(to, y, first, seq, D: gl.constexpr, ROW: gl.constexpr):
    """Write the rows of y (HALF, D), from `first` on, that are in the sequence. Rows of the matrix lie ROW apart."""
    WAY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    y = gl.convert_layout(y.to(to.dtype.element_ty), WAY)
    m = gl.expand_dims(first + gl.arange(0, HALF, layout=gl.SliceLayout(1, WAY)), 1)
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, WAY)), 0)
    gl.store(to + m * ROW + column, y, mask=(m < seq) & (column < D))


@gluon
def hopper_attention(
    out, lse, q_map, k_map, v_map, seq, heads, UNIT: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`heads`: of all sequences."""
    q_ring = gl.allocate_shared_memory(q_map.dtype, [4, HALF, D], q_map.layout)
    k_ring = gl.allocate_shared_memory(k_map.dtype, [STAGES, BLOCK, D], k_map.layout)
    v_ring = gl.allocate_shared_memory(v_map.dtype, [STAGES, BLOCK, D], v_map.layout)
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    answered = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for s in gl.static_range(2):
        hopper.mbarrier.init(asked.index(s), count=1)
        hopper.mbarrier.init(answered.index(s), count=2)
        hopper.mbarrier.init(turn.index(s), count=1)
    k_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(k_arrived.index(s), count=1)
        hopper.mbarrier.init(k_free.index(s), count=2)
        hopper.mbarrier.init(v_arrived.index(s), count=1)
        hopper.mbarrier.init(v_free.index(s), count=2)
    hopper.fence_async_shared()

    queries = (q_ring, asked, answered)
    keys = (k_ring, k_arrived, k_free)
    values = (v_ring, v_arrived, v_free)
    items = heads * gl.cdiv(seq, BLOCK)
    gl.warp_specialize([
        (attend, (out, lse, queries, keys, values, turn, seq, items, 0, UNIT, H, D)),
        (attend, (out, lse, queries, keys, values, turn, seq, items, 1, UNIT, H, D)),
        (feed, (q_map, k_map, v_map, queries, keys, values, seq, items, H, SHARE, D)),
    ], [4, 1], [240, 24])  # fmt: skip


def launch_forward(op: Any, c: Lowering, tile: AttentionTile, unit: float) -> None:
    """Append the forward pass of an op that `choices` names this kernel for: causal over whole sequences, heads of 64 or 128
    columns of 16-bit numbers, without dropout."""
    D, share = int(op.out.shape[-1]) // op.heads, op.heads // op.kv_heads
    assert tile.roles and D in (64, 128) and op.plain and not op.rate, op
    assert (tile.queries, tile.keys) == (BLOCK.value, BLOCK.value), tile
    maps = {
        f"{name}_map": rows_in_boxes(c, op.inputs[name], HALF.value if name == "q" else BLOCK.value, D)
        for name in "qkv"
    }
    c.launch(
        hopper_attention,
        maps | {"out": op.out, "lse": op.lse, "seq": lambda s: s.seq, "heads": lambda s: s.batch * op.heads},
        {"UNIT": unit, "H": op.heads, "SHARE": share, "D": D, "STAGES": tile.stages},
        grid=lambda s: (min(c.target.sms, ceil_div(s.seq, BLOCK.value) * s.batch * op.heads),), writes="out lse", warps=tile.warps,
    )  # fmt: skip


def rows_in_boxes(c: Lowering, x: Tensor, rows: int, D: int) -> TensorMap:
    """The rows of q, k or v, where they lie, in boxes of `rows` of one head."""
    return TensorMap(part(x), x.dtype, c.rows(x), int(x.shape[-1]), (rows, D), view_stride(x) or int(x.shape[-1]))
