"""Packing: the right operand of a product as panels that the register tile reads in order, made in this thread's scratch.

A panel of NV vectors of columns is [depth][NV][lanes]; with a bf16 dot instruction the depth goes in pairs,
[depth / 2][NV][lanes][2], and an odd depth gets a zero. Without one, bf16 becomes fp32 while packing.
"""

from __future__ import annotations

from typing import Any

from barellm.cpu.choices import Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose


def paired(isa: ISA, dtype: str) -> bool:
    """Whether operands of `dtype` go in pairs along the depth."""
    return dtype == "bf16" and bool(isa.dot)


def panel_bytes(isa: ISA, dtype: str, depth: int, width: int) -> int:
    """Bytes of a packed block of `width` columns, a multiple of 64."""
    if amx.uses_tiles(isa, dtype):
        depth = amx.padded(depth)
    nbytes = -(-depth // 2) * width * 4 if paired(isa, dtype) else depth * width * 4
    return -(-nbytes // 64) * 64


def load_units(k: KernelBuilder, p: Pointer, index: Any, pair: bool) -> Value:
    """`lanes` units of the packed form as i32: pairs of bf16 as they lie in memory, or fp32."""
    if pair:
        return k.op(k.ivec, f"load {k.ivec}, ptr {p.at(index).ref}, align 2")
    return k.bitcast(p.load(index), k.ivec)


def pack_transposed(
    k: KernelBuilder, panel: Pointer, w: Pointer, col: Value, *, cols: int, depth: int, tile: Tile
) -> None:
    """Panel columns `col`... of w (cols, depth): squares of lanes x lanes units are transposed in registers. Columns beyond the
    last repeat it: their products are computed and never stored."""
    pair = paired(k.isa, w.dtype)
    unit = 2 if pair else 1
    step = k.lanes * unit
    units = -(-depth // unit)
    hangs_over = cols % (tile.vectors * k.lanes) != 0
    lanes, span = k.lanes, tile.vectors * k.lanes
    whole = depth - depth % step
    with k.loop(0, span, lanes) as offset:  # not unrolled: one square is a quarter of a product's compile time

        def square(d: Any, used: int) -> None:
            rows = []
            for i in range(lanes):
                row = col + offset + i
                if hangs_over:
                    row = k.min(row, cols - 1)
                at = w.at(row * depth)
                if isinstance(d, Value):
                    rows.append(load_units(k, at, d, pair))
                elif pair:
                    rows.append(k.bitcast(tail_pairs(k, at, d, depth - d), k.ivec))
                else:
                    rows.append(k.bitcast(at.load(d, k.mask_first(depth - d)), k.ivec))
            first = k.int(d) // unit if isinstance(d, Value) else k.int(d // unit)
            for i, row in enumerate(transpose(k, rows)[:used]):
                panel.as_dtype("i32").store_raw(row, (first + i) * span + offset)

        if whole:
            with k.loop(0, whole, step) as d:
                square(d, lanes)
        if depth % step:
            square(whole, units - whole // unit)


def tail_pairs(k: KernelBuilder, p: Pointer, start: int, count: int) -> Value:
    """`count` < 2 * lanes bf16 from `start`, zeros after them, as a vector of 2 * lanes i16."""
    parts = [p.load_raw(start + h, k.mask_first(max(0, min(k.lanes, count - h)))) for h in (0, k.lanes)]
    return k.concat(parts)


def pack_interleaved(
    k: KernelBuilder, block: Pointer, b: Pointer, col: Any, depth: Any, *, stride: int, width: int, cols: int | None
) -> None:
    """Rows 0... of b (depth, stride), columns `col`... + width, with two depth rows woven into pairs where the ISA wants them.
    `cols` is the column count where the block may hang over it, None where it cannot; what hangs over becomes zero."""
    pair = paired(k.isa, b.dtype)
    lanes = k.lanes

    def load(row: Any, v: int) -> Value:
        mask = None if cols is None else k.mask_first(cols - (col + v))
        p = b.at(row * stride + col)
        return p.load_raw(v, mask) if pair else p.load(v, mask)

    vectors = range(0, width, lanes)
    weave = [x for i in range(lanes) for x in (i, lanes + i)]
    if not pair:
        with k.loop(0, depth) as d:
            for v in vectors:
                block.as_dtype("fp32").store(load(d, v), d * width + v)
        return
    depth = k.int(depth)
    out = block.as_dtype("i32")

    def put(d: Value, v: int, even: Value, odd: Value) -> None:
        out.store_raw(k.bitcast(k.shuffle(even, odd, weave), k.ivec), (d >> 1) * width + v)

    with k.loop(0, depth - depth % 2, 2) as d:
        for v in vectors:
            put(d, v, load(d, v), load(d + 1, v))
    with k.when((depth % 2).differs(0)):
        for v in vectors:
            put(depth - 1, v, load(depth - 1, v), k.const(0, f"<{lanes} x i16>"))


def pack_tiles(
    k: KernelBuilder,
    block: Pointer,
    b: Pointer,
    first: Value,
    last: Value,
    depth: Value,
    *,
    stride: int,
    rows: int,
    cols: int,
) -> None:
    """Columns [first, last) of b (depth, stride) as left operands of register tiles: [columns / rows][units][rows], where a unit is
    a pair of depth rows, or one. A tile reads its part from the beginning to the end. Columns from `cols` on become zero."""
    pair = paired(k.isa, b.dtype)
    units = (depth + 1) >> 1 if pair else depth
    item, whole = "i16" if b.dtype == "bf16" else "float", depth >> 1 if pair else depth
    ragged = cols % rows != 0

    with k.loop(first, last, rows) as col:
        tile = block.as_dtype("i32").at((col - first) * units)

        def put(u: Value, d: Value, count: int, tile: Pointer = tile, col: Value = col) -> None:
            for v in range(0, rows, k.lanes):
                n = min(rows - v, k.lanes)

                def load(row: Value, v: int = v, n: int = n) -> Value:
                    p = b.at(row * stride + col + v)
                    if not ragged:
                        return k.op(f"<{n} x {item}>", f"load <{n} x {item}>, ptr {p.ref}, align {b.itemsize}")
                    return k.shuffle(p.load_raw(0, k.mask_first(cols - (col + v))), None, list(range(n)))

                x = load(d)
                if b.dtype == "bf16" and not pair:
                    x = k.op(f"<{n} x i32>", f"zext {x.typed} to <{n} x i32>") << 16
                if pair:
                    other = load(d + 1) if count == 2 else k.const(0, f"<{n} x i16>")
                    x = k.bitcast(k.shuffle(x, other, [j for i in range(n) for j in (i, n + i)]), f"<{n} x i32>")
                k.line(f"store {x.typed}, ptr {tile.at(u * rows + v).ref}, align 4")

        with k.loop(0, whole) as u:
            put(u, u << 1 if pair else u, 2)
        if pair:
            with k.when((depth & 1).differs(0)):
                put(whole, depth - 1, 1)
