"""Matrix products: the register tile, and the kernel built on it that multiplies activations with a weight.

Shapes: a (rows, depth) row-major activations; weight (cols, depth) forward, (depth, cols) for the input gradient; out (rows, cols).
A tile of MR rows x NV vectors of accumulators is the inner loop. Its right operand is a packed panel of NV vectors of columns
(packing.py). Each output element is one accumulation chain over the depth, so its bits do not depend on how the product is cut
(choices.py).

The arithmetic hides the memory: while a tile is multiplied, the lines that it will write or read and a part of the next panel's
are prefetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.choices import Choice, Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.packing import pack_interleaved, pack_transposed, paired, panel_bytes
from barellm.cpu.lang import Pointer, Value, Var
from barellm.cpu.lang.vector import gelu, gelu_slope

LINE = 64  # bytes of a cache line
AHEAD_ROWS = 256  # the next panel's lines are fetched while the present one goes through so many rows


# --- the register tile ---

Left = Callable[[int, Value], Value]  # (row of the tile, unit of depth) -> broadcast lanes


def tile_product(
    k: KernelBuilder, tile: Tile, left: Left, panel: Pointer, units: Any, pair: bool, *,
    tail: Left | None = None, ahead: Callable[[Value], None] | None = None,
) -> list[list[Value]]:  # fmt: skip
    """MR x NV accumulators: the sum over `units` of left x panel; `tail` gives the left operand of one unit more. `ahead(r)` is
    called for each row r of the tile at even distances on the way, to prefetch what comes next: all at once would fill the
    buffers that the product's own loads wait for."""
    acc: list[list[Var]] = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.rows)]
    lanes = k.lanes

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
            ahead(r)
            start = r * turn
            with k.loop(start, k.min(start + turn, units)) as u:
                step(u, left)
    if tail is not None:
        step(k.int(units), tail)
    return [[x.value for x in row] for row in acc]


def left_rows(k: KernelBuilder, a: Pointer, rows: list[Any], depth: int, pair: bool) -> tuple[Left, int, Left | None]:
    """The left operand read from row-major memory: (operand, whole units, operand of a last odd one)."""
    bases = [a.at(row * depth) for row in rows]
    if not pair:
        return (lambda r, u: k.splat(bases[r].get(u))), depth, None

    def whole(r: int, u: Value) -> Value:
        p = bases[r].bytes(u << 2)
        return k.splat(k.op("i32", f"load i32, ptr {p.ref}, align 2"))

    def half(r: int, u: Value) -> Value:
        p = bases[r].bytes(u << 2)
        return k.splat(k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {p.ref}, align 2').ref} to i32"))

    return whole, depth // 2, half if depth % 2 else None


def block_of(unit: Value, choice: Choice, row_blocks: Any, column_blocks: Any) -> tuple[Value, Value]:
    """(row block, column block) of a claimed unit."""
    if choice.order == "rows":
        return unit // column_blocks, unit % column_blocks
    return unit % row_blocks, unit // row_blocks


class Ahead:
    """Prefetches a block of memory, `count` rows of `nbytes` with `stride` bytes between, a few rows at a time into the second
    cache: as if as many tiles as have AHEAD_ROWS rows did it together."""

    def __init__(self, k: KernelBuilder, block: Pointer, *, count: Any, stride: int, nbytes: int, rows: int) -> None:
        self.k, self.block, self.count, self.stride, self.nbytes = k, block, k.int(count), stride, nbytes
        self.step = (self.count + (rows - 1)) // rows if isinstance(count, Value) else -(-count // rows)
        self.done = k.var(0)

    def fetch(self) -> None:
        k = self.k
        first = self.done.value
        with k.when(first < self.count):
            with k.loop(first, first + self.step) as i:
                for line in range(0, self.nbytes, LINE):
                    k.prefetch(self.block.bytes(i * self.stride + line), near=False)
            self.done.value = first + self.step


def prefetch_row(k: KernelBuilder, p: Pointer, count: int, *, write: bool) -> None:
    """`count` elements from `p`."""
    for line in range(0, count * p.itemsize, LINE):
        k.prefetch(p.bytes(line), write=write)


# --- out = a @ weight, with an epilogue ---


def product(
    k: KernelBuilder, out, second, a, weight, bias, other, row_begin, row_limit,
    *, cols: int, depth: int, transposed: bool, dims: tuple[str, ...], epilogue: str, mode: str, choice: Choice,
) -> None:  # fmt: skip
    """out (rows, cols) = epilogue(a (rows, depth) @ weight + bias).

    "store"; "gelu": second = the sum, out = gelu of it; "residual": out = other + the sum; "gelu_backward": out = the sum times
    the slope of gelu at other. Rows are [row_begin, row_begin + row_limit) of the run's; pointers are to the first of them.
    """
    assert a.dtype == weight.dtype, "both operands of a product have the program's compute dtype"
    tile = choice.tile
    pair = paired(k.isa, a.dtype)
    rows = k.min(k.extent(dims) - row_begin, row_limit)
    span = tile.span(k.isa)
    panels = -(-cols // span)
    block = k.select(rows < 4 * choice.long_rows, k.int(choice.rows), choice.long_rows)
    blocks = k.max((rows + block - 1) // block, 0)
    panel = k.private("i32")
    tiles = amx.uses_tiles(k.isa, a.dtype)
    heavy = tiles or epilogue in ("gelu", "gelu_backward")
    buffer = Pointer(k, k.alloca("float", tile.rows * span), "fp32") if heavy else None
    if tiles:
        amx.configure(k)

    with k.claim_each(blocks * panels) as unit:
        row_block, panel_index = block_of(unit, choice, blocks, panels)
        col = panel_index * span
        first = row_block * block
        last = k.min(first + block, rows)
        beyond = k.select(panel_index + 1 < panels, col + span, 0)  # the next unit's panel
        if transposed:
            pack_transposed(k, panel, weight, col, cols=cols, depth=depth, tile=tile)
            lines = -(-span * depth * weight.itemsize // LINE)
            following = Ahead(k, weight.at(beyond * depth), count=lines, stride=LINE, nbytes=LINE, rows=AHEAD_ROWS)
        else:
            ragged = cols if cols % span else None
            pack_interleaved(k, panel, weight, col, depth, stride=cols, width=span, cols=ragged)
            size = weight.itemsize
            following = Ahead(
                k, weight.at(beyond), count=depth, stride=cols * size, nbytes=span * size, rows=AHEAD_ROWS
            )
        if tiles:
            amx.pad_panel(k, panel, depth)
        masks = [k.mask_first(cols - col - v * k.lanes) if cols % span else None for v in range(tile.vectors)]
        biases = [bias.load(col + v * k.lanes, masks[v]) if bias is not None else None for v in range(tile.vectors)]

        def finish(row: Value, v: int, x: Value) -> None:
            at = row * cols + col + v * k.lanes
            if biases[v] is not None:
                x = x + biases[v]
            if epilogue == "gelu":
                second.store(x, at, masks[v])
                x = gelu(k, x, out.dtype)
            elif epilogue == "residual":
                x = other.load(at, masks[v]) + x
            elif epilogue == "gelu_backward":
                x = x * gelu_slope(k, other.load(at, masks[v]), out.dtype)
            if mode == "add":
                x = x + out.load(at, masks[v])
            out.store(x, at, masks[v])

        def emit(row: Value, count: Value | None) -> None:
            def ahead(r: Value) -> None:
                at = (row + r) * cols + col
                for p, write in ((out, True), (second, True), (other, False)):
                    if p is not None:
                        prefetch_row(k, p.at(at), span, write=write)
                following.fetch()

            sums: list[list[Value]] = []
            if tiles and buffer is not None:
                copied = panel.bytes(panel_bytes(k.isa, a.dtype, depth, span))
                amx.multiply_rows(k, buffer, a.at(row * depth), count, panel, copied, depth=depth)
            else:
                # A tile that hangs over the last row computes it again and stores nothing there.
                indices = [i if count is None else k.min(k.int(i), count - 1) for i in range(tile.rows)]
                left, units, tail = left_rows(k, a.at(row * depth), indices, depth, pair)
                before = ahead if count is None else None
                sums = tile_product(k, tile, left, panel, units, pair, tail=tail, ahead=before)
            if buffer is not None:
                for r, values in enumerate(sums):
                    for v, x in enumerate(values):
                        buffer.store(x, r * span + v * k.lanes)
                with k.loop(0, tile.rows if count is None else count) as r:
                    for v in range(tile.vectors):
                        finish(row + r, v, buffer.load(r * span + v * k.lanes))
                return
            for r in range(tile.rows):
                if count is None:
                    for v in range(tile.vectors):
                        finish(row + r, v, sums[r][v])
                else:
                    with k.when(k.int(r) < count):
                        for v in range(tile.vectors):
                            finish(row + r, v, sums[r][v])

        whole = last - (last - first) % tile.rows
        with k.loop(first, whole, tile.rows) as row:
            emit(row, None)
        with k.when(whole < last):
            emit(whole, last - whole)
    if tiles:
        amx.release(k)


def product_private(isa: ISA, dtype: str, depth: int, choice: Choice) -> int:
    copied = amx.left_bytes(depth) if amx.uses_tiles(isa, dtype) else 0
    return panel_bytes(isa, dtype, depth, choice.tile.span(isa)) + copied
