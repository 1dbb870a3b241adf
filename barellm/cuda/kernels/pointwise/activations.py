"""Activations on fp32 values. What they mean is said in program/ops/pointwise/elementwise.py.

Each is two functions, the value and the slope, and a line in each of `value_of` and `slope_of`, by the names of its two ops.
"""

from __future__ import annotations

from math import e, log2

from barellm.cuda.lang import constant, device, tl
from barellm.program.ops.pointwise.elementwise import GELU_CUBIC, GELU_SCALE

ACTIVATIONS = ("gelu", "relu", "relu2")
SLOPES = tuple(f"{name}_backward" for name in ACTIVATIONS)

# tanh(u) = 2 sigmoid(2 u) - 1 turns the op's formula into x sigmoid(2 u), with one exponential and no cancellation near zero. It is
# exp2, one instruction where exp scales what may be denormal: 20 % fewer instructions in the epilogue of a product.
EXPONENT, EXPONENT_CUBIC = constant(-2 * GELU_SCALE * log2(e)), constant(-2 * GELU_SCALE * GELU_CUBIC * log2(e))
SLOPE, SLOPE_CUBIC = constant(2 * GELU_SCALE), constant(6 * GELU_SCALE * GELU_CUBIC)


@device
def inverse(x):
    """1 / x of fp32 values within an ulp, by one instruction; a division scales its operands, which takes three more. What would be
    denormal is zero."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@device
def gelu_value(x):
    """GELU of fp32 values."""
    return x * inverse(1.0 + tl.exp2(x * (EXPONENT + EXPONENT_CUBIC * (x * x))))


@device
def gelu_slope(x):
    """The derivative of GELU at fp32 values."""
    square = x * x
    s = inverse(1.0 + tl.exp2(x * (EXPONENT + EXPONENT_CUBIC * square)))
    return s * (1.0 + x * (1.0 - s) * (SLOPE + SLOPE_CUBIC * square))


@device
def relu_value(x):
    return tl.where(x < 0.0, 0.0, x)  # NaN stays


@device
def relu_slope(x):
    return tl.where(x > 0.0, 1.0, 0.0)


@device
def relu2_value(x):
    return tl.where(x < 0.0, 0.0, x * x)  # NaN stays


@device
def relu2_slope(x):
    return tl.where(x < 0.0, 0.0, x + x)


@device
def value_of(x, NAME: tl.constexpr):
    """An activation of fp32 values."""
    if NAME == "gelu":
        y = gelu_value(x)
    elif NAME == "relu":
        y = relu_value(x)
    elif NAME == "relu2":
        y = relu2_value(x)
    return y


@device
def slope_of(x, NAME: tl.constexpr):
    """The derivative of an activation at fp32 values."""
    if NAME == "gelu_backward":
        y = gelu_slope(x)
    elif NAME == "relu_backward":
        y = relu_slope(x)
    elif NAME == "relu2_backward":
        y = relu2_slope(x)
    return y
