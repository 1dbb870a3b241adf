"""Symmetric rank-k updates (SYRK): x x^T, x^T x, and a polynomial of a symmetric matrix, for Newton-Schulz steps. One triangle is
computed and stored twice.

Shapes: out (n, n); x (n, depth) where its rows are multiplied with each other, (depth, n) where its columns are.

A work item is a panel of NR columns of the result and a block of MC rows, of which only those on and below the diagonal are
computed. For each KC block of the depth, the packed B panel stays in L1 while the micro-kernel passes over the rows of A, which are
read unpacked (x x^T) or packed in panels of their own (x^T x). Sums stay in the thread's scratch to the end of the depth; the
epilogue stores squares of `lanes` x `lanes`, and their transposes. An element and its mirror are one accumulation chain, so the
result is symmetric to the bit, and no bit depends on the blocking.

Packing overlaps with the multiply-adds (packing.PanelBuffers, two buffers each for A and B): acquire(id) returns panel `id`,
packing it now if it isn't there yet; pack_next(id, exists, steps) names the panel that goes into the other buffer; the micro-kernel
calls step() once in each of its `steps` iterations, which packs a share of it; commit() makes that buffer the next to be acquired.
A panel's id is its first column (A) or panel index (B) times k_blocks, plus its KC block."""

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


def symmetric_gemm(k, out, x, linear, square, *, n: int, depth: int, columns: bool, tile: Tile) -> None:
    """out (n, n) = x x^T of x (n, depth); with `columns`, x^T x of x (depth, n); with `linear` and `square`, the polynomial linear
    x + square x x of a symmetric x (n, n), depth = n. The two factors are the bits of fp64 numbers, given at run time, so that all
    Newton-Schulz steps share the code. `tile`: the micro-tile MR x NR."""
    polynomial = linear is not None
    vnni, lanes, nr = packing.uses_vnni(k.isa, x.dtype), k.lanes, tile.nr(k.isa)
    kc = default_kc(k.isa, depth, 2 if vnni else 4)
    k_blocks, panels, m_blocks = -(-depth // kc), -(-n // nr), -(-n // MC)
    overlap = packing.can_overlap_packing(k.isa, x.dtype)
    factors = (k.splat(number(k, linear)), k.splat(number(k, square))) if polynomial else None
    scratch, nbytes = k.thread_scratch("i32"), packing.panel_bytes(k.isa, x.dtype, kc, nr)
    a_width = a_panel_width(k.isa, tile)
    a_nbytes = packing.panel_bytes(k.isa, x.dtype, kc, a_width) if columns else 0
    accumulators = scratch.bytes(2 * nbytes + 2 * a_nbytes).as_dtype("fp32")

    def kc_of(p) -> Any:
        """The depth of KC block p: the last one takes the remainder."""
        return k.select((p + 1).equals(k_blocks), k.int(depth - (k_blocks - 1) * kc), kc) if k_blocks > 1 else depth

    def pack_b_panel(into, panel_id) -> packing.PackTask:
        """The steps that pack B panel `panel_id` (panel index * k_blocks + KC block) into `into`."""
        col, p = panel_id // k_blocks * nr, panel_id % k_blocks
        if columns or polynomial:
            ragged = n if n % nr else None
            return packing.pack_b(k, into, x.at(p * (kc * n)), col, kc_of(p), stride=n, width=nr, cols=ragged)
        even = kc % 8 == 0 and depth % 8 == 0
        return packing.pack_b_transposed(k, into, x.at(p * kc), col, cols=n, stride=depth, depth=kc_of(p), even=even, nr=nr)

    def pack_a(into, panel_id) -> packing.PackTask:
        """The steps that pack A panel `panel_id` (first column of x * k_blocks + KC block) into `into`: `a_width` columns of x."""
        p = panel_id % k_blocks
        return packing.pack_b(k, into, x.at(p * (kc * n)), panel_id // k_blocks, kc_of(p), stride=n, width=a_width, cols=n)

    b_panels = packing.PanelBuffers(k, scratch, nbytes, pack_b_panel)
    a_panels = packing.PanelBuffers(k, scratch.bytes(2 * nbytes), a_nbytes, pack_a)

    def tile_syrk(row, base, first, panel, p, a_panel) -> None:
        """Add KC block p of x x^T to the tile of rows [row, row + MR) and the columns of B's `panel`: p = 0 starts the sums in
        `accumulators` (fp32, rows of NR from the item's row `first` on), later blocks continue them. `a_panel`: packed rows of A
        from `base` on; None: A is read from x, (n, depth)."""
        # Steps of the micro-kernel. A packed panel pads an odd depth with zeros; unpacked, the odd element is its `tail`.
        k_units = (kc_of(p) + 1) // 2 if vnni and a_panel is not None else kc_of(p) // 2 if vnni else kc_of(p)
        tail, is_last_k = None, None
        if a_panel is None:
            rows = [k.min(row + r, n - 1) for r in range(tile.mr)]
            load_a, tail = broadcast_a(k, x.at(p * kc), rows, vnni, depth=depth, stride=depth)
            is_last_k = (p + 1).equals(k_blocks) if k_blocks > 1 else None
        else:
            a_row = a_panel.at(row - base)

            def load_a(r: int, u) -> Value:
                type_ = "i32" if vnni else "float"
                return k.splat(k.op(type_, f"load {type_}, ptr {a_row.at(u * a_width + r).ref}, align 4"))

        def pack_step(_) -> None:
            b_panels.step()
            if a_panel is not None:
                a_panels.step()

        dst = accumulators.at((row - first) * nr)
        c_init = (p > 0, dst) if k_blocks > 1 else None
        sums = microkernel(
            k, tile, load_a, panel, k_units, vnni, tail=tail, prefetch=pack_step if overlap else None, c_init=c_init,
            is_last_k=is_last_k,
        )  # fmt: skip
        for i, value in enumerate(value for values in sums for value in values):
            dst.store(value, i * lanes)

    with k.parallel_for(panels * m_blocks) as item:
        panel_index, block = item % panels, item // panels  # of the NR columns and of the MC rows
        col = panel_index * nr
        first, last = (k.max(block * MC, col), k.min((block + 1) * MC, n))  # rows; those above the diagonal are mirrored
        with k.when(first < last), k.loop(0, k_blocks) as p:
            panel = b_panels.acquire(panel_index * k_blocks + p)
            if overlap:
                more_blocks = p + 1 < k_blocks  # of this panel; else the next item's panel is next
                next_id = k.select(more_blocks, panel_index * k_blocks + p + 1, (panel_index + 1) % panels * k_blocks)
                exists = more_blocks | (item + 1 < panels * m_blocks)
                b_panels.pack_next(next_id, exists, k.ceil_div(last - first, tile.mr) * tile.mr)
            if columns:
                with k.loop(first, last, a_width) as base:
                    a_panel = a_panels.acquire(base * k_blocks + p)
                    more_rows = base + a_width < last
                    if overlap:
                        a_panels.pack_next((base + a_width) * k_blocks + p, more_rows, k.int(a_width))
                    with k.loop(base, k.min(base + a_width, last), tile.mr) as row:
                        tile_syrk(row, base, first, panel, p, a_panel)
                    if overlap:
                        a_panels.commit()
            else:
                with k.loop(first, last, tile.mr) as row:
                    tile_syrk(row, first, first, panel, p, None)
            if overlap:
                b_panels.commit()
        with k.when(first < last):
            _store(k, out, x, accumulators, n, first, last, col, nr, factors)


def _store(k, out, x, accumulators, n: int, first, last, col, nr: int, factors: tuple[Value, Value] | None) -> None:
    """Epilogue of a work item: store rows [first, last) of the `nr` columns from `col` on, and their transposes, in squares of
    `lanes` x `lanes`. `factors`: vectors (linear, square) of the polynomial; None: the sums are the result."""
    lanes = k.lanes

    def store_square(row, column, masked: bool) -> None:
        """Store the square at row `row` and column `column`, and its transpose. `masked`: it may reach beyond the edges."""
        mask = k.mask_first(n - column) if masked else None
        values = []
        for r in range(lanes):
            value = accumulators.load((row - first + r) * nr + (column - col))
            if factors is not None:
                linear, square = factors
                value = k.fma(x.load(k.min(row + r, n - 1) * n + column, mask), linear, value * square)
            values.append(value)
        for r, value in enumerate(values):
            store_vector(row + r, column, value, last if masked else None, n - column)
        for r, value in enumerate(transpose(k, values)):
            store_vector(column + r, row, value, k.int(n) if masked else None, last - row)

    def store_vector(row, column, value, end, width) -> None:
        """Store a vector of row `row` from `column` on; with an `end`, only if the row is before it, and only `width` elements."""
        if end is None:
            out.store(value, row * n + column)
            return
        with k.when(row < end):
            out.store(value, row * n + column, k.mask_first(width))

    with k.loop(first, last, lanes) as row, k.loop(col, k.min(col + nr, n), lanes) as column:
        inside = (row + (lanes - 1) < last) & (column + (lanes - 1) < n)
        with k.when(inside):
            store_square(row, column, False)
        with k.otherwise(inside):
            store_square(row, column, True)


def a_panel_width(isa: ISA, tile: Tile) -> int:
    """Columns of x in a packed A panel: a multiple of MR (full tiles) and of the vector's lanes."""
    return lcm(tile.mr, isa.lanes)


def tile_of(isa: ISA, dtype: str, n: int) -> Tile:
    """The micro-tile MR x NR in vector registers; the tile registers of AMX are not used."""
    return default_tile(replace(isa, tiles=False), dtype, n)


def thread_scratch_bytes(isa: ISA, dtype: str, depth: int, tile: Tile, *, columns: bool) -> int:
    """Scratch bytes of a thread: two B panels, two A panels, and the sums of MC rows, plus a tile and a square."""
    kc = default_kc(isa, depth, 2 if packing.uses_vnni(isa, dtype) else 4)
    a_nbytes = packing.panel_bytes(isa, dtype, kc, a_panel_width(isa, tile)) if columns else 0
    rows = MC + tile.mr + isa.lanes
    return 2 * packing.panel_bytes(isa, dtype, kc, tile.nr(isa)) + 2 * a_nbytes + rows * tile.nr(isa) * 4


def _lower(op: Op, c: Lowering, out, x, *, depth: int, columns: bool = False, **factors) -> None:
    """Call symmetric_gemm once for each matrix of the op's bank; `factors`: linear and square of a polynomial, as bits."""
    n = int(out.shape[1])
    tile = tile_of(c.isa, x.dtype, n)
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
