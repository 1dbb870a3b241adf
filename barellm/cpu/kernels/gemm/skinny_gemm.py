"""Skinny GEMM (M <= 64; GEMV at M = 1): decoding at memory bandwidth. Each weight is read once, so the roofline is bandwidth.

Nothing is packed. A row of the weight, which is a column of the result, is read in place, sequentially. An element of the result is
one accumulation chain along the depth in the lanes of a vector, reduced at the end, so results are batch-invariant: their bits do
not depend on M. Several columns at a time hide the latency of the multiply-adds. With more rows than one the micro-tile is 4 rows x
6 columns on 32 registers: 10 loads for 24 multiply-adds. The loop over M is inside the loop over N, in KC blocks of the depth: the
columns of a KC block stay in the L1 while all rows pass. Accumulators wait in the thread's scratch from one KC block to the next.

Bandwidth depends on how many lines are in flight. Where the hardware prefetcher does not run far enough ahead, the kernel
prefetches the next columns while it multiplies the current ones, in the order of use and evenly over all tiles.

Shapes: a (rows, depth), weight (cols, depth), out (rows, cols)."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

from barellm.cpu.gemm_config import PREFETCH_LEVELS, SkinnyGemmConfig, Tile
from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.gemm import packing, skinny_gemm_amx
from barellm.cpu.kernels.gemm.epilogue import Epilogue
from barellm.cpu.kernels.gemm.microkernel import zero_tile
from barellm.cpu.lang.vector import sums_of_lanes
from barellm.program.dtypes import itemsize
from barellm.program.integers import ceil_div, round_up

FEW = 64  # rows at most
MIN_PANEL = 24  # columns of a work item, at least
KC_BYTES = 30 << 10  # of the columns of a KC block, which every tile of rows reads again
COPIED = 8  # rows up to which columns are read in place even where they conflict in the L1
LOW = 2  # rows of the last, smaller tile
PAGE = 4096  # bytes of an L1 way: lines so far apart share a set


@dataclass(frozen=True)
class Tiling:
    """The tiling on an ISA: `columns` at a time for a GEMV, a micro-tile of `rows` x `wide` columns for M > 1."""

    columns: int
    rows: int
    wide: int
    lanes: int

    @classmethod
    def of(cls, isa: ISA, dtype: str) -> "Tiling":
        if isa.registers == 32:
            widened = dtype == "bf16" and not isa.dot and not isa.masked  # operands need registers of their own as fp32
            return cls(8, 4, 4 if widened else 6, isa.lanes)
        n = 6 if isa.fma else 4  # without fma the product needs a register
        return cls(n, 2, n, isa.lanes)

    @property
    def nr(self) -> int:
        """Columns of a panel: whole micro-tiles and whole vectors."""
        return round_up(MIN_PANEL, lcm(self.columns, self.wide, self.lanes))


def skinny_configs(isa: ISA, dtype: str, cols: int, depth: int) -> list[SkinnyGemmConfig]:
    """The configs to tune over for a weight (cols, depth), the default first. Processors with AMX prefetch by themselves, faster
    than software prefetches, each of which occupies a line-fill buffer. Zen 4 wants prefetches into L2, Zen 3 into L1."""
    on_tiles = skinny_gemm_amx.fits(isa, dtype, cols, depth)
    unrolls = skinny_gemm_amx.UNROLLS if on_tiles else (Tiling.of(isa, dtype).columns, Tiling.of(isa, dtype).columns // 2)
    # At least eight work items remain.
    max_panels = max(1, ceil_div(cols, panel_width(isa, dtype, cols, depth)) // 8)
    configs = [
        SkinnyGemmConfig(panels, unroll, level)
        for panels in (1, 2, 4)
        if panels <= max_panels
        for unroll in unrolls
        for level in PREFETCH_LEVELS
    ]
    default = SkinnyGemmConfig(1, unrolls[0], 0 if isa.tiles else 2 if isa.masked else 1)
    return [default, *(config for config in configs if config != default)]


class ScratchLayout:
    """Offsets in a thread's scratch, in bytes, and its size, for every dtype: first an item's results, then `accumulators` between
    two KC blocks, `copies` of columns, and `amx`, what AMX needs."""

    def __init__(self, isa: ISA, depth: int) -> None:
        tiling = Tiling.of(isa, "fp32")  # no dtype has a larger one
        self.accumulators = 4 * FEW * (max(tiling.nr, skinny_gemm_amx.NR) + tiling.lanes)
        self.copies = self.accumulators + 4 * FEW * tiling.nr * tiling.lanes
        # KC is such that a block comes nearest to KC_BYTES, rounded up to full vectors.
        self.amx = self.copies + 3 * KC_BYTES // 2 + 2 * packing.LINE * tiling.wide
        self.nbytes = self.amx + skinny_gemm_amx.scratch_bytes(isa, depth)


def panel_width(isa: ISA, dtype: str, cols: int, depth: int) -> int:
    """Columns of a panel, the N side of a work item."""
    return skinny_gemm_amx.NR if skinny_gemm_amx.fits(isa, dtype, cols, depth) else Tiling.of(isa, dtype).nr


@dataclass(frozen=True)
class Block:
    """A block of B: some columns of the result (rows of the weight) over KC block `k_block`, elements [first, last) of the depth.
    `columns`: their addresses at element `first`; `column`: index of the first in its panel; `tiles`: how many tiles of rows use
    the block. `next`: the first byte of the next block, which is prefetched meanwhile; its columns are `run` contiguous bytes each,
    with `gap` bytes between them (run 0: all contiguous)."""

    columns: list[Pointer]
    column: Value
    k_block: Value
    first: Value
    last: Value
    tiles: Value
    next: Pointer
    run: int = 0
    gap: int = 0


class SkinnyGemm:
    """One thread's loop over panels of a skinny GEMM, M <= FEW."""

    def __init__(self, k, a, weight, rows, *, cols: int, depth: int, stride: int, config: SkinnyGemmConfig) -> None:
        """The GEMM out = a (rows, depth) @ weight (cols, depth)^T. `stride`: row stride of a. Scratch: `ScratchLayout`. Attributes:
        `tiling`; `dot`: bf16 pairs are multiplied; `unit`: elements of a row a step; `sums` [row][`width`]; `tiles`: the AMX
        kernel, or None; `kc`, `k_blocks`: blocks of the depth; `copies`: where columns that conflict in the L1 are copied."""
        self.k, self.a, self.weight, self.rows, self.config = k, a, weight, rows, config
        self.cols, self.depth, self.stride = cols, depth, stride
        self.tiling = Tiling.of(k.isa, a.dtype)
        self.dot = packing.uses_vnni(k.isa, a.dtype)
        self.unit = k.lanes * (2 if a.dtype == "bf16" else 1)  # elements of a chain's next link or two
        self.itemsize = itemsize(a.dtype)
        self.nr = panel_width(k.isa, a.dtype, cols, depth)
        self.width = self.nr + k.lanes  # of a row of sums, whose last vector may hang over
        self.sums = k.thread_scratch()
        scratch = ScratchLayout(k.isa, depth)
        self.accumulators = self.sums.bytes(scratch.accumulators)
        copies = self.accumulators.bytes(scratch.copies - scratch.accumulators)
        self.tiles = None
        if skinny_gemm_amx.fits(k.isa, a.dtype, cols, depth):
            sizes = {"cols": cols, "depth": depth, "stride": stride}
            at_amx = copies.bytes(scratch.amx - scratch.copies)
            self.tiles = skinny_gemm_amx.SkinnyGemmAmx(k, a, weight, rows, at_amx, config=config, **sizes)
        k_blocks = max(1, round(self.tiling.wide * depth * self.itemsize / KC_BYTES))
        self.kc = round_up(ceil_div(depth, k_blocks), self.unit)
        self.k_blocks = ceil_div(depth, self.kc)
        # Columns a multiple of a page apart conflict in the L1, and rows of x do too. Copies are a cache line more apart.
        self.pitch = self.kc * self.itemsize + packing.LINE
        conflict = depth * self.itemsize % PAGE == 0
        copies_of_columns = range(self.tiling.wide if conflict else 0)
        self.copies = [copies.bytes(i * self.pitch).as_dtype(a.dtype) for i in copies_of_columns]

    def run(self, make_epilogue: Callable[[Value], Epilogue]) -> None:
        """For each panel of NR columns: the sums [rows][width] fp32 to scratch, then the epilogue make_epilogue(first column)."""
        k, nr, tiles = self.k, self.nr, self.tiles
        if tiles:
            tiles.pack_x()
        with k.parallel_range(ceil_div(self.cols, nr), self.config.panels) as (begin, end), k.loop(begin, end) as panel:
            column = panel * nr
            if tiles:
                tiles.panel_sums(column, self.sums, self.width)
            else:
                is_gemv = self.rows.equals(1)
                with k.when(is_gemv):
                    self._gemv(column)
                with k.otherwise(is_gemv):
                    self._gemm_blocks(column)
            epilogue = make_epilogue(column)
            with k.loop(0, self.rows) as row:
                for v in range(nr // k.lanes):
                    epilogue.put(row, v, self.sums.load(row * self.width + v * k.lanes))
        if tiles:
            tiles.release()

    def _gemv(self, column) -> None:
        """M = 1: `config.unroll` columns at a time over the whole depth, while the next ones are prefetched."""
        k, wide = self.k, self.config.unroll
        with k.loop(0, self.tiling.nr, wide) as c:
            columns = self._columns(column + c, wide, k.int(0))
            following = columns[0].at(wide * self.depth)  # what is prefetched meanwhile
            chains = zero_tile(k, Tile(1, wide))  # a vector of partial sums for each column
            block = Block(columns, c, k_block=k.int(0), first=k.int(0), last=k.int(self.depth), tiles=k.int(1), next=following)
            self._microkernel([self.a], block, columns, chains, k.int(0))
            self._reduce_lanes(chains[0], self.sums.at(c))

    def _gemm_blocks(self, column) -> None:
        """M > 1: the sums of the panel from `column` on. For each KC block, for each micro-tile's columns, all tiles of rows."""
        k, tiling = self.k, self.tiling
        high = (self.rows + 1) // tiling.rows * tiling.rows  # rows of high tiles, the last of which may have a row less
        tiles = high // tiling.rows + k.ceil_div(self.rows - high, LOW)  # of rows
        with k.loop(0, self.k_blocks) as p, k.loop(0, tiling.nr, tiling.wide) as c:
            first = p * self.kc
            columns = self._columns(column + c, tiling.wide, first)
            last = k.min(first + self.kc, self.depth)
            block = Block(columns, c, p, first, last, tiles, **self._next_block(columns[0], c, p))
            read_from = self._copy_columns(block) if self.copies else columns
            with k.loop(0, high, tiling.rows) as row:
                self._micro_tile(block, read_from, row, tiling.rows, row // tiling.rows)
            if tiling.rows > LOW:
                with k.when(high < self.rows):
                    self._micro_tile(block, read_from, high, LOW, tiles - 1)

    def _next_block(self, at, c, p) -> dict[str, Any]:
        """`next`, `run` and `gap` of the block at column c of the panel and KC block p, whose first column is at `at`. Next come
        the columns beside it, after the panel's last the first of the next KC block, then the next panel."""
        k, tiling = self.k, self.tiling
        to_next_columns = tiling.wide * self.depth  # distances in elements
        if self.k_blocks == 1:
            return {"next": at.at(to_next_columns)}
        is_last_k = p.equals(self.k_blocks - 1)
        to_next_panel = to_next_columns - p * self.kc
        to_next_k_block = self.kc - (tiling.nr - tiling.wide) * self.depth
        from_last_columns = k.select(is_last_k, to_next_panel, to_next_k_block)
        following = at.at(k.select(c.equals(tiling.nr - tiling.wide), from_last_columns, to_next_columns))
        return {"next": following, "run": self.kc * self.itemsize, "gap": (self.depth - self.kc) * self.itemsize}

    def _copy_columns(self, block: Block) -> list[Pointer]:
        """Copy a block's columns (KC elements each) to scratch where they do not conflict in the L1, if enough rows pay for it.
        Returns the addresses to read from: the copies' or, with few rows, the columns'. No partial unit is copied."""
        k = self.k
        many = self.rows > COPIED
        bits = f"<{self.unit * self.itemsize // 4} x i32>"  # a unit of a column
        whole = (block.last - block.first) // self.unit * self.unit
        with k.when(many), k.loop(0, whole, self.unit) as d:
            for column, copy in zip(block.columns, self.copies, strict=True):
                value = k.op(bits, f"load {bits}, ptr {column.at(d).ref}, align {self.itemsize}")
                k.line(f"store {value.typed}, ptr {copy.at(d).ref}, align {self.itemsize}")
        read_from = []
        for copy, column in zip(self.copies, block.columns, strict=True):
            address = k.op("ptr", f"select {many.typed}, ptr {copy.ref}, ptr {column.ref}")
            read_from.append(Pointer(k, address.ref, self.a.dtype))
        return read_from

    def _micro_tile(self, block: Block, columns, row, rows: int, tile_number) -> None:
        """One micro-tile of a block of B: `rows` rows of a from `row` on x the block's columns, read from the addresses `columns`.
        Rows beyond the last recompute it. The accumulators, `lanes` partial sums of an element each, are loaded from scratch after
        the first KC block, stored there before the last, and reduced to `sums` after the last. `tile_number`: its index."""
        k, tiling = self.k, self.tiling
        numbers = [k.min(row + i, self.rows - 1) for i in range(rows)]
        chains = zero_tile(k, Tile(rows, tiling.wide))  # [row][column], a vector each
        kept = self.accumulators.at((block.column * FEW + row * tiling.wide) * k.lanes)  # of this tile, between KC blocks
        flat = [chain for row_chains in chains for chain in row_chains]
        if self.k_blocks > 1:
            with k.when(block.k_block > 0):
                for i, chain in enumerate(flat):
                    chain.value = kept.load(i * k.lanes)
        left = [self.a.at(r * self.stride + block.first) for r in numbers]
        self._microkernel(left, block, columns, chains, tile_number)
        is_last_k = block.k_block.equals(self.k_blocks - 1)
        if self.k_blocks > 1:
            with k.otherwise(is_last_k):
                for i, chain in enumerate(flat):
                    kept.store(chain.value, i * k.lanes)
        with k.when(is_last_k):
            for r, row_chains in zip(numbers, chains, strict=True):
                self._reduce_lanes(row_chains, self.sums.at(r * self.width + block.column))

    def _columns(self, first, count: int, depth) -> list[Pointer]:
        """`count` rows of the weight, from element `depth` on; beyond the last row that one."""
        k = self.k
        at = [k.min(first + i, self.cols - 1) if self.cols % self.tiling.nr else first + i for i in range(count)]
        return [self.weight.at(c * self.depth + depth) for c in at]

    def _microkernel(self, left, block: Block, columns, chains, tile_number) -> None:
        """chains[r][c] += row r of a * column c, lane by lane, over the block's KC elements of the depth. `left`: addresses of the
        rows at the block's first element; `columns`: of the columns, for whole units (a partial one: `block.columns`). Of the next
        block this tile prefetches an equal share, number `tile_number` of `block.tiles`, `step` bytes with each unit."""
        k, unit, run = self.k, self.unit, block.run
        whole = (block.last - block.first) // unit * unit  # elements of the depth in whole units
        unit_bytes = len(columns) * unit * self.itemsize  # of all columns
        step = k.int(unit_bytes) // block.tiles  # bytes to prefetch with each unit
        begin = tile_number * (whole // unit) * step  # this tile's share of the next block, in bytes that it has
        # Byte offset in the next block, whose columns are `gap` bytes apart, and how many bytes of the current column are left.
        offset = k.var(begin // run * (run + block.gap) + begin % run if run else begin)
        run_left = k.var(run - begin % run) if run else None
        with k.loop(0, whole, unit) as d:
            if self.config.prefetch:
                self._prefetch(block.next.bytes(offset.value), unit_bytes, step, one=len(left) == 1)
                offset.value = offset.value + step
                if run_left:
                    rest = run_left.value - step
                    ends = rest <= 0
                    offset.value = k.select(ends, offset.value + block.gap, offset.value)
                    run_left.value = k.select(ends, rest + run, rest)
            self._microkernel_unit([x.at(d) for x in left], [w.at(d) for w in columns], chains)
        if not self.depth % unit:
            return
        with k.when(block.last.equals(self.depth)):  # the partial unit at the end of the depth
            rest = self.depth % unit
            for u in range(0, rest, k.lanes):
                mask = None if rest - u >= k.lanes else k.mask_first(rest - u)
                at = whole + u
                xs = [x.load(at, mask) for x in left]
                for c, w in enumerate(block.columns):
                    self._fma_column(xs, w.load(at, mask), chains, c)

    def _microkernel_unit(self, left, right, chains) -> None:
        """chains[r][c] += left[r] * right[c] over one unit: `lanes` elements, of bf16 twice as many. Without a dot product for bf16
        the even elements are multiplied, then the odd ones, as fp32."""
        k = self.k
        if self.dot:
            xs = [_load_pairs(k, x) for x in left]
            for c, w in enumerate(right):
                y = _load_pairs(k, w)
                for x, row_chains in zip(xs, chains, strict=True):
                    row_chains[c].value = k.dot(row_chains[c].value, x, y)
        elif self.a.dtype == "bf16":
            for half in (_even_elements, _odd_elements):
                xs = [half(k, x) for x in left]
                for c, w in enumerate(right):
                    self._fma_column(xs, half(k, w), chains, c)
        else:
            xs = [x.load() for x in left]
            for c, w in enumerate(right):
                self._fma_column(xs, w.load(), chains, c)

    def _prefetch(self, at, max_bytes: int, nbytes, *, one: bool) -> None:
        """Prefetch `nbytes` bytes (at most `max_bytes`) from `at` on, or up to twice as many lines: 1, 2, 4, ... lines at a time
        behind branches, for a well-predicted branch costs less than a loop. For a GEMV (`one`) all `max_bytes`."""
        k, first = self.k, 0
        while first * packing.LINE < max_bytes:
            last = min(max(1, 2 * first), ceil_div(max_bytes, packing.LINE))
            with nullcontext() if one or not first else k.when(nbytes > first * packing.LINE):
                for line in range(first, last):
                    k.prefetch(at.bytes(line * packing.LINE), near=self.config.prefetch == 1)
            first = last

    def _fma_column(self, xs, w, chains, column: int) -> None:
        """chains[r][column] += xs[r] * w."""
        for x, row_chains in zip(xs, chains, strict=True):
            row_chains[column].value = self.k.fma(x, w, row_chains[column].value)

    def _reduce_lanes(self, chains, out) -> None:
        """out[c] = the sum of the lanes of chains[c]. Stores whole vectors: what lies behind the last sum is overwritten."""
        k = self.k
        values = [chain.value for chain in chains]
        for first in range(0, len(values), k.lanes):
            some = values[first : first + k.lanes]
            out.store(sums_of_lanes(k, some + [k.to(0.0, k.vec)] * (k.lanes - len(some))), first)


def _load_pairs(k, p) -> Value:
    """2 `lanes` bf16 as lanes of 32 bits. A row of an odd depth, or of odd columns of a wider tensor, begins at an odd element: no
    more than the alignment of one element may be stated, though the type's own is larger."""
    return k.op(k.ivec, f"load {k.ivec}, ptr {p.ref}, align {p.itemsize}")


def _even_elements(k, p) -> Value:
    """Elements 0, 2, 4, ... of 2 `lanes` bf16 as fp32: a shift."""
    return k.bitcast(_load_pairs(k, p) << 16, k.vec)


def _odd_elements(k, p) -> Value:
    """Elements 1, 3, 5, ...: a mask. They are loaded as lanes of 16 bits, so that LLVM does not see that `_even_elements` loads the
    same bytes: it would keep them in a register that is not there."""
    half = f"<{2 * k.lanes} x i16>"
    raw = k.op(half, f"load {half}, ptr {p.ref}, align {p.itemsize}")
    mask = Value(k, half, "<" + ", ".join(["i16 0, i16 -1"] * k.lanes) + ">")
    return k.bitcast(raw & mask, k.vec)


def skinny_gemm(k, out, second, a, weight, bias, other, *, cols: int, depth: int, dims: tuple[str, ...], inner: int,
        epilogues: tuple[str, ...], mode: str, config: SkinnyGemmConfig, strides: tuple[tuple[str, int], ...] = (),
        factor: float = 1.0) -> None:  # fmt: skip
    """The kernel: out (rows, cols) = a (rows, depth) @ weight.T, weight (cols, depth) row-major, then the `epilogues`, for M <= FEW
    rows; does nothing if a run has more. Other parameters as in gemm.py's `gemm`. `second`, `bias`, `other`, `factor`: of the
    epilogues; `strides`: (name, row stride) of views; `mode`: of out."""
    rows, row_strides = k.num_elements(dims, inner), dict(strides)
    tile = Tile(1, panel_width(k.isa, a.dtype, cols, depth) // k.lanes)
    make_epilogue = partial(Epilogue, k, tile, out, second, bias, other, cols=cols, epilogues=epilogues, mode=mode, factor=factor,
        bias_in_registers=False, strides=row_strides)  # fmt: skip
    with k.when(rows <= FEW):
        sizes = {"cols": cols, "depth": depth, "stride": row_strides.get("a", depth)}
        SkinnyGemm(k, a, weight, rows, config=config, **sizes).run(make_epilogue)
