"""Products of a few rows of activations, as decoding has them: one row for each sequence that grows by a token.

Shapes: x (rows, K), weight (N, K), y (rows, N); rows is 1 to FEW. The weight is all that counts: N K elements are read for
2 rows N K operations. So a program reads whole rows of it, once, every load under way before the first product, and keeps them
in registers while it goes through the rows of x. Sums are fp32, in an order that depends on K alone: no row's bits depend on how
many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cuda import choices
from barellm.cuda.kernel import MODES, Lowering, Size, Sizes
from barellm.cuda.kernels.common import MIN_SUM_COLUMNS, pow2, view_strides
from barellm.cuda.kernels.gemm.epilogue import epilogue_operands, epilogue_subtile
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def skinny_gemm(
    out, pre, x, weight, bias, other, scalars, rows,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EPILOGUE: tl.constexpr, MODE: tl.constexpr,
    X_ROW: tl.constexpr, OUT_ROW: tl.constexpr, PRE_ROW: tl.constexpr, OTHER_ROW: tl.constexpr,
):  # fmt: skip
    """BN columns of out, all rows. NAME_ROW: elements from a row of a view to the next, None where rows lie side by side."""
    x_row: tl.constexpr = X_ROW if X_ROW is not None else K
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
            OUT_ROW, PRE_ROW, OTHER_ROW,
        )  # fmt: skip


@dataclass(frozen=True)
class RowsIfSkinny:
    """A `Size`: the rows where they are few, else none."""

    rows: Size

    def __call__(self, sizes: Sizes) -> int:
        rows = self.rows(sizes)
        return rows if rows <= choices.FEW else 0


@dataclass(frozen=True)
class RowsUnlessSkinny:
    """A `Size`: the rows where they are more than a few, else none."""

    rows: Size

    def __call__(self, sizes: Sizes) -> int:
        rows = self.rows(sizes)
        return rows if rows > choices.FEW else 0


def fits(c: Lowering, *, most: int, K: int) -> bool:
    """Whether a product y = x weight^T gets this kernel, for the runs that have few rows: where there are no others, and in
    programs that go on from a cache."""
    return (most <= choices.FEW or c.decodes) and K <= choices.FEW_LONGEST


def launch_gemm(
    c: Lowering, *, out: Any, a: Any, b: Any, rows: Size, N: int, K: int, bias: Any = None, residual: Any = None,
    pre: Any = None, epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> None:  # fmt: skip
    """Does what `matmul.product` does in its role "nt"; nothing in runs of more rows."""
    few, BK = RowsIfSkinny(rows), max(pow2(K), MIN_SUM_COLUMNS)
    BN, warps = choices.few_rows_tile(BK)
    written, other = epilogue_operands(pre, residual, epilogue)
    operands = {"out": out, "pre": written, "x": a, "weight": b, "bias": bias, "other": other, "rows": few}
    constants = {"N": N, "K": K, "BN": BN, "BK": BK, "MODE": mode, "EPILOGUE": epilogue}
    constants |= view_strides(x=a, out=out, pre=written, other=other)
    grid = lambda s: (ceil_div(N, BN) if few(s) else 0,)  # noqa: E731
    c.launch(skinny_gemm, operands, constants, grid=grid, writes="out pre", warps=warps)
