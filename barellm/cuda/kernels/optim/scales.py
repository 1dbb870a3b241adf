"""Scales of 8-bit formats that follow the statistics of a tensor (delayed scaling; program/ops/optim/scales.py). Shapes: history
(ENTRIES): the largest |x| of the last steps; bias (2): exponent of a floating format's largest numbers, and steps so far; scale
(1); sums (4): those of exponents.py; x and y: rows. PER_TARGET: x is a gradient, relative to inv_targets."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import INV_TARGETS, SAMPLE, kernel, one_program, pow2, rowwise, scalar_fp64, tile_indices
from barellm.cuda.kernels.pointwise.random import sample_key, words
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.ops.optim import scales
from barellm.program.ops.optim.exponent_stats import SUMS

ABOVE, DEVIATIONS, FARTHEST = constant(scales.ABOVE), constant(scales.DEVIATIONS), constant(scales.FARTHEST)
FIRST, LAST = constant(scales.FIRST), constant(scales.LAST)
SIZE, INFINITE, TINY = constant(0x7FFFFFFF), constant(0x7F800000), constant(2.0**-24)
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
    exponent = (reference.to(tl.int32, bitcast=True) >> 23) - 127  # fp32's field, without its bias
    if not DEVIATING:
        exponent += ABOVE
    exponent = tl.maximum(tl.minimum(exponent, FARTHEST), -FARTHEST)
    tl.store(bias, tl.where(due & (reference > 0.0), exponent.to(tl.float32), exponent_now))
    tl.store(bias + 1, steps + 1.0)


@device
def round_floating(
    y, x, bias, scalars, stream, rows, C, MANTISSA_BITS, EXPONENTS, LARGEST_BITS, DENORMALS, TIES, OF_SCALE, PER_TARGET, BR, BC
):
    """y (rows, C) = x rounded to a floating format of MANTISSA_BITS and EXPONENTS exponents, the largest bias[0] (of float_bias,
    or a constant) or, with OF_SCALE, log2(bias[0]) rounded up; larger numbers saturate. TIES: even, away or stochastic. BR x BC
    elements a program, computed in fp32's bits: sign 1, exponent 8, mantissa 23.

    Numbers from the denormals' unit on are rounded in their bits, of which the last `dropped` are left out: of a denormal one more
    for each exponent below the least normal one. Below the unit the choice is between it and 0."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    i = row[:, None] * C + column[None, :]
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if PER_TARGET:
        targets = scalar_fp64(scalars, INV_TARGETS).to(tl.float32)
        value = tl.math.div_rn(value, tl.full((BR, BC), 1.0, tl.float32) * targets)
    top = tl.load(bias).to(tl.int32)
    if OF_SCALE:
        top = tl.minimum(((tl.load(bias).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127, 127)  # log2 rounded up
    least = top + (128 - EXPONENTS)  # exponent field of the least normal number; below 1 where fp32 has denormals there
    unit = tl.maximum(least - MANTISSA_BITS, -22)  # of the unit of denormals: the least number of fp32 has -22 in this counting
    unit_bits = tl.where(unit > 0, tl.maximum(unit, 0) << 23, 1 << (tl.minimum(unit, 0) + 22))
    half_unit = tl.where(unit > 1, tl.maximum(unit - 1, 0) << 23, unit_bits >> 1)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & SIZE
    exponent = magnitude >> 23
    dropped = 23 - MANTISSA_BITS  # last bits of fp32 that the format lacks
    if DENORMALS:
        dropped = tl.minimum(dropped + tl.maximum(least - tl.maximum(exponent, 1), 0), 23)
    step = (exponent * 0 + 1) << dropped  # distance of its numbers, in fp32's bits
    rest = magnitude & (step - 1)  # above the next lower of them
    if TIES == "stochastic":
        k0, k1 = sample_key(scalars, tl.load(scalars + SAMPLE) + row * 0, stream)
        word = (words(k0, k1, row, tl.program_id(1) * BC, BR, BC) >> 8).to(tl.int32)
        up = (rest << (24 - dropped)) > word  # by 24 random bits: probability rest / step
        up_to_unit = magnitude.to(tl.float32, bitcast=True) > word.to(tl.float32) * TINY * unit_bits.to(tl.float32, bitcast=True)
    elif TIES == "away":
        up, up_to_unit = rest >= (step >> 1), magnitude >= half_unit
    else:
        # To the code whose last bit is 0: of the mantissa, or of the exponent. From the unit to twice the unit it is code 1.
        odd = tl.where(dropped >= 23, 1, (magnitude >> dropped) & 1)
        if MANTISSA_BITS == 0:
            odd = (exponent + 1 - least) & 1
        up, up_to_unit = rest + odd > (step >> 1), magnitude > half_unit
    rounded = magnitude - rest + tl.where(up, step, 0)
    if DENORMALS:
        rounded = tl.where(magnitude < unit_bits, tl.where(up_to_unit, unit_bits, 0), rounded)
    else:
        rounded = tl.where(rounded < (least << 23), 0, rounded)
    rounded = tl.where(magnitude > INFINITE, magnitude, tl.minimum(rounded, ((top + 127) << 23) | LARGEST_BITS))  # NaN stays
    tl.store(y + i, (rounded | (bits & ~SIZE)).to(tl.float32, bitcast=True), mask=mask)


@lowering("float_bias", floats="fp32", also={"x": f"bf16 fp16 {PLANES}"})
def lower_float_bias(op: Any, c: Lowering) -> None:
    one_program(c, float_bias, op.x, {"elements": c.elements(op.x)}, DEVIATING=op.deviations, PER_TARGET=op.per_target)


@lowering("round_floating", also={"x": PLANES})
def lower_round_floating(op: Any, c: Lowering) -> None:
    f = op.format
    constants = {"MANTISSA_BITS": f.mantissa_bits, "EXPONENTS": f.exponents, "DENORMALS": f.denormals}
    constants |= {"LARGEST_BITS": int((f.largest - 1) * 2**23), "TIES": op.ties, "OF_SCALE": bool(op.of_scale)}
    rowwise(c, round_floating, op.y, {"stream": op.stream}, least=32, PER_TARGET=op.per_target, **constants)
