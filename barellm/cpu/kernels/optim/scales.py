"""Delayed scaling for low-precision formats (FP8 and smaller): scales from a history of statistics. Shapes: history (entries), bias
(2), scale (1), sums (4) = [sum, sum of |x|, sum of squares, max |x|]; x and y flat."""

import numpy as np

from barellm.cpu.kernel import PLANES, Value, kernel
from barellm.cpu.kernels.loops import elementwise, flat, row_grain, row_words
from barellm.cpu.kernels.numbers import FP32_BIAS, FP32_FRACTION, FP32_INFINITY, FP32_MAGNITUDE
from barellm.cpu.lang import random
from barellm.program.ops.optim.exponent_stats import SUMS
from barellm.program.ops.optim.scales import ABOVE, DEVIATIONS, FARTHEST, FIRST, LAST, MARGIN


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
            top = total_abs / n + k.sqrt(k.max(squares / n - mean * mean, k.float(0.0))) * DEVIATIONS  # in place of max |x|
        top = per_target_of(k, top, per_target)
        exponent = (k.bitcast(top, "i32") >> FP32_FRACTION) - (FP32_BIAS if deviations else FP32_BIAS - ABOVE)
        clamped = k.to(k.max(k.min(exponent, FARTHEST), -FARTHEST), "float")
        bias.put(k.select(due & (top > 0.0), clamped, bias.get(0)), 0)
        bias.put(bias.get(1) + 1.0, 1)


@kernel("round_floating", also={"x": PLANES}, constants=lambda op: {
    "form": op.format, "ties": op.ties, "of_scale": bool(op.of_scale), "per_target": op.per_target, **flat(op.y),
    "C": int(op.y.shape[-1]),
})  # fmt: skip
def round_floating(k, y, x, bias, stream, *, form, ties, of_scale, per_target, C, dims, width) -> None:
    """The kernel: y = x (`per_target`: x / inv_targets) rounded to the numbers of `form` (config/number_formats.py), of exponents
    up to bias[0], or `of_scale` up to log2(bias[0]). Numbers from the denormals' unit on are rounded in their bits, of which the
    last are left out, of a denormal one more for each exponent below the least normal one. Below the unit the choice is between it
    and 0. `ties`: "even", "away" or "stochastic", by random `stream`."""
    if of_scale:
        rounded_up = (k.bitcast(bias.get(0), "i32") + ((1 << FP32_FRACTION) - 1)) >> FP32_FRACTION
        top = k.min(rounded_up - FP32_BIAS, FP32_BIAS)  # log2
    else:
        top = k.op("i32", f"fptosi {bias.get(0).typed} to i32")
    most = k.splat(((top + FP32_BIAS) << FP32_FRACTION) | int((form.largest - 1) * 2**FP32_FRACTION))  # fp32 bits
    least = top + (FP32_BIAS - form.exponents + 1)  # exponent field of the least normal number; below 1: fp32's denormals
    unit = k.max(least - form.mantissa_bits, -22)  # of the unit of denormals: the least number of fp32 has -22 in this counting
    unit_bits = k.select(unit > 0, unit << FP32_FRACTION, k.const(1, "i32") << (k.min(unit, 0) + 22))
    half_unit = k.splat(k.select(unit > 1, (unit - 1) << FP32_FRACTION, unit_bits >> 1))
    least, unit_bits = k.splat(least), k.splat(unit_bits)
    divisor = k.splat(k.to(k.scalar("inv_targets"), "float")) if per_target else None

    def rounded(v: Value, word: Value | None) -> Value:
        # fp32 bits are compared as integers, because magnitudes are in the same order.
        bits = k.bitcast(v if divisor is None else v / divisor, k.ivec)
        magnitude = bits & FP32_MAGNITUDE
        exponent = magnitude >> FP32_FRACTION
        dropped = k.const(FP32_FRACTION - form.mantissa_bits, k.ivec)  # last bits of fp32 that the format lacks
        if form.denormals:
            dropped = k.min(dropped + k.max(least - k.max(exponent, 1), 0), FP32_FRACTION)
        step = k.const(1, k.ivec) << dropped  # the distance of two of its numbers, in fp32's bits
        rest = magnitude & (step - 1)  # above the next lower of them
        if word is not None:
            word = word >> 8  # 24 random bits
            up = (rest << (24 - dropped)) > word  # with the probability rest / step
            up_to_unit = k.bitcast(magnitude, k.vec) > k.to(word, k.vec) * 2.0**-24 * k.bitcast(unit_bits, k.vec)
        elif ties == "away":
            up, up_to_unit = rest >= (step >> 1), magnitude >= half_unit
        else:
            # To the code whose last bit is 0: of the mantissa, or of the exponent. From the unit to twice the unit it is code 1.
            odd = ((magnitude >> dropped) if form.mantissa_bits else (exponent + 1 - least)) & 1
            odd = k.select(dropped >= FP32_FRACTION, 1, odd) if form.mantissa_bits else odd
            up, up_to_unit = rest + odd > (step >> 1), magnitude > half_unit
        result = (magnitude - rest) + k.select(up, step, 0)
        if form.denormals:
            result = k.select(magnitude < unit_bits, k.select(up_to_unit, unit_bits, 0), result)
        else:
            result = k.select(result < (least << FP32_FRACTION), 0, result)
        result = k.select(magnitude > FP32_INFINITY, magnitude, k.min(result, most))  # NaN stays
        return k.bitcast(result | (bits & ~FP32_MAGNITUDE), k.vec)

    if ties != "stochastic":
        for i, mask, put in elementwise(k, k.num_elements(dims) * width, y, unroll=4):
            put(rounded(x.load(i, mask), None))
        return
    seed, step, sample = (k.scalar(name) for name in ("seed", "step", "sample"))
    rows = k.num_elements(dims) * (width // C)
    with k.parallel_range(rows, row_grain(C)) as (begin, end):
        key = random.sample_key(k, seed, step, sample, stream)
        with k.loop(begin, end) as row:
            to, source = y.at(row * C), x.at(row * C)
            for c, mask, word in row_words(k, key, row, C):
                to.store(rounded(source.load(c, mask), word), c, mask)
