"""Rung 12, shipped in 16 bits: the same kernel on bf16, as a model's matmuls are trained. It takes the fastest thing that the
processor has: AMX tiles (rung 8), dot products of pairs (rung 7), or fp32 made from bf16 while a panel is packed. To rung 8 it
adds that only 256 of the depth are multiplied at a time. So much of a panel stays in L1 while all rows pass, and
the sums wait in L2 for the next part. Read on in barellm/cpu/kernels/gemm/amx.py.
"""

from anatomy.rung import rung
from barellm.cpu.gemm_config import default
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.gemm import gemm, gemm_scratch_bytes


def config_of(isa, N, K):
    return default(isa, "input_gradient", "bf16", N, K, K)


def step(isa):
    """On tiles that of rung 8; on vectors those of rung 7, whose numbers are half as long."""
    if isa.tiles:
        return 4 * 16384, 4 * amx.TILE_BYTES
    tile = config_of(isa, 1 << 12, 1 << 12).tile
    numbers = tile.mr * tile.nr(isa) * (2 if isa.dot else 1)
    return 2 * numbers, 4 * (tile.mr + tile.nr(isa))


def scratch(isa, N, K):
    return gemm_scratch_bytes(isa, "bf16", K, config_of(isa, N, K))


@rung("shipped, 16 bits", step=step, dtype="bf16", threads=True, scratch=scratch)
def shipped_pairs(k, c, a, b, *, M, N, K):
    gemm(
        k, c, None, a, b, None, None, k.int(0), k.int(M), cols=N, depth=K, transposed=False, dims=(), inner=M,
        epilogues=(), mode="store", config=config_of(k.isa, N, K),
    )  # fmt: skip
