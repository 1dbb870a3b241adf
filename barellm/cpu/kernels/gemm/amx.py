"""Products of bf16 on AMX tiles: what takes the place of the register tile (microkernel.py) where the ISA has them.

A tile register holds 16 rows of 64 bytes. One instruction adds A B to a tile of 16 x 16 fp32: A is 16 rows of 16 pairs along the
depth, B 16 such pairs of 16 columns each. Four accumulators of 32 x 32 results, two tiles of A, two of B: eight, all there are.

B is the panel of packing.py as it is, [depth / 2][32][2]. A are rows of an activation where they lie; the columns beyond the last
whole tile, and the rows of a tile that hangs over, are first copied into a block padded with zeros, so that nothing else is read. A
weight gradient has no operand with pairs along the depth in rows: its left block is transposed while its tokens are woven, for it
is packed once and multiplied with every panel.

It ran on an Intel Xeon with AMX. On processors without, tests emulate its instructions (tests/simulators/amx_emulator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up

SIDE = 16  # rows of a tile, and its columns of 4 bytes
MR = NR = 2 * SIDE  # of the results that four accumulators hold
TILE_K = 2 * SIDE  # bf16 of a row of A: one step of the contraction
LINE = 4 * SIDE  # bytes of a row of a tile
TILE_BYTES = SIDE * LINE
KC = 256  # depth that is multiplied at a time: so much of a panel stays in the first cache while rows pass
CORNERS = [(i, j) for i in range(2) for j in range(2)]  # accumulator 2 * i + j: rows from 16 i on, columns from 16 j on


def uses_tiles(isa: ISA, dtype: str) -> bool:
    return isa.tiles and dtype == "bf16"


def padded(depth: int) -> int:
    """The depth in whole steps."""
    return round_up(depth, TILE_K)


def kc_of(depth: int) -> int:
    """The depth of a part of a product, whole steps."""
    return ceil_div(depth, ceil_div(depth, KC) * TILE_K) * TILE_K


def left_bytes(depth: int) -> int:
    """Scratch for a block of MR rows of A."""
    return MR * padded(depth) * 2


@dataclass(frozen=True)
class Left:
    """A, two tiles of it a step: rows `stride` bytes apart, the second tile `below` bytes after the first, the next step `step`
    bytes further."""

    pointer: Pointer
    stride: int
    step: int
    below: Any


def row_major(pointer: Pointer, stride: int) -> Left:
    return Left(pointer, stride, 4 * SIDE, SIDE * stride)


def configure(k: KernelBuilder) -> None:
    """All eight tiles whole. Of the thread, so a kernel does it before its first product and calls `release` at its end."""
    config = Pointer(k, k.alloca("i64", 8), "i64")
    rows = int.from_bytes(bytes([SIDE] * 8), "little")
    columns = 4 * SIDE * 0x0001000100010001
    # Palette 1; 8 x 16 bits of bytes a row; 8 x 8 of rows.
    for i, word in enumerate((1, 0, columns, columns, 0, 0, rows, 0)):
        config.put(k.int(word), i)
    _tile(k, "ldtilecfg", ("ptr", config.ref))


def release(k: KernelBuilder) -> None:
    _tile(k, "tilerelease")


@contextmanager
def tile_registers(k: KernelBuilder, used: bool) -> Iterator[None]:
    """The kernel's whole work, where it may use tiles."""
    if used:
        configure(k)
    yield
    if used:
        release(k)


def multiply(
    k: KernelBuilder, out: Pointer, panel: Pointer, parts: list[tuple[Left, Any]], *, begun: Value | None = None,
    beside: Callable[[Value], None] | None = None,
) -> None:  # fmt: skip
    """out (MR, NR) fp32 = A @ panel, or where it was `begun` out += A @ panel. `parts` has A in pieces that lie one after the
    other along the depth, each with its number of steps. `beside(step)` is done in each step of the first."""
    row = 4 * NR
    begin_sums(k, out, begun, row=row)
    at = panel
    for left, steps in parts:
        with k.loop(0, steps) as s:
            here = replace(left, pointer=left.pointer.bytes(s * left.step))
            _multiply_step(k, here, at.bytes(s * (SIDE * row)), row)
            if beside is not None and left is parts[0][0]:
                beside(s)
        at = at.bytes(k.int(steps) * (SIDE * row))
    store_sums(k, out, row=row)


def begin_sums(k: KernelBuilder, out: Pointer, begun: Value | None, *, row: int) -> None:
    """The accumulators become zero, or where it was `begun` out (MR, NR), whose rows lie `row` bytes apart."""
    if begun is None:
        _clear_tiles(k)
        return
    with k.when(begun):
        for i, j in CORNERS:
            _tile(k, "tileloadd64", 2 * i + j, *_corner(out, i, j, row))
    with k.otherwise(begun):
        _clear_tiles(k)


def add_steps(k: KernelBuilder, left: Left, panel: Pointer, steps: Any) -> None:
    """The accumulators += A @ panel over `steps`."""
    unrolled = isinstance(steps, int)
    with nullcontext(0) if unrolled else k.loop(0, steps) as s:
        for u in range(steps) if unrolled else [s]:
            here = replace(left, pointer=left.pointer.bytes(u * left.step))
            _multiply_step(k, here, panel.bytes(u * (4 * SIDE * NR)), 4 * NR)


def store_sums(k: KernelBuilder, out: Pointer, *, row: int) -> None:
    for i, j in CORNERS:
        _tile(k, "tilestored64", 2 * i + j, *_corner(out, i, j, row))


def multiply_column(
    k: KernelBuilder, out: Pointer, count: int, left: Callable[[Value], Pointer], right: Pointer, steps: Any, *,
    begun: Value | None = None,
) -> None:  # fmt: skip
    """out (16 count, 16) fp32 = A @ B, or where it was `begun` out += A @ B, with `count` tiles of A one after the other, 4 at
    most, from `left(step)` on, and one of B. A step reads less that is new than `multiply`'s: where tiles of A are met again in
    other steps they come from the first cache."""
    row = ("i64", str(LINE))

    def accumulators(name: str) -> None:
        for i in range(count):
            _tile(k, name, i, ("ptr", out.bytes(i * TILE_BYTES).ref), row)

    if begun is None:
        _clear_tiles(k)
    else:
        with k.when(begun):
            accumulators("tileloadd64")
        with k.otherwise(begun):
            _clear_tiles(k)
    with k.loop(0, steps) as s:
        at = left(s)
        _tile(k, "tileloadd64", 7, ("ptr", right.bytes(s * TILE_BYTES).ref), row)
        for i in range(count):
            _tile(k, "tileloadd64", 4 + i % 3, ("ptr", at.bytes(i * TILE_BYTES).ref), row)
            _tile(k, "tdpbf16ps", i, 4 + i % 3, 7)
    accumulators("tilestored64")


def _clear_tiles(k: KernelBuilder) -> None:
    for tile in range(4):
        _tile(k, "tilezero", tile)


def _corner(out: Pointer, i: int, j: int, row: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Where an accumulator of a block with rows of `row` bytes lies, as operands of an instruction."""
    return ("ptr", out.bytes(i * SIDE * row + 4 * SIDE * j).ref), ("i64", str(row))


def add_product(
    k: KernelBuilder, out: Pointer, left: Left, right: Pointer, steps: Any, *, rows: int, cols: int, begins: bool = False
) -> None:  # fmt: skip
    """out (rows, cols) fp32 += A @ B over `steps` of TILE_K, or with `begins` = A @ B; rows and cols are multiples of 2 tiles. A's
    pairs of tiles lie one behind the other, B is [TILE_K / 2 * steps][cols] pairs."""
    row = 4 * cols
    for i0 in range(0, rows, MR):
        for j0 in range(0, cols, NR):
            block = out.bytes(i0 * row + 4 * j0)
            for i, j in CORNERS:
                if begins:
                    _tile(k, "tilezero", 2 * i + j)
                else:
                    _tile(k, "tileloadd64", 2 * i + j, *_corner(block, i, j, row))
            a0, b0 = left.pointer.bytes(i0 // SIDE * left.below), right.bytes(4 * j0)
            unrolled = isinstance(steps, int)
            with nullcontext(0) if unrolled else k.loop(0, steps) as s:
                for u in range(steps) if unrolled else [s]:
                    _multiply_step(k, replace(left, pointer=a0.bytes(u * left.step)), b0.bytes(u * (SIDE * row)), row)
            for i, j in CORNERS:
                _tile(k, "tilestored64", 2 * i + j, *_corner(block, i, j, row))


def _multiply_step(k: KernelBuilder, left: Left, b: Pointer, row: int) -> None:
    """The four accumulators += two tiles of A @ two of B, whose rows lie `row` bytes apart."""
    for i in range(2):
        a = left.pointer.bytes(k.int(left.below) * i)
        _tile(k, "tileloadd64", 4 + i, ("ptr", a.ref), ("i64", str(left.stride)))
        for j in range(2):
            if i == 0:
                _tile(k, "tileloadd64", 6 + j, ("ptr", b.bytes(4 * SIDE * j).ref), ("i64", str(row)))
            _tile(k, "tdpbf16ps", 2 * i + j, 4 + i, 6 + j)


def repeat(k: KernelBuilder, turns: Value) -> None:
    """`turns` times four independent products of tiles, on zeros: what the processor can do at best."""
    configure(k)
    for tile in range(8):
        _tile(k, "tilezero", tile)
    with k.loop(0, turns):
        for tile in range(4):
            _tile(k, "tdpbf16ps", tile, 4 + tile // 2, 6 + tile % 2)
    release(k)


REPEATED = 4 * SIDE * SIDE * TILE_K * 2  # floating-point operations of one turn of `repeat`


def multiply_rows(
    k: KernelBuilder, out: Pointer, a: Pointer, count: Value | None, panel: Pointer, block: Pointer, *, depth: int, stride: int,
    **how: Any,
) -> None:  # fmt: skip
    """out = rows [0, count) of a (rows, depth) @ panel; `count` None means MR rows. Rows of a lie `stride` elements apart.
    `block` is scratch of `left_bytes(depth)`, and `how` is for `multiply`."""
    whole = depth // TILE_K if count is None else 0
    parts: list[tuple[Left, Any]] = [(row_major(a, 2 * stride), whole)] if whole else []
    rest = padded(depth) - whole * TILE_K
    if rest:
        rows = MR if count is None else count
        _copy_rows(k, block, a, rows, first=whole * TILE_K, depth=depth, stride=stride, width=rest)
        parts.append((row_major(block, 2 * rest), rest // TILE_K))
    multiply(k, out, panel, parts, **how)


def _copy_rows(
    k: KernelBuilder, to: Pointer, a: Pointer, count: Any, *, first: int, depth: int, stride: int, width: int
) -> None:
    """Columns [first, depth) of `count` rows, `stride` elements apart, with zeros up to `width` columns."""
    end = first + (depth - first) // k.lanes * k.lanes
    with k.loop(0, count) as r:
        source, target = a.at(r * stride), to.as_dtype("bf16").at(r * width)
        if end > first:
            with k.loop(first, end, k.lanes) as c:
                target.store_raw(source.load_raw(c), c - first)
        for c in range(end, first + width, k.lanes):
            inside = max(0, min(depth - c, k.lanes))
            raw = source.load_raw(c, k.mask_first(inside)) if inside else k.const(0, f"<{k.lanes} x i16>")
            target.store_raw(raw, c - first)


def pad_panel(k: KernelBuilder, panel: Pointer, depth: Any) -> None:
    """Zero pairs after those of `depth`, up to a whole step."""
    pairs = k.ceil_div(depth, 2)
    with k.loop(pairs, (pairs + (SIDE - 1)) & -SIDE) as u:
        for v in range(0, NR, k.lanes):
            panel.as_dtype("fp32").store(0.0, u * NR + v)


def pack_left(
    k: KernelBuilder, block: Pointer, b: Pointer, col: Value, depth: Value, *, stride: int, width: int, cols: int | None
) -> None:
    """Rows [0, depth) of b (depth, stride), columns `col`... + width, as tiles of A whose rows are b's columns:
    [width / 16][steps][16][16] pairs. `cols` as for packing.py's pack_b; what hangs over becomes zero."""
    steps = k.ceil_div(depth, TILE_K)
    weave = [x for i in range(SIDE) for x in (i, SIDE + i)]

    def squares(s: Value, *, tail: bool) -> None:
        with k.loop(0, width, SIDE) as c:
            rows = []
            for i in range(TILE_K):
                token = s * TILE_K + i
                lanes = k.int(SIDE) if cols is None else cols - (col + c)
                if tail:
                    lanes = k.select(token < depth, lanes, 0)
                mask = None if cols is None and not tail else k.mask_first(lanes)
                rows.append(b.at(token * stride + col + c).load_raw(0, mask))
            pairs = [k.bitcast(k.shuffle(x, y, weave), k.ivec) for x, y in zip(rows[::2], rows[1::2], strict=True)]
            target = block.as_dtype("i32").bytes(((c // SIDE) * steps + s) * TILE_BYTES)
            for i, row in enumerate(transpose(k, pairs)):
                target.store_raw(row, i * SIDE)

    whole = depth // TILE_K
    with k.loop(0, whole) as s:
        squares(s, tail=False)
    with k.when(whole < steps):
        squares(whole, tail=True)


def _tile(k: KernelBuilder, name: str, *args: int | tuple[str, str]) -> None:
    """An intrinsic whose tile registers are constants: LLVM's own allocation of tiles needs passes that do not run here."""
    kinds = ["i8 immarg" if isinstance(a, int) else a[0] for a in args]
    k.declare(f"void @llvm.x86.{name}({', '.join(kinds)})")
    values = [f"i8 {a}" if isinstance(a, int) else f"{a[0]} {a[1]}" for a in args]
    k.line(f"call void @llvm.x86.{name}({', '.join(values)})")
