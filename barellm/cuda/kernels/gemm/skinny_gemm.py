"""Skinny GEMM (GEMV), M <= 8, at memory bandwidth: decoding has one row for each sequence.

Shapes: x (rows, K), weight (N, K), y (rows, N); rows is 1 to SKINNY_M (gemm_config.py). The roofline is bandwidth: N K elements are
read for 2 rows N K operations. So a program reads whole rows of the weight, once, every load in flight before the first
multiplication, and keeps them in registers while it goes through the rows of x. Sums: fp32, batch-invariant."""

from dataclasses import dataclass
from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import MODES, Lowering, Size, Sizes
from barellm.cuda.kernels.common import MIN_SUM_COLUMNS, pow2, view_strides
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands, epilogue_tile
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def skinny_gemm(
    out, pre, x, weight, bias, other, scalars, rows, N, K, BN, BK, EPILOGUE, MODE, X_STRIDE, OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE
):
    """out (rows, N) = epilogue(x (rows, K) weight^T), weight (N, K): BN columns a program, all rows (8 at most); BN rows of the
    weight stay in registers, (BN, BK), read once. bias, pre, other, EPILOGUE: epilogue.py. BN, BK: powers of two, BK >= K.
    NAME_STRIDE: elements from a row of a view to the next, None where rows are contiguous."""
    x_row: tl.constexpr = X_STRIDE if X_STRIDE is not None else K
    n0 = tl.program_id(0) * BN
    n, k = tl.arange(0, BN), tl.arange(0, BK)
    k_in = k < K
    at = weight + tl.cast(n0, tl.int64) * K + n[:, None] * K + k[None, :]
    w = tl.load(at, mask=(n < N - n0)[:, None] & k_in[None, :], other=0.0)
    for row in range(rows):
        v = tl.load(x + row * x_row + k, mask=k_in, other=0.0)
        total = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], 1)
        epilogue_tile(
            out, pre, bias, other, scalars, total[None, :], row, n0, row * N + n0, rows, N, EPILOGUE, MODE, 1,
            OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
        )  # fmt: skip


@dataclass(frozen=True)
class RowsWhere:
    """A function of the run's sizes: the rows in runs that are `skinny` (of at most SKINNY_M rows), or in the others; else 0."""

    rows: Size
    skinny: bool

    def __call__(self, sizes: Sizes) -> int:
        rows = self.rows(sizes)
        return rows if (rows <= gemm_config.SKINNY_M) == self.skinny else 0


@dataclass(frozen=True)
class GridIf:
    """The grid of a launch, empty in runs in which a size (rows) is 0."""

    rows: Size
    grid: Any

    def __call__(self, sizes: Sizes) -> tuple[int, ...]:
        return self.grid(sizes) if self.rows(sizes) else (0,)


def fits_skinny_gemm(c: Lowering, *, most: int, K: int) -> bool:
    """Whether y = x weight^T takes this kernel, for its runs of at most SKINNY_M rows: if there are no others, or it decodes."""
    return (most <= gemm_config.SKINNY_M or c.decodes) and K <= gemm_config.SKINNY_MAX_K


def launch_skinny_gemm(
    c: Lowering, *, out: Any, a: Any, b: Any, rows: Size, N: int, K: int, bias: Any = None, residual: Any = None,
    pre: Any = None, epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> None:  # fmt: skip
    """Plan one launch of skinny_gemm: what `matmul.append_gemm` means by gemm_kind "nt", a (rows, K), b (N, K); in skinny runs."""
    skinny_rows, BK = RowsWhere(rows, skinny=True), max(pow2(K), MIN_SUM_COLUMNS)
    BN, warps = gemm_config.skinny_tile(BK)
    pre_out, other = epilogue_operands(pre, residual, epilogue)
    operands = {"out": out, "pre": pre_out, "x": a, "weight": b, "bias": bias, "other": other, "rows": skinny_rows}
    constants = {"N": N, "K": K, "BN": BN, "BK": BK, "MODE": mode, "EPILOGUE": epilogue}
    constants |= view_strides(x=a, out=out, pre=pre_out, other=other)
    grid = GridIf(skinny_rows, lambda s: (ceil_div(N, BN),))
    c.launch(skinny_gemm, operands, constants, grid=grid, writes="out pre", warps=warps)
