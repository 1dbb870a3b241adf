"""Matrix products: packing, the register tile, and the two kernels built on it.

Shapes: a (rows, depth) row-major activations; weight (cols, depth) forward, (depth, cols) for the input gradient; out (rows, cols).
A tile of MR rows x NV vectors of accumulators is the inner loop. Its right operand is a panel of NV vectors of columns, packed
into this thread's scratch as [depth][NV][lanes]; with a bf16 dot instruction the depth goes in pairs, [depth / 2][NV][lanes][2],
and an odd depth gets a zero. Without one, bf16 becomes fp32 while packing. Each output element is one accumulation chain over
the depth, so its bits do not depend on how the product is cut (choices.py); weight gradients add up chunks of CHUNK tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.choices import Choice, Tile
from barellm.cpu.lang import Pointer, Value, Var
from barellm.cpu.lang.vector import gelu, gelu_slope, transpose

CHUNK = 2048  # tokens of one weight gradient chunk: its two packed blocks stay in a 1 MiB L2
NONTEMPORAL = 1 << 20  # a first-written gradient of this many bytes leaves the cache anyway


def paired(isa: ISA, dtype: str) -> bool:
    """Whether operands of `dtype` go in pairs along the depth."""
    return dtype == "bf16" and bool(isa.dot)


def panel_bytes(isa: ISA, dtype: str, depth: int, width: int) -> int:
    """Bytes of a packed block of `width` columns, a multiple of 64."""
    if amx.uses_tiles(isa, dtype):
        depth = amx.padded(depth)
    nbytes = -(-depth // 2) * width * 4 if paired(isa, dtype) else depth * width * 4
    return -(-nbytes // 64) * 64


# --- packing ---


def load_units(k: KernelBuilder, p: Pointer, index: Any, pair: bool) -> Value:
    """`lanes` units of the packed form as i32: pairs of bf16 as they lie in memory, or fp32."""
    if pair:
        return k.op(k.ivec, f"load {k.ivec}, ptr {p.at(index).ref}, align 2")
    return k.bitcast(p.load(index), k.ivec)


def pack_transposed(
    k: KernelBuilder, panel: Pointer, w: Pointer, col: Value, *, cols: int, depth: int, tile: Tile
) -> None:
    """Panel columns `col`... of w (cols, depth): squares of lanes x lanes units are transposed in registers. Columns beyond the
    last repeat it: their products are computed and never stored."""
    pair = paired(k.isa, w.dtype)
    unit = 2 if pair else 1
    step = k.lanes * unit
    units = -(-depth // unit)
    hangs_over = cols % (tile.vectors * k.lanes) != 0
    lanes, span = k.lanes, tile.vectors * k.lanes
    whole = depth - depth % step
    with k.loop(0, span, lanes) as offset:  # not unrolled: one square is a quarter of a product's compile time

        def square(d: Any, used: int) -> None:
            rows = []
            for i in range(lanes):
                row = col + offset + i
                if hangs_over:
                    row = k.min(row, cols - 1)
                at = w.at(row * depth)
                if isinstance(d, Value):
                    rows.append(load_units(k, at, d, pair))
                elif pair:
                    rows.append(k.bitcast(tail_pairs(k, at, d, depth - d), k.ivec))
                else:
                    rows.append(k.bitcast(at.load(d, k.mask_first(depth - d)), k.ivec))
            first = k.int(d) // unit if isinstance(d, Value) else k.int(d // unit)
            for i, row in enumerate(transpose(k, rows)[:used]):
                panel.as_dtype("i32").store_raw(row, (first + i) * span + offset)

        if whole:
            with k.loop(0, whole, step) as d:
                square(d, lanes)
        if depth % step:
            square(whole, units - whole // unit)


def tail_pairs(k: KernelBuilder, p: Pointer, start: int, count: int) -> Value:
    """`count` < 2 * lanes bf16 from `start`, zeros after them, as a vector of 2 * lanes i16."""
    parts = [p.load_raw(start + h, k.mask_first(max(0, min(k.lanes, count - h)))) for h in (0, k.lanes)]
    return k.concat(parts)


def pack_interleaved(
    k: KernelBuilder, block: Pointer, b: Pointer, col: Any, depth: Any, *, stride: int, width: int, cols: int | None
) -> None:
    """Rows 0... of b (depth, stride), columns `col`... + width, with two depth rows woven into pairs where the ISA wants them.
    `cols` is the column count where the block may hang over it, None where it cannot; what hangs over becomes zero."""
    pair = paired(k.isa, b.dtype)
    lanes = k.lanes

    def load(row: Any, v: int) -> Value:
        mask = None if cols is None else k.mask_first(cols - (col + v))
        p = b.at(row * stride + col)
        return p.load_raw(v, mask) if pair else p.load(v, mask)

    vectors = range(0, width, lanes)
    weave = [x for i in range(lanes) for x in (i, lanes + i)]
    if not pair:
        with k.loop(0, depth) as d:
            for v in vectors:
                block.as_dtype("fp32").store(load(d, v), d * width + v)
        return
    depth = k.int(depth)
    out = block.as_dtype("i32")

    def put(d: Value, v: int, even: Value, odd: Value) -> None:
        out.store_raw(k.bitcast(k.shuffle(even, odd, weave), k.ivec), (d >> 1) * width + v)

    with k.loop(0, depth - depth % 2, 2) as d:
        for v in vectors:
            put(d, v, load(d, v), load(d + 1, v))
    with k.when((depth % 2).differs(0)):
        for v in vectors:
            put(depth - 1, v, load(depth - 1, v), k.const(0, f"<{lanes} x i16>"))


# --- the register tile ---

Left = Callable[[int, Value], Value]  # (row of the tile, unit of depth) -> broadcast lanes


def tile_product(
    k: KernelBuilder, tile: Tile, left: Left, panel: Pointer, units: Any, pair: bool, tail: Left | None = None
) -> list[list[Value]]:
    """MR x NV accumulators: the sum over `units` of left x panel; `tail` gives the left operand of one unit more."""
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

    with k.loop(0, units) as u:
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
        if transposed:
            pack_transposed(k, panel, weight, col, cols=cols, depth=depth, tile=tile)
        else:
            ragged = cols if cols % span else None
            pack_interleaved(k, panel, weight, col, depth, stride=cols, width=span, cols=ragged)
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
                x = gelu(k, x)
            elif epilogue == "residual":
                x = other.load(at, masks[v]) + x
            elif epilogue == "gelu_backward":
                x = x * gelu_slope(k, other.load(at, masks[v]))
            if mode == "add":
                x = x + out.load(at, masks[v])
            out.store(x, at, masks[v])

        def emit(row: Value, count: Value | None) -> None:
            sums: list[list[Value]] = []
            if tiles and buffer is not None:
                copied = panel.bytes(panel_bytes(k.isa, a.dtype, depth, span))
                amx.multiply_rows(k, buffer, a.at(row * depth), count, panel, copied, depth=depth)
            else:
                # A tile that hangs over the last row computes it again and stores nothing there.
                indices = [i if count is None else k.min(k.int(i), count - 1) for i in range(tile.rows)]
                left, units, tail = left_rows(k, a.at(row * depth), indices, depth, pair)
                sums = tile_product(k, tile, left, panel, units, pair, tail)
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


# --- dweight = dy.T @ x ---


def weight_gradient(
    k: KernelBuilder, dweight, dy, x, row_begin, row_limit,
    *, N: int, K: int, dims: tuple[str, ...], mode: str, choice: Choice,
) -> None:  # fmt: skip
    """dweight (N, K) = dy (tokens, N).T @ x (tokens, K). Both operands are packed with tokens woven into pairs."""
    tile, height, columns = choice.tile, choice.rows, choice.columns
    pair = paired(k.isa, dy.dtype)
    span = tile.span(k.isa)
    packed = -(-height // k.lanes) * k.lanes
    tokens = k.min(k.extent(dims) - row_begin, row_limit)
    left_block = k.private("i32")
    panel = left_block.bytes(panel_bytes(k.isa, dy.dtype, CHUNK, packed))
    keep = k.keep(mode)
    row_blocks, column_blocks = -(-N // height), -(-K // columns)
    nontemporal = N * K * 4 >= NONTEMPORAL and K % span == 0 and mode != "add"
    buffer = None
    if amx.uses_tiles(k.isa, dy.dtype):
        buffer = Pointer(k, k.alloca("float", tile.rows * span), "fp32")
        amx.configure(k)

    with k.when(tokens > 0), k.claim_each(row_blocks * column_blocks) as unit:
        row_block, column_block = block_of(unit, choice, row_blocks, column_blocks)
        n0, k0 = row_block * height, column_block * columns
        n1, k1 = k.min(n0 + height, N), k.min(k0 + columns, K)
        with k.loop(0, tokens, CHUNK) as t:
            depth = k.min(tokens - t, CHUNK)
            units = (depth + 1) >> 1 if pair else depth
            hangs = N if N % height or packed != height else None
            pack_left = amx.pack_left if buffer is not None else pack_interleaved
            pack_left(k, left_block, dy.at(t * N), n0, depth, stride=N, width=packed, cols=hangs)
            with k.loop(k0, k1, span) as col:
                pack_interleaved(k, panel, x.at(t * K), col, depth, stride=K, width=span, cols=K if K % span else None)
                if buffer is not None:
                    amx.pad_panel(k, panel, depth)
                masks = [k.mask_first(K - col - v * k.lanes) if K % span else None for v in range(tile.vectors)]
                again = t > 0 if keep is None else k.op("i1", f"or i1 {(t > 0).ref}, {keep.ref}")
                with k.loop(n0, n1, tile.rows) as row:
                    base = left_block.bytes((row - n0) << 2)

                    def left(r: int, u: Value, base: Pointer = base) -> Value:
                        p = base.bytes(u * (packed * 4) + 4 * r)
                        type_ = "i32" if pair else "float"
                        return k.splat(k.op(type_, f"load {type_}, ptr {p.ref}, align 4"))

                    sums: list[list[Value]] = []
                    if buffer is not None:
                        amx.multiply_packed(k, buffer, left_block, row - n0, panel, depth)
                    else:
                        sums = tile_product(k, tile, left, panel, units, pair)

                    def put_row(
                        r: Any, values: list[Value], add: bool, row: Value = row, col: Value = col, masks=masks
                    ):
                        for v, value in enumerate(values):
                            at = (row + r) * K + col + v * k.lanes
                            if add:
                                value = value + dweight.load(at, masks[v])
                            dweight.store(value, at, masks[v], nontemporal=nontemporal and not add)

                    def put(add: bool, row: Value = row, sums=sums, put_row=put_row) -> None:
                        if buffer is not None:
                            with k.loop(0, k.min(n1 - row, tile.rows)) as r:
                                held = [buffer.load(r * span + v * k.lanes) for v in range(tile.vectors)]
                                put_row(r, held, add)
                        for r, values in enumerate(sums):
                            inside = (row + r) < n1
                            with k.when(inside):
                                put_row(r, values, add)

                    with k.when(again):
                        put(True)
                    with k.otherwise(again):
                        put(False)
    if buffer is not None:
        amx.release(k)


def gradient_private(isa: ISA, dtype: str, choice: Choice) -> int:
    packed = -(-choice.rows // isa.lanes) * isa.lanes
    return panel_bytes(isa, dtype, CHUNK, packed) + panel_bytes(isa, dtype, CHUNK, choice.tile.span(isa))
