"""Matrix transpose. Shapes: x (rows, columns), y (columns, rows). Offsets have 64 bits: there may be more than 2^31 elements.

A program transposes one tile: it reads parts of the rows of x and writes parts of the rows of y, whole cache lines of both."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.storage import load_weight, store_weight, weight_operands
from barellm.cuda.lang import device, tl
from barellm.program.dtypes import FORMATS
from barellm.program.integers import ceil_div
from barellm.runtime.lowering import part, plane

TILE = 64  # rows and columns


@device
def transposed_tile(ROWS, COLUMNS, TILE):
    """This program's tile of x (ROWS, COLUMNS): offsets in x and their mask, then offsets in y (COLUMNS, ROWS) and their mask, for
    the transposed tile; (TILE, TILE) each, i64. The tiles are counted along the rows of x."""
    TILES_ACROSS: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    row = (tl.program_id(0) // TILES_ACROSS).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % TILES_ACROSS).to(tl.int64) * TILE + tl.arange(0, TILE)
    x_offset = row[:, None] * COLUMNS + column[None, :]
    y_offset = column[:, None] * ROWS + row[None, :]
    return (
        x_offset, (row < ROWS)[:, None] & (column < COLUMNS)[None, :],
        y_offset, (column < COLUMNS)[:, None] & (row < ROWS)[None, :],
    )  # fmt: skip


@device
def transpose_copy(y, x, ROWS, COLUMNS, TILE):
    """y = x^T of elements of 16 or 32 bits, whatever they mean."""
    x_offset, x_mask, y_offset, y_mask = transposed_tile(ROWS, COLUMNS, TILE)
    tl.store(y + y_offset, tl.trans(tl.load(x + x_offset, mask=x_mask)), mask=y_mask)


@device
def transpose_add(y, y_lo, x, x_lo, ROWS, COLUMNS, TILE):
    """y += x^T in fp32, whatever the storage of weights (storage.py): y_lo and x_lo are second planes, or None."""
    x_offset, x_mask, y_offset, y_mask = transposed_tile(ROWS, COLUMNS, TILE)
    total = load_weight(y, y_lo, y_offset, y_mask).to(tl.float32)
    total += tl.trans(load_weight(x, x_lo, x_offset, x_mask).to(tl.float32))
    store_weight(y, y_lo, y_offset, y_mask, total)


@lowering("transpose", adds="y", also=dict.fromkeys("xy", "bf16_i16 fp16_fp32 bf16_u16 e6m9 ue6m10"))
def lower_transpose(op: Any, c: Lowering) -> None:
    """Plan y = x^T, one launch for each plane of a weight, whatever its bits encode; or y += x^T in fp32, one launch."""
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
