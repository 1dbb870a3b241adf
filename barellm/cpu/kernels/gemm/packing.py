"""Packing: operands of a product as the register tile reads them in order, made in this thread's scratch.

A panel of NV vectors of columns is [depth][NV][lanes]; with a bf16 dot instruction the depth goes in pairs,
[depth / 2][NV][lanes][2], and an odd depth gets a zero. Without one, bf16 becomes fp32 while packing; fp16 always does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose_groups
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div, round_up

LINE = 64  # bytes of a cache line
NEAR, FAR = 4, 64  # so many chunks earlier their lines are fetched into the first cache and into the second
LEFT_NEAR = 8  # for units of a left block, which go several at a time


def uses_vnni(isa: ISA, dtype: str) -> bool:
    """Whether operands of `dtype` go in pairs along the depth."""
    return dtype == "bf16" and bool(isa.dot)


def panel_bytes(isa: ISA, dtype: str, depth: int, width: int) -> int:
    """The bytes of a packed block of `width` columns, a multiple of 64."""
    if amx.uses_tiles(isa, dtype):
        depth = amx.padded(depth)
    nbytes = ceil_div(depth, 2) * width * 4 if uses_vnni(isa, dtype) else depth * width * 4
    return round_up(nbytes, 64)


class Packing:
    """A panel that is packed a chunk at a time, all at once or while tiles are multiplied: beside their multiply-adds the moves and
    shuffles cost next to nothing, and memory is waited for by nobody."""

    def __init__(self, k: KernelBuilder, count: Any, chunk: Callable[[Value], None], rest: Callable[[], None]) -> None:
        """`chunk(i)` packs one of `count`, `rest()` what is not a whole one."""
        self.k, self.count, self.chunk, self.rest = k, k.int(count), chunk, rest

    def at_once(self) -> None:
        with self.k.loop(0, self.count) as i:
            self.chunk(i)
        self.rest()

    def spread(self, turns: Value, wanted: Value) -> None:
        """Work that is to be done in `turns` calls of `some`, or not at all unless it is `wanted`."""
        self.count = self.k.select(wanted, self.count, 0)
        self.done, self.step = self.k.var(0), (self.count + turns - 1) // self.k.max(turns, 1)

    def some(self) -> None:
        k = self.k
        first = self.done.value
        self.done.value = k.min(first + self.step, self.count)
        with k.loop(first, self.done.value) as i:
            self.chunk(i)


def beside(isa: ISA, dtype: str) -> bool:
    """Whether a tile leaves registers for packing and finishing others while it is multiplied."""
    return isa.registers == 32 and not amx.uses_tiles(isa, dtype)


class Panels:
    """Two panels in a thread's scratch: one is multiplied while the other is packed. `pack(where, number)` says how; a number
    stands for what is in a panel, -1 for nothing."""

    def __init__(self, k: KernelBuilder, at: Pointer, nbytes: int, pack: Callable[[Pointer, Value], Packing]) -> None:
        self.k, self.at, self.nbytes, self.pack = k, at, nbytes, pack
        self.place, self.have, self.ready = k.var(0), k.var(-1), k.var(-1)

    def _other(self) -> Pointer:
        return self.at.bytes(self.nbytes - self.place.value)

    def take(self, number: Value) -> Pointer:
        """The panel to multiply with, packed now unless it is there."""
        k = self.k
        with k.when(self.have.value.differs(number)):
            with k.when(self.ready.value.differs(number)):
                self.pack(self._other(), number).at_once()
            self.place.value = self.nbytes - self.place.value
            self.have.value, self.ready.value = number, -1
        return self.at.bytes(self.place.value)

    def follow(self, number: Value, wanted: Value, turns: Value) -> None:
        """The next panel, where it is `wanted`, is packed in the next `turns` calls of `some`; then `followed` must be called."""
        self.next, self.wanted = number, wanted & (turns > 0) & number.differs(self.have.value)
        self.packing = self.pack(self._other(), number)
        self.packing.spread(turns, self.wanted)

    def some(self) -> None:
        self.packing.some()

    def followed(self) -> None:
        with self.k.when(self.wanted):
            self.packing.rest()
            self.ready.value = self.next


def pack_b_transposed(
    k: KernelBuilder,
    panel: Pointer,
    w: Pointer,
    col: Value,
    *,
    cols: int,
    stride: int,
    depth: Any,
    even: bool,
    span: int,
    fetch: Callable[[Value], None] | None = None,
) -> Packing:
    """Panel columns `col`... of w (cols, stride), `depth` of each; `even`: always a whole number of chunks. A chunk is 4 units of
    `lanes` columns: 16 bytes of each become groups of vectors, and in each group 4 x 4 units are transposed. Columns beyond the
    last repeat it: their products are computed and never stored. `fetch(i)` fetches what is packed later, beside chunk i."""
    pair = uses_vnni(k.isa, w.dtype)
    lanes, elements = k.lanes, 8 if pair else 4
    hangs_over = cols % span != 0
    out = panel.as_dtype("i32")
    each = depth // elements

    def row(i: Any) -> Pointer:
        return w.at((k.min(col + i, cols - 1) if hangs_over else col + i) * stride)

    def fetch_ahead(i: Value) -> None:
        for lead, near in ((NEAR, True), (FAR, False)):
            j = i + lead
            later = w.at((col + j // each * lanes + i % 4 * (lanes // 4)) * stride + j % each * elements)
            for r in range(lanes // 4):  # a line has four chunks, and each fetches a quarter of the lines
                k.prefetch(later.at(r * stride), near=near)

    def chunk(i: Value) -> None:
        c, d = i // each * lanes, i % each * elements
        (fetch or fetch_ahead)(i)
        four = [k.concat([_units(k, row(c + (r + g)).at(d), pair) for g in range(0, lanes, 4)]) for r in range(4)]
        for u, vector in enumerate(transpose_groups(k, four)):
            out.store_raw(vector, (d // (elements // 4) + u) * span + c)

    def rest() -> None:
        if even:
            return
        with k.loop(0, span) as c, k.loop(each * elements, depth, 2 if pair else 1) as d:
            p = row(c).at(d)
            if not pair:
                value = k.op("i32", f"bitcast float {p.get().ref} to i32")
            else:
                half = k.var(k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {p.ref}, align 2').ref} to i32"))
                with k.when(d + 1 < depth):
                    half.value = k.op("i32", f"load i32, ptr {p.ref}, align 2")
                value = half.value
            target = out.at((d // (2 if pair else 1)) * span + c)
            k.line(f"store {value.typed}, ptr {target.ref}, align 4")

    return Packing(k, each * (span // lanes), chunk, rest)


def _units(k: KernelBuilder, p: Pointer, pair: bool) -> Value:
    """4 units of the packed form as i32: pairs of bf16 as they lie in memory, or fp32."""
    if pair or p.dtype == "fp32":
        return k.op("<4 x i32>", f"load <4 x i32>, ptr {p.ref}, align {p.itemsize}")
    half = k.op("<4 x i16>", f"load <4 x i16>, ptr {p.ref}, align 2")
    return k.bitcast(k.widen16(half, p.dtype), "<4 x i32>")


def pack_b(
    k: KernelBuilder, block: Pointer, b: Pointer, col: Any, depth: Any, *, stride: int, width: int, cols: Any,
    beside: bool = False,
) -> Packing:  # fmt: skip
    """Rows 0... of b (depth, stride), columns `col`... + width, with two depth rows woven into pairs where the ISA wants them: a
    chunk. `cols` is the column count where the block may hang over it, None where it cannot; what hangs over becomes zero.
    `beside`: the columns after these are packed next, and not the rows."""
    pair = uses_vnni(k.isa, b.dtype)
    lanes = k.lanes
    depth = k.int(depth)
    vectors = range(0, width, lanes)
    weave = [x for i in range(lanes) for x in (i, lanes + i)]

    def load(row: Any, v: int) -> Value:
        mask = None if cols is None else k.mask_first(cols - (col + v))
        p = b.at(row * stride + col)
        return p.load_raw(v, mask) if pair else p.load(v, mask)

    def fetch(row: Value) -> None:
        far = row * stride + col + width if beside else (row + FAR) * stride + col
        for at, near in (((row + NEAR) * stride + col, True), (far, False)):
            for line in range(0, width * b.itemsize, LINE):
                k.prefetch(b.at(at).bytes(line), near=near)

    def put(d: Value, v: int, even: Value, odd: Value) -> None:
        woven = k.bitcast(k.shuffle(even, odd, weave), k.ivec)
        block.as_dtype("i32").store_raw(woven, (d >> 1) * width + v)

    def chunk(i: Value) -> None:
        if not pair:
            fetch(i)
            for v in vectors:
                block.as_dtype("fp32").store(load(i, v), i * width + v)
            return
        d = i << 1
        fetch(d)
        fetch(d + 1)
        for v in vectors:
            put(d, v, load(d, v), load(d + 1, v))

    def rest() -> None:
        if pair:
            with k.when((depth & 1).differs(0)):
                for v in vectors:
                    put(depth - 1, v, load(depth - 1, v), k.const(0, f"<{lanes} x i16>"))

    return Packing(k, depth >> 1 if pair else depth, chunk, rest)


class LeftBlock:
    """Columns of b (depth, cols) as left operands of register tiles, in a thread's scratch: [columns / rows][units][rows], where
    a unit is a pair of depth rows, or one. A tile reads its part from the beginning to the end. As many tiles as share cache lines
    of b are packed together, a group; while one is multiplied the first time the next is packed, as panels are."""

    def __init__(
        self, k: KernelBuilder, at: Pointer, *, dtype: str, rows: int, cols: int, stride: int, most: Value, inside: bool,
        block: Callable[[Value], tuple[Pointer, Value, Value, Value]],
    ) -> None:  # fmt: skip
        """`rows` of a tile; `most`: the greatest depth of a block. `block(number)`: (b, first column, last, depth) of what the
        number stands for. `inside`: no tile hangs over the last of the `cols` columns; else what does becomes zero."""
        self.k, self.at, self.rows, self.block = k, at.as_dtype("i32"), rows, block
        self.cols, self.stride = cols, stride
        self.pair = uses_vnni(k.isa, dtype)
        self.slot = (most + 1) >> 1 if self.pair else most
        self.tiles, self.inside = max(1, LINE // (rows * itemsize(dtype))), inside
        self.have, self.group, self.unit = k.var(-1), k.var(0), k.var(0)  # `group`s are packed, `unit`s of the next

    def take(self, number: Value, calls: Value) -> None:
        """The block that is multiplied from now on; `some` is called so often in each tile."""
        k = self.k
        with k.when(self.have.value.differs(number)):
            self.have.value, self.group.value, self.unit.value = number, k.int(0), k.int(0)
        self.b, self.first, self.last, self.depth = self.block(number)
        self.whole = self.depth >> 1 if self.pair else self.depth
        self.groups = k.ceil_div(self.last - self.first, self.tiles * self.rows)
        self.step = (self.whole + calls * self.tiles - 1) // (calls * self.tiles)

    def tile(self, column: Value) -> Pointer:
        """The tile that starts `column` columns after the block's first, packed."""
        k = self.k
        with k.when(self.group.value.equals(column // (self.tiles * self.rows))):
            self._until(self.whole)
        return self.at.at(column * self.slot)

    def some(self) -> None:
        k = self.k
        with k.when(self.group.value < self.groups):
            self._until(k.min(self.unit.value + self.step, self.whole))

    def _until(self, end: Value) -> None:
        """The next group's units before `end`."""
        k, group = self.k, self.group.value
        columns = self._columns(group)
        hangs = columns[-1] + self.rows > self.cols
        if not self.inside:
            with k.when(hangs), k.loop(self.unit.value, end) as u:
                self._pack(columns, u, masked=True)
        with nullcontext() if self.inside else k.otherwise(hangs), k.loop(self.unit.value, end) as u:
            self._pack(columns, u)
        ends = end.equals(self.whole)
        if self.pair:
            with k.when(ends & (self.depth & 1).differs(0)):
                for col in columns:
                    self._put(col, self.whole, masked=not self.inside, half=True)
        self.group.value, self.unit.value = k.select(ends, group + 1, group), k.select(ends, 0, end)

    def _columns(self, group: Value) -> list[Value]:
        """The columns of b at which the tiles of a group start. For tiles beyond the last, the last one is packed once more."""
        start = self.first + group * (self.tiles * self.rows)
        end = self.first + (self.last - self.first - 1) // self.rows * self.rows
        return [self.k.min(start + i * self.rows, end) for i in range(self.tiles)]

    def _pack(self, columns: list[Value], u: Value, *, masked: bool = False) -> None:
        """Unit u of a group's tiles, and lines of later ones on their way into the caches. A group may begin inside a line and end
        in another: the second cache has the first of them from the group before, so only the last is fetched from FAR. Behind
        the last unit come the next group's, for a few hundred tokens are not many times FAR."""
        k, each = self.k, 2 if self.pair else 1
        first, last, near, far = columns[0], columns[-1] + (self.rows - 1), u + LEFT_NEAR, u + FAR
        beyond = far >= self.whole
        far = k.select(beyond, far - self.whole, far)
        there = k.select(beyond, last + self.tiles * self.rows, last)
        for unit, col in ((near, first), (near, last), (far, there)):
            for r in range(each):
                k.prefetch(self.b.at((unit * each + r) * self.stride + col), near=unit is near)
        for col in columns:
            self._put(col, u, masked=masked)

    def _put(self, col: Value, u: Value, *, masked: bool, half: bool = False) -> None:
        """Unit u of the tile at `col`; `masked`: it may hang over; `half`: of a pair of depth rows only the first is there."""
        k, b, rows = self.k, self.b, self.rows
        item = "i16" if b.itemsize == 2 else "float"
        tile = self.at.at((col - self.first) * self.slot + u * rows)

        for v in range(0, rows, k.lanes):
            n = min(rows - v, k.lanes)

            def load(row: Value, v: int = v, n: int = n) -> Value:
                p = b.at(row * self.stride + col + v)
                if not masked:
                    return k.op(f"<{n} x {item}>", f"load <{n} x {item}>, ptr {p.ref}, align {b.itemsize}")
                return k.shuffle(p.load_raw(0, k.mask_first(self.cols - (col + v))), None, list(range(n)))

            x = load(u << 1 if self.pair else u)
            if b.itemsize == 2 and not self.pair:
                x = k.widen16(x, b.dtype)
            if self.pair:
                other = k.const(0, f"<{n} x i16>") if half else load((u << 1) + 1)
                x = k.bitcast(k.shuffle(x, other, [j for i in range(n) for j in (i, n + i)]), f"<{n} x i32>")
            k.line(f"store {x.typed}, ptr {tile.at(v).ref}, align 4")
