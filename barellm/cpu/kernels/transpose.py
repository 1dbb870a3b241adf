"""Matrices turned over. Shapes: x (rows, columns), y (columns, rows); both sizes are given at run time, one code for all.

A tile is as wide and as high, so that both matrices are touched in pieces of some cache lines. Squares of it turn in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.loops import LINE, STREAM_BYTES
from barellm.cpu.kernels.storage import Weight, weight_operands
from barellm.cpu.lang import Value
from barellm.cpu.lang.vector import transpose
from barellm.program.dtypes import FORMATS
from barellm.program.ops.base import Op
from barellm.runtime.lowering import part, plane

TILE_BYTES = 256  # of a row of a tile

# (index of the first lane, mask or None) -> lanes of x; (lanes, index, mask or None): lanes into y
Load = Callable[[Any, Value | None], Value]
Store = Callable[[Value, Any, Value | None], None]
Square = Callable[[Value, Value], None]


def turn_tiles(
    k: KernelBuilder, rows: Value, columns: Value, *, tile: int, side: int, inner: Square, edge: Square
) -> None:
    """Threads claim tiles of x and turn their squares of `side` elements: inner(row, column) those that lie in it wholly, edge
    the others."""
    across = k.ceil_div(columns, tile)
    with k.claim(k.ceil_div(rows, tile) * across, 1) as (begin, end), k.loop(begin, end) as unit:
        row, column = unit // across * tile, unit % across * tile
        with k.loop(column, k.min(column + tile, columns), side) as c, k.loop(row, k.min(row + tile, rows), side) as r:
            whole = (r + side <= rows) & (c + side <= columns)
            with k.when(whole):
                inner(r, c)
            with k.otherwise(whole):
                edge(r, c)


def squares(k: KernelBuilder, rows: Value, columns: Value, load: Load, store: Store) -> tuple[Square, Square]:
    """Turns a square of as many 32-bit lanes as a vector has: one that is whole, and one that reaches beyond the matrix."""

    def inner(r: Value, c: Value) -> None:
        turned = transpose(k, [load((r + i) * columns + c, None) for i in range(k.lanes)])
        for i, v in enumerate(turned):
            store(v, (c + i) * rows + r, None)

    def edge(r: Value, c: Value) -> None:
        of_x, of_y = k.mask_first(columns - c), k.mask_first(rows - r)
        turned = transpose(k, [load(k.min(r + i, rows - 1) * columns + c, of_x) for i in range(k.lanes)])
        for i, v in enumerate(turned):
            with k.when(c + i < columns):
                store(v, (c + i) * rows + r, of_y)

    return inner, edge


def transpose_plane(k: KernelBuilder, y, x, rows, columns, *, lines) -> None:
    """Every bit as it is, of elements of 16 or 32 bits. `lines`: rows of y are whole cache lines."""
    past = rows * columns * y.itemsize > STREAM_BYTES if lines else k.const(0, "i1")
    wide = y.itemsize == 2

    def load(i: Any, mask: Value | None) -> Value:
        v = x.load_raw(i, mask)
        return k.op(k.ivec, f"zext {v.typed} to {k.ivec}") if wide else v

    def store(v: Value, i: Any, mask: Value | None) -> None:
        y.store_raw(k.to(v, f"<{k.lanes} x i16>") if wide else v, i, mask)

    def whole(v: Value, i: Value) -> None:
        """A vector of 32-bit lanes to a whole part of a row."""
        to, size = y.at(i), 4 * k.lanes
        with k.when(past):
            k.line(f"store {v.typed}, ptr {to.ref}, align {size}, !nontemporal !0")
        with k.otherwise(past):
            k.line(f"store {v.typed}, ptr {to.ref}, align {y.itemsize}")

    tile = TILE_BYTES // y.itemsize
    _, edge = squares(k, rows, columns, load, store)
    if not wide:
        inner, _ = squares(k, rows, columns, load, lambda v, i, mask: whole(v, i))
        turn_tiles(k, rows, columns, tile=tile, side=k.lanes, inner=inner, edge=edge)
        return
    side = 2 * k.lanes

    def pairs(r: Value, c: Value) -> None:
        """Numbers of two columns are a lane. Those of two rows make lanes of one column each: what a square of lanes turns."""
        lanes = [k.op(k.ivec, f"load {k.ivec}, ptr {x.at((r + i) * columns + c).ref}, align 2") for i in range(side)]
        both = list(zip(lanes[::2], lanes[1::2], strict=True))
        for odd, woven in enumerate(
            ([(a & 0xFFFF) | (b << 16) for a, b in both], [(a >> 16) | (b & ~0xFFFF) for a, b in both])
        ):
            for i, v in enumerate(transpose(k, woven)):
                whole(v, (c + (2 * i + odd)) * rows + r)

    def parts(r: Value, c: Value) -> None:
        with k.loop(r, k.min(r + side, rows), k.lanes) as i, k.loop(c, k.min(c + side, columns), k.lanes) as j:
            edge(i, j)

    turn_tiles(k, rows, columns, tile=tile, side=side, inner=pairs, edge=parts)


def transpose_add(k: KernelBuilder, y, y_lo, x, x_lo, rows, columns) -> None:
    """In fp32, whatever the storage."""
    of, to = Weight(k, x, x_lo), Weight(k, y, y_lo)

    def store(v: Value, i: Any, mask: Value | None) -> None:
        to.store(to.load(i, mask) + v, i, mask)

    inner, edge = squares(k, rows, columns, of.load, store)
    turn_tiles(k, rows, columns, tile=TILE_BYTES // y.itemsize, side=k.lanes, inner=inner, edge=edge)


@lowering("transpose", adds="y", also=dict.fromkeys("xy", "split half truncated e6m9 ue6m10"))
def lower_transpose(op: Op, c: Lowering) -> None:
    rows, columns = (int(n) for n in op.x.shape)
    sizes = {"rows": rows, "columns": columns}
    if op.modes["y"] == "add":
        c.call(transpose_add, {**weight_operands("y", op.y), **weight_operands("x", op.x), **sizes}, writes="y y_lo")
        return
    for i, name in enumerate(FORMATS[op.x.dtype].planes or (op.x.dtype,)):
        bits = FORMATS[name].bits
        planes = FORMATS[op.x.dtype].planes
        pair = {n: (plane(t, i)[0] if planes else part(t), f"i{bits}") for n, t in (("y", op.y), ("x", op.x))}
        c.call(transpose_plane, {**pair, **sizes}, {"lines": rows * bits % (8 * LINE) == 0}, writes="y")
