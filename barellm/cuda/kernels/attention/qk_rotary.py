"""QK norm (RMSNorm of each head of queries and keys) and half-truncated RoPE (modded-nanogpt), forward and backward. Shapes: x, y,
dy, dx (batch, seq, W), rows of x and dx X_STRIDE and DX_STRIDE elements apart; rstd (batch, seq, COUNT) for COUNT = HEADS + key
heads of D columns; cos, sin (positions, D / 4) fp32. PAIRED: two adjacent heads are one of a sequence of twice the length. SHIFT:
the upper half of each key's columns moves to the next position (modded-nanogpt's shifted keys).

A program has BR heads, adjacent in memory, in registers (BR, BC): each is read once. BC: D padded to a power of two."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, MIN_SUM_COLUMNS, pow2, store_or_add
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div


@device
def rotate(v, cos, sin, position, mask, D, BACK, BR, BC):
    """Heads v (BR, BC), whose planes (pairs of adjacent columns) are rotated by the angles of `position` (BR,), or with BACK by the
    negative angles; planes from D / 4 on stay."""
    plane = tl.arange(0, BC // 2)  # of two columns
    index = position[:, None] * (D // 4) + plane[None, :]
    rotates = mask & (plane < D // 4)[None, :]  # others get cos 1 and sin 0
    c, s = tl.load(cos + index, mask=rotates, other=1.0), tl.load(sin + index, mask=rotates, other=0.0)
    if BACK:
        s = -s
    a, b = tl.split(tl.reshape(v, (BR, BC // 2, 2)))
    return tl.reshape(tl.join(a * c + b * s, b * c - a * s), (BR, BC))


@device
def head_indices(rows, seq, COUNT, PAIRED, BR):
    """(index in the tensor, mask, row, head in the row, position in the sequence, position in the tables) of each of BR heads."""
    unit = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # number of a head, counted over all rows
    row, head = unit // COUNT, (unit % COUNT).to(tl.int32)
    t = row % seq
    position = t
    if PAIRED:
        position = 2 * t + head % 2
    return unit, row < rows, row, head, t, position


@device
def qk_rotary(y, rstd, x, cos, sin, rows, seq, X_STRIDE, D, HEADS, COUNT, PAIRED, SHIFT, EPS, BR, BC):
    """y = rotate(x rstd), rstd = 1 / sqrt(mean(x^2) + EPS), of BR heads of BC >= D columns, each read once. x (rows, W) is what the
    QKV projection wrote: HEADS query heads, then key heads, COUNT in all; y (rows, W) and rstd (rows, COUNT) fp32 are written.
    SHIFT: the upper half of a key is stored in the next position's row; that of the last position is dropped, and the first
    position keeps its own, too. Grid: blocks of heads of all rows. BR, BC: powers of two."""
    unit, live, row, head, t, position = head_indices(rows, seq, COUNT, PAIRED, BR)  # of each of BR heads
    column = tl.arange(0, BC)
    mask = live[:, None] & (column < D)[None, :]
    v = tl.load(x + row[:, None] * X_STRIDE + (head * D)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(v * v, 1) / D + EPS)  # rstd
    tl.store(rstd + unit, inverse, mask=live)
    n = rotate(v * inverse[:, None], cos, sin, position, live[:, None], D, False, BR, BC)
    i = unit[:, None] * D + column[None, :]
    if SHIFT:
        moves = (head >= HEADS)[:, None] & (column >= D // 2)[None, :]  # the upper half of keys
        last, first = (t + 1 == seq)[:, None], (t == 0)[:, None]
        tl.store(y + i + tl.where(moves, COUNT * D, 0), n, mask=mask & ~(moves & last))
        tl.store(y + i, n, mask=mask & moves & first)
    else:
        tl.store(y + i, n, mask=mask)


@device
def qk_rotary_backward(
    dx, dy, x, rstd, cos, sin, scalars, rows, seq, X_STRIDE, DX_STRIDE, D, HEADS, COUNT, PAIRED, SHIFT, BR, BC, MODE
):
    """dx = rstd (dn - n mean(dn n)) of BR heads, with dn = dy rotated back and n = x rstd; stored or added (MODE). x, rstd, cos,
    sin, grid: as in the forward pass; dy (rows, W). SHIFT: dy is read where the forward pass stored a key's upper half."""
    unit, live, row, head, t, position = head_indices(rows, seq, COUNT, PAIRED, BR)  # of each of BR heads
    column = tl.arange(0, BC)
    mask = live[:, None] & (column < D)[None, :]
    i = unit[:, None] * D + column[None, :]
    if SHIFT:
        moves = (head >= HEADS)[:, None] & (column >= D // 2)[None, :]  # the upper half of keys
        last, first = (t + 1 == seq)[:, None], (t == 0)[:, None]
        dy_head = tl.load(dy + i + tl.where(moves, COUNT * D, 0), mask=mask & ~(moves & last), other=0.0).to(tl.float32)
        dy_head += tl.load(dy + i, mask=mask & moves & first, other=0.0).to(tl.float32)
    else:
        dy_head = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
    dn = rotate(dy_head, cos, sin, position, live[:, None], D, True, BR, BC)  # the gradient of n
    offset = (head * D)[:, None] + column[None, :]
    inverse = tl.load(rstd + unit, mask=live, other=0.0)[:, None]
    n = tl.load(x + row[:, None] * X_STRIDE + offset, mask=mask, other=0.0).to(tl.float32) * inverse
    mean = tl.sum(dn * n, 1) / D
    store_or_add(dx + row[:, None] * DX_STRIDE + offset, mask, inverse * (dn - n * mean[:, None]), scalars, MODE)


def launch_qk_rotary(op: Any, c: Lowering, function: Any, **constants: Any) -> None:
    """Launch one of the two kernels over all heads of op.x; `constants`: those that the other one does not have."""
    count, rows = op.heads + op.kv_heads, c.rows(op.x)
    D = int(op.x.shape[-1]) // count
    BC = max(MIN_SUM_COLUMNS, pow2(D))
    BR = max(1, BLOCK // BC)
    shape = {"D": D, "HEADS": op.heads, "COUNT": count, "BR": BR, "BC": BC}
    shape |= {"PAIRED": bool(op.paired), "SHIFT": bool(op.shift)}
    c.launch(function, {"rows": rows}, shape | constants, grid=lambda s: (ceil_div(rows(s) * count, BR),))


@lowering("qk_rotary", views="x")
def lower_qk_rotary(op: Any, c: Lowering) -> None:
    launch_qk_rotary(op, c, qk_rotary, EPS=float(op.eps))


@lowering("qk_rotary_backward", starts="dx", views="x dx")
def lower_qk_rotary_backward(op: Any, c: Lowering) -> None:
    launch_qk_rotary(op, c, qk_rotary_backward)
