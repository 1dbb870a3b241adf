"""Binary (XNOR-popcount) matmul on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


def _binary_matmul(p: Program, a: Tensor, b: Tensor) -> Tensor:
    return p.binary_linear(a, b, dtype="bf16" if a.dtype == b.dtype == "bf16" else "fp32")


_BINARY_MATMUL = FunctionSpec("binary_matmul", {"a": "... K", "b": "N K"}, ("... N",), _binary_matmul)


def binary_matmul(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """Binary matmul, sign(a) sign(b) (BNN; Courbariaux and Hubara et al. 2016), packed 32 to a word and multiplied by xor
    and a count of ones.

    Shapes: a (..., K), b (N, K) -> (..., N). Leading axes of `a` are rows of one product; a single b serves them all.
    Formula: y[i, n] = sum over k of sign(a[i, k]) sign(b[n, k]), with sign(x) = 1 where x >= 0, else -1 (also for NaN).
    Dtypes: float32 or bfloat16 for each. The result is float32 and holds exact integers; K is at most 2^24.
    Gradients: straight through the sign where the argument is at most 1 in size, zero elsewhere. Where both are bfloat16, the
    gradient that arrives is rounded to it.
    Source: `barellm/cpu/kernels/gemm/binary_matmul.py`.

        y, vjp_fn = kernels.vjp(kernels.binary_matmul, x, weight)"""
    return call(_BINARY_MATMUL, {"a": a, "b": b}, out)[0]
