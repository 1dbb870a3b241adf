"""Rung 12, stores by TMA: a tile leaves through shared memory, and one thread orders its copy. Before, each thread computed
addresses and stored pairs of numbers: 128 instructions that the tensor cores waited for. Now the sums go to shared memory,
four pieces of eight by eight numbers with one instruction, and the consumer goes on with the next tile while TMA writes whole
lines. Edges need no masks: what lies beyond the matrix is dropped. The way out takes 64 KiB, so the ring has three buffers
instead of four.
"""

from __future__ import annotations

from anatomy.gpu.r10_roles import COLS, HALF, ring_of, sums
from anatomy.gpu.r11_persistent import load, place
from anatomy.gpu_rung import gpu_rung
from barellm.cuda.lang import gl, gluon, hopper
from barellm.program.integers import ceil_div


@gluon
def multiply(c_map, ring, slots, order, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, H: gl.constexpr):
    i = 0
    for t in range(gl.program_id(0), gl.cdiv(M, 2 * HALF) * gl.cdiv(N, COLS), gl.num_programs(0)):
        m, n = place(t, order, M, N)
        total, i = sums(ring, i, K, H)
        hopper.tma.store_wait(0)  # the tile before has left its slot
        slots.index(H).store(total.to(c_map.dtype))
        hopper.fence_async_shared()  # threads wrote, TMA reads: it must see what they wrote
        hopper.tma.async_copy_shared_to_global(c_map, [m + H * HALF, n], slots.index(H))
    hopper.tma.store_wait(0)


@gluon
def tma_stores(c_map, a_map, b_map, order, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr):
    slots = gl.allocate_shared_memory(c_map.dtype, [2, HALF, COLS], c_map.layout)
    ring = ring_of(a_map, b_map, 3)
    gl.warp_specialize(
        [
            (multiply, (c_map, ring, slots, order, M, N, K, 0)),
            (multiply, (c_map, ring, slots, order, M, N, K, 1)),
            (load, (a_map, b_map, ring, order, M, N, K)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def launch_tma(p, order):
    maps = {"c_map": p.map(p.c, 64, 256), "a_map": p.map(p.a, 64, 64), "b_map": p.map(p.b, 64, 256), "order": order}
    blocks = min(p.target.sms, ceil_div(p.N, 256) * ceil_div(p.M, 128))
    p.launch(tma_stores, maps, (blocks,), warps=4)


@gpu_rung("stores by TMA", dtype="bf16")
def launch(p):
    launch_tma(p, None)
