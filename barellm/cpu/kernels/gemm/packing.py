"""Packing of GEMM operands into the order in which the micro-kernel reads them, in a thread's scratch (BLIS's packm).

    B panel    (depth, NR)   [depth][NR] fp32, or VNNI [depth / 2][NR][2] bf16: pairs of rows interleaved, an odd depth zero-padded
    packed A   (depth, MC)   [tile of MR columns][depth][MR] fp32, or VNNI [tile][depth / 2][MR][2] bf16 (`PackedA`, wgrad only)

A unit is 32 bits: one fp32, or a VNNI pair where the ISA has a bf16 dot product. Without one, bf16 becomes fp32 while packing; fp16
always does. Packing is cut into chunks, so that it can be spread over a micro-kernel's loop (`PackTask`, `PanelBuffers`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import ISA, KernelBuilder, Pointer, Value
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang.vector import transpose_groups
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div, round_up

LINE = 64  # bytes of a cache line
NEAR, FAR = 4, 64  # prefetch distances in chunks (of A: in units), into the L1 and the L2
LEFT_NEAR = 8  # into the L1 of A, several units of which are packed at a time


def uses_vnni(isa: ISA, dtype: str) -> bool:
    """Whether packed operands of `dtype` are in VNNI layout: bf16 pairs along the depth."""
    return dtype == "bf16" and bool(isa.dot)


def panel_bytes(isa: ISA, dtype: str, depth: int, width: int) -> int:
    """The bytes of a packed block of `width` columns, a multiple of 64."""
    if amx.uses_tiles(isa, dtype):
        depth = amx.padded(depth)
    nbytes = ceil_div(depth, 2) * width * 4 if uses_vnni(isa, dtype) else depth * width * 4
    return round_up(nbytes, 64)


class PackTask(ABC):
    """The packing of one panel, in chunks: all at once, or spread over a micro-kernel's loop, where ports are idle."""

    def __init__(self, k, count) -> None:
        """`count`: how many whole chunks there are."""
        self.k, self.count = k, k.int(count)

    @abstractmethod
    def chunk(self, i) -> None:
        """Pack chunk i."""

    @abstractmethod
    def pack_tail(self) -> None:
        """Pack what is left behind the whole chunks."""

    def run(self) -> None:
        with self.k.loop(0, self.count) as i:
            self.chunk(i)
        self.pack_tail()

    def spread(self, calls, wanted) -> None:
        """Spread the chunks over `calls` calls of `step`; none unless `wanted`."""
        self.count = self.k.select(wanted, self.count, 0)
        self.done, self.per_call = self.k.var(0), (self.count + calls - 1) // self.k.max(calls, 1)

    def step(self) -> None:
        """Pack the next `per_call` chunks, as long as there are any."""
        k = self.k
        first = self.done.value
        self.done.value = k.min(first + self.per_call, self.count)
        with k.loop(first, self.done.value) as i:
            self.chunk(i)


def can_overlap_packing(isa: ISA, dtype: str) -> bool:
    """Whether a micro-kernel leaves registers for packing and for another tile's epilogue."""
    return isa.registers == 32 and not amx.uses_tiles(isa, dtype)


class PanelBuffers:
    """Double-buffered packed panels in a thread's scratch: the micro-kernel reads one while the thread packs the other, piecewise.
    Protocol: acquire(n) -> panel; pack_next(m); step() inside the micro-kernel; commit(). They are the thread's own: no barrier."""

    def __init__(self, k, at, nbytes: int, pack: Callable[[Pointer, Value], PackTask]) -> None:
        """Two buffers of `nbytes` from `at` on. pack(pointer, number) is the task that packs panel `number` there."""
        self.k, self.at, self.nbytes, self.pack = k, at, nbytes, pack
        # Byte offset of the current buffer (0 or nbytes); numbers of the panels in it and in the other buffer, -1: none.
        self.offset, self.current, self.ready = k.var(0), k.var(-1), k.var(-1)

    def _other(self) -> Pointer:
        """The buffer that the micro-kernel does not read."""
        return self.at.bytes(self.nbytes - self.offset.value)

    def acquire(self, number) -> Pointer:
        """The packed panel `number`; packs it now unless `commit` has."""
        k = self.k
        with k.when(self.current.value.differs(number)):
            with k.when(self.ready.value.differs(number)):
                self.pack(self._other(), number).run()
            self.offset.value = self.nbytes - self.offset.value
            self.current.value, self.ready.value = number, -1
        return self.at.bytes(self.offset.value)

    def pack_next(self, number, wanted, calls) -> None:
        """Start packing the next panel, if `wanted`, in the next `calls` calls of `step`; `commit` must follow."""
        self.next, self.wanted = number, wanted & (calls > 0) & number.differs(self.current.value)
        self.packing = self.pack(self._other(), number)
        self.packing.spread(calls, self.wanted)

    def step(self) -> None:
        self.packing.step()

    def commit(self) -> None:
        """The panel of `pack_next` is complete: packs its partial chunk, after all calls of `step`."""
        with self.k.when(self.wanted):
            self.packing.pack_tail()
            self.ready.value = self.next


@dataclass
class PackBTransposed(PackTask):
    """Packs a B panel (depth, nr) from a transposed B: elements [0, depth) of rows [col, col + nr) of w, which are B's columns, to
    `panel` [k unit][nr]. A chunk is 4 units of `lanes` columns, transposed 4 x 4 in each 128-bit group; chunks go along the depth
    first. Columns beyond the last repeat it; the epilogue never stores them."""

    k: KernelBuilder
    panel: Pointer
    w: Pointer  # (cols, stride) row-major, from the first element of the KC block on
    col: Value
    cols: int
    stride: int  # elements from a row of w to the next
    depth: Any  # a Value where the last KC block is shorter
    even: bool  # depth is a whole number of chunks
    nr: int  # columns of the panel, a multiple of `lanes`
    fetch: Callable[[Value], None] | None = None  # fetch(i), with chunk i: prefetch what is packed later; None: `_fetch_ahead`

    def __post_init__(self) -> None:
        self.vnni = uses_vnni(self.k.isa, self.w.dtype)
        self.elements = 8 if self.vnni else 4  # of a column in a chunk: 4 units, with VNNI pairs of bf16
        self.depth_chunks = self.depth // self.elements  # whole chunks of a column
        super().__init__(self.k, self.depth_chunks * (self.nr // self.k.lanes))

    def _column_of_b(self, i) -> Pointer:
        column = self.k.min(self.col + i, self.cols - 1) if self.cols % self.nr else self.col + i
        return self.w.at(column * self.stride)

    def _fetch_ahead(self, i) -> None:
        """Prefetch what chunks i + NEAR (to L1) and i + FAR (to L2) read; a prefetch ignores addresses beyond w."""
        k, quarter = self.k, self.k.lanes // 4
        for lead, near in ((NEAR, True), (FAR, False)):
            j = i + lead
            column = self.col + j // self.depth_chunks * k.lanes + i % 4 * quarter
            later = self.w.at(column * self.stride + j % self.depth_chunks * self.elements)
            for r in range(quarter):  # a line has four chunks: each prefetches a quarter of the lines
                k.prefetch(later.at(r * self.stride), near=near)

    def chunk(self, i) -> None:
        """Pack 4 units of `lanes` columns."""
        k = self.k
        c = i // self.depth_chunks * k.lanes  # first column in the panel
        d = i % self.depth_chunks * self.elements  # first element of the depth
        (self.fetch or self._fetch_ahead)(i)
        # Vector r has in its 128-bit group g the 4 units of column 4 g + r, so that the transposed vectors have columns in order.
        vectors = []
        for r in range(4):
            groups = [_load_four_units(k, self._column_of_b(c + (r + g)).at(d), self.vnni) for g in range(0, k.lanes, 4)]
            vectors.append(k.concat(groups))
        for u, vector in enumerate(transpose_groups(k, vectors)):
            unit = d // (self.elements // 4) + u
            self.panel.as_dtype("i32").store_raw(vector, unit * self.nr + c)

    def pack_tail(self) -> None:
        """Pack the units of a partial chunk, one by one."""
        if self.even:
            return
        k, unit_elements = self.k, 2 if self.vnni else 1
        with k.loop(0, self.nr) as c, k.loop(self.depth_chunks * self.elements, self.depth, unit_elements) as d:
            source = self._column_of_b(c).at(d)
            unit = self._pair_or_last(source, d) if self.vnni else k.op("i32", f"bitcast float {source.get().ref} to i32")
            target = self.panel.at((d // unit_elements) * self.nr + c)
            k.line(f"store {unit.typed}, ptr {target.ref}, align 4")

    def _pair_or_last(self, source, d) -> Value:
        """Elements d and d + 1 of the depth as one i32, two bf16 from `source` on; the last of an odd depth is paired with zero."""
        k = self.k
        first = k.op("i16", f"load i16, ptr {source.ref}, align 2")
        unit = k.var(k.op("i32", f"zext i16 {first.ref} to i32"))
        with k.when(d + 1 < self.depth):
            unit.value = k.op("i32", f"load i32, ptr {source.ref}, align 2")
        return unit.value


def _load_four_units(k, p, pair: bool) -> Value:
    """4 units of the packed form as i32: VNNI pairs of bf16, contiguous in memory, or fp32."""
    if pair or p.dtype == "fp32":
        return k.op("<4 x i32>", f"load <4 x i32>, ptr {p.ref}, align {p.itemsize}")
    half = k.op("<4 x i16>", f"load <4 x i16>, ptr {p.ref}, align 2")
    return k.bitcast(k.widen16(half, p.dtype), "<4 x i32>")


@dataclass
class PackB(PackTask):
    """Packs a B panel (depth, width) from row-major B: rows [0, depth) and columns [col, col + width) of b, to `block`
    [depth][width] fp32 or VNNI (`vnni`). A chunk is a row, or with VNNI an interleaved pair of rows."""

    k: KernelBuilder
    block: Pointer
    b: Pointer
    col: Value
    depth: Any
    stride: int  # elements from a row of b to the next
    width: int
    cols: int | None  # b's columns where the panel may exceed them and is zero-padded, else None
    columns_next: bool = False  # the panel of the next columns follows, not that of the next rows: the far prefetch goes there

    def __post_init__(self) -> None:
        self.depth = self.k.int(self.depth)
        self.vnni = uses_vnni(self.k.isa, self.b.dtype)
        super().__init__(self.k, self.depth >> 1 if self.vnni else self.depth)

    def _load(self, row, v: int) -> Value:
        """Vector of row `row` of b from panel column v on: raw 16-bit lanes with VNNI, else fp32; zero beyond `cols`."""
        mask = None if self.cols is None else self.k.mask_first(self.cols - (self.col + v))
        p = self.b.at(row * self.stride + self.col)
        return p.load_raw(v, mask) if self.vnni else p.load(v, mask)

    def _prefetch_rows(self, row) -> None:
        """Prefetch the panel's row NEAR rows ahead to L1, and to L2 what is needed later."""
        b, col, stride = self.b, self.col, self.stride
        far = row * stride + col + self.width if self.columns_next else (row + FAR) * stride + col
        near = (row + NEAR) * stride + col
        for first, level in ((near, True), (far, False)):
            for line in range(0, self.width * b.itemsize, LINE):
                self.k.prefetch(b.at(first).bytes(line), near=level)

    def _store_pair(self, d, v: int, even, odd) -> None:
        """Vector v of the interleaved rows d and d + 1."""
        pairs = self.k.bitcast(self.k.interleave(even, odd), self.k.ivec)
        self.block.as_dtype("i32").store_raw(pairs, (d >> 1) * self.width + v)

    def chunk(self, i) -> None:
        """Pack row i of b, or with VNNI its rows 2 i and 2 i + 1, interleaved, to row i of the block; prefetch later rows."""
        vectors = range(0, self.width, self.k.lanes)
        if not self.vnni:
            self._prefetch_rows(i)
            for v in vectors:
                self.block.as_dtype("fp32").store(self._load(i, v), i * self.width + v)
            return
        d = i << 1
        self._prefetch_rows(d)
        self._prefetch_rows(d + 1)
        for v in vectors:
            self._store_pair(d, v, self._load(d, v), self._load(d + 1, v))

    def pack_tail(self) -> None:
        """Pack the last row of an odd depth, paired with zeros."""
        k, depth = self.k, self.depth
        if self.vnni:
            with k.when((depth & 1).differs(0)):
                for v in range(0, self.width, k.lanes):
                    self._store_pair(depth - 1, v, self._load(depth - 1, v), k.const(0, f"<{k.lanes} x i16>"))


@dataclass
class PackedA:
    """A of a weight gradient, packed from A^T: columns of b (.., cols) as [columns / mr][unit][mr] words of 32 bits in thread
    scratch, from `at` on. A unit is a row of b, or with VNNI (`pair`) a pair of rows. A micro-kernel reads its tile, MR columns,
    sequentially.

    Tiles that share cache lines of b are packed together, a group of `group_tiles`; the next group is packed while the micro-kernel
    first reads the current one. Protocol: acquire(number); then tile(column) -> packed tile, step() inside each micro-kernel.

    `max_units`: room of a column, in units. Of the current block (`acquire`), rows [0, depth) and columns [first, last) of `b`:
    `whole_units` of a column (an odd last row is not in them), `groups`, and `per_step`, units that a step packs. Variables of
    the emitted code: `current`, the block's number (-1: none); `group`, the next one to pack; `unit`, the next of its units."""

    k: KernelBuilder
    at: Pointer
    dtype: str
    mr: int  # columns of b in a tile, rows of A
    cols: int  # columns of b
    stride: int  # elements from a row of b to the next
    max_depth: Value  # of any block
    inside: bool  # no tile hangs over the last column of b; else tiles are zero-padded
    block: Callable[[Value], tuple[Pointer, Value, Value, Value]]  # block(number): (b, first, last, depth)

    def __post_init__(self) -> None:
        self.at = self.at.as_dtype("i32")
        self.pair = uses_vnni(self.k.isa, self.dtype)
        self.max_units = (self.max_depth + 1) >> 1 if self.pair else self.max_depth
        self.group_tiles = max(1, LINE // (self.mr * itemsize(self.dtype)))
        self.current = self.k.var(-1)
        self.group = self.k.var(0)
        self.unit = self.k.var(0)

    def acquire(self, number, calls) -> None:
        """Make block `number` current; `step` is called `calls` times in each micro-kernel. What is packed of it stays."""
        k = self.k
        with k.when(self.current.value.differs(number)):
            self.current.value, self.group.value, self.unit.value = number, k.int(0), k.int(0)
        self.b, self.first, self.last, self.depth = self.block(number)
        self.whole_units = self.depth >> 1 if self.pair else self.depth
        self.groups = k.ceil_div(self.last - self.first, self.group_tiles * self.mr)
        self.per_step = (self.whole_units + calls * self.group_tiles - 1) // (calls * self.group_tiles)

    def tile(self, column) -> Pointer:
        """The packed tile that starts `column` columns after the block's first."""
        k = self.k
        with k.when(self.group.value.equals(column // (self.group_tiles * self.mr))):
            self._pack_units_until(self.whole_units)
        return self.at.at(column * self.max_units)

    def step(self) -> None:
        """Pack the next `per_step` units of the next group, if there is one."""
        k = self.k
        with k.when(self.group.value < self.groups):
            self._pack_units_until(k.min(self.unit.value + self.per_step, self.whole_units))

    def _pack_units_until(self, end) -> None:
        """Pack the next group from unit `self.unit` up to unit `end`. If `end` is its last whole unit, the group is complete."""
        k = self.k
        group = self.group.value
        tiles = self._tiles_of(group)
        self._pack_whole_units(tiles, end)
        is_complete = end.equals(self.whole_units)
        if self.pair:  # the last row of an odd depth follows the whole units
            with k.when(is_complete & (self.depth & 1).differs(0)):
                for col in tiles:
                    self._pack_unit(col, self.whole_units, masked=not self.inside, half=True)
        # Where the next step goes on: in the group after this one, or in this group at `end`.
        next_group = k.select(is_complete, group + 1, group)
        next_unit = k.select(is_complete, 0, end)
        self.group.value = next_group
        self.unit.value = next_unit

    def _tiles_of(self, group) -> list[Value]:
        """The columns of b where the tiles of a group start; beyond the last tile the last one is packed once more."""
        first, last = self.first, self.last
        start = first + group * (self.group_tiles * self.mr)
        last_tile = first + (last - first - 1) // self.mr * self.mr
        return [self.k.min(start + i * self.mr, last_tile) for i in range(self.group_tiles)]

    def _pack_whole_units(self, tiles: list[Value], end) -> None:
        """Pack units [self.unit, end) of the `tiles` of a group, given by their columns."""
        k = self.k
        hangs_over = tiles[-1] + self.mr > self.cols
        if not self.inside:
            with k.when(hangs_over), k.loop(self.unit.value, end) as u:
                self._pack_group_unit(tiles, u, masked=True)
        with nullcontext() if self.inside else k.otherwise(hangs_over), k.loop(self.unit.value, end) as u:
            self._pack_group_unit(tiles, u, masked=False)

    def _pack_group_unit(self, tiles: list[Value], u, *, masked: bool) -> None:
        """Pack unit u of the tiles of a group, and prefetch later units. A group may begin inside a cache line and end in another:
        the L2 has the first from the group before, so only the last is prefetched at distance FAR. After the last unit come those
        of the next group: a few hundred tokens are not many times FAR."""
        k, unit_rows = self.k, 2 if self.pair else 1
        first_col, last_col = tiles[0], tiles[-1] + (self.mr - 1)
        near_unit, far_unit = u + LEFT_NEAR, u + FAR
        in_next_group = far_unit >= self.whole_units
        far_unit = k.select(in_next_group, far_unit - self.whole_units, far_unit)
        far_col = k.select(in_next_group, last_col + self.group_tiles * self.mr, last_col)
        for unit, col, near in ((near_unit, first_col, True), (near_unit, last_col, True), (far_unit, far_col, False)):
            for r in range(unit_rows):
                row = unit * unit_rows + r
                k.prefetch(self.b.at(row * self.stride + col), near=near)
        for col in tiles:
            self._pack_unit(col, u, masked=masked)

    def _pack_unit(self, col, u, *, masked: bool, half: bool = False) -> None:
        """Pack unit u of the tile at column `col` of b: MR words of 32 bits, fp32 or VNNI pairs of rows 2 u and 2 u + 1. `masked`:
        it may hang over the last column and is zero-padded; `half`: the unit is the last row of an odd depth, paired with zeros."""
        k, b = self.k, self.b
        target = self.at.at((col - self.first) * self.max_units + u * self.mr)
        for v in range(0, self.mr, k.lanes):
            lanes = min(self.mr - v, k.lanes)
            words = self._load(u << 1 if self.pair else u, col, v, lanes, masked=masked)
            if self.pair:
                odd = k.const(0, f"<{lanes} x i16>") if half else self._load((u << 1) + 1, col, v, lanes, masked=masked)
                words = k.bitcast(k.interleave(words, odd), f"<{lanes} x i32>")
            elif b.itemsize == 2:
                words = k.widen16(words, b.dtype)
            k.line(f"store {words.typed}, ptr {target.at(v).ref}, align 4")

    def _load(self, row, col, v: int, lanes: int, *, masked: bool) -> Value:
        """`lanes` elements of a row of b, unconverted, from column col + v on; `masked`: none beyond the last column is read."""
        k = self.k
        p = self.b.at(row * self.stride + col + v)
        if masked:
            whole_vector = p.load_raw(0, k.mask_first(self.cols - (col + v)))
            return k.shuffle(whole_vector, None, list(range(lanes)))
        type_ = f"<{lanes} x {'i16' if p.itemsize == 2 else 'float'}>"
        return k.op(type_, f"load {type_}, ptr {p.ref}, align {p.itemsize}")
