"""Softmax over rows, y = softmax(SCALE x), and its gradient. Shapes: x, y, dy, dx (rows, C). Short and long rows as in
layernorm.py."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.norm.layernorm import BACKWARD, FORWARD, launch_rows
from barellm.cuda.lang import constant, device, tl

LOG2_E = constant(1.4426950408889634)
LOWEST = constant(float("-inf"))


@device
def powers(v, top, SCALE: tl.constexpr):
    """exp(SCALE (v - top)), v (rows, columns), top (rows,): by exp2, so that SCALE and log2(e) are one factor."""
    return tl.exp2((v - top[:, None]) * (SCALE * LOG2_E))


@device
def softmax(y, x, scalars, rows, C: tl.constexpr, SCALE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """BR short rows, each read once."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    mask = (row < rows)[:, None] & (column < C)[None, :]
    i = row[:, None] * C + column[None, :]
    v = tl.load(x + i, mask=mask, other=LOWEST).to(tl.float32)
    e = powers(v, tl.max(v, 1), SCALE)
    tl.store(y + i, e * (1.0 / tl.sum(e, 1))[:, None], mask=mask)


@device
def softmax_long(y, x, scalars, rows, C: tl.constexpr, SCALE: tl.constexpr, BC: tl.constexpr):
    """One long row, read twice: an online softmax, then y. Each of BC columns has a running maximum and a sum relative to it; in
    the end they are combined."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * C
    row_max, total = tl.full((1, BC), LOWEST, tl.float32), tl.zeros((1, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        v = tl.load(x + base + column[None, :], mask=(column < C)[None, :], other=LOWEST).to(tl.float32)
        new_max = tl.maximum(row_max, v)
        shift = tl.where(new_max == LOWEST, 0.0, new_max)  # -inf less -inf would be NaN
        total = total * tl.exp2((row_max - shift) * (SCALE * LOG2_E)) + tl.exp2((v - shift) * (SCALE * LOG2_E))
        row_max = new_max
    highest = tl.max(row_max, 1)
    inverse = 1.0 / tl.sum(total * powers(row_max, highest, SCALE), 1)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        i, mask = base + column[None, :], (column < C)[None, :]
        v = tl.load(x + i, mask=mask, other=LOWEST).to(tl.float32)
        tl.store(y + i, powers(v, highest, SCALE) * inverse[:, None], mask=mask)


@device
def softmax_dx(
    dx, dy, y, scalars, rows,
    C: tl.constexpr, SCALE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dx = SCALE y (dy - sum(dy y)) of BR short rows."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    mask = (row < rows)[:, None] & (column < C)[None, :]
    i = row[:, None] * C + column[None, :]
    g = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(y + i, mask=mask, other=0.0).to(tl.float32)
    store_or_add(dx + i, mask, (g - tl.sum(g * p, 1)[:, None]) * p * SCALE, scalars, MODE)


@device
def softmax_dx_long(dx, dy, y, scalars, rows, C: tl.constexpr, SCALE: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr):
    """dx of one long row, read twice: for sum(dy y), for dx."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * C
    sums = tl.zeros((1, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        i, mask = base + column[None, :], (column < C)[None, :]
        g = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
        sums += g * tl.load(y + i, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(sums, 1)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        i, mask = base + column[None, :], (column < C)[None, :]
        g = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
        p = tl.load(y + i, mask=mask, other=0.0).to(tl.float32)
        store_or_add(dx + i, mask, (g - total[:, None]) * p * SCALE, scalars, MODE)


@lowering("softmax")
def lower_softmax(op: Any, c: Lowering) -> None:
    launch_rows(c, op.y, softmax, softmax_long, {}, times=FORWARD, SCALE=float(op.scale))


@lowering("softmax_dx", starts="dx")
def lower_softmax_dx(op: Any, c: Lowering) -> None:
    launch_rows(c, op.dx, softmax_dx, softmax_dx_long, {}, times=BACKWARD, SCALE=float(op.scale))
