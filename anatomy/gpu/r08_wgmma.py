"""Rung 8, wgmma and TMA: tensor cores multiply tiles that lie in shared memory, and one thread orders the copies that bring them
there. The operands are bf16 from here on. `wgmma` is one instruction of four warps: 64 rows, up to 256 columns, 16 deep, sums
in registers, operands straight from shared memory. TMA copies a whole box of a matrix and says on a barrier how many bytes
have come; it stores them swizzled, so that the tensor cores meet no bank conflicts, and beyond the edge of the matrix it puts
zeros. There is one buffer: while the tensor cores work nothing is loaded, and the other way round.
"""

from __future__ import annotations

from anatomy.gpu_rung import gpu_rung
from barellm.cuda.lang import gl, gluon, hopper
from barellm.program.integers import ceil_div


@gluon
def store(c, total, m, n, M: gl.constexpr, N: gl.constexpr):
    """A tile whose first sum belongs to row m and column n of C."""
    SUMS: gl.constexpr = total.type.layout
    row = gl.expand_dims(m + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, SUMS)), 1)
    column = gl.expand_dims(n + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, SUMS)), 0)
    gl.store(c + row * N + column, total.to(c.dtype.element_ty), mask=(row < M) & (column < N))


@gluon
def wgmma(
    c, a_map, b_map, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    a_tile = gl.allocate_shared_memory(a_map.dtype, [ROWS, DEPTH], a_map.layout)
    b_tile = gl.allocate_shared_memory(b_map.dtype, [DEPTH, COLS], b_map.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(ready, count=1)
    hopper.fence_async_shared()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    total = gl.zeros([ROWS, COLS], gl.float32, SUMS)
    m, n = gl.program_id(1) * ROWS, gl.program_id(0) * COLS
    phase = 0
    for k in range(0, K, DEPTH):
        hopper.mbarrier.expect(ready, a_map.block_type.nbytes + b_map.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(a_map, [m, k], ready, a_tile)
        hopper.tma.async_copy_global_to_shared(b_map, [k, n], ready, b_tile)
        hopper.mbarrier.wait(ready, phase)
        total = hopper.warpgroup_mma(a_tile, b_tile, total)
        gl.thread_barrier()  # all four warps are done with the buffer before it is filled again
        phase ^= 1
    store(c, total, m, n, M, N)


def launch_wgmma(p, rows, cols, depth):
    maps = {"a_map": p.map(p.a, rows, depth), "b_map": p.map(p.b, depth, cols)}
    blocks = (ceil_div(p.N, cols), ceil_div(p.M, rows))
    p.launch(wgmma, {"c": p.c, **maps}, blocks, warps=4, ROWS=rows, COLS=cols, DEPTH=depth)


@gpu_rung("wgmma and TMA", dtype="bf16")
def launch(p):
    launch_wgmma(p, 64, 64, 64)
