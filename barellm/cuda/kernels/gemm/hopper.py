"""GEMM on Hopper: wgmma with operands of bf16 or fp16 and fp32 accumulators, every byte moved by TMA.

Shapes: out (M, N) = a b over depth K, row-major, by gemm_kind as in matmul.py. A persistent thread block of 384 threads does tiles
of 128 x TILE_N one after the other, warp-specialized: the protocol of its warps is in hopper_warp_specialized.py. Operands lie in
shared memory as in global memory, with 128-byte swizzle; what is stored along the other dimension is read transposed by wgmma.
Edges need no masks: TMA loads beyond a matrix give zeros, stores beyond it are dropped. Its roofline: docs/cuda_gemm.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cuda import gemm_config, tuning
from barellm.cuda.kernel import MODES, Lowering, Size, TensorMap
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands
from barellm.cuda.kernels.gemm.hopper_warp_specialized import ONES_N, TILE_K, gemm_consumer_warpgroup, gemm_producer_warp, load_c
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.kernels.hopper_pipeline import WG_M, mbarriers, smem_boxes
from barellm.cuda.lang import gl, gluon, hopper
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, view_stride


@gluon
def hopper_gemm(
    out_map, pre_map, a_map, b_map, c_map, bias, sums, scalars, M: gl.int32, N: gl.int32, K: gl.int32, k_per_split, group,
    A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N, STAGES, EPI_STAGES,
):  # fmt: skip
    """out (M, N) = epilogue(a (M, K) b (K, N)), bf16 or fp16 operands, by persistent thread blocks of 384 threads: allocates shared
    memory and mbarriers, and starts the warps (hopper_warp_specialized.py). Grid: one block per multiprocessor, or per tile.

    NAME_map: tensor maps of row-major matrices; `pre_map`: the pre-activation that the epilogue writes, `c_map`: the matrix C that
    it reads, or None; `bias` (N) or None; `sums`, if given: (slices, M) fp32, the row sums of a over each slice. With split-K,
    slice p of K, `k_per_split` long, is written to rows p M onwards of out. `group`: rows of tiles of the rasterization. TILE_N, a
    power of two from 64 to 256, and STAGES and EPI_STAGES, stages of the operand and epilogue rings, must fit in shared memory."""
    a_ring, b_ring, c_buffers = smem_boxes(a_map, 2 * STAGES), smem_boxes(b_map, STAGES), smem_boxes(out_map, 2 * EPI_STAGES)
    full, empty = mbarriers(STAGES), mbarriers(STAGES)
    c_full, c_empty = mbarriers(2 * EPI_STAGES), mbarriers(2 * EPI_STAGES)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=2)  # one arrival of each consumer
    for s in gl.static_range(2 * EPI_STAGES):
        hopper.mbarrier.init(c_full.index(s), count=1)
        hopper.mbarrier.init(c_empty.index(s), count=1)
    stagger = mbarriers(1)  # consumer 1 starts behind consumer 0
    hopper.mbarrier.init(stagger.index(0), count=1)
    row_sums = (sums, None)  # no buffer of ones
    if sums is not None:  # a times a matrix of ones: the narrowest wgmma
        SWIZZLE_128: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # of 128 bytes; elements of 16 bits, two axes
        ones = gl.allocate_shared_memory(a_map.dtype, [1, ONES_N, TILE_K], SWIZZLE_128)
        ONES_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])  # 4 elements a thread, 2 x 64 a warp
        ones.index(0).store(gl.full([ONES_N, TILE_K], 1.0, a_map.dtype, ONES_LAYOUT))
        row_sums = (sums, ones)
    hopper.fence_async_shared()

    sizes = (M, N, K, k_per_split, group)
    pipeline = (a_ring, b_ring, full, empty)
    c_pipeline = (c_buffers, c_full, c_empty)
    outputs = (out_map, pre_map, bias, scalars)
    # Warps and registers of a thread, of all partitions but the first. Constants stand where they are passed: a constexpr that is
    # put into a variable or a tuple becomes a run-time value.
    if c_map is None:
        gl.warp_specialize([
            (gemm_consumer_warpgroup, (outputs, pipeline, c_pipeline, stagger, row_sums, sizes, 0,
                                       A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N)),
            (gemm_consumer_warpgroup, (outputs, pipeline, c_pipeline, stagger, row_sums, sizes, 1,
                                       A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N)),
            (gemm_producer_warp, (a_map, b_map, pipeline, sizes, A_TRANSPOSED, B_TRANSPOSED, TILE_N)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (gemm_consumer_warpgroup, (outputs, pipeline, c_pipeline, stagger, row_sums, sizes, 0,
                                       A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N)),
            (gemm_consumer_warpgroup, (outputs, pipeline, c_pipeline, stagger, row_sums, sizes, 1,
                                       A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, TILE_N)),
            (gemm_producer_warp, (a_map, b_map, pipeline, sizes, A_TRANSPOSED, B_TRANSPOSED, TILE_N)),
            (load_c, (c_map, scalars, c_pipeline, sizes, 0, EPILOGUE, TILE_N)),
            (load_c, (c_map, scalars, c_pipeline, sizes, 1, EPILOGUE, TILE_N)),
        ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip


HALF_DTYPES = ("bf16", "fp16")  # dtypes of operands
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def operand_of(value: Any) -> tuple[Region, str]:
    """(Region, dtype) of an operand, a Tensor or that pair."""
    return value if isinstance(value, tuple) else (part(value), value.dtype)


def fits_hopper_gemm(
    c: Lowering, gemm_kind: str, *, out: Any, a: Any, b: Any, most: int, N: int, K: int,
    residual: Any = None, pre: Any = None, mode: int = MODES["store"], **_: Any,
) -> bool:  # fmt: skip
    """Whether hopper_gemm takes this GEMM, with the arguments of `matmul.append_gemm`: operands of bf16 or of fp16, rows of a
    multiple of 16 bytes, at most one matrix that the epilogue reads, and at least half a wave of small tiles."""
    matrices = [v for v in (out, a, b, residual, pre) if v is not None]
    regions, (out_dtype, a_dtype, b_dtype, *c_dtypes) = zip(*map(operand_of, matrices), strict=True)
    if not c.target.hopper or c.target.matmul == "triton":
        return False
    if a_dtype not in HALF_DTYPES or b_dtype != a_dtype or out_dtype not in ("fp32", a_dtype):
        return False
    # TMA: addresses and rows are multiples of 16 bytes. N and K are, of 16-bit elements, if they are multiples of 8.
    if any(region.start % 16 for region in regions) or N % 8 or K % 8:
        return False
    if any((view_stride(v) or 0) * ITEMSIZE[operand_of(v)[1]] % 16 for v in matrices):
        return False
    read_by_epilogue = [mode != MODES["store"], residual is not None, pre is not None]
    if any(dtype != out_dtype for dtype in c_dtypes) or sum(read_by_epilogue) > 1:
        return False
    rows, cols, depth = _sizes(gemm_kind, most, N, K)  # of the result, at most
    tiles = ceil_div(rows, gemm_config.TILE_M) * ceil_div(cols, 128)  # 128: the smaller tile_n
    if gemm_kind == "tn":
        tiles *= gemm_config.max_splits(tiles, depth)
        return out_dtype == "fp32" and N % WG_M.value == 0 and 2 * tiles >= gemm_config.WAVE
    return 2 * tiles >= gemm_config.WAVE


def launch_hopper_gemm(
    c: Lowering, gemm_kind: str, *, out: Any, a: Any, b: Any, rows: Size, most: int, N: int, K: int,
    bias: Any = None, residual: Any = None, pre: Any = None, epilogue: str = "", mode: int = MODES["store"],
    dbias: Tensor | None = None, dbias_mode: int = MODES["store"],
) -> None:  # fmt: skip
    """Plan one GEMM that `fits_hopper_gemm`, with the arguments of `matmul.append_gemm`: one launch; with split-K ("tn" only) into
    scratch (slices, height, width), which a second launch adds up. `dbias` (N), of "tn": the row sums of a, from the tiles that are
    multiplied, written as `dbias_mode` says. The result is (height, width) over `depth`, at most."""
    height, width, depth = _sizes(gemm_kind, most, N, K)
    # Split-K, by the tiles of the default configuration: bits do not depend on tuning.
    default_n = gemm_config.select_tile_n(gemm_kind, height, width, depth)
    tiles = ceil_div(height, gemm_config.TILE_M) * ceil_div(width, default_n)
    slices = gemm_config.max_splits(tiles, depth) if gemm_kind == "tn" else 1
    split = SplitK(rows, tiles) if slices > 1 else None
    # The epilogue: a result that is added to is a matrix that it reads, unless a second launch adds up slices.
    pre_out, other = epilogue_operands(pre, residual, epilogue)
    if not epilogue and mode != MODES["store"] and split is None:
        other = out
        epilogue = "add" if mode == MODES["add"] else "start"
    problem = tuning.GemmProblem(gemm_kind, operand_of(a)[1], height, width, depth, "hopper", epilogue)
    config = tuning.select_config(c.target, problem)
    # Where the tiles go, and the rows of the matrices there: the result, or a slice of scratch below the other.
    M: Size | int = height if gemm_kind == "tn" else rows
    gemm_k: Size | int = rows if gemm_kind == "tn" else depth
    tiles_out, out_rows = out, M
    if split is not None:
        tiles_out = c.scratch("partials", (slices, height, width))
        out_rows = _Times(split.count, height)
    sums = c.scratch("sums", (slices, height)) if dbias is not None else None
    # Boxes that TMA moves: of b, a tile's columns and a step of K, in the order in which it is stored.
    b_box = (config.tile_n, TILE_K.value) if gemm_kind == "nt" else (TILE_K.value, config.tile_n)
    b_rows, b_columns = (rows, width) if gemm_kind == "tn" else (N, K)

    def grid(sizes: Any) -> tuple[int, ...]:
        """A thread block for each multiprocessor, or for each tile of all slices where those are fewer."""
        m_tiles = ceil_div(M if isinstance(M, int) else M(sizes), gemm_config.TILE_M)
        return (min(c.target.sms, m_tiles * ceil_div(width, config.tile_n) * (split.count(sizes) if split else 1)),)

    c.launch(
        hopper_gemm,
        {
            "out_map": _subtile_map(tiles_out, out_rows, width),
            "pre_map": _subtile_map(pre_out, out_rows, width),
            "a_map": _map(a, rows, N if gemm_kind == "tn" else depth, (WG_M.value, TILE_K.value)),
            "b_map": _map(b, b_rows, b_columns, b_box),
            "c_map": _subtile_map(other, out_rows, width),
            "bias": bias, "sums": sums, "M": M, "N": width, "K": gemm_k, "k_per_split": split or gemm_k, "group": config.group_m,
        },
        {
            "A_TRANSPOSED": gemm_kind == "tn", "B_TRANSPOSED": gemm_kind == "nt", "EPILOGUE": epilogue,
            "TILE_N": config.tile_n, "STAGES": config.num_stages, "EPI_STAGES": config.epilogue_stages,
        },
        grid=grid,
        writes="out_map pre_map sums",
    )  # fmt: skip
    if split is not None:
        reduce_splits(c, out, tiles_out, split.count, height * width, mode)
    if sums is not None:
        reduce_splits(c, dbias, sums, split.count if split else 1, height, dbias_mode)


def _sizes(gemm_kind: str, most: int, N: int, K: int) -> tuple[int, int, int]:
    """(M, N, K) of the GEMM, at most: rows and columns of the result, and the contracted dimension."""
    return {"nt": (most, N, K), "nn": (most, K, N), "tn": (N, K, most)}[gemm_kind]


def _map(value: Any, rows: Size | int, columns: int, box: tuple[int, int]) -> TensorMap:
    """The tensor map of an operand (rows, columns), maybe a view, in boxes of (rows, columns)."""
    region, dtype = operand_of(value)
    return TensorMap(region, dtype, rows, columns, box, view_stride(value) or columns)


def _subtile_map(value: Any, rows: Size | int, columns: int) -> TensorMap | None:
    """The tensor map of a matrix that the epilogue stores or loads, in boxes of an epilogue buffer, 128 bytes wide, or None."""
    return None if value is None else _map(value, rows, columns, (WG_M.value, 128 // ITEMSIZE[operand_of(value)[1]]))


@dataclass(frozen=True)
class _Times:
    """A function of the run's sizes: a `Size` times a number."""

    size: Size
    factor: int

    def __call__(self, sizes: Any) -> int:
        return self.size(sizes) * self.factor
