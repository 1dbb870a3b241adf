"""Scales that follow the numbers they are for. Shapes: history (entries), bias (2), scale (1), sums (4); x and y flat."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import INV_TARGETS, flat_indices, launch_elementwise, pow2, scalar_fp64
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.ops.optim import scales
from barellm.program.ops.optim.exponents import SUMS
from barellm.runtime.lowering import weight_operand

ABOVE, DEVIATIONS, FARTHEST = constant(scales.ABOVE), constant(scales.DEVIATIONS), constant(scales.FARTHEST)
FIRST, LAST = constant(scales.FIRST), constant(scales.LAST)
BELOW, FRACTION = constant(scales.EXPONENTS - 1), constant(scales.FRACTION)
HALF, MASK = constant(1 << (22 - scales.FRACTION)), constant(-(1 << (23 - scales.FRACTION)))  # of an fp32 fraction
SIZE, INFINITE = constant(0x7FFFFFFF), constant(0x7F800000)
LARGEST = constant(SUMS.index("max_abs"))


@device
def delayed_scale(
    scale, history, ENTRIES: tl.constexpr, PER_NUMBER: tl.constexpr, FIRST_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.arange(0, BLOCK)
    top = tl.max(tl.load(history + i, mask=i < ENTRIES, other=0.0), 0)
    tl.store(scale, tl.where(top > 0.0, top * PER_NUMBER, FIRST_SCALE))


@device
def remember(history, sums, scalars, ENTRIES: tl.constexpr, PER_TARGET: tl.constexpr, BLOCK: tl.constexpr):
    """All entries are read before the first is written."""
    i = tl.arange(0, BLOCK)
    before = tl.load(history + i - 1, mask=(i > 0) & (i < ENTRIES), other=0.0)
    top = tl.load(sums + LARGEST)
    if PER_TARGET:
        top = tl.math.div_rn(top, scalar_fp64(scalars, INV_TARGETS).to(tl.float32))
    tl.debug_barrier()
    tl.store(history + i, tl.where(i > 0, before, top), mask=i < ENTRIES)


@device
def float_bias(bias, sums, scalars, elements, DEVIATING: tl.constexpr, PER_TARGET: tl.constexpr):
    """`elements` of x."""
    most, number = tl.load(bias), tl.load(bias + 1)
    count = number.to(tl.int32)
    doubling = (count >= FIRST) & (count < LAST) & ((count & (count - 1)) == 0)
    due = ((count & (LAST - 1)) == 0) | doubling
    top = tl.load(sums + LARGEST)
    if DEVIATING:
        n = elements.to(tl.float32)
        mean = tl.math.div_rn(tl.load(sums), n)
        variance = tl.maximum(tl.math.div_rn(tl.load(sums + 2), n) - mean * mean, 0.0)
        top = tl.math.div_rn(tl.load(sums + 1), n) + tl.math.sqrt_rn(variance) * DEVIATIONS
    if PER_TARGET:
        top = tl.math.div_rn(top, scalar_fp64(scalars, INV_TARGETS).to(tl.float32))
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
    if not DEVIATING:
        exponent += ABOVE
    exponent = tl.maximum(tl.minimum(exponent, FARTHEST), -FARTHEST)
    tl.store(bias, tl.where(due & (top > 0.0), exponent.to(tl.float32), most))
    tl.store(bias + 1, number + 1.0)


@device
def power(exponent):
    """2^exponent, of a normal number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@device
def round_floating(
    y, x, bias, scalars, units,
    DENORMALS: tl.constexpr, PER_TARGET: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normal numbers are rounded in their bits: half a unit is added, and the rest cut off. Of a multiple of the denormals' unit,
    which is small, the fraction is compared with a half, for a sum with one could round."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    value = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if PER_TARGET:
        targets = scalar_fp64(scalars, INV_TARGETS).to(tl.float32)
        value = tl.math.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * targets)
    most = tl.load(bias).to(tl.int32)
    unit = most - (BELOW + FRACTION)
    largest, least = ((most + 128) << 23) + MASK, (most + (127 - BELOW)) << 23
    bits = value.to(tl.int32, bitcast=True)
    size = bits & SIZE
    near = (size + HALF) & MASK
    if DENORMALS:
        multiple = tl.minimum(size, least).to(tl.float32, bitcast=True) * power(-unit)
        whole = multiple.to(tl.int32)
        whole += tl.where(multiple - whole.to(tl.float32) >= 0.5, 1, 0)
        small = (whole.to(tl.float32) * power(unit)).to(tl.int32, bitcast=True)
        near = tl.where(size < least, small, near)
    else:
        near = tl.where(near < least, 0, near)
    near = tl.where(size > INFINITE, size, tl.minimum(near, largest))  # NaN stays
    tl.store(y + i, (near | (bits & ~SIZE)).to(tl.float32, bitcast=True), mask=mask)


def once(sizes: Any) -> tuple[int, ...]:
    return (1,)


@lowering("delayed_scale", floats="fp32")
def lower_delayed_scale(op: Any, c: Lowering) -> None:
    entries = op.history.size
    constants = {"ENTRIES": entries, "BLOCK": pow2(entries), "FIRST_SCALE": float(op.first)}
    constants |= {"PER_NUMBER": scales.MARGIN / op.largest}
    c.launch(delayed_scale, {"scale": op.scale, "history": op.history}, constants, grid=once, writes="scale", warps=1)


@lowering("remember", floats="fp32")
def lower_remember(op: Any, c: Lowering) -> None:
    constants = {"ENTRIES": op.history.size, "BLOCK": pow2(op.history.size), "PER_TARGET": op.per_target}
    c.launch(remember, {"history": op.history, "sums": op.sums}, constants, grid=once, writes="history", warps=1)


@lowering("float_bias", floats="fp32", also={"x": f"bf16 fp16 {PLANES}"})
def lower_float_bias(op: Any, c: Lowering) -> None:
    operands = {"bias": op.bias, "sums": op.sums, "elements": c.elements(op.x)}
    constants = {"DEVIATING": op.deviations, "PER_TARGET": op.per_target}
    c.launch(float_bias, operands, constants, grid=once, writes="bias", warps=1)


@lowering("round_floating", also={"x": PLANES})
def lower_round_floating(op: Any, c: Lowering) -> None:
    operands = {"y": op.y, "x": weight_operand(op.x), "bias": op.bias}
    launch_elementwise(c, round_floating, op.y, operands, writes="y", DENORMALS=op.denormals, PER_TARGET=op.per_target)
