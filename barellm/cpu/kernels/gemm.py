"""Matrix products: the register tile, and the kernel built on it that multiplies activations with a weight.

Shapes: a (rows, depth) row-major activations; weight (cols, depth) forward, (depth, cols) for the input gradient; out (rows, cols).
A tile of MR rows x NV vectors of accumulators is the inner loop. Its right operand is a packed panel of NV vectors of columns
(packing.py). Each output element is one accumulation chain over the depth, so its bits do not depend on how the product is cut
(choices.py).

The arithmetic hides the memory: while a tile is multiplied, the lines that it will write or read are prefetched and a part of the
next panel is packed. Where GELU's slope comes behind, the tile before is finished meanwhile too: its loads and look-ups fill what
the multiplier leaves. GELU itself is slower so: its division holds the multiplier up wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from barellm.cpu.choices import BUSY, Choice, Tile, part_of
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.packing import LINE, Packing, Panels, beside, interleaved, paired, panel_bytes
from barellm.cpu.kernels.packing import transposed as transposed_panel
from barellm.cpu.lang import Pointer, Value, Var
from barellm.cpu.lang.vector import gelu, gelu_slope

# --- the register tile ---

BURST = 16  # units between two calls of what is done beside a product
LATER = 512  # depth of a tile that is long enough to finish another one beside it
Left = Callable[[int, Value], Value]  # (row of the tile, unit of depth) -> broadcast lanes


def tile_product(
    k: KernelBuilder, tile: Tile, left: Left, panel: Pointer, units: Any, pair: bool, *, tail: Left | None = None,
    ahead: Callable[[Value], None] | None = None, beside: Callable[[], None] | None = None,
    sums: tuple[Value, Pointer] | None = None, ends: Value | None = None,
) -> list[list[Value]]:  # fmt: skip
    """MR x NV accumulators: the sum over `units` of left x panel; `tail` gives the left operand of one unit more, where `ends`.
    `sums`: (whether, from where) they start with what is in memory. `ahead(r)` is called for each row r of the tile at even
    distances on the way, to prefetch what comes next: all at once would fill the buffers that the product's own loads wait for.
    `beside()` is called `bursts` times, for what is more."""
    lanes = k.lanes
    acc: list[list[Var]] = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.rows)]
    if sums is not None:
        with k.when(sums[0]):
            for i, x in enumerate(x for row in acc for x in row):
                x.value = sums[1].load(i * lanes)

    def step(u: Value, operand: Left) -> None:
        right = [panel.as_dtype("i32").load_raw(u * (tile.vectors * lanes) + v * lanes) for v in range(tile.vectors)]
        for r in range(tile.rows):
            a = operand(r, u)
            for v in range(tile.vectors):
                acc[r][v].value = (
                    k.dot(acc[r][v].value, a, right[v])
                    if pair
                    else k.fma(a, k.bitcast(right[v], k.vec), acc[r][v].value)
                )

    if ahead is None:
        with k.loop(0, units) as u:
            step(u, left)
    else:
        turn = (units + (tile.rows - 1)) // tile.rows
        with k.loop(0, tile.rows) as r:
            start = r * turn
            ahead(r)
            if beside is None:
                with k.loop(start, k.min(start + turn, units)) as u:
                    step(u, left)
            else:
                with k.loop(start, start + turn, BURST) as first:
                    beside()
                    with k.loop(first, k.min(k.min(first + BURST, start + turn), units)) as u:
                        step(u, left)
    if tail is not None:
        with k.when(ends) if ends is not None else nullcontext():
            step(k.int(units), tail)
    return [[x.value for x in row] for row in acc]


def bursts(k: KernelBuilder, tile: Tile, units: Value) -> Value:
    """How often `tile_product` calls `beside`."""
    return k.ceil_div(k.ceil_div(units, tile.rows), BURST) * tile.rows


def left_rows(k: KernelBuilder, a: Pointer, rows: list[Any], depth: int, pair: bool) -> tuple[Left, Left | None]:
    """The left operand read from row-major memory: (operand of whole units, operand of a last odd one)."""
    bases = [a.at(row * depth) for row in rows]
    if not pair:
        return (lambda r, u: k.splat(bases[r].get(u))), None

    def whole(r: int, u: Value) -> Value:
        p = bases[r].bytes(u << 2)
        return k.splat(k.op("i32", f"load i32, ptr {p.ref}, align 2"))

    def half(r: int, u: Value) -> Value:
        p = bases[r].bytes(u << 2)
        return k.splat(k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {p.ref}, align 2').ref} to i32"))

    return whole, half if depth % 2 else None


def block_of(unit: Value, choice: Choice, row_blocks: Any, column_blocks: Any) -> tuple[Value, Value]:
    """(row block, column block) of a claimed unit."""
    if choice.order == "rows":
        return unit // column_blocks, unit % column_blocks
    return unit % row_blocks, unit // row_blocks


def prefetch_row(k: KernelBuilder, p: Pointer, count: int, *, write: bool) -> None:
    """`count` elements from `p`."""
    for line in range(0, count * p.itemsize, LINE):
        k.prefetch(p.bytes(line), write=write)


# --- out = a @ weight, with an epilogue ---


class Epilogue:
    """What becomes of the sums in a panel's columns, from `col` on, when the bias has been added.

    "store"; "gelu": second = the sum, out = gelu of it; "residual": out = other + the sum; "gelu_backward": out = the sum times
    the slope of gelu at other.
    """

    def __init__(
        self, k: KernelBuilder, col: Value, tile: Tile, out: Pointer, second: Pointer | None, bias: Pointer | None,
        other: Pointer | None, *, cols: int, kind: str, mode: str, early: bool,
    ) -> None:  # fmt: skip
        """`early`: bias and masks are made now and stay in registers."""
        self.k, self.col, self.cols, self.kind, self.mode = k, col, cols, kind, mode
        self.out, self.second, self.bias, self.other = out, second, bias, other
        self.span = tile.span(k.isa)
        self.early = [self._bias_and_mask(v) for v in range(tile.vectors)] if early else []

    def _bias_and_mask(self, v: Any) -> tuple[Value | None, Value | None]:
        first = self.col + v * self.k.lanes
        mask = self.k.mask_first(self.cols - first) if self.cols % self.span else None
        return None if self.bias is None else self.bias.load(first, mask), mask

    def put(self, row: Value, v: Any, x: Value) -> None:
        """Vector v of a row's finished sums, to memory; v is a number of Python's where `early`."""
        at = row * self.cols + self.col + v * self.k.lanes
        bias, mask = self.early[v] if self.early else self._bias_and_mask(v)
        if bias is not None:
            x = x + bias
        if self.kind == "gelu":
            self.second.store(x, at, mask)
            x = gelu(self.k, x, self.out.dtype)
        elif self.kind == "residual":
            x = self.other.load(at, mask) + x
        elif self.kind == "gelu_backward":
            x = x * gelu_slope(self.k, self.other.load(at, mask), self.out.dtype)
        if self.mode == "add":
            x = x + self.out.load(at, mask)
        self.out.store(x, at, mask)

    def fetch(self, row: Value) -> None:
        """The lines of a row that `put` will write or read."""
        at = row * self.cols + self.col
        for p, write in ((self.out, True), (self.second, True), (self.other, False)):
            if p is not None:
                prefetch_row(self.k, p.at(at), self.span, write=write)


def product(
    k: KernelBuilder, out, second, a, weight, bias, other, row_begin, row_limit,
    *, cols: int, depth: int, transposed: bool, dims: tuple[str, ...], inner: int, epilogue: str, mode: str, choice: Choice,
) -> None:  # fmt: skip
    """out (rows, cols) = epilogue(a (rows, depth) @ weight + bias). Rows are [row_begin, row_begin + row_limit) of the run's
    `k.extent(dims, inner)`; pointers are to the first of them."""
    assert a.dtype == weight.dtype, "both operands of a product have the program's compute dtype"
    tile = choice.tile
    pair = paired(k.isa, a.dtype)
    rows = k.min(k.extent(dims, inner) - row_begin, row_limit)
    span = tile.span(k.isa)
    panels = -(-cols // span)
    part = depth_part(k.isa, a.dtype, depth)
    parts = -(-depth // part)
    long_blocks = k.ceil_div(rows, choice.long_rows)
    few = long_blocks * panels < k.threads * BUSY
    blocks = k.max(k.select(few, k.ceil_div(rows, choice.rows), long_blocks), 0)
    block = even_rows(k, rows, blocks, tile)
    groups = panel_groups(k, panels, choice.columns // span, blocks)
    scratch, nbytes = k.private("i32"), panel_bytes(k.isa, a.dtype, part, span)
    tiles, spare = amx.uses_tiles(k.isa, a.dtype), beside(k.isa, a.dtype)
    held = None  # sums that are not finished: of a tile, or of the whole claim where the depth goes in parts
    if parts > 1:
        held = scratch.bytes(2 * nbytes).as_dtype("fp32")
    elif tiles or epilogue in ("gelu", "gelu_backward"):
        held = Pointer(k, k.alloca("float", tile.rows * span), "fp32")
    later = spare and epilogue == "gelu_backward" and depth >= LATER
    if tiles:
        amx.configure(k)

    def pack(into: Pointer, number: Value) -> Packing:
        """Part number % parts of the depth, of panel number // parts."""
        col, p = number // parts * span, number % parts
        length = k.select((p + 1).equals(parts), k.int(depth - (parts - 1) * part), part) if parts > 1 else depth
        if transposed:
            w, even = weight.at(p * part), part % 8 == 0 and depth % 8 == 0
            return transposed_panel(k, into, w, col, cols=cols, stride=depth, depth=length, even=even, span=span)
        ragged = cols if cols % span else None
        return interleaved(k, into, weight.at(p * (part * cols)), col, length, stride=cols, width=span, cols=ragged)

    two = Panels(k, scratch, nbytes, pack)

    with k.claim_each(blocks * groups) as unit:
        row_block, group = block_of(unit, choice, blocks, groups)
        first_panel, last_panel = group * panels // groups, (group + 1) * panels // groups
        first = row_block * block
        last = k.min(first + block, rows)
        whole = last - (last - first) % tile.rows
        parts_in_turn = k.loop(0, parts) if parts > 1 else nullcontext(k.int(0))
        with parts_in_turn as p, k.loop(first_panel, last_panel) as panel_index:
            col = panel_index * span
            finish = Epilogue(
                k, col, tile, out, second, bias, other, cols=cols, kind=epilogue, mode=mode, early=held is None
            )

            def held_row(row: Value, r: Any) -> Pointer:
                """Where the sums of row `row` + r are held."""
                if parts == 1:
                    return held.at(k.int(r) * span)
                return held.at(((panel_index - first_panel) * block + (row - first) + r) * span)

            def finish_row(row: Value, r: Any) -> None:
                def put(v: Any) -> None:
                    finish.put(row + r, v, held_row(row, r).load(v * k.lanes))

                if later:  # all of a row at once need more registers than the next tile leaves
                    with k.loop(0, tile.vectors) as v:
                        put(v)
                else:
                    for v in range(tile.vectors):
                        put(v)

            ends = (p + 1).equals(parts) if parts > 1 else None
            length = k.select(ends, k.int(depth - (parts - 1) * part), part) if parts > 1 else depth
            number = panel_index * parts + p
            panel = two.take(number)
            if tiles:
                amx.pad_panel(k, panel, depth)
            if spare:
                # Next come the group's other panels, then the next part of its depth, then the next claim.
                _, after = block_of(unit + 1, choice, blocks, groups)
                wanted, after = unit + 1 < blocks * groups, after * panels // groups * parts
                if ends is not None:
                    wanted, after = wanted | (p + 1 < parts), k.select(ends, after, first_panel * parts + p + 1)
                same = panel_index + 1 < last_panel
                wanted, after = wanted | same, k.select(same, number + parts, after)
                two.follow(after, wanted, whole - first)
            left_part = a.at(p * part)

            def emit(row: Value, small: Tile, count: Value | None) -> None:
                """The product of a tile of rows, or of `count` < small.rows: what hangs over computes the last row again."""

                def ahead(r: Value) -> None:
                    with k.when(ends) if ends is not None else nullcontext():
                        finish.fetch(row + r)
                        if later:
                            with k.when(row > first):
                                finish_row(row - tile.rows, r)
                    if parts > 1:
                        # The next tile's rows; each is a stream of its own, too short for the processor to see it.
                        for line in range(0, part * a.itemsize, LINE):
                            k.prefetch(left_part.at((row + tile.rows + r) * depth).bytes(line), near=False)
                    if spare:
                        two.some()

                sums: list[list[Value]] = []
                if tiles:
                    copied = scratch.bytes(2 * nbytes)
                    amx.multiply_rows(k, held, a.at(row * depth), count, panel, copied, depth=depth)
                else:
                    indices = [i if count is None else k.min(k.int(i), count - 1) for i in range(small.rows)]
                    left, tail = left_rows(k, left_part.at(row * depth), indices, depth, pair)
                    units = length // 2 if pair else length
                    begun = (p > 0, held_row(row, 0)) if parts > 1 else None
                    fetch = ahead if count is None else None
                    sums = tile_product(
                        k, small, left, panel, units, pair, tail=tail, ahead=fetch, sums=begun, ends=ends
                    )
                if held is not None:
                    for r, values in enumerate(sums):
                        for v, x in enumerate(values):
                            held_row(row, 0).store(x, r * span + v * k.lanes)
                    if later and count is None:
                        return
                    many = k.int(tile.rows) if count is None else count
                    with k.loop(0, many if ends is None else k.select(ends, many, 0)) as r:
                        finish_row(row, r)
                    return
                for r in range(small.rows):
                    with k.when(k.int(r) < count) if count is not None else nullcontext():
                        for v in range(tile.vectors):
                            finish.put(row + r, v, sums[r][v])

            with k.loop(first, whole, tile.rows) as row:
                emit(row, tile, None)
            if later:
                any_tile = whole > first
                with k.when(any_tile if ends is None else any_tile & ends), k.loop(0, tile.rows) as r:
                    finish_row(whole - tile.rows, r)
            if spare:
                two.followed()
            small = tile if tiles else tile.tail()
            with k.loop(whole, last, small.rows) as row:
                emit(row, small, k.min(last - row, small.rows))
    if tiles:
        amx.release(k)


def depth_part(isa: ISA, dtype: str, depth: int) -> int:
    """Depth that is packed and multiplied at a time; tile registers take all of it."""
    return depth if amx.uses_tiles(isa, dtype) else part_of(depth, 2 if paired(isa, dtype) else 4)


def panel_groups(k: KernelBuilder, panels: int, most: int, blocks: Value) -> Value:
    """Groups of at most `most` panels, about as large as each other: one is a claim's. Enough of them for threads to be busy, and
    as many for each thread."""
    if most == 1:
        return k.int(panels)
    wanted = k.max(k.ceil_div(k.threads * (BUSY // 2), k.max(blocks, 1)), -(-panels // most))
    return k.min(k.ceil_div(wanted, k.threads) * k.threads, panels)


def even_rows(k: KernelBuilder, rows: Value, blocks: Value, tile: Tile) -> Value:
    """Rows of each of `blocks` blocks, a multiple of the tile's: as even as can be."""
    many = k.max(blocks, 1) * tile.rows
    return (rows + (many - 1)) // many * tile.rows


def product_private(isa: ISA, dtype: str, depth: int, choice: Choice) -> int:
    """Bytes: two packed panels; the copied left operand of AMX, or the sums of a block between two parts of the depth."""
    part, span = depth_part(isa, dtype, depth), choice.tile.span(isa)
    if amx.uses_tiles(isa, dtype):
        rest = amx.left_bytes(depth)
    else:
        rest = 4 * max(choice.rows, choice.long_rows) * choice.columns if part < depth else 0
    return 2 * panel_bytes(isa, dtype, part, span) + rest
