"""Algorithm selection for convolutions: micro-kernels of bf16 implicit GEMMs, and direct or Winograd for 3 x 3 filters.

**Implicit GEMM in bf16.** A candidate (AMX tiles, or bf16 dot products with some register tile) is worth its throughput in fp32
multiply-adds times its utilization, the share of what it multiplies that is not padding: channels are padded to pairs or to tiles,
positions and output channels to tiles. fp32 is taken where it is worth more.

**3 x 3 filters.** A cost model takes the fastest for each pass: forward (fprop), gradient of the input (dgrad, "dx"), whose filters
are transposed, and gradient of the filters (wgrad, "dw"). A pass sums over C channels and makes K. What each algorithm does is
counted, and every count has a cost in direct multiply-adds at the processor's peak. With the pixels of the result, T tiles of m x m
of them, both rounded up to vectors, and n = m + 2:

    direct      9 C K pixels multiply-adds; 9 C K of the filters, or of their gradient; K pixels results; 9 C pixels of im2col,
                which costs more where a line of the image is shorter than a vector
    Winograd    n^2 C K T multiply-adds; n^2 C K of the filter transform; n^2 C T of the input transform; n^2 K T of the output
                transform, or of dy's tiles

The costs are fitted to the 3 x 3 layers of VGG-16 and ResNet-50 by least squares of the relative error, those of direct
convolutions in fp32 on an Intel Xeon with AMX (benchmarks/results/xeon-amx/convolution-fp32.json), those of bf16 dot products on
Zen 4 (benchmarks/results/zen4/convolution-bf16.json). docs/convolution.md: how the selection does on other layers."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from barellm.cpu.gemm_config import Tile, vector_tiles
from barellm.cpu.isa import ISA
from barellm.cpu.kernels.conv.conv_fft import fft_algorithm, fft_is_faster
from barellm.cpu.kernels.conv.conv_implicit_gemm import OutputMap
from barellm.cpu.kernels.conv.conv_polyphase import PolyphaseLayout
from barellm.cpu.kernels.conv.conv_tiled import TileAlgorithm, gemm_tile
from barellm.cpu.kernels.conv.im2col import ConvGeometry
from barellm.cpu.kernels.conv.winograd import winograd
from barellm.cpu.kernels.gemm import amx
from barellm.program.integers import ceil_div, round_up

AMX_SPEEDUP, DOT_SPEEDUP = 6.0, 1.5  # over fp32, measured
MAX_OUTPUT_WIDTH = 4096  # the planes of an output line should stay in L2
MAX_EXPANSION = 16  # positions of all planes for each of the output: widely dilated filters see many lines, few of them used
LANES = 16  # pixels of a line, from which on im2col columns are whole vectors


@dataclass(frozen=True)
class Bf16MicroKernel:
    """A register tile for bf16 operands, in AMX tile registers with `use_amx`."""

    tile: Tile
    use_amx: bool


def utilization(size: int, multiple: int) -> float:
    """The share of `size` rounded up to `multiple` that is not padding."""
    return size / round_up(size, multiple)


def supports_bf16(isa: ISA, dtype: str, geometry: ConvGeometry) -> bool:
    """Whether there is an implicit GEMM in bf16 for these images at all."""
    if dtype != "bf16" or not isa.dot or not geometry.taps or geometry.output_size[1] > MAX_OUTPUT_WIDTH:
        return False
    layout = PolyphaseLayout(geometry, geometry.output_size[0], 1)
    return len(layout.phases()) * layout.size <= MAX_EXPANSION * layout.positions


def select_bf16(isa: ISA, dtype: str, geometry: ConvGeometry, *, wgrad: bool) -> Bf16MicroKernel | None:
    """The micro-kernel of the highest throughput for a forward convolution or dgrad (conv_implicit_gemm_bf16.py: M is positions, N
    output channels, K input channels), or for a filter gradient (conv_wgrad_bf16.py: M is output channels, N input channels, K
    positions); None: fp32 is faster."""
    if not supports_bf16(isa, dtype, geometry):
        return None
    (P, Q), pitch = geometry.output_size, PolyphaseLayout(geometry, geometry.output_size[0], 1).pitch
    candidates = [(DOT_SPEEDUP, Bf16MicroKernel(tile, False), tile.mr, 2) for tile in vector_tiles(isa)]
    if isa.tiles:
        tile = Tile(amx.MR, amx.NR // isa.lanes) if wgrad else Tile(4 * amx.SIDE, 1)
        candidates.append((AMX_SPEEDUP, Bf16MicroKernel(tile, True), amx.SIDE, amx.TILE_K))

    def throughput(speedup: float, kernel: Bf16MicroKernel, tile_m: int, tile_k: int) -> float:
        """In fp32 multiply-adds, with M padded to `tile_m` (a fprop may leave out some of a tile) and K to `tile_k`."""
        of_positions, nr = P * Q / round_up(P * pitch, tile_k if wgrad else tile_m), kernel.tile.nr(isa)
        if wgrad:
            return speedup * of_positions * utilization(geometry.rows, kernel.tile.mr) * utilization(geometry.channels, nr)
        return speedup * of_positions * utilization(geometry.channels, tile_k) * utilization(geometry.rows, nr)

    best = max(candidates, key=lambda candidate: throughput(*candidate), default=None)
    fp32 = 1.0 if wgrad else utilization(geometry.rows, 8)  # its throughput, with output channels padded to 8
    return best[1] if best and throughput(*best) > fp32 else None


class Costs(NamedTuple):
    """In direct multiply-adds at peak: of a multiply-add, and of an element of each operand and the result, transforms included."""

    matmul: float
    filters: float
    results: float
    inputs: float


# By pass ("forward", "dx", "dw"), then by m, 0 for the direct algorithm: matmul, filters, results, inputs. In fp32:
FP32_COSTS = {
    "forward": {0: Costs(1.33, 23.6, 18.0, 9.24), 2: Costs(2.17, 26.5, 36.1, 47.8), 4: Costs(2.33, 34.6, 33.3, 120.0)},
    "dx": {0: Costs(1.22, 154.0, 0.0, 15.9), 2: Costs(2.19, 74.1, 0.0, 79.2), 4: Costs(2.11, 59.7, 58.7, 118.0)},
    "dw": {0: Costs(1.96, 351.0, 31.3, 19.0), 2: Costs(1.96, 182.0, 55.0, 57.5), 4: Costs(2.29, 160.0, 75.7, 102.0)},
}

# Where the direct algorithm runs on bf16 dot products, in multiply-adds at the peak of those:
BF16_COSTS = {
    "forward": {0: Costs(1.11, 14.9, 0.0, 3.02), 4: Costs(2.69, 48.4, 46.3, 92.8)},
    "dx": {0: Costs(1.13, 25.3, 0.0, 0.0), 4: Costs(2.42, 61.7, 116.0, 48.9)},
    "dw": {0: Costs(1.06, 32.5, 0.0, 17.8), 4: Costs(2.56, 172.0, 92.5, 102.0)},
}


def select_winograd_tile(costs: dict[int, Costs], C: int, K: int, images: int, outputs: tuple[int, int], tile_n: int) -> int:
    """The m of Winograd's m x m tiles that is the fastest, 0 for the direct algorithm, by the `costs` of a pass, which has C input
    and K output channels and `outputs` = (P, Q) pixels. `tile_n`: tiles or pixels of a register tile."""
    P, Q = outputs

    def time(m: int) -> float:
        """The estimated time of F(m x m, 3 x 3), or of the direct algorithm (m = 0), in direct multiply-adds."""
        cost = costs[m]
        if m == 0:
            pixels = images * P * Q
            im2col = cost.inputs * C * pixels * (1 + LANES / Q)
            work = cost.matmul * C * K * round_up(pixels, tile_n) + cost.filters * C * K + im2col
            return 9 * work + cost.results * K * pixels
        tiles = images * ceil_div(P, m) * ceil_div(Q, m)
        padded = round_up(tiles, tile_n)
        work = cost.matmul * C * K * padded + cost.filters * C * K + cost.inputs * C * padded + cost.results * K * tiles
        return (m + 2) ** 2 * work

    return min(costs, key=time)


def select_tiled(isa: ISA, which: str, algorithm: str, geometry: ConvGeometry, target: OutputMap, images: int,
        bf16: Bf16MicroKernel | None) -> TileAlgorithm | None:  # fmt: skip
    """The algorithm over tiles for a pass of a convolution, None for the direct one. With "auto" the cost models select it; `bf16`:
    the micro-kernel that the direct algorithm would have. Direct on AMX tiles is faster than any algorithm in fp32."""
    size = len(geometry.row_offsets), len(geometry.column_offsets)
    plain, auto = is_plain(geometry, target), algorithm == "auto"
    result = "filters" if which == "dw" else "images"
    if algorithm == "fft" or (auto and not bf16 and plain and fft_is_faster(isa, result, geometry, images)):
        return fft_algorithm(*size)
    if algorithm == "direct" or size != (3, 3) or not plain or (auto and bf16 and isa.tiles):
        return None
    if not auto:
        return winograd(int(algorithm[-1]))
    costs = (BF16_COSTS if bf16 else FP32_COSTS)[which]
    m = select_winograd_tile(costs, geometry.channels, geometry.rows, images, geometry.output_size, gemm_tile(isa).nr(isa))
    return winograd(m) if m else None


def is_plain(geometry: ConvGeometry, target: OutputMap) -> bool:
    """Whether stride and dilation are 1 and all outputs are computed: what the algorithms over tiles support."""
    undilated = all({abs(b - a) for a, b in pairwise(line)} <= {1} for line in (geometry.row_offsets, geometry.column_offsets))
    return geometry.stride == (1, 1) and target == OutputMap(geometry.output_size) and undilated
