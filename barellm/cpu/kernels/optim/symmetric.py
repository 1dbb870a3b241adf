"""Products with symmetric results: x x^T, x^T x, and the square of a symmetric matrix. One triangle is computed, and stored twice.

Shapes: out (n, n); x (n, depth) where its rows are multiplied with each other, (depth, n) where its columns are; a (n, n).

A claim is a panel of columns of the result and a block of rows of it, of which only those from the panel's first column on are
computed. Their sums stay in this thread's scratch until the depth is through; then they go to memory by squares of `lanes` rows and
columns, as they are and transposed. An element and its mirror are one chain of the same products, so the result is symmetric to
the bit, and no bit depends on how it is cut.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from barellm.cpu.gemm_config import BLOCK, Tile, default_tile, part_of
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.gemm.microkernel import left_rows, tile_product
from barellm.cpu.kernels.gemm.packing import Packing, Panels, beside, pack_b, pack_b_transposed, panel_bytes, uses_vnni
from barellm.cpu.kernels.numbers import bits, number
from barellm.cpu.kernels.optim.muon import each_matrix
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.ops.base import Op


def symmetric_product(
    k: KernelBuilder, out, x, linear, square, *, n: int, depth: int, columns: bool, tile: Tile
) -> None:  # fmt: skip
    """out (n, n) = x x^T of x (n, depth); with `columns` x^T x of x (depth, n). With `linear` and `square` (bits of numbers, for
    all turns share the code), linear x + square x x of a symmetric x."""
    weave = linear is not None
    pair, lanes, span = uses_vnni(k.isa, x.dtype), k.lanes, tile.nr(k.isa)
    part = part_of(k.isa, depth, 2 if pair else 4)
    parts, panels, blocks = -(-depth // part), -(-n // span), -(-n // BLOCK)
    spare = beside(k.isa, x.dtype)
    factors = (k.splat(number(k, linear)), k.splat(number(k, square))) if weave else None
    scratch, nbytes = k.thread_scratch("i32"), panel_bytes(k.isa, x.dtype, part, span)
    wide = left_width(k.isa, tile)
    left_bytes = panel_bytes(k.isa, x.dtype, part, wide) if columns else 0
    held = scratch.bytes(2 * nbytes + 2 * left_bytes).as_dtype("fp32")

    def length(p: Value) -> Any:
        return k.select((p + 1).equals(parts), k.int(depth - (parts - 1) * part), part) if parts > 1 else depth

    def pack(into: Pointer, number: Value) -> Packing:
        """Part number % parts of the depth, of panel number // parts."""
        col, p = number // parts * span, number % parts
        if columns or weave:
            ragged = n if n % span else None
            return pack_b(k, into, x.at(p * (part * n)), col, length(p), stride=n, width=span, cols=ragged)
        even = part % 8 == 0 and depth % 8 == 0
        return pack_b_transposed(
            k, into, x.at(p * part), col, cols=n, stride=depth, depth=length(p), even=even, span=span
        )

    def pack_left(into: Pointer, number: Value) -> Packing:
        """The same part of the `wide` columns of x from number // parts on."""
        p = number % parts
        return pack_b(k, into, x.at(p * (part * n)), number // parts, length(p), stride=n, width=wide, cols=n)

    right = Panels(k, scratch, nbytes, pack)
    left_panels = Panels(k, scratch.bytes(2 * nbytes), left_bytes, pack_left)

    def multiply(row: Value, base: Value, first: Value, panel: Pointer, p: Value, lefts: Pointer | None) -> None:
        """A tile from row `row` on; `lefts`: the packed rows from `base` on."""
        units = (length(p) + 1) // 2 if pair and lefts is not None else length(p) // 2 if pair else length(p)
        tail, ends = None, None
        if lefts is None:
            rows = [k.min(row + r, n - 1) for r in range(tile.mr)]
            left, tail = left_rows(k, x.at(p * part), rows, pair, depth=depth, stride=depth)
            ends = (p + 1).equals(parts) if parts > 1 else None
        else:
            at = lefts.at(row - base)

            def left(r: int, u: Value) -> Value:
                type_ = "i32" if pair else "float"
                return k.splat(k.op(type_, f"load {type_}, ptr {at.at(u * wide + r).ref}, align 4"))

        def ahead(_: Value) -> None:
            right.some()
            if lefts is not None:
                left_panels.some()

        to = held.at((row - first) * span)
        begun = (p > 0, to) if parts > 1 else None
        sums = tile_product(
            k, tile, left, panel, units, pair, tail=tail, ahead=ahead if spare else None, sums=begun, ends=ends
        )
        for i, value in enumerate(value for values in sums for value in values):
            to.store(value, i * lanes)

    with k.parallel_for(panels * blocks) as unit:
        panel_index, block = unit % panels, unit // panels
        col = panel_index * span
        first, last = k.max(block * BLOCK, col), k.min((block + 1) * BLOCK, n)
        with k.when(first < last), k.loop(0, parts) as p:
            panel = right.take(panel_index * parts + p)
            if spare:
                more = p + 1 < parts
                after = k.select(more, panel_index * parts + p + 1, (panel_index + 1) % panels * parts)
                right.follow(after, more | (unit + 1 < panels * blocks), k.ceil_div(last - first, tile.mr) * tile.mr)
            if columns:
                with k.loop(first, last, wide) as base:
                    lefts = left_panels.take(base * parts + p)
                    following = base + wide < last
                    if spare:
                        left_panels.follow((base + wide) * parts + p, following, k.int(wide))
                    with k.loop(base, k.min(base + wide, last), tile.mr) as row:
                        multiply(row, base, first, panel, p, lefts)
                    if spare:
                        left_panels.followed()
            else:
                with k.loop(first, last, tile.mr) as row:
                    multiply(row, first, first, panel, p, None)
            if spare:
                right.followed()
        with k.when(first < last):
            _store(k, out, x, held, n, first, last, col, span, factors)


def _store(
    k: KernelBuilder, out, x, held, n: int, first, last, col, span: int, factors: tuple[Value, Value] | None
) -> None:
    """Finished sums of rows [first, last) and the `span` columns from `col` on, and their mirror."""
    lanes = k.lanes

    def block(row: Value, at: Value, masked: bool) -> None:
        """A square from (row, at) on; `masked`: it may hang over."""
        there = k.mask_first(n - at) if masked else None
        values = []
        for r in range(lanes):
            value = held.load((row - first + r) * span + (at - col))
            if factors is not None:
                linear, square = factors
                value = k.fma(x.load(k.min(row + r, n - 1) * n + at, there), linear, value * square)
            values.append(value)
        for r, value in enumerate(values):
            put(row + r, at, value, last if masked else None, n - at)
        for r, value in enumerate(transpose(k, values)):
            put(at + r, row, value, k.int(n) if masked else None, last - row)

    def put(row: Value, at: Value, value: Value, end: Value | None, width: Value) -> None:
        """A vector of a row, if that is below `end`, as far as `width`; all of it without an end."""
        if end is None:
            out.store(value, row * n + at)
            return
        with k.when(row < end):
            out.store(value, row * n + at, k.mask_first(width))

    with k.loop(first, last, lanes) as row, k.loop(col, k.min(col + span, n), lanes) as at:
        inside = (row + (lanes - 1) < last) & (at + (lanes - 1) < n)
        with k.when(inside):
            block(row, at, False)
        with k.otherwise(inside):
            block(row, at, True)


def left_width(isa: ISA, tile: Tile) -> int:
    """Columns of x that are packed as left operands at a time: whole tiles and whole vectors."""
    return lcm(tile.mr, isa.lanes)


def tile_of(isa: ISA, dtype: str, n: int) -> Tile:
    """The register tile; tile registers of AMX are not used."""
    return default_tile(replace(isa, tiles=False), dtype, n)


def thread_scratch_bytes(isa: ISA, dtype: str, depth: int, tile: Tile, *, columns: bool) -> int:
    """Two packed panels, two of left operands, the sums of a block; a last tile and a last square may hang over it."""
    part = part_of(isa, depth, 2 if uses_vnni(isa, dtype) else 4)
    left = panel_bytes(isa, dtype, part, left_width(isa, tile)) if columns else 0
    rows = BLOCK + tile.mr + isa.lanes
    return 2 * panel_bytes(isa, dtype, part, tile.nr(isa)) + 2 * left + rows * tile.nr(isa) * 4


def _lower(op: Op, c: Lowering, out: Any, x: Any, *, depth: int, columns: bool = False, **factors: Any) -> None:
    n = int(out.shape[1])
    tile = tile_of(c.isa, x.dtype, n)
    c.thread_scratch(thread_scratch_bytes(c.isa, x.dtype, depth, tile, columns=columns))
    constants = {"n": n, "depth": depth, "columns": columns, "tile": tile}
    for one in each_matrix(op, out=out, x=x):
        operands = {**one, "linear": factors.get("linear"), "square": factors.get("square")}
        c.call(symmetric_product, operands, constants, writes="out")


@lowering("gram")
def gram(op: Op, c: Lowering) -> None:
    _lower(op, c, op.a, op.x, depth=max(op.one(op.x)), columns=op.is_tall(op.x))


@lowering("gram_polynomial")
def gram_polynomial(op: Op, c: Lowering) -> None:
    _lower(op, c, op.b, op.a, depth=int(op.a.shape[1]), linear=bits(op.linear), square=bits(op.square))
