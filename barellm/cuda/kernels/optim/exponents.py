"""Histograms of exponents. Shapes: x any, n = units * UNIT elements; counts (BINS = 256) i32, one for each fp32 exponent field;
sums (4): of x, |x|, x^2, and the largest |x|; partial ones (programs, 256) and (programs, 4)."""

from typing import Any

from barellm.cuda.kernel import Count, Lowering, Sizes, lowering
from barellm.cuda.kernels.common import unit_of
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.ops.optim import exponent_stats as op_module
from barellm.program.ops.optim.exponent_stats import SUMS
from barellm.runtime.lowering import Region, weight_operand

BLOCK = 2048  # elements that a program counts at a time
PROGRAMS = 512  # at most, whatever the card: their number decides in which order sums are added
ROWS = 16  # of partial results that are added at a time
BINS, NOT_FINITE = constant(op_module.BINS), constant(op_module.NOT_FINITE)


@device
def exponent_stats(counts, sums, x, units, blocks, UNIT, BLOCK):
    """A histogram of the exponent fields of x (n elements, any float dtype, as fp32), and sums: each program writes those of its
    `blocks` blocks of BLOCK elements, counts (programs, BINS) i32 and sums (programs, 4) fp32: of x, |x|, x^2, and max |x|.
    Infinities and NaN, whose field is NOT_FINITE, are counted but not summed. BLOCK: a power of two."""
    program = tl.program_id(0).to(tl.int64)
    n = units.to(tl.int64) * UNIT
    count = tl.zeros((BINS,), tl.int32)
    total, absolute, square, largest = 0.0, 0.0, 0.0, 0.0
    for block in range(blocks):
        i = (program * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        exponent = (v.to(tl.int32, bitcast=True) >> 23) & NOT_FINITE  # the 8 bits above fp32's mantissa
        count += tl.histogram(exponent, BINS, mask=i < n)
        v = tl.where(exponent < NOT_FINITE, v, 0.0)
        a = tl.abs(v)
        total += tl.sum(v, 0)
        absolute += tl.sum(a, 0)
        square += tl.sum(v * v, 0)
        largest = tl.maximum(largest, tl.max(a, 0))
    tl.store(counts + program * BINS + tl.arange(0, BINS), count)
    tl.store(sums + program * 4, total)
    tl.store(sums + program * 4 + 1, absolute)
    tl.store(sums + program * 4 + 2, square)
    tl.store(sums + program * 4 + 3, largest)


@device
def combine_exponent_stats(counts, sums, partial_counts, partial_sums, programs, ROWS):
    """counts (BINS) i32 and sums (4) fp32 = the sums over what exponent_stats' programs wrote, partial_counts (programs, BINS) and
    partial_sums (programs, 4), in order (of max |x| the maximum): one program, ROWS of them at a time."""
    column, field = tl.arange(0, BINS), tl.arange(0, 4)
    count, total, largest = tl.zeros((BINS,), tl.int32), tl.zeros((4,), tl.float64), tl.zeros((4,), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < programs)[:, None]  # rows of partials that were written
        count += tl.sum(tl.load(partial_counts + row[:, None] * BINS + column[None, :], mask=live, other=0), 0)
        rows = tl.load(partial_sums + row[:, None] * 4 + field[None, :], mask=live, other=0.0)
        total += tl.sum(rows.to(tl.float64), 0)
        largest = tl.maximum(largest, tl.max(rows, 0))
    tl.store(counts + column, count)
    tl.store(sums + field, tl.where(field == 3, largest, total.to(tl.float32)))  # field 3 is max |x|


@lowering("exponent_stats", "measure", also={"x": PLANES, "counts": "i32"}, views="counts sums")
def lower_exponent_stats(op: Any, c: Lowering) -> None:
    """Plan two launches: partial results of up to PROGRAMS programs into scratch, then their sum."""
    unit = unit_of(op.x)
    units = Count(tuple(d.name for d in op.x.dims), op.x.width // unit)

    def blocks(sizes: Sizes) -> int:
        return ceil_div(ceil_div(units(sizes) * unit, BLOCK), PROGRAMS)

    def programs(sizes: Sizes) -> int:
        return ceil_div(units(sizes) * unit, blocks(sizes) * BLOCK)

    rows = min(PROGRAMS, ceil_div(op.x.size, BLOCK))
    partials = {"counts": c.scratch("counts", (rows, op_module.BINS), "i32"), "sums": c.scratch("sums", (rows, len(SUMS)))}
    c.launch(
        exponent_stats, {**partials, "x": weight_operand(op.x), "units": units, "blocks": blocks},
        {"UNIT": unit, "BLOCK": BLOCK}, grid=lambda s: (programs(s),), writes="counts sums",
    )  # fmt: skip
    outs = {}
    for name in partials:
        out = op.outputs[name]
        first = 4 * out.first_column
        outs[name] = Region(out.base, first, first + 4 * out.size), out.dtype
    c.launch(
        combine_exponent_stats,
        {**outs, **{f"partial_{name}": t for name, t in partials.items()}, "programs": programs}, {"ROWS": ROWS},
        grid=lambda s: (1,), writes="counts sums",
    )  # fmt: skip
