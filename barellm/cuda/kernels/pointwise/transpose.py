"""Matrices turned over. Shapes: x (rows, columns), y (columns, rows). Offsets have 64 bits: there may be more than 2^31 elements.

A program turns one tile: it reads parts of the rows of x and writes parts of the rows of y, whole cache lines of both.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.storage import load_weight, store_weight, weight_operands
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import FORMATS
from barellm.program.integers import ceil_div
from barellm.runtime.lowering import part, plane

TILE = 64  # rows and columns


@device
def tile_of(ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """The tile of this program: the offsets of its elements in x and in y, and which of them there are, each (TILE, TILE)."""
    ACROSS: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    row = (tl.program_id(0) // ACROSS).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % ACROSS).to(tl.int64) * TILE + tl.arange(0, TILE)
    of = row[:, None] * COLUMNS + column[None, :]
    to = column[:, None] * ROWS + row[None, :]
    return (
        of,
        (row < ROWS)[:, None] & (column < COLUMNS)[None, :],
        to,
        (column < COLUMNS)[:, None] & (row < ROWS)[None, :],
    )


@device
def transpose_copy(y, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Elements of 16 or 32 bits, as they are."""
    of, inside, to, within = tile_of(ROWS, COLUMNS, TILE)
    tl.store(y + to, tl.trans(tl.load(x + of, mask=inside)), mask=within)


@device
def transpose_add(y, y_lo, x, x_lo, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Add in fp32, whatever the storage."""
    of, inside, to, within = tile_of(ROWS, COLUMNS, TILE)
    total = load_weight(y, y_lo, to, within).to(tl.float32) + tl.trans(load_weight(x, x_lo, of, inside).to(tl.float32))
    store_weight(y, y_lo, to, within, total)


@lowering("transpose", adds="y", also=dict.fromkeys("xy", "split half truncated e6m9 ue6m10"))
def lower_transpose(op: Any, c: Lowering) -> None:
    rows, columns = (int(n) for n in op.x.shape)
    constants = {"ROWS": rows, "COLUMNS": columns, "TILE": TILE}
    grid = ceil_div(rows, TILE) * ceil_div(columns, TILE)
    if op.modes["y"] == "add":
        both = {**weight_operands("y", op.y), **weight_operands("x", op.x)}
        c.launch(transpose_add, both, constants, grid=lambda s: (grid,), writes="y y_lo", warps=8)
        return
    planes = FORMATS[op.x.dtype].planes
    for i, name in enumerate(planes or (op.x.dtype,)):
        kind = "i32" if FORMATS[name].bits == 32 else "i16"
        pair = {n: (plane(t, i)[0] if planes else part(t), kind) for n, t in (("y", op.y), ("x", op.x))}
        c.launch(transpose_copy, pair, constants, grid=lambda s: (grid,), writes="y", warps=8)
