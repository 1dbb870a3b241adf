"""Causal attention on Hopper, backward, by warps with roles as in hopper_attention.py: one kernel, for dk and dv or for dq.

Shapes as in attention_backward.py, whose sums it computes in the same order. A tile is BLOCK keys of one head (KEYS), or as many
queries, 64 for each of two warpgroups; blocks of STEP rows of the other kind stream past it. With x, y for what a tile has and a, b
for what streams (k, v and q, dout; or q, dout and k, v), a turn of a half is

    s = x a^T,  g = y b^T,  p = exp2(s unit - lse),  dv += p b (KEYS only),  dk or dq += (p (g - delta)) a

in shared memory

    x_ring, y_ring (2 x 2, 64, D)    asked[t]: a tile's have arrived, answered[t]: both halves are done with them
    a_ring, b_ring (S, STEP, D)      arrived[s], free[s]: both halves have multiplied them; with KEYS also
    stats_ring (S, STEP, 4)          lse and delta of the queries

The exponentials are computed while g is multiplied, and what follows while dv is. The last product is waited for in its own turn:
it reads registers, and ptxas lets no product overlap anything if such a one is under way across a loop. Streams go up, so that dq's
last block has the mask and of dk's the first. Blocks beyond the diagonal of one half only are given back unread. Tensor maps end
with the batch and not with a sequence: the next sequence's queries in a last, partial block get the probability zero, so they and
their dout must be finite.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from barellm.cuda.choices import AttentionTile
from barellm.cuda.kernel import Lowering, TensorMap
from barellm.cuda.kernels.attention.hopper_attention import BLOCK, operand, place, put_rows, rows_in_boxes, scores
from barellm.cuda.kernels.gemm.hopper_warp_specialized import HALF
from barellm.cuda.lang import constant, gl, gluon, hopper
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part

STATS = constant(4)  # numbers of a query in the scratch, of which two are used, or three where queries are bounded
STEP = constant(64)  # rows that stream past a tile in one turn


@gluon
def stream(own, seq, KEYS: gl.constexpr):
    """The rows that stream past the tile from `own` on: from its first key to the last query, or from the first key to its last
    query, in whole blocks."""
    if KEYS:
        return own, seq
    else:
        return 0, own + BLOCK


@gluon
def fill(
    x_map, y_map, a_map, b_map, stats_map, mine, theirs, seq, items,
    KEYS: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Fill the rings as far ahead as they have room: also with the next tile's."""
    x_ring, y_ring, asked, answered = mine
    a_ring, b_ring, stats_ring, arrived, free = theirs
    STAGES: gl.constexpr = a_ring.shape[0]
    OWN: gl.constexpr = H // SHARE if KEYS else H
    NBYTES: gl.constexpr = 2 * a_map.block_type.nbytes + (stats_map.block_type.nbytes if KEYS else 0)
    i, t = 0, 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, own = place(w, seq)
        sequence, group = head // OWN, head % OWN
        row = sequence * seq
        ready = asked.index(t % 2)
        hopper.mbarrier.wait(answered.index(t % 2), (t // 2 & 1) ^ 1)
        hopper.mbarrier.expect(ready, 4 * x_map.block_type.nbytes)
        for half in gl.static_range(2):
            at = [row + own + half * HALF, group * D]
            hopper.tma.async_copy_global_to_shared(x_map, at, ready, x_ring.index(2 * (t % 2) + half))
            hopper.tma.async_copy_global_to_shared(y_map, at, ready, y_ring.index(2 * (t % 2) + half))
        begin, stop = stream(own, seq, KEYS)
        for served in range(SHARE if KEYS else 1):
            other = group * SHARE + served if KEYS else group // SHARE
            for n in range(begin, stop, STEP):
                s = i % STAGES
                full = arrived.index(s)
                hopper.mbarrier.wait(free.index(s), (i // STAGES & 1) ^ 1)
                hopper.mbarrier.expect(full, NBYTES)
                at = [row + n, other * D]
                hopper.tma.async_copy_global_to_shared(a_map, at, full, a_ring.index(s))
                hopper.tma.async_copy_global_to_shared(b_map, at, full, b_ring.index(s))
                if KEYS:
                    at = [(sequence * H + other) * seq + n, 0]
                    hopper.tma.async_copy_global_to_shared(stats_map, at, full, stats_ring.index(s))
                i += 1
        t += 1  # noqa: SIM113


@gluon
def differentiate(
    dx, dy, stats, mine, theirs, seq, items,
    HALF_OF: gl.constexpr, KEYS: gl.constexpr, UNIT: gl.constexpr, ROOT: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr,
    D: gl.constexpr, DX_ROW: gl.constexpr, DY_ROW: gl.constexpr,
):  # fmt: skip
    """One half of each tile. `i` counts blocks that stream, `t` tiles."""
    x_ring, y_ring, asked, answered = mine
    a_ring, b_ring, stats_ring, arrived, free = theirs
    STAGES: gl.constexpr = a_ring.shape[0]
    OWN: gl.constexpr = H // SHARE if KEYS else H
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    i, t = 0, 0
    for w in range(gl.program_id(0), items, gl.num_programs(0)):
        head, own = place(w, seq)
        first = own + HALF_OF * HALF
        x = x_ring.index(2 * (t % 2) + HALF_OF)
        y = y_ring.index(2 * (t % 2) + HALF_OF)
        x_sum = gl.zeros((HALF, D), gl.float32, SUMS)
        y_sum = gl.zeros((HALF, D), gl.float32, SUMS)
        row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
        if not KEYS:
            to = stats + STATS * (head * seq + row)
            top = gl.expand_dims(gl.load(to, mask=row < seq, other=0.0), 1)
            delta = gl.expand_dims(gl.load(to + 1, mask=row < seq, other=0.0), 1)
        hopper.mbarrier.wait(asked.index(t % 2), t // 2 & 1)
        begin = first if KEYS else 0
        stop = seq if KEYS else first + HALF
        for _ in range(SHARE if KEYS else 1):
            if KEYS and HALF_OF == 1:
                i = pass_by(arrived, free, i)
            for n in range(begin, stop, STEP):
                s = i % STAGES
                hopper.mbarrier.wait(arrived.index(s), i // STAGES & 1)
                p = scores(x, a_ring.index(s), SCORES)
                g = scores(y, b_ring.index(s), SCORES)
                p = hopper.warpgroup_mma_wait(1, deps=(p,))
                if KEYS:
                    top = column(stats_ring.index(s), 0, SCORES)
                p = gl.exp2(p * UNIT - top)
                if n == first or (KEYS and n + STEP > seq):
                    own_rows = gl.expand_dims(row, 1)
                    others = gl.expand_dims(n + gl.arange(0, STEP, layout=gl.SliceLayout(0, SCORES)), 0)
                    if KEYS:
                        p = gl.where((others >= own_rows) & (others < seq), p, 0.0)
                    else:
                        p = gl.where(own_rows >= others, p, 0.0)
                if KEYS:
                    weights = operand(p, b_ring.dtype, SUMS)
                    y_sum = hopper.warpgroup_mma(weights, b_ring.index(s), y_sum, is_async=True)
                    g = hopper.warpgroup_mma_wait(1, deps=(g,))
                    delta = column(stats_ring.index(s), 1, SCORES)
                else:
                    g, p = hopper.warpgroup_mma_wait(0, deps=(g, p))
                weights = operand(p * (g - delta), a_ring.dtype, SUMS)
                x_sum = hopper.warpgroup_mma(weights, a_ring.index(s), x_sum, is_async=True)
                if KEYS:
                    x_sum, y_sum = hopper.warpgroup_mma_wait(0, deps=(x_sum, y_sum))
                else:
                    x_sum = hopper.warpgroup_mma_wait(0, deps=(x_sum,))
                hopper.mbarrier.arrive(free.index(s))
                i += 1
            if not KEYS and HALF_OF == 0:
                i = pass_by(arrived, free, i)
        hopper.mbarrier.arrive(answered.index(t % 2))
        at = gl.cast(head // OWN * seq, gl.int64)
        put_rows(dx + at * DX_ROW + head % OWN * D, x_sum * ROOT, first, seq, D, DX_ROW)
        if KEYS:
            put_rows(dy + at * DY_ROW + head % OWN * D, y_sum, first, seq, D, DY_ROW)
        t += 1  # noqa: SIM113


@gluon
def pass_by(arrived, free, i):
    """Give the i-th block back, which only the other half needs. Not before it has arrived: then the other half has given back the
    stage's last block, and the two returns of this block are not counted with that one's."""
    STAGES: gl.constexpr = free.shape[0]
    hopper.mbarrier.wait(arrived.index(i % STAGES), i // STAGES & 1)
    hopper.mbarrier.arrive(free.index(i % STAGES))
    return i + 1


@gluon
def column(block, which: gl.constexpr, SCORES: gl.constexpr):
    """A number of each query that streams, (1, STEP), in the registers of its scores: lse (0) or delta (1)."""
    THEIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [STEP, 1]
    )
    found = block.slice(which, 1, dim=1).load(THEIRS).reshape([STEP])
    return gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(0, SCORES), assert_trivial=True), 0)


@gluon
def hopper_attention_backward(
    dx, dy, stats, x_map, y_map, a_map, b_map, stats_map, seq, heads,
    KEYS: gl.constexpr, UNIT: gl.constexpr, ROOT: gl.constexpr, H: gl.constexpr, SHARE: gl.constexpr, D: gl.constexpr,
    DX_ROW: gl.constexpr, DY_ROW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dx is dk and dy dv, or dx is dq and dy None. `heads`: of the tiles, of all sequences. `stats` are for dq, `stats_map` for dk
    and dv: the same matrix."""
    x_ring = gl.allocate_shared_memory(x_map.dtype, [4, HALF, D], x_map.layout)
    y_ring = gl.allocate_shared_memory(y_map.dtype, [4, HALF, D], y_map.layout)
    a_ring = gl.allocate_shared_memory(a_map.dtype, [STAGES, STEP, D], a_map.layout)
    b_ring = gl.allocate_shared_memory(b_map.dtype, [STAGES, STEP, D], b_map.layout)
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    answered = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for s in gl.static_range(2):
        hopper.mbarrier.init(asked.index(s), count=1)
        hopper.mbarrier.init(answered.index(s), count=2)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(arrived.index(s), count=1)
        hopper.mbarrier.init(free.index(s), count=2)
    hopper.fence_async_shared()

    mine = (x_ring, y_ring, asked, answered)
    theirs = (a_ring, b_ring, None, arrived, free)
    if KEYS:
        stats_ring = gl.allocate_shared_memory(stats_map.dtype, [STAGES, STEP, STATS], stats_map.layout)
        theirs = (a_ring, b_ring, stats_ring, arrived, free)
    items = heads * gl.cdiv(seq, BLOCK)
    gl.warp_specialize([
        (differentiate, (dx, dy, stats, mine, theirs, seq, items, 0, KEYS, UNIT, ROOT, H, SHARE, D, DX_ROW, DY_ROW)),
        (differentiate, (dx, dy, stats, mine, theirs, seq, items, 1, KEYS, UNIT, ROOT, H, SHARE, D, DX_ROW, DY_ROW)),
        (fill, (x_map, y_map, a_map, b_map, stats_map, mine, theirs, seq, items, KEYS, H, SHARE, D)),
    ], [4, 1], [240, 24])  # fmt: skip


def launch_backward(op: Any, c: Lowering, tile: AttentionTile, stats: Tensor, unit: float, *, keys: bool) -> None:
    """Append dk and dv (`keys`), or dq, of an op that `choices` names this kernel for: causal over whole sequences, heads of 64 or
    128 columns of 16-bit numbers, without dropout, results stored and not added. `stats`: of attention_stats."""
    D, share = int(op.out.shape[-1]) // op.heads, op.heads // op.kv_heads
    assert tile.roles and D in (64, 128) and op.plain and not op.rate, op
    assert (tile.queries, tile.keys) == ((STEP.value, BLOCK.value) if keys else (BLOCK.value, STEP.value)), tile
    queries, theirs = (op.q, op.dout), (op.k, op.v)
    own, streams = (theirs, queries) if keys else (queries, theirs)
    maps = {f"{name}_map": rows_in_boxes(c, x, HALF.value, D) for name, x in zip("xy", own, strict=True)}
    maps |= {f"{name}_map": rows_in_boxes(c, x, STEP.value, D) for name, x in zip("ab", streams, strict=True)}
    box = TensorMap(part(stats), stats.dtype, c.elements(op.lse), STATS.value, (STEP.value, STATS.value), STATS.value)
    results = {"dx": op.dk, "dy": op.dv} if keys else {"dx": op.dq, "dy": None}
    heads = op.kv_heads if keys else op.heads
    c.launch(
        hopper_attention_backward,
        maps | results | {
            "stats": None if keys else stats, "stats_map": box if keys else None, "seq": lambda s: s.seq,
            "heads": lambda s: s.batch * heads,
        },
        {
            "KEYS": keys, "UNIT": unit, "ROOT": 1 / sqrt(D), "H": op.heads, "SHARE": share, "D": D, "STAGES": tile.stages,
            "DX_ROW": results["dx"].row_stride, "DY_ROW": op.dv.row_stride if keys else 0,
        },
        grid=lambda s: (min(c.target.sms, ceil_div(s.seq, BLOCK.value) * s.batch * heads),),
        writes="dx dy" if keys else "dx", warps=tile.warps,
    )  # fmt: skip
