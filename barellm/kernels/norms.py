"""Norms and softmax of rows on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.kernels.call import call
from barellm.kernels.function_spec import FunctionSpec
from barellm.kernels.options import number

if TYPE_CHECKING:
    from barellm.kernels.arrays import Array


_LAYERNORM = FunctionSpec("layernorm", {"x": "... C", "weight": "C", "bias": "C"}, ("... C",), optional=("bias",))
_RMSNORM = FunctionSpec("rmsnorm", {"x": "... C", "weight": "C"}, ("... C",), optional=("weight",))
_SOFTMAX = FunctionSpec("softmax", {"x": "... C"}, ("... C",))


def layernorm(x: Array, weight: Array, bias: Array | None = None, *, eps: float = 1e-5, out: Array | None = None) -> Array:
    """LayerNorm over the last axis (Ba et al. 2016).

    Shapes: x (..., C), weight (C,), bias (C,) or none -> (..., C).
    Formula: y = (x - mean) / sqrt(variance + eps) weight + bias, with the mean and the variance of the row.
    Dtypes: float32 or bfloat16 each; the result has that of x. Statistics are fp32.
    Source: `barellm/cpu/kernels/norm/layernorm.py`.

        y = kernels.layernorm(x, weight, bias)
        y, vjp_fn = kernels.vjp(kernels.layernorm, x, weight, bias)
        dx, dweight, dbias = vjp_fn(dy)"""
    eps = number("layernorm", "eps", eps, least=0.0)
    return call(_LAYERNORM, {"x": x, "weight": weight, "bias": bias}, out, eps=eps)[0]


def rmsnorm(x: Array, weight: Array | None = None, *, eps: float = 1e-5, out: Array | None = None) -> Array:
    """RMSNorm over the last axis (Zhang and Sennrich 2019).

    Shapes: x (..., C), weight (C,) or none -> (..., C).
    Formula: y = x / sqrt(mean(x^2) + eps) weight.
    Dtypes: float32 or bfloat16 each; the result has that of x. Statistics are fp32.
    Source: `barellm/cpu/kernels/norm/layernorm.py`.

        y = kernels.rmsnorm(x, weight)"""
    eps = number("rmsnorm", "eps", eps, least=0.0)
    return call(_RMSNORM, {"x": x, "weight": weight}, out, eps=eps)[0]


def softmax(x: Array, *, scale: float = 1.0, out: Array | None = None) -> Array:
    """Softmax over the last axis.

    Shapes: x (..., C) -> (..., C).
    Formula: y = exp(scale x) / sum(exp(scale x)), scale above 0; the largest element of the row is taken off first.
    Dtypes: float32 or bfloat16; the result has that of x. Exponentials and sums are fp32.
    Source: `barellm/cpu/kernels/norm/softmax.py`.

        y = kernels.softmax(logits)"""
    return call(_SOFTMAX, {"x": x}, out, scale=number("softmax", "scale", scale))[0]
