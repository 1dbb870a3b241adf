"""Weight gradients: dweight = dy.T @ x, contracted over tokens.

Both operands are packed with two token rows woven into pairs, in this thread's scratch: no transposed copy of an activation
exists. Chunks of tokens are added up in order, so the bits do not depend on how the product is cut (choices.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from barellm.cpu.choices import Choice, Tile, chunk_of
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.packing import LeftBlock, Packing, Panels, interleaved, paired, panel_bytes
from barellm.cpu.kernels.register_tile import block_of, bursts, prefetch_row, tile_product
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div, round_up

NONTEMPORAL = 1 << 20  # a first-written gradient of this many bytes leaves the cache anyway


def weight_gradient(
    k: KernelBuilder, dweight, dy, x, row_begin, row_limit,
    *, N: int, K: int, dims: tuple[str, ...], inner: int, mode: str, choice: Choice, strides: tuple[tuple[str, int], ...] = (),
    scale: Value | None = None,
) -> None:  # fmt: skip
    """dweight (N, K) = dy (tokens, N).T @ x (tokens, K). Both operands are packed with tokens woven into pairs. Tokens are
    [row_begin, row_begin + row_limit) of the run's `k.extent(dims, inner)`; dy and x point to the first of them.
    `strides`: elements from a row to the next, of operands that are views. `scale` multiplies the sums of each chunk."""
    dy_row, x_row = (dict(strides).get(name, width) for name, width in (("dy", N), ("x", K)))
    tile, height, columns = choice.tile, choice.rows, choice.columns
    pair = paired(k.isa, dy.dtype)
    span, chunk = tile.span(k.isa), chunk_of(k.isa)
    tokens = k.min(k.extent(dims, inner) - row_begin, row_limit)
    scratch, nbytes = k.private("i32"), panel_bytes(k.isa, dy.dtype, chunk, span)
    left_at = scratch.bytes(2 * nbytes)
    keep = k.keep(mode)
    row_blocks, column_blocks = ceil_div(N, height), ceil_div(K, columns)
    heights = [min(height, N - n) for n in range(0, N, height)]
    nontemporal = N * K * 4 >= NONTEMPORAL and K % span == 0 and mode != "add"
    buffer, held = None, k.var(-1)
    rests = sorted({n % tile.rows for n in heights} - {0})  # rows of a block that are no whole tile
    if amx.uses_tiles(k.isa, dy.dtype):
        buffer = Pointer(k, k.alloca("float", tile.rows * span), "fp32")
        amx.configure(k)
        rests = []

    def pack(into: Pointer, number: Value) -> Packing:
        """Columns number % K of the chunk of tokens that starts at number // K."""
        t, col = number // K, number % K
        ragged = K if K % span else None
        return interleaved(
            k, into, x.at(t * x_row), col, k.min(tokens - t, chunk), stride=x_row, width=span, cols=ragged
        )

    def block(number: Value) -> tuple[Pointer, Value, Value, Value]:
        """Rows number % row_blocks of the result, of the chunk of tokens that starts at number // row_blocks."""
        t, first = number // row_blocks, number % row_blocks * height
        return dy.at(t * dy_row), first, k.min(first + height, N), k.min(tokens - t, chunk)

    # Rows move through one register, so 16 are enough for packing beside a tile: gemm.py's transposes need more.
    two, spare = Panels(k, scratch, nbytes, pack), not amx.uses_tiles(k.isa, dy.dtype)
    inside = all(i * height + round_up(n, tile.rows) <= N for i, n in enumerate(heights))
    left_block = LeftBlock(
        k, left_at, dtype=dy.dtype, rows=tile.rows, cols=N, stride=dy_row, most=k.min(tokens, chunk), inside=inside, block=block
    )  # fmt: skip

    with k.when(tokens > 0), k.claim_each(row_blocks * column_blocks) as unit:
        row_block, column_block = block_of(unit, choice, row_blocks, column_blocks)
        n0, k0 = row_block * height, column_block * columns
        n1, k1 = k.min(n0 + height, N), k.min(k0 + columns, K)
        whole = n1 - (n1 - n0) % tile.rows if rests else n1
        with k.loop(0, tokens, chunk) as t:
            depth = k.min(tokens - t, chunk)
            units = (depth + 1) >> 1 if pair else depth
            calls = bursts(k, tile, units)  # in each tile
            rows_number = t * row_blocks + row_block
            if buffer is None:
                left_block.take(rows_number, calls)
            else:
                with k.when(held.value.differs(rows_number)):
                    held.value, packed = rows_number, _packed(k.isa, choice)
                    hangs = N if N % height or packed != height else None
                    amx.pack_left(k, left_at, dy.at(t * dy_row), n0, depth, stride=dy_row, width=packed, cols=hangs)
            again = t > 0 if keep is None else k.op("i1", f"or i1 {(t > 0).ref}, {keep.ref}")
            with k.loop(k0, k1, span) as col:
                number = t * K + col
                panel = two.take(number)
                if buffer is not None:
                    amx.pad_panel(k, panel, depth)
                if spare:
                    same, more = col + span < k1, t + chunk < tokens
                    _, after = block_of(unit + 1, choice, row_blocks, column_blocks)
                    after = k.select(more, (t + chunk) * K + k0, after * columns)
                    after = k.select(same, number + span, after)
                    wanted = same | more | (unit + 1 < row_blocks * column_blocks)
                    two.follow(after, wanted, (n1 - n0) // tile.rows * calls)
                masks = [k.mask_first(K - col - v * k.lanes) if K % span else None for v in range(tile.vectors)]

                def multiply(row: Value, small: Tile, panel: Pointer = panel, col: Value = col, masks=masks) -> None:
                    """Rows from `row` on, as many as `small` has."""
                    base = left_block.tile(row - n0) if buffer is None else left_at

                    def left(r: int, u: Value) -> Value:
                        type_ = "i32" if pair else "float"
                        p = base.bytes(u * (tile.rows * 4) + 4 * r)
                        return k.splat(k.op(type_, f"load {type_}, ptr {p.ref}, align 4"))

                    def ahead(r: Value) -> None:
                        target = dweight.at((row + r) * K + col)
                        if nontemporal:
                            with k.when(again):
                                prefetch_row(k, target, span, write=True)
                        else:
                            prefetch_row(k, target, span, write=True)

                    def some() -> None:
                        two.some()
                        left_block.some()

                    sums: list[list[Value]] = []
                    if buffer is not None:
                        amx.multiply_packed(k, buffer, left_at, row - n0, panel, depth)
                    else:
                        sums = tile_product(
                            k, small, left, panel, units, pair, ahead=ahead, beside=some if spare else None
                        )

                    def put_row(r: Any, values: list[Value], add: bool) -> None:
                        for v, value in enumerate(values):
                            at = (row + r) * K + col + v * k.lanes
                            value = value if scale is None else value * scale
                            if add:
                                value = value + dweight.load(at, masks[v])
                            dweight.store(value, at, masks[v], nontemporal=nontemporal and not add)

                    def put(add: bool) -> None:
                        if buffer is not None:
                            with k.loop(0, k.min(n1 - row, tile.rows)) as r:
                                held = [buffer.load(r * span + v * k.lanes) for v in range(tile.vectors)]
                                put_row(r, held, add)
                        for r, values in enumerate(sums):
                            put_row(r, values, add)

                    with k.when(again):
                        put(True)
                    with k.otherwise(again):
                        put(False)

                with k.loop(n0, whole, tile.rows) as row:
                    multiply(row, tile)
                for rest in rests:
                    with k.when((n1 - whole).equals(rest)) if len(set(heights)) > 1 else nullcontext():
                        multiply(whole, Tile(rest, tile.vectors))
                if spare:
                    two.followed()
    if buffer is not None:
        amx.release(k)


def _packed(isa: ISA, choice: Choice) -> int:
    """Columns of dy in the left block."""
    return round_up(round_up(choice.rows, choice.tile.rows), isa.lanes)


def gradient_private(isa: ISA, dtype: str, tokens: int, choice: Choice) -> int:
    """The scratch of a thread, in bytes. `tokens` is the largest number of tokens of a run."""
    chunk = chunk_of(isa)
    left = panel_bytes(isa, dtype, min(tokens, chunk), _packed(isa, choice))
    return 2 * panel_bytes(isa, dtype, chunk, choice.tile.span(isa)) + left
