"""Rung 3, shared: a block copies a tile of A and a tile of B into shared memory, and all its threads read them from there. A
number that comes from memory is now used 32 times. Shared memory is close to the cores and about ten times as fast, but each
multiply-add still loads two numbers from it. Between writing a tile and reading it all threads of the block must meet: the
compiler sees who writes and who reads, and puts the barriers there.
"""

from __future__ import annotations

from anatomy.gpu_rung import gpu_rung
from barellm.cuda.lang import gl, gluon
from barellm.program.integers import ceil_div


@gluon
def tiled(
    c, a, b, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr,  # of a block's tiles
    EACH_ROWS: gl.constexpr, EACH_COLS: gl.constexpr,  # neighbouring sums that one thread has
    LANE_ROWS: gl.constexpr, LANE_COLS: gl.constexpr, WARP_ROWS: gl.constexpr, WARP_COLS: gl.constexpr,  # how threads stand
    VECTOR: gl.constexpr, A_ORDER: gl.constexpr, B_WARPS: gl.constexpr,
):  # fmt: skip
    """Rungs 4 to 7 are this kernel with other numbers. VECTOR: numbers of one load from memory; A_ORDER: the axis of A's tile that
    is contiguous in shared memory; B_WARPS: warps that load different rows of B."""
    WARPS: gl.constexpr = WARP_ROWS * WARP_COLS
    THREADS: gl.constexpr = gl.BlockedLayout([EACH_ROWS, EACH_COLS], [LANE_ROWS, LANE_COLS], [WARP_ROWS, WARP_COLS], [1, 0])
    A_LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // DEPTH, DEPTH // VECTOR], [WARPS, 1], [1, 0])
    B_LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [B_WARPS, WARPS // B_WARPS], [1, 0])
    A_SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [A_ORDER, 1 - A_ORDER])
    B_SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a_tile = gl.allocate_shared_memory(gl.float32, [ROWS, DEPTH], A_SHARED)
    b_tile = gl.allocate_shared_memory(gl.float32, [DEPTH, COLS], B_SHARED)
    m, n = gl.program_id(1) * ROWS, gl.program_id(0) * COLS
    a_row = gl.expand_dims(m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A_LOADS)), 1)
    a_depth = gl.expand_dims(gl.arange(0, DEPTH, layout=gl.SliceLayout(0, A_LOADS)), 0)
    b_depth = gl.expand_dims(gl.arange(0, DEPTH, layout=gl.SliceLayout(1, B_LOADS)), 1)
    b_column = gl.expand_dims(n + gl.arange(0, COLS, layout=gl.SliceLayout(0, B_LOADS)), 0)
    total = gl.zeros([ROWS, COLS], gl.float32, THREADS)
    for k in range(0, K, DEPTH):
        x = gl.load(a + a_row * K + (k + a_depth), mask=(a_row < M) & (k + a_depth < K), other=0.0)
        y = gl.load(b + (k + b_depth) * N + b_column, mask=(k + b_depth < K) & (b_column < N), other=0.0)
        a_tile.store(x)
        b_tile.store(y)
        for s in gl.static_range(DEPTH):
            total += a_tile.slice(s, 1, dim=1).load(THREADS) * b_tile.slice(s, 1, dim=0).load(THREADS)
    row = gl.expand_dims(m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, THREADS)), 1)
    column = gl.expand_dims(n + gl.arange(0, COLS, layout=gl.SliceLayout(0, THREADS)), 0)
    gl.store(c + row * N + column, total, mask=(row < M) & (column < N))


def launch_tiled(p, tile, *, each, lanes, warps, vector=1, columns_of_a=False):
    """Pairs are (rows, columns); `tile` has the depth as a third. `columns_of_a`: A's tile is stored by columns."""
    many = warps[0] * warps[1]
    numbers = {"VECTOR": vector, "A_ORDER": 0 if columns_of_a else 1, "B_WARPS": min(many, tile[2])}
    for name, pair in (("EACH", each), ("LANE", lanes), ("WARP", warps)):
        numbers |= {f"{name}_ROWS": pair[0], f"{name}_COLS": pair[1]}
    blocks = (ceil_div(p.N, tile[1]), ceil_div(p.M, tile[0]))
    sizes = {"ROWS": tile[0], "COLS": tile[1], "DEPTH": tile[2]}
    p.launch(tiled, {"c": p.c, "a": p.a, "b": p.b}, blocks, warps=many, **sizes, **numbers)


@gpu_rung("shared", dtype="fp32")
def launch(p):
    launch_tiled(p, (32, 32, 32), each=(1, 1), lanes=(1, 32), warps=(32, 1))
