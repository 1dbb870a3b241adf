"""Matrix multiplication (GEMM) on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.errors import WrongType
from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


def _matmul(p: Program, a: Tensor, b: Tensor, b_transposed: bool) -> Tensor:
    if a.dtype != b.dtype:
        raise WrongType(f"matmul expects a and b of one dtype, a is {a.dtype} and b is {b.dtype}")
    return p.linear(a, b, transposed_weight=not b_transposed)


_MATMUL = FunctionSpec("matmul", {"a": "... K", "b": "K N"}, ("... N",), _matmul, transposable=("b",))


def matmul(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """Matrix multiplication a @ b (GEMM), accumulated in fp32.

    Shapes: a (..., K), b (K, N) -> (..., N). Leading axes of `a` are rows of one GEMM; b is not batched.
    Formula: y[i, n] = sum over k of a[i, k] b[k, n]; each element is one accumulation chain.
    Dtypes: float32 or bfloat16, the same for a and b. The result has it too.
    Copies: none where `a` is row-major and `b` is row-major or the transpose of a row-major array, such as a weight (N, K).
    Source: `barellm/cpu/kernels/gemm/gemm.py`.

        y = kernels.matmul(x, weight.T)"""
    return call(_MATMUL, {"a": a, "b": b}, out)[0]
