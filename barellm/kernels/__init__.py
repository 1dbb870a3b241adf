"""Ops as functions on NumPy arrays: `y = kernels.matmul(a, b)`, gradients by `kernels.vjp`.

To add a function, write it into the file of its family here: a `build` that appends ops to a Program, a `FunctionSpec` with the
legends of its arguments and results, and a typed function with a docstring that hands its arguments to `call`. Name it below and
in docs/arrays.md, and give `CASES` of tests/kernels/test_functions.py its formula in float64; gradients come from the ops."""

from barellm.kernels.attention import attention
from barellm.kernels.binary import binary_matmul
from barellm.kernels.blocksparse import blocksparse_matmul
from barellm.kernels.call import vjp
from barellm.kernels.convolution import conv2d
from barellm.kernels.matmul import matmul
from barellm.kernels.norms import layernorm, rmsnorm, softmax
from barellm.kernels.quantization import dequantize, quantize
from barellm.kernels.topk import top_k

__all__ = [
    "attention", "binary_matmul", "blocksparse_matmul", "conv2d", "dequantize", "layernorm", "matmul", "quantize", "rmsnorm",
    "softmax", "top_k", "vjp",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
