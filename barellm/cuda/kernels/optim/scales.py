"""Scales of 8-bit formats that follow the statistics of a tensor (delayed scaling; program/ops/optim/scales.py). Shapes: history
(ENTRIES): the largest |x| of the last steps; bias (2): exponent of a floating format's largest numbers, and steps so far; scale
(1); sums (4): those of exponents.py; x and y flat. PER_TARGET: x is a gradient, measured relative to inv_targets."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import INV_TARGETS, flat_indices, kernel, one_program, pow2, scalar_fp64
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.ops.optim import scales
from barellm.program.ops.optim.exponent_stats import SUMS

ABOVE, DEVIATIONS, FARTHEST = constant(scales.ABOVE), constant(scales.DEVIATIONS), constant(scales.FARTHEST)
FIRST, LAST = constant(scales.FIRST), constant(scales.LAST)
BELOW, FRACTION = constant(scales.EXPONENTS - 1), constant(scales.FRACTION)
HALF, MASK = constant(1 << (22 - scales.FRACTION)), constant(-(1 << (23 - scales.FRACTION)))  # of an fp32 fraction
SIZE, INFINITE = constant(0x7FFFFFFF), constant(0x7F800000)
LARGEST = constant(SUMS.index("max_abs"))


@kernel(
    "delayed_scale", floats="fp32", constants=lambda op: {
        "ENTRIES": op.history.size, "BLOCK": pow2(op.history.size), "FIRST_SCALE": float(op.first),
        "PER_NUMBER": scales.MARGIN / op.largest,
    },
)  # fmt: skip
def delayed_scale(scale, history, ENTRIES, PER_NUMBER, FIRST_SCALE, BLOCK):
    """scale = the largest entry of the history times PER_NUMBER; FIRST_SCALE while all are zero (delayed scaling)."""
    i = tl.arange(0, BLOCK)
    top = tl.max(tl.load(history + i, mask=i < ENTRIES, other=0.0), 0)
    tl.store(scale, tl.where(top > 0.0, top * PER_NUMBER, FIRST_SCALE))


@kernel(
    "remember", floats="fp32", constants=lambda op: {
        "ENTRIES": op.history.size, "BLOCK": pow2(op.history.size), "PER_TARGET": op.per_target,
    },
)  # fmt: skip
def remember(history, sums, scalars, ENTRIES, PER_TARGET, BLOCK):
    """Shift the history by one entry and put the largest |x| in front. All entries are read before the first is written."""
    i = tl.arange(0, BLOCK)
    before = tl.load(history + i - 1, mask=(i > 0) & (i < ENTRIES), other=0.0)
    top = tl.load(sums + LARGEST)
    if PER_TARGET:
        top = tl.math.div_rn(top, scalar_fp64(scalars, INV_TARGETS).to(tl.float32))
    tl.debug_barrier()
    tl.store(history + i, tl.where(i > 0, before, top), mask=i < ENTRIES)


@device
def float_bias(bias, sums, scalars, elements, DEVIATING, PER_TARGET):
    """Update bias (2) fp32 = [exponent of a floating 8-bit format's largest numbers, steps so far] from the sums (4) of x, of which
    there are `elements` (exponents.py wrote them). The exponent is that of max |x| plus ABOVE or, with DEVIATING, of mean |x| plus
    DEVIATIONS standard deviations; it changes at steps 0, FIRST, 2 FIRST, 4 FIRST ... LAST, then every LAST steps."""
    exponent_now, steps = tl.load(bias), tl.load(bias + 1)
    count = steps.to(tl.int32)
    doubling = (count >= FIRST) & (count < LAST) & ((count & (count - 1)) == 0)  # a power of two
    due = ((count & (LAST - 1)) == 0) | doubling
    reference = tl.load(sums + LARGEST)
    if DEVIATING:
        n = elements.to(tl.float32)
        mean = tl.math.div_rn(tl.load(sums), n)
        variance = tl.maximum(tl.math.div_rn(tl.load(sums + 2), n) - mean * mean, 0.0)
        reference = tl.math.div_rn(tl.load(sums + 1), n) + tl.math.sqrt_rn(variance) * DEVIATIONS
    if PER_TARGET:
        reference = tl.math.div_rn(reference, scalar_fp64(scalars, INV_TARGETS).to(tl.float32))
    exponent = (reference.to(tl.int32, bitcast=True) >> 23) - 127
    if not DEVIATING:
        exponent += ABOVE
    exponent = tl.maximum(tl.minimum(exponent, FARTHEST), -FARTHEST)
    tl.store(bias, tl.where(due & (reference > 0.0), exponent.to(tl.float32), exponent_now))
    tl.store(bias + 1, steps + 1.0)


@device
def power(exponent):
    """2^exponent (i32) in fp32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@kernel("round_floating", also={"x": PLANES}, constants=lambda op: {"DENORMALS": op.denormals, "PER_TARGET": op.per_target})
def round_floating(y, x, bias, scalars, units, DENORMALS, PER_TARGET, UNIT, BLOCK):
    """y (n) fp32 = x (n) rounded to a floating format with FRACTION mantissa bits whose largest exponent is bias[0] (float_bias);
    larger numbers saturate. BLOCK elements a program, computed in fp32's bits: sign 1, exponent 8, mantissa 23.

    Normal numbers: half a unit (HALF) is added, and the lower bits are cut off (MASK). DENORMALS: below `least`, the smallest
    normal number, to a multiple of the denormals' unit, whose fraction is compared with 0.5; else to 0 or `least`."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if PER_TARGET:
        targets = scalar_fp64(scalars, INV_TARGETS).to(tl.float32)
        value = tl.math.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * targets)
    largest_exponent = tl.load(bias).to(tl.int32)
    unit = largest_exponent - (BELOW + FRACTION)
    # Bits: of the next power of two less one unit in the last place; of 2^(largest_exponent - BELOW). fp32's exponent bias is 127.
    largest, least = ((largest_exponent + 128) << 23) + MASK, (largest_exponent + (127 - BELOW)) << 23
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & SIZE
    rounded = (magnitude + HALF) & MASK
    if DENORMALS:
        multiple = tl.minimum(magnitude, least).to(tl.float32, bitcast=True) * power(-unit)
        quotient = multiple.to(tl.int32)
        quotient += tl.where(multiple - quotient.to(tl.float32) >= 0.5, 1, 0)
        denormal = (quotient.to(tl.float32) * power(unit)).to(tl.int32, bitcast=True)
        rounded = tl.where(magnitude < least, denormal, rounded)
    else:
        rounded = tl.where(rounded < least, 0, rounded)
    rounded = tl.where(magnitude > INFINITE, magnitude, tl.minimum(rounded, largest))  # NaN stays
    tl.store(y + i, (rounded | (bits & ~SIZE)).to(tl.float32, bitcast=True), mask=mask)


@lowering("float_bias", floats="fp32", also={"x": f"bf16 fp16 {PLANES}"})
def lower_float_bias(op: Any, c: Lowering) -> None:
    one_program(c, float_bias, op.x, {"elements": c.elements(op.x)}, DEVIATING=op.deviations, PER_TARGET=op.per_target)
