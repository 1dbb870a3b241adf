"""Symmetric rank-k updates (SYRK): x x^T, x^T x, and a polynomial of a symmetric matrix, for Newton-Schulz steps. One triangle is
computed and stored twice.

Shapes: out (n, n); x (n, depth) where its rows are multiplied with each other, (depth, n) where its columns are.

A work item is a panel of NR columns of the result and a block of MC rows, of which only those on and below the diagonal are
computed. For each KC block of the depth, the packed B panel stays in L1 while the micro-kernel passes over the rows of A, which are
read unpacked (x x^T) or packed in panels of their own (x^T x). Sums stay in the thread's scratch to the end of the depth; the
epilogue stores squares of `lanes` x `lanes`, and their transposes. An element and its mirror are one accumulation chain, so the
result is symmetric to the bit, and no bit depends on the blocking.

Packing overlaps with the multiply-adds (packing.PanelBuffers has the protocol), in two buffers each for A and B. A panel's
id is its first column (A) or panel index (B) times k_blocks, plus its KC block."""

from dataclasses import replace
from math import lcm
from typing import Any

from barellm.cpu.gemm_config import MC, Tile, default_kc, default_tile
from barellm.cpu.kernel import ISA, Lowering, Op, Value, lowering
from barellm.cpu.kernels.gemm import packing
from barellm.cpu.kernels.gemm.microkernel import broadcast_a, microkernel
from barellm.cpu.kernels.numbers import bits, number
from barellm.cpu.kernels.optim.muon import each_matrix
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div


def symmetric_gemm(k, out, x, linear, square, *, n: int, depth: int, columns: bool, tile: Tile) -> None:
    """The kernel: out (n, n) = x x^T of x (n, depth); with `columns`, x^T x of x (depth, n); with `linear` and `square`, the
    polynomial linear x + square x x of a symmetric x (n, n), depth = n. The two factors are the bits of fp64 numbers, given at run
    time, so that all Newton-Schulz steps share the code. `tile`: the micro-tile MR x NR."""
    factors = None if linear is None else (k.splat(number(k, linear)), k.splat(number(k, square)))
    SymmetricGemm(k, out, x, factors, n=n, depth=depth, columns=columns, tile=tile).run()


class SymmetricGemm:
    """One thread's loop over work items. State: rows [first, last) of the result x the columns of B panel `panel_index`."""

    def __init__(self, k, out, x, factors: tuple[Value, Value] | None, *, n: int, depth: int, columns: bool, tile: Tile) -> None:
        """Operands as in `symmetric_gemm`; `factors`: linear and square in all lanes. Scratch: two B panels, two A panels, the
        accumulators of an item's rows, [row][NR] fp32. `panels` x `m_blocks` items, `k_blocks` KC blocks of `kc`."""
        self.k, self.out, self.x, self.factors = k, out, x, factors
        self.n, self.depth, self.columns, self.tile, self.nr = n, depth, columns, tile, tile.nr(k.isa)
        self.vnni, self.overlap = packing.uses_vnni(k.isa, x.dtype), packing.can_overlap_packing(k.isa, x.dtype)
        self.kc = default_kc(k.isa, depth, 2 if self.vnni else 4)
        self.k_blocks, self.panels, self.m_blocks = ceil_div(depth, self.kc), ceil_div(n, self.nr), ceil_div(n, MC)
        scratch, nbytes = k.thread_scratch("i32"), packing.panel_bytes(k.isa, x.dtype, self.kc, self.nr)
        self.a_width = a_panel_width(k.isa, tile)
        a_nbytes = packing.panel_bytes(k.isa, x.dtype, self.kc, self.a_width) if columns else 0
        self.accumulators = scratch.bytes(2 * nbytes + 2 * a_nbytes).as_dtype("fp32")
        self.b_panels = packing.PanelBuffers(k, scratch, nbytes, self._pack_b_panel)
        self.a_panels = packing.PanelBuffers(k, scratch.bytes(2 * nbytes), a_nbytes, self._pack_a_panel)

    def _kc_of(self, p) -> Any:
        """The depth of KC block p: the last one takes the remainder."""
        if self.k_blocks == 1:
            return self.depth
        return self.k.select((p + 1).equals(self.k_blocks), self.k.int(self.depth - (self.k_blocks - 1) * self.kc), self.kc)

    def _pack_b_panel(self, into, panel_id) -> packing.PackTask:
        """The task that packs B panel `panel_id` (panel index * k_blocks + KC block) into `into`, [k unit][NR]."""
        k, x, n, nr, kc, depth = self.k, self.x, self.n, self.nr, self.kc, self.depth
        col, p = panel_id // self.k_blocks * nr, panel_id % self.k_blocks  # first column, KC block
        if self.columns or self.factors is not None:
            ragged = n if n % nr else None
            return packing.PackB(k, into, x.at(p * (kc * n)), col, self._kc_of(p), stride=n, width=nr, cols=ragged)
        even = kc % 8 == 0 and depth % 8 == 0  # 8: elements of a chunk of VNNI pairs
        sizes = {"cols": n, "stride": depth, "even": even, "nr": nr}
        return packing.PackBTransposed(k, into, x.at(p * kc), col, depth=self._kc_of(p), **sizes)

    def _pack_a_panel(self, into, panel_id) -> packing.PackTask:
        """The task that packs A panel `panel_id` (first column of x * k_blocks + KC block) into `into`: `a_width` columns of x."""
        k, n, p = self.k, self.n, panel_id % self.k_blocks
        source, col = self.x.at(p * (self.kc * n)), panel_id // self.k_blocks
        return packing.PackB(k, into, source, col, self._kc_of(p), stride=n, width=self.a_width, cols=n)

    def run(self) -> None:
        """The parallel loop over work items (a B panel x MC rows): the KC blocks of each, then its epilogue."""
        k, n = self.k, self.n
        with k.parallel_for(self.panels * self.m_blocks) as self.item:
            self.panel_index, block = self.item % self.panels, self.item // self.panels
            self.col = self.panel_index * self.nr
            # Rows of the item; those above the diagonal are mirrored.
            self.first, self.last = k.max(block * MC, self.col), k.min((block + 1) * MC, n)
            with k.when(self.first < self.last), k.loop(0, self.k_blocks) as p:
                self._multiply_k_block(p)
            with k.when(self.first < self.last):
                self._store()

    def _multiply_k_block(self, p) -> None:
        """KC block p of all tiles of the item; meanwhile the B panel, and the A panel, that are needed next are packed."""
        k, tile, last = self.k, self.tile, self.last
        panel = self.b_panels.acquire(self.panel_index * self.k_blocks + p)
        if self.overlap:
            more_blocks = p + 1 < self.k_blocks  # of this panel; else the next item's panel is next
            same_panel = self.panel_index * self.k_blocks + p + 1
            next_id = k.select(more_blocks, same_panel, (self.panel_index + 1) % self.panels * self.k_blocks)
            exists = more_blocks | (self.item + 1 < self.panels * self.m_blocks)
            self.b_panels.pack_next(next_id, exists, k.ceil_div(last - self.first, tile.mr) * tile.mr)
        if self.columns:
            with k.loop(self.first, last, self.a_width) as base:
                a_panel = self.a_panels.acquire(base * self.k_blocks + p)
                more_rows = base + self.a_width < last
                if self.overlap:
                    self.a_panels.pack_next((base + self.a_width) * self.k_blocks + p, more_rows, k.int(self.a_width))
                with k.loop(base, k.min(base + self.a_width, last), tile.mr) as row:
                    self._multiply_tile(row, base, panel, p, a_panel)
                if self.overlap:
                    self.a_panels.commit()
        else:
            with k.loop(self.first, last, tile.mr) as row:
                self._multiply_tile(row, self.first, panel, p, None)
        if self.overlap:
            self.b_panels.commit()

    def _multiply_tile(self, row, base, panel, p, a_panel) -> None:
        """The accumulators [MR][NR] fp32 of rows [row, row + MR) += A @ panel over KC block p, from zero where p is 0. `panel`:
        packed B; `a_panel`: packed A, whose first row is `base`; None: A is read from x (n, depth), unpacked. A packed panel pads
        an odd depth with zeros; unpacked, the odd element is the micro-kernel's `tail`."""
        k, x, tile, vnni = self.k, self.x, self.tile, self.vnni
        tail, is_last_k = None, None
        if a_panel is None:
            k_units = self._kc_of(p) // 2 if vnni else self._kc_of(p)
            rows = [k.min(row + r, self.n - 1) for r in range(tile.mr)]
            load_a, tail = broadcast_a(k, x.at(p * self.kc), rows, vnni, depth=self.depth, stride=self.depth)
            is_last_k = (p + 1).equals(self.k_blocks) if self.k_blocks > 1 else None
        else:
            k_units = (self._kc_of(p) + 1) // 2 if vnni else self._kc_of(p)
            a_row = a_panel.at(row - base)

            def load_a(r: int, u) -> Value:
                type_ = "i32" if vnni else "float"
                return k.splat(k.op(type_, f"load {type_}, ptr {a_row.at(u * self.a_width + r).ref}, align 4"))

        def pack_step(_) -> None:
            self.b_panels.step()
            if a_panel is not None:
                self.a_panels.step()

        dst = self.accumulators.at((row - self.first) * self.nr)  # [MR][NR]: rows of NR, one after the other
        sums = microkernel(k, tile, load_a, panel, k_units, vnni, tail=tail, prefetch=pack_step if self.overlap else None,
            c_init=(p > 0, dst) if self.k_blocks > 1 else None, is_last_k=is_last_k)  # fmt: skip
        for i, value in enumerate(value for values in sums for value in values):
            dst.store(value, i * k.lanes)

    def _store(self) -> None:
        """The epilogue of a work item: its accumulators and their transposes to out, in squares of `lanes` x `lanes`."""
        k, lanes, n = self.k, self.k.lanes, self.n
        with k.loop(self.first, self.last, lanes) as row, k.loop(self.col, k.min(self.col + self.nr, n), lanes) as column:
            inside = (row + (lanes - 1) < self.last) & (column + (lanes - 1) < n)  # the square and its mirror image are whole
            for masked, branch in ((False, k.when), (True, k.otherwise)):
                with branch(inside):
                    self._store_square(row, column, masked)

    def _store_square(self, row, column, masked: bool) -> None:
        """Store the square at (row, column) of the result and its transpose, which is its mirror image below or above the diagonal:
        the accumulators, or with `factors` the polynomial of these and of x. `masked`: it may reach beyond the edges."""
        k, n, lanes = self.k, self.n, self.k.lanes
        mask = k.mask_first(n - column) if masked else None
        values = []
        for r in range(lanes):
            value = self.accumulators.load((row - self.first + r) * self.nr + (column - self.col))
            if self.factors is not None:
                linear, square = self.factors
                value = k.fma(self.x.load(k.min(row + r, n - 1) * n + column, mask), linear, value * square)
            values.append(value)
        for r, value in enumerate(values):
            self._store_vector(row + r, column, value, self.last if masked else None, n - column)
        for r, value in enumerate(transpose(k, values)):
            self._store_vector(column + r, row, value, k.int(n) if masked else None, self.last - row)

    def _store_vector(self, row, column, value, end, width) -> None:
        """Store a vector of row `row` of out from `column` on; with an `end`, if the row is before it, `width` elements."""
        if end is None:
            self.out.store(value, row * self.n + column)
            return
        with self.k.when(row < end):
            self.out.store(value, row * self.n + column, self.k.mask_first(width))


def a_panel_width(isa: ISA, tile: Tile) -> int:
    """Columns of x in a packed A panel: a multiple of MR (full tiles) and of the vector's lanes."""
    return lcm(tile.mr, isa.lanes)


def thread_scratch_bytes(isa: ISA, dtype: str, depth: int, tile: Tile, *, columns: bool) -> int:
    """Scratch bytes of a thread: two B panels, two A panels, and the sums of MC rows, plus a tile and a square."""
    kc = default_kc(isa, depth, 2 if packing.uses_vnni(isa, dtype) else 4)
    a_nbytes = packing.panel_bytes(isa, dtype, kc, a_panel_width(isa, tile)) if columns else 0
    rows = MC + tile.mr + isa.lanes
    return 2 * packing.panel_bytes(isa, dtype, kc, tile.nr(isa)) + 2 * a_nbytes + rows * tile.nr(isa) * 4


def _lower(op: Op, c: Lowering, out, x, *, depth: int, columns: bool = False, **factors) -> None:
    """Call symmetric_gemm once for each matrix of the op's bank; `factors`: linear and square of a polynomial, as bits."""
    n = int(out.shape[1])
    tile = default_tile(replace(c.isa, tiles=False), x.dtype, n)  # of vector registers: AMX tiles are not used
    c.thread_scratch(thread_scratch_bytes(c.isa, x.dtype, depth, tile, columns=columns))
    constants = {"n": n, "depth": depth, "columns": columns, "tile": tile}
    for matrix in each_matrix(op, out=out, x=x):
        operands = {**matrix, "linear": factors.get("linear"), "square": factors.get("square")}
        c.call(symmetric_gemm, operands, constants, writes="out")


@lowering("gram")
def gram(op: Op, c: Lowering) -> None:
    _lower(op, c, op.a, op.x, depth=max(op.one(op.x)), columns=op.is_tall(op.x))


@lowering("gram_polynomial")
def gram_polynomial(op: Op, c: Lowering) -> None:
    _lower(op, c, op.b, op.a, depth=int(op.a.shape[1]), linear=bits(op.linear), square=bits(op.square))
