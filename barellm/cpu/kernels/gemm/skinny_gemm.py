"""Products of a few rows with a weight, at the speed of memory.

To multiply few rows costs what reading the weight costs. So nothing is packed: each row of the weight, which is a column of the
result, is read where it lies, from its first byte to its last, beside a few others. An element of the result is one chain of
multiply-adds of vectors along the depth, whose lanes are added at the end; so its bits do not depend on how many rows there are.
Several columns go together, since a chain alone would wait for its own sums. More rows than one go in tiles: where there are 32
registers, four rows with six columns take 10 loads for 24 multiply-adds. All rows pass by a block of columns, part of the depth
by part, before the next block. Parts keep the block near, and the sums wait in this thread's scratch from one part to the next.

What memory gives depends on how much of it is on its way. A processor that does not read far enough ahead is helped: while some
columns are multiplied, those that come next are fetched, in the order in which they are needed and evenly over all tiles.

Shapes: a (rows, depth), weight (cols, depth), out (rows, cols).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import lcm
from typing import Any

from barellm.cpu.gemm_config import FETCHES, SkinnyGemmConfig, Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import skinny_gemm_amx
from barellm.cpu.kernels.gemm.epilogue import Epilogue
from barellm.cpu.kernels.gemm.packing import LINE, uses_vnni
from barellm.cpu.kernels.gemm.skinny_gemm_amx import tiles_private
from barellm.cpu.lang import Pointer, Value, Var
from barellm.cpu.lang.vector import sums_of_lanes
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div, round_up

FEW = 64  # rows at most
LEAST_SPAN = 24  # columns of a claim, at least
PART_BYTES = 30 << 10  # of a block of columns, which every tile reads again
COPIED = 8  # rows up to which columns are multiplied where they lie, wherever that is
LOW = 2  # rows of the last tile, where no more are left
PAGE = 4096  # bytes after which a first cache puts lines into the same places


@dataclass(frozen=True)
class Cut:
    """How an ISA cuts a product: columns that one row is multiplied with at a time, `rows` x `wide` columns of a tile, and the
    columns of a claim."""

    columns: int
    rows: int
    wide: int
    lanes: int

    @classmethod
    def of(cls, isa: ISA, dtype: str) -> Cut:
        if isa.registers == 32:
            halves = dtype == "bf16" and not isa.dot and not isa.masked  # which wait in registers of their own
            return cls(8, 4, 4 if halves else 6, isa.lanes)
        n = 6 if isa.fma else 4  # without fma the product needs a register
        return cls(n, 2, n, isa.lanes)

    @property
    def span(self) -> int:
        return round_up(LEAST_SPAN, lcm(self.columns, self.wide, self.lanes))


def skinny_configs(isa: ISA, dtype: str, cols: int, depth: int) -> list[SkinnyGemmConfig]:
    """The ways to walk a weight, the one that is taken untuned first. A processor with AMX tiles reads ahead by itself, faster than
    by requests, each of which takes one of few places for lines on their way. Zen 4 reads most with requests into its second cache,
    Zen 3 with requests into its first."""
    on_tiles = skinny_gemm_amx.fits(isa, dtype, cols, depth)
    together = skinny_gemm_amx.TOGETHER if on_tiles else (Cut.of(isa, dtype).columns, Cut.of(isa, dtype).columns // 2)
    most = max(1, ceil_div(cols, span_of(isa, dtype, cols, depth)) // 8)
    ways = [SkinnyGemmConfig(n, t, f) for n in (1, 2, 4) if n <= most for t in together for f in FETCHES]
    first = SkinnyGemmConfig(1, together[0], 0 if isa.tiles else 2 if isa.masked else 1)
    return [first, *(way for way in ways if way != first)]


def skinny_gemm_scratch_bytes(isa: ISA, depth: int) -> int:
    """Bytes of a thread's own scratch: the sums of a claim, those that wait between two parts of the depth, copies of columns, and
    what tiles need."""
    return _sums_bytes(isa) + _kept_bytes(isa) + _copies_bytes(isa) + tiles_private(isa, depth)


def span_of(isa: ISA, dtype: str, cols: int, depth: int) -> int:
    """Columns of a claim."""
    return skinny_gemm_amx.NR if skinny_gemm_amx.fits(isa, dtype, cols, depth) else Cut.of(isa, dtype).span


def _sums_bytes(isa: ISA) -> int:
    cut = Cut.of(isa, "fp32")  # the span of every dtype
    return 4 * FEW * (max(cut.span, skinny_gemm_amx.NR) + cut.lanes)


def _kept_bytes(isa: ISA) -> int:
    cut = Cut.of(isa, "fp32")  # the span of every dtype
    return 4 * FEW * cut.span * cut.lanes


def _copies_bytes(isa: ISA) -> int:
    """At most: the depth goes in as many parts as make a block nearest to PART_BYTES, which are rounded up to whole vectors."""
    return 3 * PART_BYTES // 2 + 2 * LINE * Cut.of(isa, "fp32").wide


@dataclass(frozen=True)
class Block:
    """Columns over the part [first, last) of the depth, which is number `part`: where the part begins in each, and which column of
    the claim the first of them is. `tiles`: how many tiles of rows pass by. `ahead`: the first byte of the block that comes next,
    whose columns have `run` bytes; those of the next one follow them, or begin `apart` bytes further."""

    columns: list[Pointer]
    column: Value
    part: Value
    first: Value
    last: Value
    tiles: Value
    ahead: Pointer
    run: int = 0
    apart: int = 0


class FewRows:
    """One thread's part of a product with FEW rows at most."""

    def __init__(
        self, k: KernelBuilder, a: Pointer, weight: Pointer, rows: Value, *, cols: int, depth: int, stride: int,
        choice: SkinnyGemmConfig,
    ) -> None:  # fmt: skip
        """`stride`: elements from a row of a to the next."""
        self.k, self.a, self.weight, self.rows, self.choice = k, a, weight, rows, choice
        self.cols, self.depth, self.stride = cols, depth, stride
        self.cut, self.dot = Cut.of(k.isa, a.dtype), uses_vnni(k.isa, a.dtype)
        self.unit = k.lanes * (2 if a.dtype == "bf16" else 1)  # elements of a chain's next link or two
        self.itemsize = itemsize(a.dtype)
        self.span = span_of(k.isa, a.dtype, cols, depth)
        self.width = self.span + k.lanes  # of a row of sums, whose last vector may hang over
        self.sums = k.thread_scratch()
        scratch = self.sums.bytes(_sums_bytes(k.isa))
        self.kept, copies = scratch, scratch.bytes(_kept_bytes(k.isa))
        self.tiles = None
        if skinny_gemm_amx.fits(k.isa, a.dtype, cols, depth):
            sizes = {"cols": cols, "depth": depth, "stride": stride}
            self.tiles = skinny_gemm_amx.FewTiles(
                k, a, weight, rows, copies.bytes(_copies_bytes(k.isa)), choice=choice, **sizes
            )
        parts = max(1, round(self.cut.wide * depth * self.itemsize / PART_BYTES))
        self.part = round_up(ceil_div(depth, parts), self.unit)
        self.parts = ceil_div(depth, self.part)
        # Columns a multiple of a page apart displace each other in the first cache, and rows of x do too. Copies lie side by side.
        self.pitch = self.part * self.itemsize + LINE
        apart = depth * self.itemsize % PAGE == 0
        self.copies = [copies.bytes(i * self.pitch).as_dtype(a.dtype) for i in range(self.cut.wide)] if apart else []

    def run(self, finish: Callable[[Value], Epilogue]) -> None:
        """`finish(column)` makes the epilogue of a claim."""
        k, span, tiles = self.k, self.span, self.tiles
        if tiles:
            tiles.begin()
        with k.parallel_range(ceil_div(self.cols, span), self.choice.spans) as (begin, end), k.loop(begin, end) as at:
            column = at * span
            if tiles:
                tiles.multiply(column, self.sums, self.width)
            else:
                self._multiply_vectors(column)
            epilogue = finish(column)
            with k.loop(0, self.rows) as row:
                for v in range(span // k.lanes):
                    epilogue.put(row, v, self.sums.load(row * self.width + v * k.lanes))
        if tiles:
            tiles.end()

    def _multiply_vectors(self, column: Value) -> None:
        one = self.rows.equals(1)
        with self.k.when(one):
            self._one_row(column)
        with self.k.otherwise(one):
            self._blocks(column)

    def _one_row(self, column: Value) -> None:
        k, wide = self.k, self.choice.together
        with k.loop(0, self.cut.span, wide) as c:
            columns = self._columns(column + c, wide, k.int(0))
            ahead = columns[0].at(wide * self.depth)
            chains = self._chains(1, wide)
            block = Block(columns, c, k.int(0), k.int(0), k.int(self.depth), k.int(1), ahead)
            self._multiply([self.a], block, columns, chains, k.int(0))
            self._add_lanes(chains[0], self.sums.at(c))

    def _blocks(self, column: Value) -> None:
        """Tiles of all rows, block after block: the columns of the claim over one part of the depth, then over the next."""
        k, cut = self.k, self.cut
        high = (self.rows + 1) // cut.rows * cut.rows  # rows of high tiles, the last of which may have a row less
        tiles = high // cut.rows + k.ceil_div(self.rows - high, LOW)
        with k.loop(0, self.parts) as p, k.loop(0, cut.span, cut.wide) as c:
            first = p * self.part
            columns = self._columns(column + c, cut.wide, first)
            last = k.min(first + self.part, self.depth)
            block = Block(columns, c, p, first, last, tiles, **self._next(columns[0], c, p))
            near = self._copied(block) if self.copies else columns
            with k.loop(0, high, cut.rows) as row:
                self._tile(block, near, row, cut.rows, row // cut.rows)
            if cut.rows > LOW:
                with k.when(high < self.rows):
                    self._tile(block, near, high, LOW, tiles - 1)

    def _next(self, at: Pointer, c: Value, p: Value) -> dict[str, Any]:
        """Where the block behind the one at column c of the claim and part p lies, whose first column is `at`: the next columns, or
        the first ones over the next part, or those of the next claim."""
        k, cut = self.k, self.cut
        beside = cut.wide * self.depth
        if self.parts == 1:
            return {"ahead": at.at(beside)}
        back = k.select(
            p.equals(self.parts - 1), beside - p * self.part, self.part - (cut.span - cut.wide) * self.depth
        )
        ahead = at.at(k.select(c.equals(cut.span - cut.wide), back, beside))
        return {"ahead": ahead, "run": self.part * self.itemsize, "apart": (self.depth - self.part) * self.itemsize}

    def _copied(self, block: Block) -> list[Pointer]:
        """Where a block's columns are multiplied: copies of their whole units, if there are enough rows for that."""
        k, many, bits = self.k, self.rows > COPIED, f"<{self.unit * self.itemsize // 4} x i32>"
        whole = (block.last - block.first) // self.unit * self.unit
        with k.when(many), k.loop(0, whole, self.unit) as d:
            for column, copy in zip(block.columns, self.copies, strict=True):
                value = k.op(bits, f"load {bits}, ptr {column.at(d).ref}, align {self.itemsize}")
                k.line(f"store {value.typed}, ptr {copy.at(d).ref}, align {self.itemsize}")
        pairs = zip(self.copies, block.columns, strict=True)
        texts = [f"select {many.typed}, ptr {copy.ref}, ptr {column.ref}" for copy, column in pairs]
        return [Pointer(k, k.op("ptr", text).ref, self.a.dtype) for text in texts]

    def _tile(self, block: Block, columns: list[Pointer], row: Value, rows: int, turn: Value) -> None:
        """`rows` rows from `row` on, which are tile number `turn`; where fewer are left, the last one again."""
        k, cut = self.k, self.cut
        numbers = [k.min(row + i, self.rows - 1) for i in range(rows)]
        chains = self._chains(rows, cut.wide)
        kept = self.kept.at((block.column * FEW + row * cut.wide) * k.lanes)
        each = [chain for of_row in chains for chain in of_row]
        if self.parts > 1:
            with k.when(block.part > 0):
                for i, chain in enumerate(each):
                    chain.value = kept.load(i * k.lanes)
        left = [self.a.at(r * self.stride + block.first) for r in numbers]
        self._multiply(left, block, columns, chains, turn)
        ends = block.part.equals(self.parts - 1)
        if self.parts > 1:
            with k.otherwise(ends):
                for i, chain in enumerate(each):
                    kept.store(chain.value, i * k.lanes)
        with k.when(ends):
            for r, of_row in zip(numbers, chains, strict=True):
                self._add_lanes(of_row, self.sums.at(r * self.width + block.column))

    def _chains(self, rows: int, columns: int) -> list[list[Var]]:
        return [[self.k.var_vec(0.0) for _ in range(columns)] for _ in range(rows)]

    def _columns(self, first: Value, count: int, depth: Value) -> list[Pointer]:
        """The rows of the weight from element `depth` on; of those behind the last one that one."""
        k = self.k
        at = [k.min(first + i, self.cols - 1) if self.cols % self.cut.span else first + i for i in range(count)]
        return [self.weight.at(c * self.depth + depth) for c in at]

    def _multiply(
        self, left: list[Pointer], block: Block, columns: list[Pointer], chains: list[list[Var]], turn: Value
    ) -> None:
        """Adds the products of rows, each given where the block's part of the depth begins, with the block's columns to the chains.
        Meanwhile so many bytes of the next block are fetched that all tiles, of which this is number `turn`, fetch it all. Whole
        units are read from `columns`."""
        k, unit, size = self.k, self.unit, block.last - block.first
        whole, each = size // unit * unit, len(columns) * unit * self.itemsize
        step = k.int(each) // block.tiles
        begin, run = turn * (whole // unit) * step, block.run
        place = k.var(begin // run * (run + block.apart) + begin % run if run else begin)
        left_over = k.var(run - begin % run) if run else None
        with k.loop(0, whole, unit) as d:
            if self.choice.fetch:
                self._fetch(block.ahead.bytes(place.value), each, step, one=len(left) == 1)
                place.value = place.value + step
                if left_over:
                    rest = left_over.value - step
                    ends = rest <= 0
                    place.value = k.select(ends, place.value + block.apart, place.value)
                    left_over.value = k.select(ends, rest + run, rest)
            self._unit([x.at(d) for x in left], [w.at(d) for w in columns], chains)
        if not self.depth % unit:
            return
        with k.when(block.last.equals(self.depth)):
            rest = self.depth % unit
            for u in range(0, rest, k.lanes):
                mask, at = None if rest - u >= k.lanes else k.mask_first(rest - u), whole + u
                xs = [x.load(at, mask) for x in left]
                for c, w in enumerate(block.columns):
                    self._link(xs, w.load(at, mask), chains, c)

    def _unit(self, left: list[Pointer], right: list[Pointer], chains: list[list[Var]]) -> None:
        k = self.k
        if self.dot:
            xs = [_both(k, x) for x in left]
            for c, w in enumerate(right):
                y = _both(k, w)
                for x, of_row in zip(xs, chains, strict=True):
                    of_row[c].value = k.dot(of_row[c].value, x, y)
        elif self.a.dtype == "bf16":
            for half in (_lower, _upper):
                xs = [half(k, x) for x in left]
                for c, w in enumerate(right):
                    self._link(xs, half(k, w), chains, c)
        else:
            xs = [x.load() for x in left]
            for c, w in enumerate(right):
                self._link(xs, w.load(), chains, c)

    def _fetch(self, at: Pointer, most: int, count: Value, *, one: bool) -> None:
        """Ask for `count` bytes from `at` on, or up to twice as many lines: a branch that goes one way throughout a product costs
        less than a loop. There are `most` at most, and so many if the tile is `one` row."""
        k, first = self.k, 0
        while first * LINE < most:
            last = min(max(1, 2 * first), ceil_div(most, LINE))
            with nullcontext() if one or not first else k.when(count > first * LINE):
                for line in range(first, last):
                    k.prefetch(at.bytes(line * LINE), near=self.choice.fetch == 1)
            first = last

    def _link(self, xs: list[Value], w: Value, chains: list[list[Var]], column: int) -> None:
        for x, of_row in zip(xs, chains, strict=True):
            of_row[column].value = self.k.fma(x, w, of_row[column].value)

    def _add_lanes(self, chains: list[Var], out: Pointer) -> None:
        """The sum of each chain's lanes, side by side."""
        k = self.k
        values = [chain.value for chain in chains]
        for first in range(0, len(values), k.lanes):
            some = values[first : first + k.lanes]
            out.store(sums_of_lanes(k, some + [k.to(0.0, k.vec)] * (k.lanes - len(some))), first)


def _both(k: KernelBuilder, p: Pointer) -> Value:
    """2 `lanes` bf16 as lanes of 32 bits. A row of an odd depth, or of odd columns of a wider tensor, begins at an odd element: no
    more than the alignment of one element may be stated, though the type's own is larger."""
    return k.op(k.ivec, f"load {k.ivec}, ptr {p.ref}, align {p.itemsize}")


def _lower(k: KernelBuilder, p: Pointer) -> Value:
    """Elements 0, 2, 4, ... of 2 `lanes` bf16 as fp32: a shift."""
    return k.bitcast(_both(k, p) << 16, k.vec)


def _upper(k: KernelBuilder, p: Pointer) -> Value:
    """Elements 1, 3, 5, ...: a mask. They are loaded as lanes of 16 bits, so that LLVM does not see that `_lower` loads the same
    bytes: it would keep them in a register that is not there."""
    half = f"<{2 * k.lanes} x i16>"
    raw = k.op(half, f"load {half}, ptr {p.ref}, align {p.itemsize}")
    mask = Value(k, half, "<" + ", ".join(["i16 0, i16 -1"] * k.lanes) + ">")
    return k.bitcast(raw & mask, k.vec)


def skinny_gemm(
    k: KernelBuilder, out, second, a, weight, bias, other, *, cols: int, depth: int, dims: tuple[str, ...], inner: int,
    epilogues: tuple[str, ...], mode: str, choice: SkinnyGemmConfig, strides: tuple[tuple[str, int], ...] = (), factor: float = 1.0,
) -> None:  # fmt: skip
    """out (rows, cols) = a (rows, depth) @ weight.T and then the `epilogues`, for FEW rows at most; nothing if a run has more."""
    rows, apart = k.num_elements(dims, inner), dict(strides)
    vectors = span_of(k.isa, a.dtype, cols, depth) // k.lanes

    def finish(col: Value) -> Epilogue:
        how: dict[str, Any] = {"cols": cols, "epilogues": epilogues, "mode": mode, "early": False, "strides": apart}
        return Epilogue(k, col, Tile(1, vectors), out, second, bias, other, factor=factor, **how)

    with k.when(rows <= FEW):
        sizes = {"cols": cols, "depth": depth, "stride": apart.get("a", depth)}
        FewRows(k, a, weight, rows, choice=choice, **sizes).run(finish)
