"""Activations on fp32 values, which program/ops/pointwise/elementwise.py defines. Each is two functions, the value and the slope
(derivative), and a line in each of `value_of` and `slope_of`, by the names of its two ops."""

from math import e, log2, pi, sqrt

from barellm.cuda.lang import constant, device, tl
from barellm.program.ops.pointwise.elementwise import GELU_CUBIC, GELU_SCALE

# Those that a GEMM's epilogue has, and those that are kernels of their own: the error function would take its registers.
IN_EPILOGUES = ("gelu", "relu", "relu2")
ACTIVATIONS = (*IN_EPILOGUES, "gelu_erf", "silu")
SLOPES = tuple(f"{name}_backward" for name in ACTIVATIONS)

# tanh(u) = 2 sigmoid(2 u) - 1 turns the op's formula into x sigmoid(2 u), with one exponential and no cancellation near zero. It is
# exp2, one instruction where exp scales what may be denormal: 20 % fewer instructions in a GEMM's epilogue.
EXPONENT, EXPONENT_CUBIC = constant(-2 * GELU_SCALE * log2(e)), constant(-2 * GELU_SCALE * GELU_CUBIC * log2(e))
SLOPE, SLOPE_CUBIC = constant(2 * GELU_SCALE), constant(6 * GELU_SCALE * GELU_CUBIC)
LOG2_E, ROOT_HALF, DENSITY = constant(log2(e)), constant(sqrt(0.5)), constant(1 / sqrt(2 * pi))


@device
def inverse(x):
    """1 / x of fp32 values within an ulp, by one instruction (a division, which scales its operands, takes four). Denormals: 0."""
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
def sigmoid(x):
    """The logistic function of fp32 values."""
    return 1.0 / (1.0 + tl.exp2(-LOG2_E * x))


@device
def normal_below(x):
    """The normal distribution function: the probability that a standard normal is below x, within 2^-24."""
    return 0.5 + 0.5 * tl.erf(x * ROOT_HALF)


@device
def value_of(x, NAME):
    """The activation NAME of fp32 values x, of any shape; NAME is known at compile time, so one branch is left. NaN stays."""
    if NAME == "gelu":
        y = gelu_value(x)
    elif NAME == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif NAME == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    elif NAME == "gelu_erf":
        y = x * normal_below(x)
    elif NAME == "silu":
        y = x * sigmoid(x)
    return y


@device
def slope_of(x, NAME):
    """The derivative of an activation at fp32 values x, of any shape; NAME, known at compile time: that of the derivative's op."""
    if NAME == "gelu_backward":
        y = gelu_slope(x)
    elif NAME == "relu_backward":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif NAME == "relu2_backward":
        y = tl.where(x < 0.0, 0.0, x + x)
    elif NAME == "gelu_erf_backward":
        y = normal_below(x) + x * DENSITY * tl.exp2(-0.5 * LOG2_E * x * x)
    elif NAME == "silu_backward":
        s = sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    return y
