"""RMSNorm forward; its gradient is LayerNorm's without the mean (layernorm.py, layernorm_backward.py).

Shapes: x, y, b, total (rows, C); weight (C) or none; rstd (rows) fp32.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.norm.layernorm import launch_rows, summed, times_alone
from barellm.cuda.lang import device, tl

THREAD = (
    8  # elements of a row in a thread: with 16, ptxas would rather spill two of them than take more than 40 registers
)


@device
def scaled(v, inverse, weight, column, inside):
    """v * inverse * weight."""
    n = v * inverse[:, None]
    if weight is not None:
        n *= tl.load(weight + column, mask=inside, other=0.0)[None, :]
    return n


@device
def rmsnorm(
    y, rstd, x, b, total, weight, scalars, rows, C: tl.constexpr, EPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """A row is read once and stays in registers."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    live, inside = row < rows, column < C
    mask = live[:, None] & inside[None, :]
    i = row[:, None] * C + column[None, :]
    v = summed(x, b, total, i, mask, row, scalars, None, None, None, None, BR, BC)
    inverse = 1.0 / tl.sqrt(tl.sum(v * v, 1) / C + EPS)
    tl.store(rstd + row, inverse, mask=live)
    tl.store(y + i, scaled(v, inverse, weight, column, inside), mask=mask)


@device
def rmsnorm_long(y, rstd, x, b, total, weight, scalars, rows, C: tl.constexpr, EPS: tl.constexpr, BC: tl.constexpr):
    """The same for a row that does not fit in registers: one program walks it twice."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * C
    squares = tl.zeros((1, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        i = base + column[None, :]
        v = summed(x, b, total, i, (column < C)[None, :], row, scalars, None, None, None, None, 1, BC)
        squares += v * v
    if b is not None:
        tl.debug_barrier()  # other threads may read what this one stored
        x = total
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 1) / C + EPS)
    tl.store(rstd + row, inverse)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        inside = column < C
        i = base + column[None, :]
        v = tl.load(x + i, mask=inside[None, :], other=0.0).to(tl.float32)
        tl.store(y + i, scaled(v, inverse, weight, column, inside), mask=inside[None, :])


@lowering("rmsnorm", "add_rmsnorm")
def lower_rmsnorm(op: Any, c: Lowering) -> None:
    """Alone, or behind an addition, whose result it writes."""
    operands = {
        "y": op.y, "rstd": op.rstd, "weight": op.weight,
        "x": op.inputs.get("x") or op.a, "b": op.inputs.get("b"), "total": op.outputs.get("total"),
    }  # fmt: skip
    how = {"writes": "y rstd total", "thread": THREAD, "times": times_alone(op)}
    launch_rows(c, op.y, rmsnorm, rmsnorm_long, operands, **how, EPS=float(op.eps))
