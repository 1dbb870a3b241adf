"""GEMM by NVIDIA's cuBLASLt, where the target asks for it and the library has the same operation.

It takes what `matmul.append_gemm` takes where rows are contiguous multiples of 16 bytes. The only activation that it has is GELU,
in the tanh form as ours; how exact it is in fp32 is not said anywhere, so fp32 GEMMs with GELU stay ours. A bias has the dtype of
the result there: in 16 bits it is rounded first. Otherwise it rounds as ours does, in another order of the sums."""

from typing import Any

from barellm.cuda.cublaslt import EPILOGUES, WORKSPACE_ALIGN
from barellm.cuda.kernel import MODES, GemmSpec, LibraryGemm, Lowering, Size
from barellm.cuda.kernels.common import BLOCK
from barellm.cuda.kernels.gemm.hopper import operand_of
from barellm.cuda.kernels.pointwise.elementwise import cast
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, view_stride

WORKSPACE_BYTES = (32 << 20) + WORKSPACE_ALIGN  # what NVIDIA recommends for Hopper, and room to align it
ROW = 16  # bytes: rows and the beginnings of operands are multiples of them
MODE_NAMES = {number: name for name, number in MODES.items()}


def fits_cublaslt(
    c: Lowering, *, out: Any, a: Any, b: Any, N: int, K: int, bias: Any = None, residual: Any = None, pre: Any = None,
    epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> bool:  # fmt: skip
    """Whether cuBLASLt takes this GEMM, with the arguments of `matmul.append_gemm`: the target asks for it, and cuBLASLt has the
    epilogue; rows are contiguous and aligned to 16 bytes, a and b of one dtype, the result in it or fp32."""
    if c.target.matmul != "cublaslt" or (epilogue.replace("residual", ""), bias is not None) not in EPILOGUES:
        return False
    if any(view_stride(v) for v in (out, a, b, residual, pre)):
        return False
    (_, kind), (_, left), (_, right) = (operand_of(v) for v in (out, a, b))
    operands = [operand_of(v) for v in (out, a, b, residual, pre) if v is not None]
    if left != right or kind not in ("fp32", left):
        return False
    if any(region.start % ROW for region, _ in operands) or N * itemsize(left) % ROW or K * itemsize(left) % ROW:
        return False
    if any(dtype != kind for _, dtype in operands[3:]) or (pre is not None and kind == "fp32"):
        return False
    return mode == MODES["store"] or (residual is None and pre is None)  # one matrix C is all that it can add


def append_cublaslt_gemm(
    c: Lowering, gemm_kind: str, *, out: Any, a: Any, b: Any, rows: Size, N: int, K: int, bias: Any = None,
    residual: Any = None, pre: Any = None, epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> None:  # fmt: skip
    """Append what `matmul.append_gemm` means, as a call of the library. Its arguments are those; it `fits_cublaslt`."""
    # A residual is no epilogue of cuBLASLt: it adds it as what was there before.
    (out_region, kind), (a_region, dtype), (b_region, _) = (operand_of(v) for v in (out, a, b))
    tf32 = dtype == "fp32" and c.target.tf32
    spec = GemmSpec(gemm_kind, N, K, dtype, kind, epilogue.replace("residual", ""), MODE_NAMES[mode], tf32)
    extra = [None if v is None else operand_of(v)[0] for v in (_bias(c, bias, kind, N), pre, residual)]
    c.launches.append(LibraryGemm(spec, out_region, a_region, b_region, *extra, part(_workspace(c)), rows, c.op))


def _bias(c: Lowering, bias: Any, kind: str, N: int) -> Any:
    """The bias in the dtype of the result."""
    if bias is None or bias.dtype == kind:
        return bias
    rounded = c.scratch("bias", (N,), kind)
    constants = {"UNIT": 1, "BLOCK": BLOCK, "MODE": MODES["store"]}
    operands = {"y": rounded, "x": bias, "units": N}
    c.launch(cast, operands, constants, grid=lambda s: (ceil_div(N, BLOCK),), writes="y")
    return rounded


def _workspace(c: Lowering) -> Tensor:
    """The workspace of the op. All its GEMMs, which follow one another, share it."""
    name = f"{c.op.name}.workspace"
    for t in c.scratch_tensors:
        if t.name == name:
            return t
    return c.scratch("workspace", (WORKSPACE_BYTES // itemsize("fp32"),))
