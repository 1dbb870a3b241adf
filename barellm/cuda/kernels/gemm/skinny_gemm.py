"""Skinny GEMM (GEMV), M <= 8, at memory bandwidth: decoding has one row for each sequence.

Shapes: x (rows, K), weight (N, K), y (rows, N); rows is 1 to SKINNY_M (gemm_config.py). The roofline is bandwidth: N K elements are
read for 2 rows N K operations. So a program reads whole rows of the weight, once, every load in flight before the first
multiplication, and keeps them in registers while it goes through the rows of x. Sums are fp32, in an order that depends on K alone:
results are batch-invariant."""

from dataclasses import dataclass
from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import MODES, Lowering, Size, Sizes
from barellm.cuda.kernels.common import MIN_SUM_COLUMNS, pow2, view_strides
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands, epilogue_subtile
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def skinny_gemm(
    out, pre, x, weight, bias, other, scalars, rows, N, K, BN, BK, EPILOGUE, MODE, X_STRIDE, OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE
):
    """BN columns of out (rows, N) = x weight^T with its epilogue (epilogue.py), all rows. BK: K padded to a power of two.
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
        epilogue_subtile(
            out, pre, bias, other, scalars, total[None, :], row, n0, row * N + n0, rows, N, EPILOGUE, MODE,
            OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
        )  # fmt: skip


@dataclass(frozen=True)
class RowsIfSkinny:
    """A function of the run's sizes: the rows if they are at most SKINNY_M, else 0."""

    rows: Size

    def __call__(self, sizes: Sizes) -> int:
        rows = self.rows(sizes)
        return rows if rows <= gemm_config.SKINNY_M else 0


@dataclass(frozen=True)
class RowsUnlessSkinny:
    """A function of the run's sizes: the rows if they are more than SKINNY_M, else 0."""

    rows: Size

    def __call__(self, sizes: Sizes) -> int:
        rows = self.rows(sizes)
        return rows if rows > gemm_config.SKINNY_M else 0


def fits(c: Lowering, *, most: int, K: int) -> bool:
    """Whether y = x weight^T takes this kernel, for its runs of at most SKINNY_M rows: if there are no others (`most`), and in
    programs with a KV cache, which decode."""
    return (most <= gemm_config.SKINNY_M or c.decodes) and K <= gemm_config.SKINNY_MAX_K


def launch_gemm(
    c: Lowering, *, out: Any, a: Any, b: Any, rows: Size, N: int, K: int, bias: Any = None, residual: Any = None,
    pre: Any = None, epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> None:  # fmt: skip
    """Launch what `matmul.append_gemm` means by gemm_kind "nt", with an empty grid in runs of more than SKINNY_M rows."""
    skinny_rows, BK = RowsIfSkinny(rows), max(pow2(K), MIN_SUM_COLUMNS)
    BN, warps = gemm_config.skinny_tile(BK)
    pre_out, other = epilogue_operands(pre, residual, epilogue)
    operands = {"out": out, "pre": pre_out, "x": a, "weight": b, "bias": bias, "other": other, "rows": skinny_rows}
    constants = {"N": N, "K": K, "BN": BN, "BK": BK, "MODE": mode, "EPILOGUE": epilogue}
    constants |= view_strides(x=a, out=out, pre=pre_out, other=other)
    grid = lambda s: (ceil_div(N, BN) if skinny_rows(s) else 0,)  # noqa: E731
    c.launch(skinny_gemm, operands, constants, grid=grid, writes="out pre", warps=warps)
