"""Functions on fp32 lanes: polynomials, because llvm.exp and its like become scalar calls.

Errors are measured in tests/cpu/test_vector.py against float64 over the whole range.
"""

from __future__ import annotations

from math import log, pi

from barellm.cpu.lang.emit import Builder, Value
from barellm.program.ops.elementwise import GELU_CUBIC, GELU_SCALE

LOG2E = 1.4426950408889634
# 2^f on [-0.5, 0.5], Chebyshev fit of degree 6: relative error 2e-8 before rounding.
EXP2 = (
    1.0,
    0.693147182464599609375,
    0.2402265071868896484,
    0.05550357326865196,
    0.009618237614631653,
    0.0013398874104022980,
    0.00015465189653449,
)
MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer that lies in the low mantissa bits


def exp2(k: Builder, x: Value) -> Value:
    """2**x; 0 below -126, infinity above 128."""
    clipped = k.max(k.min(x, 128.0), -126.0)
    shifted = clipped + MAGIC
    f = clipped - (shifted - MAGIC)
    p = k.to(EXP2[-1], k.vec)
    for c in reversed(EXP2[:-1]):
        p = k.fma(p, f, c)
    # Add the integer to the exponent field; 2^127 * 2 for x = 128 overflows to infinity as it should.
    scaled = k.bitcast(k.bitcast(p, k.ivec) + (k.bitcast(shifted, k.ivec) << 23), k.vec)
    return k.select(x < -126.0, 0.0, k.select(x < 128.0, scaled, x + float("inf")))  # NaN stays NaN


def exp(k: Builder, x: Value) -> Value:
    """e**x. The product with log2(e) is exact to two floats, so that the error stays at an ulp or two for large |x|."""
    clipped = k.max(k.min(x, 89.0), -88.0)
    shifted = k.fma(clipped, LOG2E, MAGIC)
    n = shifted - MAGIC
    r = k.fma(n, -0.693145751953125, clipped)
    r = k.fma(n, -1.428606765330187e-06, r)
    p = k.to(1 / 5040, k.vec)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = k.fma(p, r, c)
    scaled = k.bitcast(k.bitcast(p, k.ivec) + (k.bitcast(shifted, k.ivec) << 23), k.vec)
    return k.select(x < -87.33654, 0.0, k.select(x < 88.7228, scaled, x + float("inf")))  # NaN stays NaN


def ln(k: Builder, x: Value) -> Value:
    """Natural logarithm of positive normal numbers, infinity and NaN: exponent and mantissa apart, then the series of atanh."""
    bits = k.bitcast(x, k.ivec)
    # Mantissa in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2) before taking the exponent off.
    offset = bits - 0x3F3504F3
    exponent_bits = k.op(k.ivec, f"ashr {offset.typed}, {k.const(23, k.ivec).ref}")
    e = k.to(exponent_bits, k.vec)
    m = k.bitcast(bits - (exponent_bits << 23), k.vec)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = k.to(2 / 11, k.vec)
    for c in (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0):
        p = k.fma(p, z, c)
    return k.select(x < float("inf"), k.fma(e, log(2.0), p * s), x)


def sigmoid(k: Builder, x: Value) -> Value:
    return 1.0 / (1.0 + exp(k, -x))


def tanh(k: Builder, x: Value) -> Value:
    """2 sigmoid(2x) - 1: absolute error an ulp of 1, which is what GELU needs."""
    return 2.0 * sigmoid(k, 2.0 * x) - 1.0


def _gelu_argument(k: Builder, x: Value) -> Value:
    """2 sqrt(2/pi) (x + 0.044715 x^3): gelu(x) = x sigmoid of it."""
    return x * k.fma(x * x, 2 * GELU_SCALE * GELU_CUBIC, k.to(2 * GELU_SCALE, k.vec))


def gelu(k: Builder, x: Value) -> Value:
    return x * sigmoid(k, _gelu_argument(k, x))


def gelu_slope(k: Builder, x: Value) -> Value:
    """s + x s (1 - s) u'(x), with s the sigmoid of u(x). 1 - s as s exp(-u) keeps the digits that cancel in the difference."""
    e = k.min(1e37, exp(k, -_gelu_argument(k, x)))
    s = 1.0 / (1.0 + e)
    du = k.fma(x * x, 6 * GELU_SCALE * GELU_CUBIC, k.to(2 * GELU_SCALE, k.vec))
    return k.fma(x * s * (s * e), du, s)


def sincos_turn(k: Builder, turn: Value) -> tuple[Value, Value]:
    """Sine and cosine of 2 pi turn / 2^24, for i32 lanes in [0, 2^24): the reduction to an eighth of a turn is exact."""
    quadrant = (turn + (1 << 21)) >> 22
    r = k.to(turn - (quadrant << 22), k.vec) * (2 * pi / 2**24)
    z = r * r
    sine = k.to(1 / 362880, k.vec)
    for c in (-1 / 5040, 1 / 120, -1 / 6):
        sine = k.fma(sine, z, c)
    sine = k.fma(sine * z, r, r)
    cosine = k.to(-1 / 3628800, k.vec)
    for c in (1 / 40320, -1 / 720, 1 / 24, -0.5, 1.0):
        cosine = k.fma(cosine, z, c)
    swapped = (quadrant & 1).differs(0)
    # The sine is negative in the quadrants 2 and 3, the cosine in 1 and 2.
    s = k.bitcast(k.select(swapped, cosine, sine), k.ivec) ^ ((quadrant & 2) << 30)
    c = k.bitcast(k.select(swapped, sine, cosine), k.ivec) ^ (((quadrant + 1) & 2) << 30)
    return k.bitcast(s, k.vec), k.bitcast(c, k.vec)
