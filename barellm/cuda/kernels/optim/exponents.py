"""Histograms of exponents. Shapes: x any, n elements; counts (256) i32; sums (4); partial ones (programs, 256) and
(programs, 4)."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Count, Lowering, Sizes, lowering
from barellm.cuda.kernels.common import unit_of
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.ops.optim import exponents as op_module
from barellm.program.ops.optim.exponents import SUMS
from barellm.runtime.lowering import Region, weight_operand

BLOCK = 2048  # elements that a program counts at a time
PROGRAMS = 512  # at most, whatever the card: their number decides in which order sums are added
ROWS = 16  # of partial results that are added at a time
BINS, NOT_FINITE = constant(op_module.BINS), constant(op_module.NOT_FINITE)


@device
def exponents(counts, sums, x, units, turns, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """A program counts `turns` blocks of elements, of units * UNIT in all."""
    program = tl.program_id(0).to(tl.int64)
    n = units.to(tl.int64) * UNIT
    count = tl.zeros((BINS,), tl.int32)
    total, size, square, largest = 0.0, 0.0, 0.0, 0.0
    for turn in range(turns):
        i = (program * turns + turn) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        e = (v.to(tl.int32, bitcast=True) >> 23) & NOT_FINITE
        count += tl.histogram(e, BINS, mask=i < n)
        v = tl.where(e < NOT_FINITE, v, 0.0)
        a = tl.abs(v)
        total += tl.sum(v, 0)
        size += tl.sum(a, 0)
        square += tl.sum(v * v, 0)
        largest = tl.maximum(largest, tl.max(a, 0))
    tl.store(counts + program * BINS + tl.arange(0, BINS), count)
    tl.store(sums + program * 4, total)
    tl.store(sums + program * 4 + 1, size)
    tl.store(sums + program * 4 + 2, square)
    tl.store(sums + program * 4 + 3, largest)


@device
def combine_exponents(counts, sums, partial_counts, partial_sums, programs, ROWS: tl.constexpr):
    """The results of all programs as one."""
    column, place = tl.arange(0, BINS), tl.arange(0, 4)
    count, total, largest = tl.zeros((BINS,), tl.int32), tl.zeros((4,), tl.float64), tl.zeros((4,), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < programs)[:, None]
        count += tl.sum(tl.load(partial_counts + row[:, None] * BINS + column[None, :], mask=live, other=0), 0)
        found = tl.load(partial_sums + row[:, None] * 4 + place[None, :], mask=live, other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
        largest = tl.maximum(largest, tl.max(found, 0))
    tl.store(counts + column, count)
    tl.store(sums + place, tl.where(place == 3, largest, total.to(tl.float32)))


@lowering("exponents", "measure", also={"x": PLANES, "counts": "i32"}, views="counts sums")
def lower_exponents(op: Any, c: Lowering) -> None:
    unit = unit_of(op.x)
    units = Count(tuple(d.name for d in op.x.dims), op.x.width // unit)

    def turns(sizes: Sizes) -> int:
        return ceil_div(ceil_div(units(sizes) * unit, BLOCK), PROGRAMS)

    def programs(sizes: Sizes) -> int:
        return ceil_div(units(sizes) * unit, turns(sizes) * BLOCK)

    most = min(PROGRAMS, ceil_div(op.x.size, BLOCK))
    partials = {
        "counts": c.scratch("counts", (most, op_module.BINS), "i32"),
        "sums": c.scratch("sums", (most, len(SUMS))),
    }
    c.launch(
        exponents,
        {**partials, "x": weight_operand(op.x), "units": units, "turns": turns},
        {"UNIT": unit, "BLOCK": BLOCK},
        grid=lambda s: (programs(s),),
        writes="counts sums",
    )
    outs = {}
    for name in partials:
        out = op.outputs[name]
        first = 4 * out.first_column
        outs[name] = Region(out.base, first, first + 4 * out.size), out.dtype
    c.launch(
        combine_exponents,
        {**outs, **{f"partial_{name}": t for name, t in partials.items()}, "programs": programs},
        {"ROWS": ROWS},
        grid=lambda s: (1,),
        writes="counts sums",
    )
