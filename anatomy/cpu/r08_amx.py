"""Rung 8, AMX tiles: a register holds a tile of 16 rows, and one instruction multiplies two of them. `tdpbf16ps` adds the
product of 16 x 32 and 32 x 16 numbers to 16 x 16 sums: 16,384 operations, where vdpbf16ps does 64. Four such tiles of sums,
two of A and two of B use all eight tile registers, and each tile that is loaded is used twice. The panel of B is that of rung
7, filled up with zeros to a depth of 32; A is read where it lies. Machines without AMX compile this rung and do not run it.
"""

from anatomy.cpu.r05_register_tile import columns
from anatomy.cpu.r07_bf16_dot import packed_pairs
from anatomy.rung import rung
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Pointer


def scratch(isa, N, K):
    """The panel of B, and a block of rows of A that is filled up with zeros."""
    return 2 * amx.padded(K) * amx.NR + amx.padded_a_bytes(K)


@rung("AMX tiles", step=lambda isa: (4 * 16384, 4 * amx.TILE_BYTES), dtype="bf16", scratch=scratch, needs=lambda isa: isa.tiles)
def amx_tiles(k, c, a, b, *, M, N, K):
    amx.configure(k)
    sums = Pointer(k, k.alloca("float", amx.MR * amx.NR), "fp32")
    block = k.thread_scratch("bf16").at(amx.padded(K) * amx.NR)

    def panel(j, masks):
        packed_pairs(k, b, j, masks, N=N, K=K, span=amx.NR)
        amx.pad_panel(k, k.thread_scratch("i32"), K)
        with k.loop(0, M, amx.MR) as i:
            count = None if M % amx.MR == 0 else k.min(M - i, amx.MR)
            amx.microkernel_rows(k, sums, a.at(i * K), count, k.thread_scratch("i32"), block, depth=K, stride=K)
            with k.loop(0, amx.MR if count is None else count) as r:
                for v, mask in enumerate(masks):
                    c.at((i + r) * N).store(sums.at(r * amx.NR).load(v * k.lanes), j + v * k.lanes, mask)

    columns(k, N, panel)
    amx.release(k)
