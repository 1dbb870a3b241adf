"""Delayed scaling for low-precision formats (FP8 and smaller): scales from a history of statistics. Shapes: history (entries), bias
(2), scale (1), sums (4) = [sum, sum of |x|, sum of squares, max |x|]; x and y flat."""

import numpy as np

from barellm.cpu.kernel import PLANES, Value, kernel
from barellm.cpu.kernels.loops import elementwise, flat
from barellm.cpu.kernels.numbers import FP32_BIAS, FP32_FRACTION, FP32_INFINITY, FP32_MAGNITUDE
from barellm.program.ops.optim.exponent_stats import SUMS
from barellm.program.ops.optim.scales import ABOVE, DEVIATIONS, EXPONENTS, FARTHEST, FIRST, FRACTION, LAST, MARGIN

DROPPED = FP32_FRACTION - FRACTION  # bits of an fp32 fraction


def per_target_of(k, value, per_target: bool) -> Value:
    """A statistic, with `per_target` (of gradients) divided by inv_targets, so that it does not depend on the batch size."""
    return value / k.to(k.scalar("inv_targets"), "float") if per_target else value


@kernel("delayed_scale", floats="fp32", constants=lambda op: {
    "entries": op.history.size, "per_number": float(np.float32(MARGIN / op.largest)), "first": float(op.first),
})  # fmt: skip
def delayed_scale(k, scale, history, *, entries, per_number, first) -> None:
    """scale (1) = per_number * the history's maximum, per_number = margin / the format's largest number; `first` if 0."""
    with k.parallel_for(1):
        top = k.float(0.0)
        for i in range(entries):
            top = k.max(history.get(i), top)
        scale.put(k.select(top > 0.0, top * per_number, first))


@kernel("remember", floats="fp32", constants=lambda op: {"entries": op.history.size, "per_target": op.per_target})
def remember(k, history, sums, *, entries, per_target) -> None:
    """history = [the newest max |x|, the history without its oldest entry]."""
    with k.parallel_for(1):
        for i in reversed(range(1, entries)):
            history.put(history.get(i - 1), i)
        history.put(per_target_of(k, sums.get(SUMS.index("max_abs")), per_target), 0)


@kernel("float_bias", floats="fp32", also={"x": f"bf16 fp16 {PLANES}"}, constants=lambda op: {
    "deviations": op.deviations, "per_target": op.per_target, **flat(op.x),
})  # fmt: skip
def float_bias(k, bias, sums, *, deviations, per_target, dims, width) -> None:
    """The kernel: bias (2) = [the exponent of the format's largest numbers, the number of calls so far]. The exponent is updated at
    calls FIRST, 2 FIRST, 4 FIRST ... LAST, and then every LAST calls, from `sums` (4) of x: the exponent of max |x| plus ABOVE, or
    with `deviations` of mean |x| plus DEVIATIONS standard deviations."""
    with k.parallel_for(1):
        count = k.to(bias.get(1), "i64")
        doubling = (count >= FIRST) & (count < LAST) & (count & (count - 1)).equals(0)  # powers of two
        due = (count & (LAST - 1)).equals(0) | doubling
        total, total_abs, squares, top = (sums.get(i) for i in range(4))
        if deviations:
            n = k.float(k.num_elements(dims) * width)
            mean = total / n
            top = total_abs / n + k.sqrt(k.max(squares / n - mean * mean, k.float(0.0))) * DEVIATIONS
        top = per_target_of(k, top, per_target)
        exponent = (k.bitcast(top, "i32") >> FP32_FRACTION) - (FP32_BIAS if deviations else FP32_BIAS - ABOVE)
        clamped = k.to(k.max(k.min(exponent, FARTHEST), -FARTHEST), "float")
        bias.put(k.select(due & (top > 0.0), clamped, bias.get(0)), 0)
        bias.put(bias.get(1) + 1.0, 1)


def power(k, exponent) -> Value:
    """2^exponent (i32, of a normal number) as a float."""
    return k.bitcast((exponent + FP32_BIAS) << FP32_FRACTION, "float")


@kernel("round_floating", also={"x": PLANES}, constants=lambda op: {
    "denormals": op.denormals, "per_target": op.per_target, **flat(op.y),
})  # fmt: skip
def round_floating(k, y, x, bias, *, denormals, per_target, dims, width) -> None:
    """The kernel: y = x (`per_target`: x / inv_targets), flat, rounded to a float of FRACTION bits and EXPONENTS exponents up to
    bias[0] (`float_bias`), half away from zero, saturating at the largest number; smaller numbers are denormals, or 0 without
    `denormals`. Normal numbers are rounded in their bits: half a unit is added, and the rest cut off. A denormal's (small) multiple
    of the unit has its fraction compared with a half: a sum with a half could round."""
    top_exponent = k.op("i32", f"fptosi {bias.get(0).typed} to i32")
    largest = k.splat(((top_exponent + FP32_BIAS) << FP32_FRACTION) | ((1 << FP32_FRACTION) - (1 << DROPPED)))  # fp32 bits
    least = k.splat((top_exponent + (FP32_BIAS - EXPONENTS + 1)) << FP32_FRACTION)  # of the least normal number
    unit = power(k, top_exponent - (EXPONENTS - 1 + FRACTION))  # of denormals
    inverse_unit, unit = k.splat(1.0 / unit), k.splat(unit)
    divisor = k.splat(k.to(k.scalar("inv_targets"), "float")) if per_target else None

    for i, mask, put in elementwise(k, k.num_elements(dims) * width, y, unroll=4):
        # fp32 bits are compared as integers, because magnitudes are in the same order.
        v = x.load(i, mask)
        bits = k.bitcast(v if divisor is None else v / divisor, k.ivec)
        magnitude = bits & FP32_MAGNITUDE
        rounded = (magnitude + (1 << (DROPPED - 1))) & -(1 << DROPPED)
        if denormals:
            multiple = k.bitcast(k.min(magnitude, least), k.vec) * inverse_unit
            integer = k.to(multiple, k.ivec)
            fraction = multiple - k.to(integer, k.vec)
            denormal = k.bitcast(k.to(k.select(fraction >= 0.5, integer + 1, integer), k.vec) * unit, k.ivec)
            rounded = k.select(magnitude < least, denormal, rounded)
        else:
            rounded = k.select(rounded < least, 0, rounded)
        rounded = k.select(magnitude > FP32_INFINITY, magnitude, k.min(rounded, largest))  # NaN stays
        put(k.bitcast(rounded | (bits & ~FP32_MAGNITUDE), k.vec))
