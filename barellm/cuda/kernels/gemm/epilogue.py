"""GEMM epilogues, done on the accumulators: bias, an activation or its derivative, the residual.

Shapes: out, pre, other (M, N); bias (N); all but out may be None. EPILOGUE: "" (none), an activation, whose input is written to
`pre`; an activation's derivative ("gelu_backward", ...), whose input is read from `other`; or "residual", read from `other`. MODE:
whether out is stored or added to. `at`: flat offset(s) row * N + column of elements in a contiguous (M, N). OUT_STRIDE, PRE_STRIDE
and OTHER_STRIDE: elements from a row of a view to the next, None where rows are contiguous."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.pointwise.activations import SLOPES, slope_of, value_of
from barellm.cuda.lang import device, tl


@device
def row_offsets(at, row, N: tl.int32, STRIDE):
    """Offsets `at` (BM, BN) of elements of a contiguous matrix (M, N), whose rows are `row` (BM,), for rows STRIDE apart."""
    if STRIDE is not None:
        at += row.to(tl.int64)[:, None] * (STRIDE - N)
    return at


@device
def epilogue_tile(
    out, pre, bias, other, scalars, acc, m0, n0, at, M: tl.int32, N: tl.int32,
    EPILOGUE, MODE, SUBTILES, OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
):  # fmt: skip
    """GEMM epilogue of a tile of accumulators acc (BM, BN) fp32, whose first element is (m0, n0), number `at` of (M, N), then its
    masked store: with x = acc + bias, out = x; or pre = x, out = activation(x); or out = x + other; or out = x slope(other).

    It is done in SUBTILES (a power of two) parts of the columns, by halving, one after the other: `pre` and `other` then need few
    registers at a time. Dtypes of out, pre, other and bias are free."""
    if SUBTILES > 1:
        left, right = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        half = acc.shape[1] // 2
        epilogue_tile(
            out, pre, bias, other, scalars, left, m0, n0, at, M, N, EPILOGUE, MODE, SUBTILES // 2,
            OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
        )  # fmt: skip
        epilogue_tile(
            out, pre, bias, other, scalars, right, m0, n0 + half, at + half, M, N, EPILOGUE, MODE, SUBTILES // 2,
            OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE,
        )  # fmt: skip
    else:
        m, n = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])  # in the tile
        n_in = n < N - n0
        mask = (m < M - m0)[:, None] & n_in[None, :]
        at += m[:, None] * N + n[None, :]
        if bias is not None:
            acc += tl.load(bias + n0 + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
        if pre is not None:
            tl.store(pre + row_offsets(at, m0 + m, N, PRE_STRIDE), acc, mask=mask)
            acc = value_of(acc, EPILOGUE)
        elif other is not None:
            operand = tl.load(other + row_offsets(at, m0 + m, N, OTHER_STRIDE), mask=mask, other=0.0).to(tl.float32)
            if EPILOGUE == "residual":
                acc += operand
            else:
                acc *= slope_of(operand, EPILOGUE)
        store_or_add(out + row_offsets(at, m0 + m, N, OUT_STRIDE), mask, acc, scalars, MODE)


def epilogue_operands(pre: Any, residual: Any, epilogue: str) -> tuple[Any, Any]:
    """(pre, other) of `epilogue_tile`: what the epilogue writes besides the result (an activation's input), and what it reads."""
    return (None, pre) if epilogue in SLOPES else (pre, residual)
