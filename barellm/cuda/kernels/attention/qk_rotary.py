"""RMSNorm of heads and half-truncated rotary positions, both ways. Shapes: x, y, dy, dx (batch, seq, W), rows of x and dx X_ROW and
DX_ROW elements apart; rstd (batch, seq, COUNT) for COUNT heads of D columns; cos, sin (positions, D / 4) fp32.

A program has BR heads, one after the other in memory, in registers: each is read once.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import BLOCK, MIN_SUM_COLUMNS, pow2, row_strides, store_or_add
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def turned(v, cos, sin, position, mask, D: tl.constexpr, BACK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """v (BR, BC) with its planes turned by the angles of `position` (BR,); those from D / 4 on stay."""
    plane = tl.arange(0, BC // 2)
    at = position[:, None] * (D // 4) + plane[None, :]
    turning = mask & (plane < D // 4)[None, :]
    c, s = tl.load(cos + at, mask=turning, other=1.0), tl.load(sin + at, mask=turning, other=0.0)
    if BACK:
        s = -s
    a, b = tl.split(tl.reshape(v, (BR, BC // 2, 2)))
    return tl.reshape(tl.join(a * c + b * s, b * c - a * s), (BR, BC))


@device
def place(rows, seq, COUNT: tl.constexpr, PAIRED: tl.constexpr, BR: tl.constexpr):
    """The heads of this program: number (BR,), mask, row, head in the row, position in the sequence and in the tables."""
    unit = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    row, head = unit // COUNT, (unit % COUNT).to(tl.int32)
    t = row % seq
    position = t
    if PAIRED:
        position = 2 * t + head % 2
    return unit, row < rows, row, head, t, position


@device
def qk_rotary(
    y, rstd, x, cos, sin, rows, seq,
    X_ROW: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr, PAIRED: tl.constexpr, SHIFT: tl.constexpr,
    EPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The upper half of a key, if it moves, is stored in the next row."""
    unit, live, row, head, t, position = place(rows, seq, COUNT, PAIRED, BR)
    column = tl.arange(0, BC)
    mask = live[:, None] & (column < D)[None, :]
    v = tl.load(x + row[:, None] * X_ROW + (head * D)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(v * v, 1) / D + EPS)
    tl.store(rstd + unit, inverse, mask=live)
    n = turned(v * inverse[:, None], cos, sin, position, live[:, None], D, False, BR, BC)
    i = unit[:, None] * D + column[None, :]
    if SHIFT:
        moves = (head >= HEADS)[:, None] & (column >= D // 2)[None, :]
        last, first = (t + 1 == seq)[:, None], (t == 0)[:, None]
        tl.store(y + i + tl.where(moves, COUNT * D, 0), n, mask=mask & ~(moves & last))
        tl.store(y + i, n, mask=mask & moves & first)
    else:
        tl.store(y + i, n, mask=mask)


@device
def qk_rotary_backward(
    dx, dy, x, rstd, cos, sin, scalars, rows, seq,
    X_ROW: tl.constexpr, DX_ROW: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr,
    PAIRED: tl.constexpr, SHIFT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dx = rstd (dn - n mean(dn n)), dn being dy turned back."""
    unit, live, row, head, t, position = place(rows, seq, COUNT, PAIRED, BR)
    column = tl.arange(0, BC)
    mask = live[:, None] & (column < D)[None, :]
    i = unit[:, None] * D + column[None, :]
    if SHIFT:
        moves = (head >= HEADS)[:, None] & (column >= D // 2)[None, :]
        last, first = (t + 1 == seq)[:, None], (t == 0)[:, None]
        given = tl.load(dy + i + tl.where(moves, COUNT * D, 0), mask=mask & ~(moves & last), other=0.0).to(tl.float32)
        given += tl.load(dy + i, mask=mask & moves & first, other=0.0).to(tl.float32)
    else:
        given = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
    dn = turned(given, cos, sin, position, live[:, None], D, True, BR, BC)
    within = (head * D)[:, None] + column[None, :]
    inverse = tl.load(rstd + unit, mask=live, other=0.0)[:, None]
    n = tl.load(x + row[:, None] * X_ROW + within, mask=mask, other=0.0).to(tl.float32) * inverse
    mean = tl.sum(dn * n, 1) / D
    store_or_add(dx + row[:, None] * DX_ROW + within, mask, inverse * (dn - n * mean[:, None]), scalars, MODE)


def launch(op: Any, c: Lowering, function: Any, operands: dict[str, Any], *, writes: str, **constants: Any) -> None:
    count, rows = op.heads + op.kv_heads, c.rows(op.x)
    D = int(op.x.shape[-1]) // count
    BC = max(MIN_SUM_COLUMNS, pow2(D))
    BR = max(1, BLOCK // BC)
    shape = {
        "D": D,
        "HEADS": op.heads,
        "COUNT": count,
        "PAIRED": bool(op.paired),
        "SHIFT": bool(op.shift),
        "BR": BR,
        "BC": BC,
    }
    tables = {"cos": op.cos, "sin": op.sin}
    c.launch(
        function,
        {**operands, **tables, "rows": rows, "seq": lambda s: s.seq},
        shape | constants,
        grid=lambda s: (ceil_div(rows(s) * count, BR),),
        writes=writes,
    )


@lowering("qk_rotary", views="x")
def lower_qk_rotary(op: Any, c: Lowering) -> None:
    operands = {"y": op.y, "rstd": op.rstd, "x": op.x}
    launch(op, c, qk_rotary, operands, writes="y rstd", EPS=float(op.eps), **row_strides(x=op.x))


@lowering("qk_rotary_backward", starts="dx", views="x dx")
def lower_qk_rotary_backward(op: Any, c: Lowering) -> None:
    operands = {"dx": op.dx, "dy": op.dy, "x": op.x, "rstd": op.rstd}
    strides = row_strides(x=op.x, dx=op.dx)
    launch(op, c, qk_rotary_backward, operands, writes="dx", MODE=mode(op, "dx"), **strides)
