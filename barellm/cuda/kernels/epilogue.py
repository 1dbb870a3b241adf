"""What follows a product, done on its accumulators: bias, an activation or its slope, the residual.

Shapes: out, pre, other (M, N); bias (N). The result is stored in its mode.
"""

from __future__ import annotations

from barellm.cuda.kernels.activations import slope_of, value_of
from barellm.cuda.kernels.common import keep
from barellm.cuda.lang import device, tl


@device
def finish_tile(
    out, pre, bias, other, scalars, acc, m0, n0, at, M, N,
    EPILOGUE: tl.constexpr, MODE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the accumulators of the tile at (m0, n0), the element `at` of out, with what the table of fusions adds to a product: in
    PARTS, one after the other, so that what is added finds registers."""
    if PARTS > 1:
        left, right = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
        half = acc.shape[1] // 2
        finish_tile(out, pre, bias, other, scalars, left, m0, n0, at, M, N, EPILOGUE, MODE, PARTS // 2)
        finish_tile(out, pre, bias, other, scalars, right, m0, n0 + half, at + half, M, N, EPILOGUE, MODE, PARTS // 2)
    else:
        finish_part(out, pre, bias, other, scalars, acc, m0, n0, at, M, N, EPILOGUE, MODE)


@device
def finish_part(out, pre, bias, other, scalars, acc, m0, n0, at, M, N, EPILOGUE: tl.constexpr, MODE: tl.constexpr):
    m, n = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    n_in = n < N - n0
    mask = (m < M - m0)[:, None] & n_in[None, :]
    at += m[:, None] * N + n[None, :]
    if bias is not None:
        acc += tl.load(bias + n0 + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    if pre is not None:
        tl.store(pre + at, acc, mask=mask)
        acc = value_of(acc, EPILOGUE)
    elif other is not None:
        read = tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
        if EPILOGUE == "residual":
            acc += read
        else:
            acc *= slope_of(read, EPILOGUE)
    keep(out + at, mask, acc, scalars, MODE)
