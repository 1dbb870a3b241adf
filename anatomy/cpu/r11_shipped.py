"""Rung 11, shipped: the kernel that barellm trains with, called as it is. To rung 10 it adds what a whole model needs. Panels
and blocks of rows are claimed together, so that many threads find work in a small matmul. A long depth goes in parts that
stay in the caches. Where registers are left, the next panel is packed while this one is multiplied. And bias, GELU or a
residual are added to a tile while it is still in registers. Read on in barellm/cpu/kernels/gemm/gemm.py.
"""

from anatomy.rung import rung
from barellm.cpu.gemm_config import default
from barellm.cpu.kernels.gemm.gemm import gemm, gemm_scratch_bytes


def config_of(isa, N, K):
    """How barellm cuts this product unless its tuner has found something faster; rows make no difference to it."""
    return default(isa, "input_gradient", "fp32", N, K, K)


def step(isa):
    tile = config_of(isa, 1 << 12, 1 << 12).tile
    return 2 * tile.mr * tile.nr(isa), 4 * (tile.mr + tile.nr(isa))


def scratch(isa, N, K):
    return gemm_scratch_bytes(isa, "fp32", K, config_of(isa, N, K))


@rung("shipped", step=step, threads=True, scratch=scratch)
def shipped(k, c, a, b, *, M, N, K):
    gemm(
        k, c, None, a, b, None, None, k.int(0), k.int(M), cols=N, depth=K, transposed=False, dims=(), inner=M,
        epilogues=(), mode="store", config=config_of(k.isa, N, K),
    )  # fmt: skip
