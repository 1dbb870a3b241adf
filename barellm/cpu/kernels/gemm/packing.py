"""Packing of GEMM operands into the order in which the micro-kernel reads them, in a thread's scratch (BLIS's packm).

    B panel    (depth, NR)   [depth][NR] fp32, or VNNI [depth / 2][NR][2] bf16: pairs of rows interleaved, an odd depth zero-padded
    packed A   (depth, MC)   [tile of MR columns][depth][MR] fp32, or VNNI [tile][depth / 2][MR][2] bf16 (`PackedA`, wgrad only)

A unit is 32 bits: one fp32, or a VNNI pair where the ISA has a bf16 dot product. Without one, bf16 becomes fp32 while packing; fp16
always does. Packing is cut into chunks, so that it can be spread over a micro-kernel's loop (`PackTask`, `PanelBuffers`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

from barellm.cpu.kernel import ISA, Pointer, Value
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


class PackBTransposed(PackTask):
    """Packs a B panel (depth, nr) from a transposed B: elements [0, depth) of rows [col, col + nr) of w (cols, stride), which are
    B's columns, to `panel` [k unit][nr]. A chunk is 4 units of `lanes` columns, transposed 4 x 4 in each 128-bit group; chunks go
    along the depth first. Columns beyond the last repeat it; the epilogue never stores them."""

    def __init__(self, k, panel, w, col, *, cols: int, stride: int, depth, even: bool, nr: int,
            fetch: Callable[[Value], None] | None = None) -> None:  # fmt: skip
        """`even`: depth is a whole number of chunks. `fetch(i)`: with chunk i, prefetch what is packed later (None: NEAR and FAR
        chunks on). `nr`: columns of the panel, a multiple of `lanes`; `depth`: a Value where the last KC block is shorter.
        `depth_chunks`: whole chunks of a column."""
        self.out, self.w, self.col, self.cols, self.stride, self.depth = panel.as_dtype("i32"), w, col, cols, stride, depth
        self.even, self.nr, self.fetch, self.vnni = even, nr, fetch or self._fetch_ahead, uses_vnni(k.isa, w.dtype)
        self.elements = 8 if self.vnni else 4  # of a column in a chunk
        self.depth_chunks = depth // self.elements
        super().__init__(k, self.depth_chunks * (nr // k.lanes))

    def _column_of_b(self, i) -> Pointer:
        column = self.k.min(self.col + i, self.cols - 1) if self.cols % self.nr else self.col + i
        return self.w.at(column * self.stride)

    def _fetch_ahead(self, i) -> None:
        """Prefetch what chunks i + NEAR (to L1) and i + FAR (to L2) read. It may name addresses beyond w, which a prefetch
        ignores."""
        k, quarter = self.k, self.k.lanes // 4
        for lead, near in ((NEAR, True), (FAR, False)):
            j = i + lead
            column = self.col + j // self.depth_chunks * k.lanes + i % 4 * quarter
            later = self.w.at(column * self.stride + j % self.depth_chunks * self.elements)
            for r in range(quarter):  # a line has four chunks: each prefetches a quarter of the lines
                k.prefetch(later.at(r * self.stride), near=near)

    def chunk(self, i) -> None:
        """Pack 4 units of `lanes` columns."""
        # First column in the panel, first element of the depth.
        k, c, d = self.k, i // self.depth_chunks * self.k.lanes, i % self.depth_chunks * self.elements
        self.fetch(i)
        # Vector r has in its 128-bit group g the 4 units of column 4 g + r, so that the transposed vectors have columns in order.
        groups = range(0, k.lanes, 4)
        four = [k.concat([_load_four_units(k, self._column_of_b(c + (r + g)).at(d), self.vnni) for g in groups]) for r in range(4)]
        for u, vector in enumerate(transpose_groups(k, four)):
            self.out.store_raw(vector, (d // (self.elements // 4) + u) * self.nr + c)

    def pack_tail(self) -> None:
        """Pack the units of a partial chunk, one by one; the last of an odd depth is paired with zero."""
        if self.even:
            return
        k, unit_elements = self.k, 2 if self.vnni else 1
        with k.loop(0, self.nr) as c, k.loop(self.depth_chunks * self.elements, self.depth, unit_elements) as d:
            p = self._column_of_b(c).at(d)
            if not self.vnni:
                value = k.op("i32", f"bitcast float {p.get().ref} to i32")
            else:
                unit = k.var(k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {p.ref}, align 2').ref} to i32"))
                with k.when(d + 1 < self.depth):
                    unit.value = k.op("i32", f"load i32, ptr {p.ref}, align 2")
                value = unit.value
            target = self.out.at((d // unit_elements) * self.nr + c)
            k.line(f"store {value.typed}, ptr {target.ref}, align 4")


def _load_four_units(k, p, pair: bool) -> Value:
    """4 units of the packed form as i32: VNNI pairs of bf16, contiguous in memory, or fp32."""
    if pair or p.dtype == "fp32":
        return k.op("<4 x i32>", f"load <4 x i32>, ptr {p.ref}, align {p.itemsize}")
    half = k.op("<4 x i16>", f"load <4 x i16>, ptr {p.ref}, align 2")
    return k.bitcast(k.widen16(half, p.dtype), "<4 x i32>")


class PackB(PackTask):
    """Packs a B panel (depth, width) from row-major B: rows [0, depth) and columns [col, col + width) of b, row stride `stride`
    elements, to `block` [depth][width] fp32 or VNNI. A chunk is a row, or with VNNI an interleaved pair of rows."""

    def __init__(self, k, block, b, col, depth, *, stride: int, width: int, cols, columns_next: bool = False) -> None:
        """`cols`: the number of b's columns where the panel may exceed it (zero-padded), else None. `columns_next`: the panel of
        the next columns follows, not that of the next rows, so the far prefetch goes there."""
        self.block, self.b, self.col, self.depth, self.stride, self.width = block, b, col, k.int(depth), stride, width
        self.cols, self.columns_next, self.vnni = cols, columns_next, uses_vnni(k.isa, b.dtype)
        super().__init__(k, self.depth >> 1 if self.vnni else self.depth)

    def _load(self, row, v: int) -> Value:
        """Vector of row `row` of b from panel column v on: raw 16-bit lanes with VNNI, else fp32; columns beyond `cols` are
        zero."""
        mask = None if self.cols is None else self.k.mask_first(self.cols - (self.col + v))
        p = self.b.at(row * self.stride + self.col)
        return p.load_raw(v, mask) if self.vnni else p.load(v, mask)

    def _prefetch_rows(self, row) -> None:
        """Prefetch the panel's row NEAR rows ahead to L1, and to L2 what is needed later."""
        b, col, stride = self.b, self.col, self.stride
        far = row * stride + col + self.width if self.columns_next else (row + FAR) * stride + col
        for at, near in (((row + NEAR) * stride + col, True), (far, False)):
            for line in range(0, self.width * b.itemsize, LINE):
                self.k.prefetch(b.at(at).bytes(line), near=near)

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


class PackedA:
    """A of a weight gradient, packed from A^T: columns of b (depth, cols) as [columns / mr][units][mr] in thread scratch, a unit
    being a row of b or with VNNI a pair of rows. A micro-kernel reads its tile sequentially. Tiles that share cache lines of b are
    packed together, as a group; the next group is packed while the micro-kernel first reads the current one."""

    def __init__(self, k, at, *, dtype: str, rows: int, cols: int, stride: int, max_depth, inside: bool,
            block: Callable[[Value], tuple[Pointer, Value, Value, Value]]) -> None:  # fmt: skip
        """`at`: where it lies in scratch; `rows`: MR; `cols`, `stride`: columns and row stride (elements) of b; `max_depth`: of any
        block. `block(number)`: (b, first column, last column + 1, depth) of block `number`. `inside`: no tile hangs over the last
        of the `cols` columns; else it is zero-padded."""
        self.k, self.at, self.rows, self.block = k, at.as_dtype("i32"), rows, block
        self.cols, self.stride = cols, stride
        self.pair = uses_vnni(k.isa, dtype)
        self.max_units = (max_depth + 1) >> 1 if self.pair else max_depth  # of a column, so of 32-bit words
        self.tiles, self.inside = max(1, LINE // (rows * itemsize(dtype))), inside  # tiles of a group
        # The current block's number, -1: none; its packed groups; packed units of the next group.
        self.current, self.group, self.unit = k.var(-1), k.var(0), k.var(0)

    def acquire(self, number, calls) -> None:
        """Make block `number` current; `step` is called `calls` times in each micro-kernel. What is packed of it stays."""
        k = self.k
        with k.when(self.current.value.differs(number)):
            self.current.value, self.group.value, self.unit.value = number, k.int(0), k.int(0)
        self.b, self.first, self.last, self.depth = self.block(number)
        self.whole = self.depth >> 1 if self.pair else self.depth  # whole units of a column
        self.groups = k.ceil_div(self.last - self.first, self.tiles * self.rows)  # of tiles in the block
        self.per_call = (self.whole + calls * self.tiles - 1) // (calls * self.tiles)

    def tile(self, column) -> Pointer:
        """The packed tile that starts `column` columns after the block's first."""
        k = self.k
        with k.when(self.group.value.equals(column // (self.tiles * self.rows))):
            self._pack_units_until(self.whole)
        return self.at.at(column * self.max_units)

    def step(self) -> None:
        """Pack the next `per_call` units of the next group, if there is one."""
        k = self.k
        with k.when(self.group.value < self.groups):
            self._pack_units_until(k.min(self.unit.value + self.per_call, self.whole))

    def _pack_units_until(self, end) -> None:
        """Pack units [unit, `end`) of the next group, complete where `end` is its last whole unit; then an odd last row follows."""
        k, group = self.k, self.group.value
        columns = self._columns(group)
        hangs_over = columns[-1] + self.rows > self.cols
        if not self.inside:
            with k.when(hangs_over), k.loop(self.unit.value, end) as u:
                self._pack_group_unit(columns, u, masked=True)
        with nullcontext() if self.inside else k.otherwise(hangs_over), k.loop(self.unit.value, end) as u:
            self._pack_group_unit(columns, u)
        complete = end.equals(self.whole)
        if self.pair:
            with k.when(complete & (self.depth & 1).differs(0)):
                for col in columns:
                    self._pack_unit(col, self.whole, masked=not self.inside, half=True)
        self.group.value, self.unit.value = k.select(complete, group + 1, group), k.select(complete, 0, end)

    def _columns(self, group) -> list[Value]:
        """Where in b the tiles of a group start; beyond the last tile the last one is packed once more."""
        start = self.first + group * (self.tiles * self.rows)
        end = self.first + (self.last - self.first - 1) // self.rows * self.rows
        return [self.k.min(start + i * self.rows, end) for i in range(self.tiles)]

    def _pack_group_unit(self, columns, u, *, masked: bool = False) -> None:
        """Pack unit u of the tiles at `columns` of b, a group, and prefetch later ones. A group may begin inside a cache line and
        end in another: the L2 has the first from the group before, so only the last is prefetched at distance FAR. After the last
        unit come those of the next group: a few hundred tokens are not many times FAR."""
        k, unit_rows = self.k, 2 if self.pair else 1
        first, last, near, far = columns[0], columns[-1] + (self.rows - 1), u + LEFT_NEAR, u + FAR
        beyond = far >= self.whole
        far = k.select(beyond, far - self.whole, far)
        far_col = k.select(beyond, last + self.tiles * self.rows, last)
        for unit, col in ((near, first), (near, last), (far, far_col)):
            for r in range(unit_rows):
                k.prefetch(self.b.at((unit * unit_rows + r) * self.stride + col), near=unit is near)
        for col in columns:
            self._pack_unit(col, u, masked=masked)

    def _pack_unit(self, col, u, *, masked: bool, half: bool = False) -> None:
        """Pack unit u of the tile at column `col` of b: MR words of 32 bits, fp32 or VNNI pairs of rows 2 u and 2 u + 1. `masked`:
        it may hang over the last column and is zero-padded; `half`: the unit is the last row of an odd depth, paired with zeros."""
        k, b, rows = self.k, self.b, self.rows
        item = "i16" if b.itemsize == 2 else "float"
        tile = self.at.at((col - self.first) * self.max_units + u * rows)

        for v in range(0, rows, k.lanes):
            n = min(rows - v, k.lanes)

            def load(row, v: int = v, n: int = n) -> Value:  # n lanes of a row; masked: none beyond `cols` is read
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
