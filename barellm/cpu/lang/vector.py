"""Functions on fp32 lanes: polynomials, because llvm.exp and its like become scalar calls.

Errors are measured in tests/cpu/test_vector.py against float64 over the whole range."""

import math
from functools import cache
from itertools import pairwise
from math import cos, log, pi, sqrt

from barellm.cpu.lang.emit import Builder
from barellm.cpu.lang.values import Value, constant
from barellm.program.ops.pointwise.elementwise import GELU_CUBIC, GELU_SCALE

LOG2E = 1.4426950408889634
# Minimax fits of degree 6, relative error 2e-9 and 3e-9: 2^f on [-0.5, 0.5], e^r on [-ln(2)/2, ln(2)/2].
EXP2 = (1.0, 0.6931472028810532, 0.24022647910278372, 0.05550332409476683, 0.009618437606629159, 0.0013398900238861516,
        0.00015353341035825844)  # fmt: skip
EXP = (1.0, 1.0, 0.499999934477676, 0.1666652063151181, 0.041668388051127006, 0.008368716898075616,
       0.0013814598365808955)  # fmt: skip
# 2^f to 8e-5, a fiftieth of what rounding to bf16 does.
EXP2_BF16 = (0.9999280665, 0.6932609858, 0.2426111308, 0.0551716726)
MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer that lies in the low mantissa bits


def polynomial(k: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """The sum of coefficients[i] x^i by Horner's scheme."""
    p = k.to(coefficients[-1], k.vec)
    for c in reversed(coefficients[:-1]):
        p = k.fma(p, x, c)
    return p


def _scale(k: Builder, p: Value, shifted: Value, x: Value, *, low: float, high: float) -> Value:
    """p 2^n, where `shifted` = MAGIC + n: 0 where x is below `low`, infinity from `high` on; NaN stays NaN."""
    if k.isa.masked:  # AVX-512's VSCALEFPS handles under- and overflow
        n = shifted - MAGIC
        return k.call("llvm.x86.avx512.mask.scalef.ps.512", k.vec, p, n, f"{k.vec} undef", "i16 -1", "i32 4")
    # n is added to the exponent field.
    scaled = k.bitcast(k.bitcast(p, k.ivec) + (k.bitcast(shifted, k.ivec) << 23), k.vec)
    return k.select(x < low, 0.0, k.select(x < high, scaled, x + float("inf")))


def exp2(k: Builder, x: Value, coefficients: tuple[float, ...] = EXP2, least: float = -151.0) -> Value:
    """2**x; 0 below -126 (AVX-512: denormals), infinity above 128; x is clipped to at least `least`. NaN stays."""
    clipped = k.max(least, k.min(129.0, x))  # of a NaN and a number the second: NaN stays
    shifted = clipped + MAGIC
    p = polynomial(k, clipped - (shifted - MAGIC), coefficients)
    return _scale(k, p, shifted, x, low=-126.0, high=128.0)


def exp2_within(k: Builder, x: Value) -> Value:
    """2**x of numbers that are known to lie from -126 to 127: a third fewer instructions. NaN stays."""
    shifted = x + MAGIC
    n = shifted - MAGIC
    power = k.bitcast((k.bitcast(shifted, k.ivec) << 23) + 0x3F800000, k.vec)
    return polynomial(k, x - n, EXP2) * power


def _reduce_range(k: Builder, x: Value) -> tuple[Value, Value]:
    """(MAGIC + n, r) such that e^x = 2^n e^r: n = round(x log2(e)), r = x - n ln(2). ln(2) is subtracted as the sum of two floats
    (Cody and Waite 1980), so that the error stays at an ulp or two for large |x|."""
    shifted = k.fma(x, LOG2E, MAGIC)
    n = shifted - MAGIC
    r = k.fma(n, -0.693145751953125, x)
    return shifted, k.fma(n, -1.428606765330187e-06, r)


def exp(k: Builder, x: Value, least: float = -105.0) -> Value:
    """e**x, below `least` that power, as 2^n e^r (`_reduce_range`)."""
    shifted, r = _reduce_range(k, k.max(least, k.min(89.0, x)))
    return _scale(k, polynomial(k, r, EXP), shifted, x, low=-87.33654, high=88.7228)


def tanh(k: Builder, x: Value) -> Value:
    """expm1(2 x) / (expm1(2 x) + 2), with expm1 = 2^n (e^r - 1) + (2^n - 1): no digits cancel, near 0 either."""
    clipped = k.max(-40.0, k.min(40.0, x + x))  # of a NaN and a number the second: NaN stays
    shifted, r = _reduce_range(k, clipped)
    power = k.bitcast((k.bitcast(shifted, k.ivec) << 23) + 0x3F800000, k.vec)
    e = k.fma(power, r * polynomial(k, r, EXP[1:]), power - 1.0)
    return e / (e + 2.0)


def ln(k: Builder, x: Value) -> Value:
    """Natural logarithm of positive normal numbers, infinity and NaN: x = 2^e m with m in [sqrt(1/2), sqrt(2)), ln(m) = 2 atanh(s)
    by its series, s = (m - 1) / (m + 1)."""
    bits = k.bitcast(x, k.ivec)
    # Subtract the bits of sqrt(1/2) before taking the exponent off.
    offset = bits - 0x3F3504F3
    exponent_bits = k.op(k.ivec, f"ashr {offset.typed}, {k.const(23, k.ivec).ref}")
    e = k.to(exponent_bits, k.vec)
    m = k.bitcast(bits - (exponent_bits << 23), k.vec)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = polynomial(k, z, (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9, 2 / 11))
    return k.select(x < float("inf"), k.fma(e, log(2.0), p * s), x)


def _exp_to_add_to_one(k: Builder, x: Value, dtype: str) -> Value:
    """2**x for bf16, else e**x, to be added to 1: never a denormal, which takes an Intel core some hundred cycles."""
    return exp2(k, x, EXP2_BF16, least=-125.0) if dtype == "bf16" else exp(k, x, least=-87.0)


def _exp_of_minus_u(k: Builder, x: Value, squared: Value, dtype: str) -> Value:
    """exp(-u(x)), u = 2 sqrt(2/pi) (x + 0.044715 x^3), so that gelu(x) = x / (1 + exp(-u)), as exactly as `dtype` can show."""
    scale = -2 * GELU_SCALE * (LOG2E if dtype == "bf16" else 1.0)
    exponent = x * k.fma(squared, scale * GELU_CUBIC, k.to(scale, k.vec))
    return _exp_to_add_to_one(k, exponent, dtype)


def gelu(k: Builder, x: Value, dtype: str = "fp32") -> Value:
    """`dtype`: what the result is rounded to. For bf16 12 instead of 20 cycles a vector (Zen 4), error 8e-5."""
    return x / (1.0 + _exp_of_minus_u(k, x, x * x, dtype))


def gelu_slope(k: Builder, x: Value, dtype: str = "fp32") -> Value:
    """s + x s (1 - s) u'(x), with s the sigmoid of u(x). 1 - s as s exp(-u) keeps the digits that cancel in the difference."""
    if dtype == "bf16" and k.isa.masked:
        return _gelu_slope_from_tables(k, x)
    squared = x * x
    e = k.min(1e37, _exp_of_minus_u(k, x, squared, dtype))
    s = 1.0 / (1.0 + e)
    du = k.fma(squared, 6 * GELU_SCALE * GELU_CUBIC, k.to(2 * GELU_SCALE, k.vec))
    return k.fma(x * s * (s * e), du, s)


def _exp_of_minus(k: Builder, x: Value, dtype: str) -> Value:
    return _exp_to_add_to_one(k, x * -LOG2E if dtype == "bf16" else -x, dtype)


def silu(k: Builder, x: Value, dtype: str = "fp32") -> Value:
    """x / (1 + exp(-x)). `dtype` as in `gelu`."""
    return x / (1.0 + _exp_of_minus(k, x, dtype))


def silu_and_slope(k: Builder, x: Value, dtype: str = "fp32") -> tuple[Value, Value]:
    """silu(x) = x s and s + x s (1 - s), with s the sigmoid. 1 - s as s exp(-x) keeps the digits that cancel in the difference."""
    e = k.min(1e37, _exp_of_minus(k, x, dtype))
    s = 1.0 / (1.0 + e)
    y = x * s
    return y, k.fma(y, s * e, s)


# erfc(z) = exp(-z^2) t (a1 + a2 t + ... + a5 t^4), t = 1 / (1 + p z), for z >= 0 (Abramowitz and Stegun 7.1.26): error 1.5e-7.
ERFC_P, ERFC = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def gelu_erf_and_slope(k: Builder, x: Value) -> tuple[Value, Value]:
    """x P(x) and P(x) + x p(x), with P and p the normal distribution and its density."""
    size = k.bitcast(k.bitcast(x, k.ivec) & 0x7FFFFFFF, k.vec)
    t = 1.0 / k.fma(size, ERFC_P / sqrt(2), k.to(1.0, k.vec))
    e = exp(k, x * x * -0.5)
    tail = polynomial(k, t, ERFC) * t * e * 0.5  # P(-|x|)
    below = k.select(x < 0.0, tail, 1.0 - tail)
    return x * below, k.fma(x * e, 1 / sqrt(2 * pi), below)


def gelu_erf(k: Builder, x: Value, dtype: str = "fp32") -> Value:
    """GELU by the error function, whatever the result is rounded to."""
    return gelu_erf_and_slope(k, x)[0]


SLOPE_STEPS = 3.2  # pieces a unit: 16 of them reach to 4.8, where the slope is 1 but for 3e-5


def _gelu_slope_from_tables(k: Builder, x: Value) -> Value:
    """gelu'(x) to 9e-6, where rounding to bf16 leaves 2e-3. gelu' - 1/2 is odd: of |x| it is a cubic in each of 16 pieces. One
    AVX-512 permutation looks up a coefficient for all lanes; 4 multiplications or fmas, where the formula has 13 and a division
    (Zen 4: what else is done here is free between a GEMM's multiply-adds)."""
    steps = k.bitcast(k.bitcast(x, k.ivec) & 0x7FFFFFFF, k.vec) * SLOPE_STEPS
    steps = k.min(SLOPE_LANES - 0.51, steps)  # of a number and a NaN the second: NaN stays
    shifted = steps + MAGIC
    # The number of the piece is in the low bits of `index`, and VPERMPS reads no others.
    r = steps - (shifted - MAGIC)
    index = k.bitcast(shifted, k.ivec)
    p: Value | None = None
    for table in reversed(_slope_tables()):
        values = ", ".join(f"float {constant(c, 'float')}" for c in table)
        c = k.call("llvm.x86.avx512.permvar.sf.512", k.vec, Value(k, k.vec, f"<{values}>"), index)
        p = c if p is None else k.fma(p, r, c)
    assert p is not None
    return k.copysign(p, x) + 0.5


SLOPE_LANES = 16  # of a table: those of a vector


@cache
def _slope_tables() -> list[list[float]]:
    """[power of r, 0 to 3][piece n, 0 to SLOPE_LANES - 1]: coefficients of the cubics gelu'((n + r) / SLOPE_STEPS) - 1/2 for r in
    [-1/2, 1/2], interpolated at the four Chebyshev points by Newton's divided differences. Each row fills one vector, from which
    `_gelu_slope_from_tables` permutes. Less 1/2, gelu' is odd: a table for x >= 0 is enough, and the sign is put back."""
    points = [cos((2 * j + 1) * pi / 8) / 2 for j in range(4)]

    def cubic(n: int) -> list[float]:
        rises = [_slope((n + r) / SLOPE_STEPS) - 0.5 for r in points]  # divided differences, in place
        for order in range(1, 4):
            for j in range(3, order - 1, -1):
                rises[j] = (rises[j] - rises[j - 1]) / (points[j] - points[j - order])
        powers = [0.0] * 4
        for rise, point in zip(reversed(rises), reversed(points), strict=True):  # Horner: p (r - point) + rise
            powers = [rise - point * powers[0], *(a - point * b for a, b in pairwise(powers))]
        return powers

    return [list(column) for column in zip(*map(cubic, range(SLOPE_LANES)), strict=True)]


def _slope(x: float) -> float:
    """gelu'(x), of the tanh form."""
    t = math.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3))
    return (1 + t + x * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)) / 2


def sincos_turn(k: Builder, turn: Value) -> tuple[Value, Value]:
    """Sine and cosine of 2 pi turn / 2^24, for i32 lanes in [0, 2^24): the reduction to an eighth of a turn is exact, then Taylor
    polynomials. `quadrant`: of the nearest multiple of a quarter turn."""
    quadrant = (turn + (1 << 21)) >> 22
    r = k.to(turn - (quadrant << 22), k.vec) * (2 * pi / 2**24)
    z = r * r
    sine = k.fma(polynomial(k, z, (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880)) * z, r, r)
    cosine = polynomial(k, z, (1.0, -0.5, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800))
    swapped = (quadrant & 1).differs(0)
    # The sine is negative in the quadrants 2 and 3, the cosine in 1 and 2.
    s = k.bitcast(k.select(swapped, cosine, sine), k.ivec) ^ ((quadrant & 2) << 30)
    c = k.bitcast(k.select(swapped, sine, cosine), k.ivec) ^ (((quadrant + 1) & 2) << 30)
    return k.bitcast(s, k.vec), k.bitcast(c, k.vec)


def transpose_groups(k: Builder, rows: list[Value]) -> list[Value]:
    """Four vectors of 32-bit elements, transposed 4 x 4 elements inside each group of 128 bits: columns 0 to 3 of every group."""
    a, b, c, d = rows
    low_ab = _unpack(k, a, b, half=0, unit=1)  # in each group: a0 b0 a1 b1
    low_cd = _unpack(k, c, d, half=0, unit=1)
    high_ab = _unpack(k, a, b, half=1, unit=1)  # a2 b2 a3 b3
    high_cd = _unpack(k, c, d, half=1, unit=1)
    column_0 = _unpack(k, low_ab, low_cd, half=0, unit=2)  # a0 b0 c0 d0
    column_1 = _unpack(k, low_ab, low_cd, half=1, unit=2)
    column_2 = _unpack(k, high_ab, high_cd, half=0, unit=2)
    column_3 = _unpack(k, high_ab, high_cd, half=1, unit=2)
    return [column_0, column_1, column_2, column_3]


def _unpack(k: Builder, a: Value, b: Value, *, half: int, unit: int) -> Value:
    """unpcklps (`half` 0) or unpckhps (1): half of each 128-bit group of a and of b, in turn `unit` elements (1 or 2) of each."""
    from_a = [2 * half, 2 * half + 1]  # places in a group
    from_b = [k.lanes + i for i in from_a]  # a shuffle counts the lanes of its second vector from `lanes` on
    order = [*from_a, *from_b] if unit == 2 else [from_a[0], from_b[0], from_a[1], from_b[1]]
    return k.shuffle(a, b, [group + i for group in range(0, k.lanes, 4) for i in order])


def transpose(k: Builder, rows: list[Value]) -> list[Value]:
    """A square of `lanes` vectors of 32-bit elements, transposed: 4 x 4 elements inside each group of 128 bits, then the groups.

    Each shuffle is one instruction without an index vector. LLVM spends two thirds of a kernel's compile time on selecting
    general two-vector shuffles; these cost it a third less."""
    # Group g of four[q][i] is a quarter of column 4 g + i of the square: its elements of the rows 4 q to 4 q + 3.
    four = [transpose_groups(k, rows[first : first + 4]) for first in range(0, len(rows), 4)]
    columns: list[Value] = [rows[0]] * len(rows)
    for i in range(4):
        columns[i::4] = _collect_groups(k, [quarter[i] for quarter in four])
    return columns


def _collect_groups(k: Builder, vectors: list[Value]) -> list[Value]:
    """For each group of 128 bits the vector of that group of all `vectors`, as many as a vector has groups. They are merged in
    pairs: first those with even groups of two vectors and those with odd ones, of which each list is merged in the same way."""
    if len(vectors) == 1:
        return vectors
    merged = []
    for parity in (0, 1):
        order = [group + i for group in range(4 * parity, 2 * k.lanes, 8) for i in range(4)]
        halves = [k.shuffle(a, b, order) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        merged.append(_collect_groups(k, halves))
    even, odd = merged
    return [vector for pair in zip(even, odd, strict=True) for vector in pair]


def sums_of_lanes(k: Builder, vectors: list[Value]) -> Value:
    """Lane i is the sum of the lanes of vector i, of `lanes` vectors. Two vectors a and b become one by two shuffles of one
    instruction each and an addition: twice inside each group of four lanes, then across groups."""
    n = k.lanes
    groups = range(0, n, 4)  # first lanes of the groups; lane n + i is lane i of b
    # Of each level the lanes that are the first summands, and how many lanes further the second ones are.
    levels = [([g + i for g in groups for i in order], 2) for order in ((0, n, 1, n + 1), (0, 1, n, n + 1))]
    distance = n // 2
    while distance >= 4:
        of_a = [i for i in range(n) if i // distance % 2 == 0]
        levels.append(([*of_a, *(n + i for i in of_a)], distance))
        distance //= 2
    for first, distance in levels:
        second = [lane + distance for lane in first]
        vectors = [k.shuffle(a, b, first) + k.shuffle(a, b, second) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]
