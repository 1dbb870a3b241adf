"""Rotary position embedding (RoPE, Su et al. 2021) of packed heads. Shapes: x, y (batch, seq, W); cos, sin (maxT, HALF) fp32; HALF
is half a head's columns. A plane is a pair of columns of one head, HALF apart, that is rotated. x and y are moved once."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, POS, pow2, store_or_add
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div

WIDE = 256  # planes, or columns that pass through, of one program's row


@device
def rope(y, x, cos, sin, scalars, rows, seq, W, ROTARY_DIM, HALF, INVERSE, BR, BC, MODE):
    """(y_j, y_{j + HALF}) = (a c - b s, b c + a s) of each plane (a, b) = (x_j, x_{j + HALF}), with c, s = cos, sin[pos + t, j]:
    the first ROTARY_DIM columns (complete heads) of x (rows, W); the other columns are copied. Stored or added (MODE). INVERSE: by
    the negative angles, for the gradient. Grid: blocks of BR rows; blocks of BC planes, then of BC columns to copy."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = (row < rows)[:, None]
    PLANES: tl.constexpr = ROTARY_DIM // 2
    ROTATED_BLOCKS: tl.constexpr = (PLANES + BC - 1) // BC
    if tl.program_id(1) < ROTATED_BLOCKS:
        plane = tl.program_id(1) * BC + tl.arange(0, BC)
        mask = live & (plane < PLANES)[None, :]
        angle = (tl.load(scalars + POS) + row % seq)[:, None] * HALF + (plane % HALF)[None, :]  # index in the tables
        c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
        if INVERSE:
            s = -s
        i = row[:, None] * W + (plane // HALF * (2 * HALF) + plane % HALF)[None, :]  # head plane // HALF, column plane % HALF
        a = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + i + HALF, mask=mask, other=0.0).to(tl.float32)
        store_or_add(y + i, mask, a * c - b * s, scalars, MODE)
        store_or_add(y + i + HALF, mask, b * c + a * s, scalars, MODE)
    else:
        column = ROTARY_DIM + (tl.program_id(1) - ROTATED_BLOCKS) * BC + tl.arange(0, BC)
        mask = live & (column < W)[None, :]
        i = row[:, None] * W + column[None, :]
        store_or_add(y + i, mask, tl.load(x + i, mask=mask, other=0.0).to(tl.float32), scalars, MODE)


@lowering("rope", starts="y")
def lower_rope(op: Any, c: Lowering) -> None:
    """Plan one launch: RoPE or its inverse on the first op.heads heads of each row; a program has a block of rows and planes."""
    W, HALF, rows = int(op.x.shape[-1]), int(op.cos.shape[-1]), c.rows(op.x)
    rotary_dim = op.heads * 2 * HALF
    BC = min(WIDE, pow2(max(rotary_dim // 2, W - rotary_dim)))
    BR = BLOCK // BC
    constants = {"W": W, "ROTARY_DIM": rotary_dim, "HALF": HALF, "INVERSE": bool(op.inverse), "BR": BR, "BC": BC}
    c.launch(
        rope, {"rows": rows}, constants,
        grid=lambda s: (ceil_div(rows(s), BR), ceil_div(rotary_dim // 2, BC) + ceil_div(W - rotary_dim, BC)),
    )  # fmt: skip
