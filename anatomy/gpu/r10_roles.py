"""Rung 10, producer and consumers: one warp does nothing but order copies, and two warpgroups do nothing but multiply. They meet
in a ring of buffers. `full[s]` says that buffer s has arrived, `empty[s]` that both consumers have read it; the phase of a
barrier is the parity of how often the ring has gone round. So the next copies are always under way while the tensor cores
work. The tile is 128 x 256: each consumer has half of its rows, 128 registers of sums in each thread. The producer gives its
registers away (24 of 240 stay).
"""

from __future__ import annotations

from anatomy.gpu.r08_wgmma import store
from anatomy.gpu_rung import gpu_rung
from barellm.cuda.lang import constant, gl, gluon, hopper
from barellm.program.integers import ceil_div

HALF, COLS, DEPTH = constant(64), constant(256), constant(64)  # rows of a consumer; columns and depth of a buffer
STAGES = constant(4)  # buffers of the ring


@gluon
def load(a_map, b_map, ring, K: gl.constexpr):
    a_ring, b_ring, full, empty = ring
    m, n = gl.program_id(1) * 2 * HALF, gl.program_id(0) * COLS
    for i in range(gl.cdiv(K, DEPTH)):
        s, k = i % STAGES, i * DEPTH
        hopper.mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(full.index(s), 2 * a_map.block_type.nbytes + b_map.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(a_map, [m, k], full.index(s), a_ring.index(2 * s))
        hopper.tma.async_copy_global_to_shared(a_map, [m + HALF, k], full.index(s), a_ring.index(2 * s + 1))
        hopper.tma.async_copy_global_to_shared(b_map, [k, n], full.index(s), b_ring.index(s))


@gluon
def sums(ring, i, K: gl.constexpr, H: gl.constexpr):
    """Half H of a tile, and how many buffers have been read then, i of them before. One product stays under way."""
    a_ring, b_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    total = gl.zeros([HALF, COLS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))
    for k in range(0, K, DEPTH):
        hopper.mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        total = hopper.warpgroup_mma(a_ring.index(2 * (i % STAGES) + H), b_ring.index(i % STAGES), total, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=(total,))
        hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=k > 0)
        i += 1
    total = hopper.warpgroup_mma_wait(0, deps=(total,))
    hopper.mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))
    return total, i


@gluon
def multiply(c, ring, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, H: gl.constexpr):
    total, _ = sums(ring, gl.to_tensor(0), K, H)
    store(c, total, (gl.program_id(1) * 2 + H) * HALF, gl.program_id(0) * COLS, M, N)


@gluon
def ring_of(a_map, b_map, STAGES: gl.constexpr):
    a_ring = gl.allocate_shared_memory(a_map.dtype, [2 * STAGES, HALF, DEPTH], a_map.layout)
    b_ring = gl.allocate_shared_memory(b_map.dtype, [STAGES, DEPTH, COLS], b_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=2)
    hopper.fence_async_shared()
    return a_ring, b_ring, full, empty


@gluon
def roles(c, a_map, b_map, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    ring = ring_of(a_map, b_map, STAGES)
    gl.warp_specialize(
        [(multiply, (c, ring, M, N, K, 0)), (multiply, (c, ring, M, N, K, 1)), (load, (a_map, b_map, ring, K))],
        [4, 1], [240, 24],
    )  # fmt: skip


@gpu_rung("producer and consumers", dtype="bf16")
def launch(p):
    maps = {"a_map": p.map(p.a, 64, 64), "b_map": p.map(p.b, 64, 256)}
    p.launch(roles, {"c": p.c, **maps}, (ceil_div(p.N, 256), ceil_div(p.M, 128)), warps=4)
