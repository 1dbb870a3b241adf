"""Element by element, and with a row's bias. Shapes: x, y, a, b, dx, dy (..., C) dense; bias (C)."""

from __future__ import annotations

from math import e, log2
from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import flat, keep, sweep, sweep_rows, tile
from barellm.cuda.lang import constant, device, tl
from barellm.program.ops.elementwise import GELU_CUBIC, GELU_SCALE

# tanh(u) = 2 sigmoid(2 u) - 1 turns the op's formula into x sigmoid(2 u), with one exponential and no cancellation near zero. It is
# exp2, one instruction where exp scales what may be denormal: 20 % fewer instructions in the epilogue of a product.
EXPONENT, EXPONENT_CUBIC = constant(-2 * GELU_SCALE * log2(e)), constant(-2 * GELU_SCALE * GELU_CUBIC * log2(e))
SLOPE, SLOPE_CUBIC = constant(2 * GELU_SCALE), constant(6 * GELU_SCALE * GELU_CUBIC)


@device
def gelu_value(x):
    """GELU of fp32 values."""
    return x / (1.0 + tl.exp2(x * (EXPONENT + EXPONENT_CUBIC * (x * x))))


@device
def gelu_slope(x):
    """The derivative of GELU at fp32 values."""
    square = x * x
    s = 1.0 / (1.0 + tl.exp2(x * (EXPONENT + EXPONENT_CUBIC * square)))
    return s * (1.0 + x * (1.0 - s) * (SLOPE + SLOPE_CUBIC * square))


@device
def add(y, a, b, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat(units, UNIT, BLOCK)
    total = tl.load(a + i, mask=mask).to(tl.float32) + tl.load(b + i, mask=mask).to(tl.float32)
    keep(y + i, mask, total, scalars, MODE)


@device
def cast(y, x, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat(units, UNIT, BLOCK)
    keep(y + i, mask, tl.load(x + i, mask=mask), scalars, MODE)


@device
def gelu(y, x, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat(units, UNIT, BLOCK)
    keep(y + i, mask, gelu_value(tl.load(x + i, mask=mask, other=0.0).to(tl.float32)), scalars, MODE)


@device
def gelu_backward(dx, dy, x, scalars, units, UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr):
    i, mask = flat(units, UNIT, BLOCK)
    slope = gelu_slope(tl.load(x + i, mask=mask, other=0.0).to(tl.float32))
    keep(dx + i, mask, tl.load(dy + i, mask=mask, other=0.0).to(tl.float32) * slope, scalars, MODE)


@device
def bias(y, x, bias, scalars, rows, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr):
    row, column, mask = tile(rows, C, BR, BC)
    i = row[:, None] * C + column[None, :]
    b = tl.load(bias + column, mask=column < C, other=0.0)
    keep(y + i, mask, tl.load(x + i, mask=mask).to(tl.float32) + b[None, :], scalars, MODE)


@device
def last_row(y, x, scalars, rows, seq, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr):
    """y (batch, 1, C) = x (batch, seq, C) at the last position; a row of y is a sequence."""
    row, column, mask = tile(rows, C, BR, BC)
    last = (row + 1) * seq - 1
    value = tl.load(x + last[:, None] * C + column[None, :], mask=mask)
    keep(y + row[:, None] * C + column[None, :], mask, value, scalars, MODE)


@lowering("add", starts="y")
def lower_add(op: Any, c: Lowering) -> None:
    sweep(c, add, op.y, {"y": op.y, "a": op.a, "b": op.b}, writes="y", MODE=mode(op, "y"))


@lowering("cast", starts="y")
def lower_cast(op: Any, c: Lowering) -> None:
    sweep(c, cast, op.y, {"y": op.y, "x": op.x}, writes="y", MODE=mode(op, "y"))


@lowering("gelu", starts="y")
def lower_gelu(op: Any, c: Lowering) -> None:
    sweep(c, gelu, op.y, {"y": op.y, "x": op.x}, writes="y", MODE=mode(op, "y"))


@lowering("gelu_backward", starts="dx")
def lower_gelu_backward(op: Any, c: Lowering) -> None:
    operands = {"dx": op.dx, "dy": op.dy, "x": op.x}
    sweep(c, gelu_backward, op.dx, operands, writes="dx", MODE=mode(op, "dx"))


@lowering("bias", starts="y")
def lower_bias(op: Any, c: Lowering) -> None:
    sweep_rows(c, bias, op.y, {"y": op.y, "x": op.x, "bias": op.bias}, writes="y", MODE=mode(op, "y"))


@lowering("last_row", starts="y")
def lower_last_row(op: Any, c: Lowering) -> None:
    sweep_rows(c, last_row, op.y, {"y": op.y, "x": op.x, "seq": lambda s: s.seq}, writes="y", MODE=mode(op, "y"))
