"""Rung 11, persistent: as many blocks as the card has multiprocessors, and each does one tile after the other. While the
consumers store a tile, the producer already fills the ring for the next one, so its first copies do not have to be waited
for. The order of the tiles can be chosen now: sixteen rows of tiles are walked together, column by column, and the blocks
that run at the same time read few different rows and columns, which stay in L2.
"""

from __future__ import annotations

from anatomy.gpu.r08_wgmma import store
from anatomy.gpu.r10_roles import COLS, DEPTH, HALF, STAGES, ring_of, sums
from anatomy.gpu_rung import gpu_rung
from barellm.cuda.lang import constant, gl, gluon, hopper
from barellm.program.integers import ceil_div

GROUP = constant(16)  # rows of tiles that are walked together


@gluon
def place(t, order, M: gl.constexpr, N: gl.constexpr):
    """The first row and the first column of tile t. `order`: a table of tiles, for rung 13."""
    rows, columns = gl.cdiv(M, 2 * HALF), gl.cdiv(N, COLS)
    if order is not None:
        tile = gl.load(order + t)
        return tile // columns * 2 * HALF, tile % columns * COLS
    first = t // (GROUP * columns) * GROUP
    height, within = min(rows - first, GROUP), t % (GROUP * columns)
    return (first + within % height) * 2 * HALF, within // height * COLS


@gluon
def load(a_map, b_map, ring, order, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    a_ring, b_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    i = 0  # buffers filled so far, of all tiles
    for t in range(gl.program_id(0), gl.cdiv(M, 2 * HALF) * gl.cdiv(N, COLS), gl.num_programs(0)):
        m, n = place(t, order, M, N)
        for k in range(0, K, DEPTH):
            s = i % STAGES
            hopper.mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
            hopper.mbarrier.expect(full.index(s), 2 * a_map.block_type.nbytes + b_map.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(a_map, [m, k], full.index(s), a_ring.index(2 * s))
            hopper.tma.async_copy_global_to_shared(a_map, [m + HALF, k], full.index(s), a_ring.index(2 * s + 1))
            hopper.tma.async_copy_global_to_shared(b_map, [k, n], full.index(s), b_ring.index(s))
            i += 1


@gluon
def multiply(c, ring, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, H: gl.constexpr):
    i = 0
    for t in range(gl.program_id(0), gl.cdiv(M, 2 * HALF) * gl.cdiv(N, COLS), gl.num_programs(0)):
        m, n = place(t, None, M, N)
        total, i = sums(ring, i, K, H)
        store(c, total, m + H * HALF, n, M, N)


@gluon
def persistent(c, a_map, b_map, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    ring = ring_of(a_map, b_map, STAGES)
    gl.warp_specialize(
        [(multiply, (c, ring, M, N, K, 0)), (multiply, (c, ring, M, N, K, 1)), (load, (a_map, b_map, ring, None, M, N, K))],
        [4, 1], [240, 24],
    )  # fmt: skip


@gpu_rung("persistent", dtype="bf16")
def launch(p):
    maps = {"a_map": p.map(p.a, 64, 64), "b_map": p.map(p.b, 64, 256)}
    blocks = min(p.target.sms, ceil_div(p.N, 256) * ceil_div(p.M, 128))
    p.launch(persistent, {"c": p.c, **maps}, (blocks,), warps=4)
