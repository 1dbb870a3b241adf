"""Matrix products on Hopper: operands of bf16 or fp16, fp32 accumulators, every byte moved by the tensor memory accelerator.

Shapes: out (M, N) = a b over depth K, row-major, in three roles:

    nt  a (M, K)  b stored (N, K)    forward: M tokens
    nn  a (M, K)  b stored (K, N)    input gradient
    tn  a stored (K, M)  b stored (K, N)    weight gradient: K tokens, in parts that are added in order afterwards

A block of 384 threads does tiles of 128 x COLS, one after the other. Two warpgroups of 232 registers multiply 64 rows each: 128
registers hold 64 x 256 sums. One warp fills a ring of operands, and goes on with the next tile's while a tile is on its way out.
Operands lie in shared memory as they lie in global memory; what is stored along the other dimension is read transposed by the
product itself. Edges need no masks: loads beyond a matrix give zeros, stores beyond it are dropped. What each warp does:
hopper_warp_specialized.py. What it should reach, by arithmetic: docs/cuda_gemm.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cuda import choices, tuning
from barellm.cuda.kernel import MODES, Lowering, Size, TensorMap
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands
from barellm.cuda.kernels.gemm.hopper_warp_specialized import DEPTH, HALF, ONES, ROWS, fetch, load, multiply
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.lang import gl, gluon, hopper
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import Region, part, view_stride


@gluon
def hopper_gemm(
    out_map, pre_map, a_map, b_map, other_map, bias, sums, scalars, M, N, K, chunk, group,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, EPILOGUE: gl.constexpr,
    COLS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """out (M, N) = a (M, K) times b (K, N), or part p of K, `chunk` long, into rows p M onwards. Persistent: a block does every
    (number of blocks)-th tile. `sums`, where it is given: (parts, M), the sums of the rows of a over each part of K."""
    a_ring = gl.allocate_shared_memory(
        a_map.dtype, [2 * STAGES, a_map.block_shape[0], a_map.block_shape[1]], a_map.layout
    )
    b_ring = gl.allocate_shared_memory(b_map.dtype, [STAGES, b_map.block_shape[0], b_map.block_shape[1]], b_map.layout)
    slots = gl.allocate_shared_memory(
        out_map.dtype, [2 * SLOTS, out_map.block_shape[0], out_map.block_shape[1]], out_map.layout
    )
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    arrived = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], BARRIER)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=2)
    for s in gl.static_range(2 * SLOTS):
        hopper.mbarrier.init(arrived.index(s), count=1)
        hopper.mbarrier.init(free.index(s), count=1)
    ahead = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    hopper.mbarrier.init(ahead.index(0), count=1)
    rows_to = (sums, None)
    if sums is not None:
        ROWS_OF_128: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        ones = gl.allocate_shared_memory(a_map.dtype, [1, ONES, DEPTH], ROWS_OF_128)
        ones.index(0).store(gl.full([ONES, DEPTH], 1.0, a_map.dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
        rows_to = (sums, ones)
    hopper.fence_async_shared()

    sizes = (M, N, K, chunk, group)
    ring = (a_ring, b_ring, full, empty)
    way = (slots, arrived, free)
    # Constants stand where they are passed: one that is put into a variable or a tuple is none any more.
    if other_map is None:
        gl.warp_specialize([
            (multiply, (out_map, pre_map, bias, scalars, ring, way, ahead, rows_to, sizes,
                        0, A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, COLS)),
            (multiply, (out_map, pre_map, bias, scalars, ring, way, ahead, rows_to, sizes,
                        1, A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, COLS)),
            (load, (a_map, b_map, ring, sizes, A_TRANSPOSED, B_TRANSPOSED, COLS)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply, (out_map, pre_map, bias, scalars, ring, way, ahead, rows_to, sizes,
                        0, A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, COLS)),
            (multiply, (out_map, pre_map, bias, scalars, ring, way, ahead, rows_to, sizes,
                        1, A_TRANSPOSED, B_TRANSPOSED, EPILOGUE, COLS)),
            (load, (a_map, b_map, ring, sizes, A_TRANSPOSED, B_TRANSPOSED, COLS)),
            (fetch, (other_map, scalars, way, sizes, 0, EPILOGUE, COLS)),
            (fetch, (other_map, scalars, way, sizes, 1, EPILOGUE, COLS)),
        ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip


HALVES = ("bf16", "fp16")  # dtypes of operands
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def matrix(value: Any) -> tuple[Region, str]:
    """An operand, a Tensor or (Region, dtype), as the latter."""
    return value if isinstance(value, tuple) else (part(value), value.dtype)


def fits(
    c: Lowering, role: str, *, out: Any, a: Any, b: Any, most: int, N: int, K: int,
    residual: Any = None, pre: Any = None, mode: int = MODES["store"], **_: Any,
) -> bool:  # fmt: skip
    """Whether `launch_product` takes this product, with the arguments of `matmul.product`: operands of bf16 or of fp16, rows of a
    multiple of 16 bytes, one thing at most that the epilogue reads, and at least half a wave of small tiles."""
    operands = [matrix(v) for v in (out, a, b, residual, pre) if v is not None]
    if not c.target.hopper or operands[1][1] not in HALVES or operands[2][1] != operands[1][1]:
        return False
    if (
        any(region.start % 16 for region, _ in operands)
        or any((view_stride(v) or 0) * ITEMSIZE[matrix(v)[1]] % 16 for v in (out, a, b, residual, pre) if v is not None)
        or N % 8
        or K % 8
        or any(d != operands[0][1] for _, d in operands[3:])
    ):
        return False
    if (
        operands[0][1] not in ("fp32", operands[1][1])
        or sum([mode != MODES["store"], residual is not None, pre is not None]) > 1
    ):
        return False
    rows, cols, depth = _sizes(role, most, N, K)
    tiles = ceil_div(rows, ROWS.value) * ceil_div(cols, 128)
    if role == "tn":
        tiles *= choices.most_splits(tiles, depth)
        return operands[0][1] == "fp32" and N % HALF.value == 0 and 2 * tiles >= choices.WAVE
    return 2 * tiles >= choices.WAVE


def launch_gemm(
    c: Lowering, role: str, *, out: Any, a: Any, b: Any, rows: Size, most: int, N: int, K: int,
    bias: Any = None, residual: Any = None, pre: Any = None, epilogue: str = "", mode: int = MODES["store"],
    dbias: Tensor | None = None, dbias_mode: int = MODES["store"],
) -> None:  # fmt: skip
    """Append one product that `fits`; its arguments are those of `matmul.product`. `dbias` (N), of role "tn": the sum of the rows
    of a, from the tiles that are multiplied."""
    height, width, depth = _sizes(role, most, N, K)
    usual = choices.columns(role, height, width, depth)
    tiles = ceil_div(height, ROWS.value) * ceil_div(
        width, usual
    )  # by the default's columns: bits do not depend on tuning
    parts = choices.most_splits(tiles, depth) if role == "tn" else 1
    written, other = epilogue_operands(pre, residual, epilogue)
    if not epilogue and mode != MODES["store"] and parts == 1:
        other, epilogue = out, "add" if mode == MODES["add"] else "start"
    f = tuning.choose(c.target, tuning.GemmKey(role, matrix(a)[1], height, width, depth, "hopper", epilogue))
    M: Size | int = height if role == "tn" else rows
    target, out_rows, chunk = out, M, depth if role != "tn" else rows
    split = None
    if parts > 1:
        split = SplitK(rows, tiles)
        target, out_rows, chunk = c.scratch("partials", (parts, height, width)), _Times(split.count, height), split
    sums = c.scratch("sums", (parts, height)) if dbias is not None else None
    c.launch(
        hopper_gemm,
        {
            "out_map": _map(target, out_rows, width, _block(target)),
            "pre_map": _map(written, out_rows, width, _block(written)) if written is not None else None,
            "a_map": _map(a, rows, N if role == "tn" else depth, (HALF.value, DEPTH.value)),
            "b_map": _map(b, rows, width, (DEPTH.value, f.cols)) if role == "tn" else _map(
                b, N, K, (f.cols, DEPTH.value) if role == "nt" else (DEPTH.value, f.cols)
            ),
            "other_map": _map(other, out_rows, width, _block(other)) if other is not None else None,
            "bias": bias, "sums": sums, "M": M, "N": width, "K": rows if role == "tn" else depth, "chunk": chunk,
            "group": f.group,
        },
        {
            "A_TRANSPOSED": role == "tn", "B_TRANSPOSED": role == "nt", "EPILOGUE": epilogue,
            "COLS": f.cols, "STAGES": f.stages, "SLOTS": f.slots,
        },
        grid=_Grid(c.target.sms, M, ceil_div(width, f.cols), split.count if split else None),
        writes="out_map pre_map sums",
    )  # fmt: skip
    if split is not None:
        reduce_splits(c, out, target, split.count, height * width, mode)
    if sums is not None:
        reduce_splits(c, dbias, sums, split.count if split else 1, height, dbias_mode)


def _sizes(role: str, most: int, N: int, K: int) -> tuple[int, int, int]:
    """Rows, columns and depth of the result, at most."""
    return {"nt": (most, N, K), "nn": (most, K, N), "tn": (N, K, most)}[role]


def _map(value: Any, rows: Size | int, columns: int, box: tuple[int, int]) -> TensorMap:
    region, dtype = matrix(value)
    return TensorMap(region, dtype, rows, columns, box, view_stride(value) or columns)


def _block(value: Any) -> tuple[int, int]:
    """The box of what goes out or comes in past the products: 128 bytes wide, as one slot is."""
    return HALF.value, 128 // ITEMSIZE[matrix(value)[1]]


@dataclass(frozen=True)
class _Times:
    """A `Size` times a number."""

    size: Size
    factor: int

    def __call__(self, sizes: Any) -> int:
        return self.size(sizes) * self.factor


@dataclass(frozen=True)
class _Grid:
    """A grid of one block per multiprocessor, or per tile where those are fewer."""

    sms: int
    rows: Size | int
    n_tiles: int
    parts: Size | None

    def __call__(self, sizes: Any) -> tuple[int, ...]:
        rows = self.rows if isinstance(self.rows, int) else self.rows(sizes)
        return (min(self.sms, ceil_div(rows, ROWS.value) * self.n_tiles * (self.parts(sizes) if self.parts else 1)),)
