"""Products by NVIDIA's cuBLASLt, where the target asks for them and it has them in the form that ours have.

It takes what `matmul.product` takes where rows are multiples of 16 bytes and lie side by side. The only activation that it has is
GELU, in the tanh form as ours; how exact it is in fp32 is not said anywhere, so fp32 products with GELU stay ours. A bias has the
dtype of the result there: in 16 bits it is rounded first. What NVIDIA's library computes for those has the same rounding as ours
otherwise, in another order of the sums.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.cublaslt import EPILOGUES, WORKSPACE_ALIGN
from barellm.cuda.kernel import MODES, GemmSpec, LibraryGemm, Lowering, Size
from barellm.cuda.kernels.common import BLOCK
from barellm.cuda.kernels.gemm.hopper import matrix
from barellm.cuda.kernels.pointwise.elementwise import cast
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, view_stride

WORKSPACE_BYTES = (32 << 20) + WORKSPACE_ALIGN  # what NVIDIA recommends for Hopper, and room to align it
ROW = 16  # bytes, of which rows are multiples
MODE_NAMES = {number: name for name, number in MODES.items()}


def fits(
    c: Lowering, *, out: Any, a: Any, b: Any, N: int, K: int, bias: Any = None, residual: Any = None, pre: Any = None,
    epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> bool:  # fmt: skip
    """Whether `append` takes this product, with the arguments of `matmul.product`."""
    if c.target.matmul != "cublaslt" or (_activation(epilogue), bias is not None) not in EPILOGUES:
        return False
    if any(view_stride(v) for v in (out, a, b, residual, pre)):
        return False
    (_, kind), (_, left), (_, right) = (matrix(v) for v in (out, a, b))
    operands = [matrix(v) for v in (out, a, b, residual, pre) if v is not None]
    if left != right or kind not in ("fp32", left):
        return False
    if any(region.start % ROW for region, _ in operands) or N * itemsize(left) % ROW or K * itemsize(left) % ROW:
        return False
    if any(dtype != kind for _, dtype in operands[3:]) or (pre is not None and kind == "fp32"):
        return False
    return mode == MODES["store"] or (residual is None and pre is None)


def append(
    c: Lowering, role: str, *, out: Any, a: Any, b: Any, rows: Size, N: int, K: int, bias: Any = None,
    residual: Any = None, pre: Any = None, epilogue: str = "", mode: int = MODES["store"], **_: Any,
) -> None:  # fmt: skip
    """Appends what `matmul.product` would, as a call of the library."""
    (to, kind), (left, dtype), (right, _) = (matrix(v) for v in (out, a, b))
    spec = GemmSpec(role, N, K, dtype, kind, _activation(epilogue), MODE_NAMES[mode], dtype == "fp32" and c.target.tf32)
    extra = [None if v is None else matrix(v)[0] for v in (_bias(c, bias, kind, N), pre, residual)]
    c.launches.append(LibraryGemm(spec, to, left, right, *extra, part(_workspace(c)), rows, c.op))


def _activation(epilogue: str) -> str:
    """The epilogue as cuBLASLt knows it: it adds a residual as what was there before."""
    return "" if epilogue == "residual" else epilogue


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
    """The workspace of the op. All its products, which follow one another, share it."""
    name = f"{c.op.name}.workspace"
    for t in c.scratch_tensors:
        if t.name == name:
            return t
    return c.scratch("workspace", (WORKSPACE_BYTES // itemsize("fp32"),))
