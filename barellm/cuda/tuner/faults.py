"""Kernels for the self-test, with the parameters of matmul.gemm: what a tuner must reject, each for its reason.

They are part of the package because `barellm tune --self-test --device cuda` needs them on the user's card: that a kernel which
hangs there ends its own process only, and that the others are told apart from right ones, no machine without a GPU can show.
"""

from __future__ import annotations

from barellm.cuda.kernels.gemm.matmul import gemm
from barellm.cuda.lang import device, tl


@device
def wrong_values(
    out, pre, a, b, bias, other, scalars, M, N, K, chunk,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr, EPILOGUE: tl.constexpr, MODE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, TF32: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, OUT_ROW: tl.constexpr, PRE_ROW: tl.constexpr, OTHER_ROW: tl.constexpr,
):  # fmt: skip
    """The right product, and its first element is 1 more."""
    gemm(out, pre, a, b, bias, other, scalars, M, N, K, chunk, A_TRANSPOSED, B_TRANSPOSED, EVEN_K, EPILOGUE, MODE,
         BM, BN, BK, GROUP, PARTS, TF32, A_ROW, B_ROW, OUT_ROW, PRE_ROW, OTHER_ROW)  # fmt: skip
    if tl.program_id(0) == 0:
        tl.debug_barrier()
        tl.store(out, tl.load(out) + 1.0)


@device
def writes_beyond(
    out, pre, a, b, bias, other, scalars, M, N, K, chunk,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr, EPILOGUE: tl.constexpr, MODE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, TF32: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, OUT_ROW: tl.constexpr, PRE_ROW: tl.constexpr, OTHER_ROW: tl.constexpr,
):  # fmt: skip
    """The right product, and its first element a second time over what is read."""
    gemm(out, pre, a, b, bias, other, scalars, M, N, K, chunk, A_TRANSPOSED, B_TRANSPOSED, EVEN_K, EPILOGUE, MODE,
         BM, BN, BK, GROUP, PARTS, TF32, A_ROW, B_ROW, OUT_ROW, PRE_ROW, OTHER_ROW)  # fmt: skip
    if tl.program_id(0) == 0:
        tl.debug_barrier()
        tl.store(b, tl.load(b) + 1.0)


@device
def hangs(
    out, pre, a, b, bias, other, scalars, M, N, K, chunk,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr, EPILOGUE: tl.constexpr, MODE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, TF32: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, OUT_ROW: tl.constexpr, PRE_ROW: tl.constexpr, OTHER_ROW: tl.constexpr,
):  # fmt: skip
    """Never comes back."""
    batch = tl.load(scalars, volatile=True)
    while batch > 0:
        batch = tl.load(scalars, volatile=True)


# Name, and words of the reason that it is rejected for.
FAULTS = (("wrong_values", "wrong values"), ("writes_beyond", "wrote outside its result"), ("hangs", "it hangs"))
