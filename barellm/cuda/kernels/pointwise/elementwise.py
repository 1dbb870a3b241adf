"""Elementwise kernels, and the addition of a bias. Shapes: x, y, a, b, dx, dy (..., C), contiguous but for the results of casts and
zeros; bias (C). Each program has BLOCK elements, or a block (BR, BC) of rows; results are stored or added as MODE says."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import elementwise, flat_indices, kernel, rowwise, store_or_add, tile_indices
from barellm.cuda.kernels.loss.cross_entropy import scale_of
from barellm.cuda.kernels.pointwise.activations import ACTIVATIONS, SLOPES, slope_of, value_of
from barellm.cuda.lang import device, tl
from barellm.runtime.lowering import view_stride


@kernel("add", starts="y")
def add(y, a, b, scalars, units, UNIT, BLOCK, MODE):
    i, mask = flat_indices(units, UNIT, BLOCK)
    total = tl.load(a + i, mask=mask).to(tl.float32) + tl.load(b + i, mask=mask).to(tl.float32)
    store_or_add(y + i, mask, total, scalars, MODE)


@kernel("rescale", starts="y", constants=lambda op: {"FACTOR": float(op.forward)})
def rescale(y, x, scalars, units, FACTOR, UNIT, BLOCK, MODE):
    i, mask = flat_indices(units, UNIT, BLOCK)
    store_or_add(y + i, mask, tl.load(x + i, mask=mask).to(tl.float32) * FACTOR, scalars, MODE)


@kernel("gradient_scale", starts="y", also={"given": "i32", "wanted": "i32"}, constants=lambda op: {"FILTERED": op.filtered})
def gradient_scale(y, x, given, wanted, scalars, units, UNIT, BLOCK, MODE, FILTERED):
    """y = x times the scale `wanted` (2) / the scale `given` (2); FILTERED: 0 where x is not finite."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    v = tl.load(x + i, mask=mask).to(tl.float32)
    if FILTERED:
        v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
    store_or_add(y + i, mask, v * (scale_of(wanted) / scale_of(given)), scalars, MODE)


@device
def cast(y, x, scalars, units, UNIT, BLOCK, MODE):
    i, mask = flat_indices(units, UNIT, BLOCK)
    store_or_add(y + i, mask, tl.load(x + i, mask=mask), scalars, MODE)


@device
def cast_rows(y, x, scalars, rows, C, Y_STRIDE, BR, BC, MODE):
    """y = x cast into rows that are Y_STRIDE elements apart; zeros if x is None."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    value = tl.zeros((BR, BC), tl.float32)
    if x is not None:
        value = tl.load(x + row[:, None] * C + column[None, :], mask=mask)
    store_or_add(y + row[:, None] * Y_STRIDE + column[None, :], mask, value, scalars, MODE)


@kernel(*ACTIVATIONS, starts="y", constants=lambda op: {"NAME": op.name})
def activation(y, x, scalars, units, NAME, UNIT, BLOCK, MODE):
    i, mask = flat_indices(units, UNIT, BLOCK)
    store_or_add(y + i, mask, value_of(tl.load(x + i, mask=mask, other=0.0).to(tl.float32), NAME), scalars, MODE)


@kernel(*SLOPES, starts="dx", constants=lambda op: {"NAME": op.name})
def activation_backward(dx, dy, x, scalars, units, NAME, UNIT, BLOCK, MODE):
    i, mask = flat_indices(units, UNIT, BLOCK)
    slope = slope_of(tl.load(x + i, mask=mask, other=0.0).to(tl.float32), NAME)
    store_or_add(dx + i, mask, tl.load(dy + i, mask=mask, other=0.0).to(tl.float32) * slope, scalars, MODE)


@kernel("bias", starts="y")
def bias(y, x, bias, scalars, rows, C, BR, BC, MODE):
    """y = x + bias in every row."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    i = row[:, None] * C + column[None, :]
    b = tl.load(bias + column, mask=column < C, other=0.0)
    store_or_add(y + i, mask, tl.load(x + i, mask=mask).to(tl.float32) + b[None, :], scalars, MODE)


@kernel("last_row", starts="y")
def last_row(y, x, scalars, rows, seq, C, BR, BC, MODE):
    """y (batch, 1, C) = x (batch, seq, C) at the last position; a row of y is a sequence."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    last = (row + 1) * seq - 1
    value = tl.load(x + last[:, None] * C + column[None, :], mask=mask)
    store_or_add(y + row[:, None] * C + column[None, :], mask, value, scalars, MODE)


@lowering("cast", starts="y", views="y")
def lower_cast(op: Any, c: Lowering) -> None:
    if view_stride(op.y) is None:
        elementwise(c, cast, op.y, {})
    else:
        rowwise(c, cast_rows, op.y, {})


@lowering("zeros", starts="y", views="y")
def lower_zeros(op: Any, c: Lowering) -> None:
    rowwise(c, cast_rows, op.y, {"x": None})
