"""Matrix transpose. Shapes: x (rows, columns), y (columns, rows). The sizes are compile-time constants, so that the offsets of a
square's rows are parts of instructions: to compute them took as long as memory.

Squares of lanes x lanes are transposed in registers. A strip of squares reads as many rows of x from left to right; a tile is
STRIPS strips below each other, which write adjacent parts of the rows of y."""

from collections.abc import Callable
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Value, lowering, part, plane
from barellm.cpu.kernels import loops, storage
from barellm.cpu.lang.vector import transpose
from barellm.program.dtypes import FORMATS

STRIPS = 16  # of a tile
WIDTH = 4096  # bytes of a tile's rows: a strip stays in the L2
PREFETCH_LINES = 8  # of each row of a strip, where its rows are long
PREFETCH_SQUARES = 2  # squares of y that are on their way where y is read too

# (index, further elements, mask or None) -> lanes of x, and (lanes, index, further elements, mask or None): lanes into y
Load = Callable[[Any, int, Value | None], Value]
Store = Callable[[Value, Any, int, Value | None], None]
Square = Callable[[Value, Value], None]


class Squares:
    """Transposes the square of 32-bit lanes whose first element is x[r, c], by the functions `load` and `store`."""

    def __init__(self, k, rows: int, columns: int, load: Load, store: Store) -> None:
        self.k, self.rows, self.columns, self.load, self.store = k, rows, columns, load, store

    def inner(self, r, c) -> None:
        """A full square."""
        src, dst = r * self.columns + c, c * self.rows + r  # first elements of the square in x, y
        lines = [self.load(src, i * self.columns, None) for i in range(self.k.lanes)]
        for i, v in enumerate(transpose(self.k, lines)):
            self.store(v, dst, i * self.rows, None)

    def edge(self, r, c) -> None:
        """A partial square at an edge: rows beyond the last are read from it, and not stored."""
        k, dst = self.k, c * self.rows + r
        x_mask, y_mask = k.mask_first(self.columns - c), k.mask_first(self.rows - r)
        row_offsets = [k.min(r + i, self.rows - 1) * self.columns + c for i in range(k.lanes)]
        for i, v in enumerate(transpose(k, [self.load(src, 0, x_mask) for src in row_offsets])):
            with k.when(c + i < self.columns):
                self.store(v, dst, i * self.rows, y_mask)


def transpose_tiles(k, y, x, rows: int, columns: int, *, side: int, inner: Square, edge: Square, adds: bool) -> None:
    """Transpose tiles of x (rows, columns) into y (columns, rows) in parallel, by squares of `side` elements: inner(r, c) for a
    full square at x[r, c], edge(r, c) for a partial one. Software prefetches, because no hardware prefetcher follows so many rows:
    for long rows of what is to their right, else of the square below; with `adds` (y is read too) also of what squares to the right
    read of y. Long rows take two squares at a time: rows of y are short then, and parts of two cache lines are written together."""
    long = columns > rows
    strip, next_read = (2 * side, PREFETCH_LINES * loops.LINE // x.itemsize) if long else (side, side * columns)
    height, width = STRIPS * side, WIDTH // x.itemsize  # of a tile
    tiles_per_row = -(-columns // width)
    with k.parallel_range(-(-rows // height) * tiles_per_row, 1) as (begin, end), k.loop(begin, end) as tile:
        top, left = tile // tiles_per_row * height, tile % tiles_per_row * width
        bottom, right = k.min(top + height, rows), k.min(left + width, columns)
        strips, across_tile = k.loop(top, bottom, strip), k.loop(left, right, side)
        with strips as first, across_tile as c, k.loop(first, k.min(first + strip, bottom), side) as r:
            next_x, next_y = x.at(r * columns + c + next_read), y.at((c + PREFETCH_SQUARES * side) * rows + r)
            for i in range(side):
                k.prefetch(next_x.at(i * columns), near=False)
                if adds:
                    k.prefetch(next_y.at(i * rows), write=True, near=False)
            is_full = (r + side <= rows) & (c + side <= columns)
            with k.when(is_full):
                inner(r, c)
            with k.otherwise(is_full):
                edge(r, c)


def transpose_plane(k, y, x, *, rows, columns) -> None:
    """The kernel: y (columns, rows) = x^T of elements of 16 or 32 bits, whatever they encode, past the caches if it exceeds
    them."""
    halves, side = y.itemsize == 2, k.lanes * 4 // y.itemsize  # 16-bit elements; elements of a square's side
    nontemporal = rows * y.itemsize % loops.LINE == 0 and rows * columns * y.itemsize > loops.STREAM_BYTES

    def load(src, further: int, mask) -> Value:
        """The vector at element src + further of x, in 32-bit lanes."""
        v = x.at(src).load_raw(further, mask)
        return k.op(k.ivec, f"zext {v.typed} to {k.ivec}") if halves else v

    def store(v, dst, further: int, mask) -> None:
        """Store 32-bit lanes as elements, from element dst + further of y on."""
        y.at(dst).store_raw(k.to(v, f"<{k.lanes} x i16>") if halves else v, further, mask)

    def store_vector(v, dst, further: int, mask=None) -> None:
        """Store a full vector of 32-bit lanes, whatever they hold."""
        attributes = f"align {4 * k.lanes}, !nontemporal !0" if nontemporal else f"align {y.itemsize}"
        k.line(f"store {v.typed}, ptr {y.at(dst).at(further).ref}, {attributes}")

    def transpose_pairs(r, c) -> None:
        """A full square of 16-bit elements. A 32-bit lane of a row holds two columns; the lanes of two rows are recombined so that
        each holds one column of both rows. Then squares of lanes are transposed, of the even columns and of the odd ones."""
        src, dst = x.at(r * columns + c), c * rows + r
        lines = [k.op(k.ivec, f"load {k.ivec}, ptr {src.at(i * columns).ref}, align 2") for i in range(side)]
        both = list(zip(lines[::2], lines[1::2], strict=True))
        even, odd = [(a & 0xFFFF) | (b << 16) for a, b in both], [(a >> 16) | (b & ~0xFFFF) for a, b in both]
        for first, vectors in enumerate((even, odd)):
            for i, v in enumerate(transpose(k, vectors)):
                store_vector(v, dst, (2 * i + first) * rows)

    masked = Squares(k, rows, columns, load, store)

    def transpose_edge(r, c) -> None:
        """A partial square of 16-bit elements, by squares of 32-bit lanes."""
        with k.loop(r, k.min(r + side, rows), k.lanes) as i, k.loop(c, k.min(c + side, columns), k.lanes) as j:
            masked.edge(i, j)

    full = Squares(k, rows, columns, load, store_vector)
    inner, edge = (transpose_pairs, transpose_edge) if halves else (full.inner, masked.edge)
    transpose_tiles(k, y, x, rows, columns, side=side, inner=inner, edge=edge, adds=False)


def transpose_add(k, y, y_lo, x, x_lo, *, rows, columns) -> None:
    """The kernel: y (columns, rows) += x^T in fp32, for any storage format (`_lo`: low planes, or None)."""
    src, dst = storage.Weight(k, x, x_lo), storage.Weight(k, y, y_lo)

    def load(offset, further: int, mask) -> Value:
        return src.load(offset + further, mask)

    def store(v, offset, further: int, mask) -> None:
        dst.store(dst.load(offset + further, mask) + v, offset + further, mask)

    squares = Squares(k, rows, columns, load, store)
    transpose_tiles(k, y, x, rows, columns, side=k.lanes, inner=squares.inner, edge=squares.edge, adds=True)


@lowering("transpose", adds="y", also=dict.fromkeys("xy", "bf16_i16 fp16_fp32 bf16_u16 e6m9 ue6m10"))
def lower_transpose(op: Op, c: Lowering) -> None:
    """Call transpose_add if the op adds to y; else copy the bits of each plane, transposed, whatever they encode."""
    rows, columns = (int(n) for n in op.x.shape)
    sizes = {"rows": rows, "columns": columns}
    if op.modes["y"] == "add":
        c.call(transpose_add, {**storage.weight_operands("y", op.y), **storage.weight_operands("x", op.x)}, sizes, writes="y y_lo")
        return
    planes = FORMATS[op.x.dtype].planes
    for i, name in enumerate(planes or (op.x.dtype,)):
        kind = f"i{FORMATS[name].bits}"
        pair = {n: (plane(t, i)[0] if planes else part(t), kind) for n, t in (("y", op.y), ("x", op.x))}
        c.call(transpose_plane, pair, sizes, writes="y")
