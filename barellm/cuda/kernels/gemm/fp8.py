"""FP8 GEMM: operands of e4m3 or e5m2 on tensor cores that have them (compute capability 8.9 and later), accumulated in fp32, with
one scale for each tensor. And GEMMs of the bf16 or fp32 operands that other ways of rounding to 8 bits give (optim/scales.py).

Shapes: x (tokens, K), weight (K, N), y (tokens, N), row-major; scales (1,): a value is its code times the scale. Tensor cores want
both operands K-major (the contracted dimension, `depth`, as the last axis). So one kernel does out (M, N) = a b^T with a (M, depth)
and b (N, depth), and what lies the other way round is transposed first: the weight for y, x and dy for dweight; a byte to read and
a byte to write for each code. per_target: a gradient's scale is relative to 1 / targets of the step (`inv_targets`).

Hopper's tensor cores keep few bits of a sum over e4m3 or e5m2: after each DEPTH of them it is added to one in fp32."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Count, Lowering, Size, lowering, mode
from barellm.cuda.kernels.common import INV_TARGETS, elementwise, flat_indices, scalar_fp64, store_or_add
from barellm.cuda.kernels.gemm.matmul import grouped_tile, load_k_blocks
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import EIGHTS, LARGEST, PLANES, itemsize
from barellm.program.integers import ceil_div, round_up
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import weight_operand

FIRST_ARCH = 89  # the first compute capability that has these formats
ROWS, COLUMNS = 128, 128  # a tile of the result (M, N)
DEPTH = 128  # bytes of K for each step, and the codes in the sums that a tensor core makes by itself
GROUP = 8  # rows of tiles that are walked column by column (grouped rasterization)
TRANSPOSE_TILE = 64  # side of the tiles that are transposed


@device
def divisor(scale, scalars, PER_TARGET):
    """The number that one code stands for: `scale`, times inv_targets where PER_TARGET."""
    by = tl.load(scale)
    if PER_TARGET:
        by *= scalar_fp64(scalars, INV_TARGETS).to(tl.float32)
    return by


@device
def quantise(y, x, scale, scalars, units, PER_TARGET, UNIT, BLOCK):
    """y = x / scale, rounded to y's dtype; conversions to 8 bits saturate. The division is correctly rounded, as on the CPU."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    value = tl.math.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * divisor(scale, scalars, PER_TARGET))
    tl.store(y + i, value.to(y.dtype.element_ty), mask=mask)


@device
def transpose_codes(y, x, rows, COLUMNS, Y_STRIDE, DEPTH, TILE):
    """y (COLUMNS, rows) = x^T of 8-bit codes x (rows, COLUMNS), a TILE x TILE tile for each program. Rows of y are Y_STRIDE
    elements apart, with zeros behind the last element up to a multiple of DEPTH, so that the GEMM needs no mask over K."""
    TILES_ACROSS: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    r0, c0 = tl.program_id(0) // TILES_ACROSS * TILE, tl.program_id(0) % TILES_ACROSS * TILE
    x += tl.cast(r0, tl.int64) * COLUMNS + c0
    y += tl.cast(c0, tl.int64) * Y_STRIDE + r0
    r, c = tl.arange(0, TILE), tl.arange(0, TILE)
    column_in = c < COLUMNS - c0
    value = tl.load(x + r[:, None] * COLUMNS + c[None, :], mask=(r < rows - r0)[:, None] & column_in[None, :], other=0.0)
    written = r < tl.cdiv(rows, DEPTH) * DEPTH - r0  # rows of x and the zeros behind them
    tl.store(y + c[:, None] * Y_STRIDE + r[None, :], tl.trans(value), mask=column_in[:, None] & written[None, :])


@device
def fp8_gemm(
    out, a, b, scale, other_scale, scalars, M: tl.int32, depth,
    N, A_STRIDE, B_STRIDE, EVEN, FP8, PER_TARGET, MODE, BM, BN, BK, GROUP,
):  # fmt: skip
    """out (M, N) = a (M, depth) b (N, depth)^T * scale * other_scale: one (BM, BN) tile a program, in steps of BK. a, b: codes that
    `quantise` wrote, maybe transposed (or bf16, fp32 of other ways to round), rows NAME_STRIDE apart; scales (1,) fp32; PER_TARGET:
    `scale` is a gradient's. FP8: a and b are e4m3 or e5m2, whose sums leave the tensor core after each BK
    (`max_num_imprecise_acc`). EVEN: rows are zeros from `depth` up to a multiple of BK, so no mask over K is needed. GROUP: rows of
    tiles that are walked column by column."""
    m0, n0 = grouped_tile(M, N, BM, BN, GROUP)
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    m_in, n_in = m < M - m0, n < N - n0
    a_ptrs = a + tl.cast(m0, tl.int64) * A_STRIDE + (m[:, None] * A_STRIDE + k[None, :])
    b_ptrs = b + tl.cast(n0, tl.int64) * B_STRIDE + (n[None, :] * B_STRIDE + k[:, None])
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, depth, BK):
        a_block, b_block = load_k_blocks(a_ptrs, b_ptrs, m_in, n_in, k, k0, depth, EVEN)
        acc = tl.dot(a_block, b_block, acc, input_precision="ieee", max_num_imprecise_acc=BK if FP8 else None)
        a_ptrs += BK
        b_ptrs += BK
    acc *= tl.load(other_scale) * divisor(scale, scalars, PER_TARGET)
    to = out + tl.cast(m0, tl.int64) * N + n0 + (m[:, None] * N + n[None, :])
    store_or_add(to, m_in[:, None] & n_in[None, :], acc, scalars, MODE)


def check_arch(c: Lowering, codes: Tensor) -> None:
    """Raise a ValueError where the target has no tensor cores for the dtype of `codes`."""
    if codes.dtype in LARGEST and c.target.arch < FIRST_ARCH:
        found = f"{c.target.arch // 10}.{c.target.arch % 10}"
        raise ValueError(f"{c.op.name} needs a GPU of compute capability 8.9 or later, found {found}")


def append_code_transpose(c: Lowering, name: str, codes: Tensor, rows: Size) -> Tensor:
    """Plan the transpose of codes (..., columns), `rows` of them in a run. Returns scratch `name` (columns, most rows rounded up to
    DEPTH), with zeros behind the run's rows up to a multiple of DEPTH."""
    columns = int(codes.shape[-1])
    stride = round_up(codes.size // columns, DEPTH)
    t = c.scratch(name, (columns, stride), codes.dtype)
    across = ceil_div(columns, TRANSPOSE_TILE)
    constants = {"COLUMNS": columns, "Y_STRIDE": stride, "DEPTH": DEPTH, "TILE": TRANSPOSE_TILE}
    grid = lambda s: (round_up(rows(s), DEPTH) // TRANSPOSE_TILE * across,)  # noqa: E731
    c.launch(transpose_codes, {"y": t, "x": codes, "rows": rows}, constants, grid=grid, writes="y", warps=4)
    return t


def append_fp8_gemm(
    c: Lowering, out: Tensor, a: Tensor, b: Tensor, scale: Tensor, other_scale: Tensor,
    *, M: Size, depth: Size | int, mode: int, per_target: bool,
) -> None:  # fmt: skip
    """Plan one launch: out (M, N) = a b^T * scale * other_scale, of operands (..., depth), codes and their scales. per_target:
    `scale`, that of a gradient, is relative to inv_targets. `mode`: whether out is stored or added to."""
    check_arch(c, a)
    N, tile_k = int(out.shape[-1]), DEPTH // itemsize(a.dtype)
    strides = {"A_STRIDE": int(a.shape[-1]), "B_STRIDE": int(b.shape[-1])}
    even = not any(stride % tile_k for stride in strides.values())
    operands = {"out": out, "a": a, "b": b, "scale": scale, "other_scale": other_scale, "M": M, "depth": depth}
    constants = {"N": N, **strides, "EVEN": even, "FP8": a.dtype in LARGEST, "PER_TARGET": per_target, "MODE": mode}
    constants |= {"BM": ROWS, "BN": COLUMNS, "BK": tile_k, "GROUP": GROUP}
    grid = lambda s: (ceil_div(M(s), ROWS) * ceil_div(N, COLUMNS),)  # noqa: E731
    c.launch(fp8_gemm, operands, constants, grid=grid, writes="out", warps=8, stages=4)


@lowering("quantise", also={"x": PLANES, "y": EIGHTS})
def lower_quantise(op: Any, c: Lowering) -> None:
    check_arch(c, op.y)
    operands = {"y": op.y, "x": weight_operand(op.x), "scale": op.scale}
    elementwise(c, quantise, op.y, operands, writes="y", PER_TARGET=op.per_target)


@lowering("scaled_matmul", also={"x": EIGHTS, "weight": EIGHTS})
def lower_scaled_matmul(op: Any, c: Lowering) -> None:
    depth = int(op.weight.shape[0])
    options = {"M": c.rows(op.x), "depth": depth, "mode": mode(op, "y"), "per_target": False}
    append_fp8_gemm(
        c, op.y, op.x, append_code_transpose(c, "weight", op.weight, Count((), depth)), op.x_scale, op.weight_scale, **options
    )


@lowering("scaled_matmul_dx", starts="dx", also={"dy": EIGHTS, "weight": EIGHTS})
def lower_scaled_matmul_dx(op: Any, c: Lowering) -> None:
    options = {"M": c.rows(op.dy), "depth": int(op.weight.shape[1]), "mode": mode(op, "dx"), "per_target": True}
    append_fp8_gemm(c, op.dx, op.dy, op.weight, op.dy_scale, op.weight_scale, **options)


@lowering("scaled_matmul_dw", starts="dweight", also={"x": EIGHTS, "dy": EIGHTS})
def lower_scaled_matmul_dw(op: Any, c: Lowering) -> None:
    rows = c.rows(op.x)
    a, b = append_code_transpose(c, "x", op.x, rows), append_code_transpose(c, "dy", op.dy, rows)
    options = {"M": Count((), int(op.dweight.shape[0])), "depth": rows, "mode": mode(op, "dweight"), "per_target": True}
    append_fp8_gemm(c, op.dweight, a, b, op.dy_scale, op.x_scale, **options)
