"""Elementwise kernels, and the addition of a bias. Shapes: x, y, a, b, dx, dy (..., C), contiguous but for the results of casts and
zeros; bias (C). Each program has BLOCK elements, or a block (BR, BC) of rows; results are stored or added as MODE says."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import elementwise, flat_indices, row_strides, rowwise, store_or_add, tile_indices
from barellm.cuda.kernels.pointwise.activations import ACTIVATIONS, SLOPES, slope_of, value_of
from barellm.cuda.lang import device, tl
from barellm.runtime.lowering import view_stride


@device
def add(y, a, b, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat_indices(units, UNIT, BLOCK)
    total = tl.load(a + i, mask=mask).to(tl.float32) + tl.load(b + i, mask=mask).to(tl.float32)
    store_or_add(y + i, mask, total, scalars, MODE)


@device
def rescale(y, x, scalars, units, FACTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat_indices(units, UNIT, BLOCK)
    store_or_add(y + i, mask, tl.load(x + i, mask=mask).to(tl.float32) * FACTOR, scalars, MODE)


@device
def cast(y, x, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat_indices(units, UNIT, BLOCK)
    store_or_add(y + i, mask, tl.load(x + i, mask=mask), scalars, MODE)


@device
def cast_rows(y, x, scalars, rows, C: tl.constexpr, Y_STRIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr):
    """y = x cast into rows that are Y_STRIDE elements apart; zeros if x is None."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    value = tl.zeros((BR, BC), tl.float32)
    if x is not None:
        value = tl.load(x + row[:, None] * C + column[None, :], mask=mask)
    store_or_add(y + row[:, None] * Y_STRIDE + column[None, :], mask, value, scalars, MODE)


@device
def activation(y, x, scalars, units, NAME: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat_indices(units, UNIT, BLOCK)
    store_or_add(y + i, mask, value_of(tl.load(x + i, mask=mask, other=0.0).to(tl.float32), NAME), scalars, MODE)


@device
def activation_backward(dx, dy, x, scalars, units, NAME: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat_indices(units, UNIT, BLOCK)
    slope = slope_of(tl.load(x + i, mask=mask, other=0.0).to(tl.float32), NAME)
    store_or_add(dx + i, mask, tl.load(dy + i, mask=mask, other=0.0).to(tl.float32) * slope, scalars, MODE)


@device
def bias(y, x, bias, scalars, rows, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr):
    """y = x + bias in every row."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    i = row[:, None] * C + column[None, :]
    b = tl.load(bias + column, mask=column < C, other=0.0)
    store_or_add(y + i, mask, tl.load(x + i, mask=mask).to(tl.float32) + b[None, :], scalars, MODE)


@device
def last_row(y, x, scalars, rows, seq, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr):
    """y (batch, 1, C) = x (batch, seq, C) at the last position; a row of y is a sequence."""
    row, column, mask = tile_indices(rows, C, BR, BC)
    last = (row + 1) * seq - 1
    value = tl.load(x + last[:, None] * C + column[None, :], mask=mask)
    store_or_add(y + row[:, None] * C + column[None, :], mask, value, scalars, MODE)


@lowering("add", starts="y")
def lower_add(op: Any, c: Lowering) -> None:
    elementwise(c, add, op.y, {"y": op.y, "a": op.a, "b": op.b}, writes="y", MODE=mode(op, "y"))


@lowering("rescale", starts="y")
def lower_rescale(op: Any, c: Lowering) -> None:
    elementwise(c, rescale, op.y, {"y": op.y, "x": op.x}, writes="y", MODE=mode(op, "y"), FACTOR=float(op.forward))


@lowering("cast", starts="y", views="y")
def lower_cast(op: Any, c: Lowering) -> None:
    if view_stride(op.y) is None:
        elementwise(c, cast, op.y, {"y": op.y, "x": op.x}, writes="y", MODE=mode(op, "y"))
    else:
        lower_rows(op, c, op.x)


@lowering("zeros", starts="y", views="y")
def lower_zeros(op: Any, c: Lowering) -> None:
    lower_rows(op, c, None)


def lower_rows(op: Any, c: Lowering, x: Any) -> None:
    rowwise(c, cast_rows, op.y, {"y": op.y, "x": x}, writes="y", MODE=mode(op, "y"), **row_strides(y=op.y))


@lowering(*ACTIVATIONS, starts="y")
def lower_activation(op: Any, c: Lowering) -> None:
    elementwise(c, activation, op.y, {"y": op.y, "x": op.x}, writes="y", MODE=mode(op, "y"), NAME=op.name)


@lowering(*SLOPES, starts="dx")
def lower_activation_backward(op: Any, c: Lowering) -> None:
    operands = {"dx": op.dx, "dy": op.dy, "x": op.x}
    elementwise(c, activation_backward, op.dx, operands, writes="dx", MODE=mode(op, "dx"), NAME=op.name)


@lowering("bias", starts="y")
def lower_bias(op: Any, c: Lowering) -> None:
    rowwise(c, bias, op.y, {"y": op.y, "x": op.x, "bias": op.bias}, writes="y", MODE=mode(op, "y"))


@lowering("last_row", starts="y")
def lower_last_row(op: Any, c: Lowering) -> None:
    rowwise(c, last_row, op.y, {"y": op.y, "x": op.x, "seq": lambda s: s.seq}, writes="y", MODE=mode(op, "y"))
