"""Kernels for the self-test, with the parameters of matmul.gemm: what a tuner must reject, each for its reason.

They are part of the package because `barellm tune --self-test --device cuda` needs them on the user's card: that a kernel which
hangs there ends its own process only, and that the others are told apart from right ones, no machine without a GPU can show."""

from __future__ import annotations

from barellm.cuda.kernels.gemm.matmul import gemm
from barellm.cuda.lang import device, tl


@device
def faulty(
    out, pre, a, b, bias, other, scalars, M: tl.int32, N: tl.int32, K: tl.int32, k_per_split,
    FAULT, A_TRANSPOSED, B_TRANSPOSED, EVEN_K, EPILOGUE, MODE, BM, BN, BK, GROUP, SUBTILES, TF32, A_STRIDE, B_STRIDE, OUT_STRIDE,
    PRE_STRIDE, OTHER_STRIDE,
):  # fmt: skip
    """The right GEMM, but "wrong_values" adds 1 to the result's first element, "writes_beyond" to an operand's, "hangs" never
    ends."""
    if FAULT == "hangs":
        batch = tl.load(scalars, volatile=True)
        while batch > 0:
            batch = tl.load(scalars, volatile=True)
    gemm(out, pre, a, b, bias, other, scalars, M, N, K, k_per_split, A_TRANSPOSED, B_TRANSPOSED, EVEN_K, EPILOGUE, MODE,
         BM, BN, BK, GROUP, SUBTILES, TF32, A_STRIDE, B_STRIDE, OUT_STRIDE, PRE_STRIDE, OTHER_STRIDE)  # fmt: skip
    if tl.program_id(0) == 0:
        tl.debug_barrier()
        spoilt = out if FAULT == "wrong_values" else b
        tl.store(spoilt, tl.load(spoilt) + 1.0)


# Name, and words of the reason that it is rejected for.
FAULTS = (("wrong_values", "wrong values"), ("writes_beyond", "wrote outside its result"), ("hangs", "it hangs"))
