"""GEMM configurations: tiles, warps and pipeline stages, and the number of split-K slices of weight gradients.

A tile changes speed and no bit of the result: each element is one chain of additions over K. Split-K does change bits, so it is a
function of the shape alone: it counts tiles against WAVE, the multiprocessors of an H100, whatever card is there."""

from dataclasses import dataclass, replace

from barellm.program.integers import ceil_div

WAVE = 132
MIN_ROWS_PER_SPLIT = 256
MAX_SPLITS = 64
GROUP_SIZES = (4, 8, 16, 32)  # of `group_m`
SPLIT_COST_ROWS = 5  # writing and reading one more partial tile takes as long as multiplying this many rows into a tile


@dataclass(frozen=True)
class GemmConfig:
    """Configuration of the Triton GEMM: a (tile_m, tile_n) tile of the result per program, tile_k of K per step, `num_stages` steps
    of loads in flight. Grouped rasterization: `group_m` rows of tiles are walked column by column, so that their operands stay in
    L2."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k} {self.num_warps}w {self.num_stages}s g{self.group_m}"


# Largest first. Shared memory: num_stages * (tile_m + tile_n) * tile_k * itemsize bytes; accumulators: tile_m * tile_n / (32 *
# num_warps) registers of each thread.
# Steps of 64 halve the barriers per K, those of 32 leave room for two programs on a multiprocessor: no card below sm_90 has judged
# them yet, so the tuner has both, and the default is the first of its size.
_BF16 = {
    80: ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
         (128, 256, 32, 8, 3), (128, 128, 32, 4, 4), (128, 64, 32, 4, 4), (64, 64, 32, 4, 4)),
    89: ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
         (128, 128, 32, 8, 4), (128, 64, 32, 4, 4), (64, 64, 32, 4, 4)),
    90: ((128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4)),
}  # fmt: skip
# Other cards use the configurations of one of these: 8.7 has the shared memory of 8.0; those with tcgen05 that of 9.0; and the
# tiles of sm_89, whose 99 KiB and mma are what 8.6 and 12.0 have, run everywhere.
_TUNED_AS = {87: 80, 100: 90, 101: 90, 103: 90, 110: 90}
# The first fp32 tile multiplies for 1024 cycles a K step, longer than a load takes; with a third stage, one epilogue spilled.
_FP32 = ((128, 64, 16, 8, 2), (64, 64, 16, 4, 3), (32, 64, 16, 4, 3), (32, 32, 16, 2, 3))
# Of fp32 operands on tensor cores; the largest fills the 99 KiB of sm_89.
_TF32 = ((128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 3), (32, 64, 32, 4, 3))


def tuned_arch(arch: int) -> int:
    """The compute capability whose configurations `arch` uses."""
    return arch if arch in _BF16 else _TUNED_AS.get(arch, 89)


def gemm_configs(dtype: str, arch: int) -> tuple[GemmConfig, ...]:
    """Every configuration of a GEMM with operands of `dtype`; fp16 has those of bf16."""
    fields_of_configs = {"fp32": _FP32, "tf32": _TF32}.get(dtype) or _BF16[tuned_arch(arch)]
    return tuple(GemmConfig(*fields) for fields in fields_of_configs)


def select_config(gemm_kind: str, M: int, N: int, K: int, dtype: str, arch: int, sms: int = WAVE) -> GemmConfig:
    """The configuration with the least estimated time for (M, N) = (M, K) (K, N): waves of `sms` tiles times the tile's area, so
    the least wave and tile quantization. A smaller tile loads more for each multiplication, which counts as a tenth of its time
    for each step down the list. Weight gradients ("tn") use split-K until they fill the card: then a tile is a part of the work."""
    best, least = None, 0.0
    for step, t in enumerate(gemm_configs(dtype, arch)):
        count = ceil_div(M, t.tile_m) * ceil_div(N, t.tile_n)
        if gemm_kind == "tn":
            count *= num_splits(count, K)
            work = ceil_div(M, t.tile_m) * ceil_div(N, t.tile_n) / count
        else:
            work = 1.0
        time = ceil_div(count, sms) * work * t.tile_m * t.tile_n * (1 + 0.1 * step)
        if best is None or time < least:
            best, least = t, time
    assert best is not None
    return best


def num_splits(tiles: int, K: int) -> int:
    """The number of split-K slices of a sum over K tokens if the result has `tiles` tiles: as many as fill the card best, the cost
    of partial results included. K is rounded down to a power of two, so that only a few shapes need be looked at to find the
    most."""
    K = 1 << (max(K, 1).bit_length() - 1)

    def time(s: int) -> int:
        return ceil_div(tiles * s, WAVE) * ceil_div(K, s) + (SPLIT_COST_ROWS * tiles * s if s > 1 else 0)

    return min(range(1, min(MAX_SPLITS, max(K // MIN_ROWS_PER_SPLIT, 1)) + 1), key=time)


def max_splits(tiles: int, K: int) -> int:
    """The largest `num_splits` of any number of tokens up to K."""
    return max(num_splits(tiles, 1 << i) for i in range(max(K, 1).bit_length()))


SKINNY_M = 8  # rows of activations up to which skinny_gemm is used
SKINNY_MAX_K = 1 << 14  # columns of a weight whose rows fit in registers
_PROGRAM_ELEMENTS = 4096  # elements of the weight in one program: 32 a thread, 64 bytes of bf16 in flight


def skinny_tile(K: int) -> tuple[int, int]:
    """(rows of the weight per program, warps) of skinny_gemm, K padded to a power of two."""
    return max(1, _PROGRAM_ELEMENTS // K), 4 if K <= _PROGRAM_ELEMENTS else 8


TILE_M, TILE_K = 128, 64  # of Hopper's GEMM: 64 rows for each consumer warpgroup, 128 bytes of bf16 per K step
SHARED_BYTES = 232448 - 1024  # of shared memory for its pipelines; barriers and what the compiler needs take the rest
EPILOGUE_BUFFER_BYTES = 8192  # 64 rows of 128 bytes


@dataclass(frozen=True)
class HopperGemmConfig:
    """Configuration of Hopper's warp-specialized GEMM: tiles of (TILE_M, tile_n), a pipeline of `num_stages` operand stages, and
    `epilogue_stages` shared-memory buffers per consumer warpgroup for subtiles that the epilogue stores, and loads where it reads a
    matrix. The operand stages fill what the epilogue's buffers leave. `group_m`: as in GemmConfig; 16 x 8 tiles of 128 x 256, a
    wave, read the fewest bytes."""

    tile_n: int
    num_stages: int
    epilogue_stages: int
    group_m: int = 16

    def __str__(self) -> str:
        return f"128x{self.tile_n} {self.num_stages} stages {self.epilogue_stages} slots g{self.group_m}"


def hopper_config(tile_n: int, *, loads_c: bool) -> HopperGemmConfig:
    """Two epilogue stages: one is stored while the next is computed. Where the epilogue loads a matrix, twice that hides the
    loads."""
    return _with_all_stages(tile_n, 4 if loads_c else 2)


def _with_all_stages(tile_n: int, epilogue_stages: int) -> HopperGemmConfig:
    left = SHARED_BYTES - 2 * epilogue_stages * EPILOGUE_BUFFER_BYTES
    return HopperGemmConfig(tile_n, left // (TILE_M + tile_n) // (2 * TILE_K), epilogue_stages)


def hopper_configs() -> tuple[HopperGemmConfig, ...]:
    """Every configuration of Hopper's GEMM."""
    return tuple(_with_all_stages(tile_n, stages) for tile_n in (256, 128) for stages in (2, 4))


def rasterizations(config: GemmConfig | HopperGemmConfig) -> tuple[GemmConfig | HopperGemmConfig, ...]:
    """The same configuration with every rasterization order of tiles, its own first."""
    return (config, *(replace(config, group_m=group) for group in GROUP_SIZES if group != config.group_m))


def select_tile_n(gemm_kind: str, M: int, N: int, K: int) -> int:
    """tile_n of Hopper's GEMM: the fewest columns times waves. 128 loads 4/3 as much for each multiplication."""

    def time(tile_n: int) -> float:
        tiles = ceil_div(M, TILE_M) * ceil_div(N, tile_n)
        slices = num_splits(tiles, K) if gemm_kind == "tn" else 1
        return ceil_div(tiles * slices, WAVE) / slices * tile_n * (1.0 if tile_n == 256 else 1.15)

    return min((256, 128), key=time)
