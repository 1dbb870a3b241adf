"""The operations that follow a product, done on its accumulators: bias, an activation or its slope, the residual.

Shapes: out, pre, other (M, N); bias (N). The result is stored in its mode. OUT_ROW, PRE_ROW and OTHER_ROW are the elements from a
row of a view to the next, None where rows lie side by side.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.pointwise.activations import SLOPES, slope_of, value_of
from barellm.cuda.lang import device, tl


@device
def row_offsets(at, row, N, ROW: tl.constexpr):
    """The offsets of elements `at` of a matrix (M, N), in rows `row`, in one whose rows lie ROW elements apart (None: N
    elements)."""
    if ROW is not None:
        at += row.to(tl.int64)[:, None] * (ROW - N)
    return at


@device
def epilogue_tile(
    out, pre, bias, other, scalars, acc, m0, n0, at, M, N,
    EPILOGUE: tl.constexpr, MODE: tl.constexpr, PARTS: tl.constexpr,
    OUT_ROW: tl.constexpr, PRE_ROW: tl.constexpr, OTHER_ROW: tl.constexpr,
):  # fmt: skip
    """Store the accumulators of the tile at (m0, n0), the element `at` of a matrix (M, N), with what the table of fusions adds to a
    product: in PARTS, one after the other, so that what is added finds registers."""
    if PARTS > 1:
        left, right = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        half = acc.shape[1] // 2
        epilogue_tile(
            out, pre, bias, other, scalars, left, m0, n0, at, M, N, EPILOGUE, MODE, PARTS // 2, OUT_ROW, PRE_ROW, OTHER_ROW
        )  # fmt: skip
        epilogue_tile(
            out, pre, bias, other, scalars, right, m0, n0 + half, at + half, M, N, EPILOGUE, MODE, PARTS // 2,
            OUT_ROW, PRE_ROW, OTHER_ROW,
        )  # fmt: skip
    else:
        epilogue_subtile(
            out, pre, bias, other, scalars, acc, m0, n0, at, M, N, EPILOGUE, MODE, OUT_ROW, PRE_ROW, OTHER_ROW
        )


@device
def epilogue_subtile(
    out, pre, bias, other, scalars, acc, m0, n0, at, M, N, EPILOGUE: tl.constexpr, MODE: tl.constexpr,
    OUT_ROW: tl.constexpr, PRE_ROW: tl.constexpr, OTHER_ROW: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    n_in = n < N - n0
    mask = (m < M - m0)[:, None] & n_in[None, :]
    at += m[:, None] * N + n[None, :]
    if bias is not None:
        acc += tl.load(bias + n0 + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    if pre is not None:
        tl.store(pre + row_offsets(at, m0 + m, N, PRE_ROW), acc, mask=mask)
        acc = value_of(acc, EPILOGUE)
    elif other is not None:
        read = tl.load(other + row_offsets(at, m0 + m, N, OTHER_ROW), mask=mask, other=0.0).to(tl.float32)
        if EPILOGUE == "residual":
            acc += read
        else:
            acc *= slope_of(read, EPILOGUE)
    store_or_add(out + row_offsets(at, m0 + m, N, OUT_ROW), mask, acc, scalars, MODE)


def epilogue_operands(pre: Any, residual: Any, epilogue: str) -> tuple[Any, Any]:
    """The matrices that an epilogue writes beside the result, and that it reads: an activation leaves its input, which its slope
    reads."""
    return (None, pre) if epilogue in SLOPES else (pre, residual)
