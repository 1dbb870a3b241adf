"""Weight gradients: dweight = dy.T @ x, contracted over tokens.

Both operands are packed with two token rows woven into pairs, in this thread's scratch: no transposed copy of an activation
exists. Chunks of tokens are added up in order, so the bits do not depend on how the product is cut (gemm_config.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile, chunk_of
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx, gradient_tiles
from barellm.cpu.kernels.gemm.microkernel import block_of, bursts, prefetch_row, tile_product
from barellm.cpu.kernels.gemm.packing import LeftBlock, Packing, Panels, pack_b, panel_bytes, uses_vnni
from barellm.cpu.kernels.optim.squares import BlockSum, block_number
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div, round_up

NONTEMPORAL = 1 << 20  # a first-written gradient of this many bytes leaves the cache anyway


def weight_gradient(
    k: KernelBuilder, dweight, dy, x, row_begin, row_limit, squares=None,
    *, N: int, K: int, dims: tuple[str, ...], inner: int, mode: str, choice: GemmConfig, strides: tuple[tuple[str, int], ...] = (),
    scale: Value | None = None,
) -> None:  # fmt: skip
    """dweight (N, K) = dy (tokens, N).T @ x (tokens, K). Both operands are packed with tokens woven into pairs. Tokens are
    [row_begin, row_begin + row_limit) of the run's `k.num_elements(dims, inner)`; dy and x point to the first of them.
    `strides`: elements from a row to the next, of operands that are views. `scale` multiplies the sums of each chunk. `squares`:
    sums of squares of what is stored, block by block (squares.py). The blocks are those of AMX tiles, so only these give them."""
    dy_row, x_row = (dict(strides).get(name, width) for name, width in (("dy", N), ("x", K)))
    tile, height, columns = choice.tile, choice.rows, choice.columns
    span, chunk = tile.nr(k.isa), chunk_of(k.isa)
    tokens = k.min(k.num_elements(dims, inner) - row_begin, row_limit)
    keep = k.keep(mode)
    nontemporal = N * K * 4 >= NONTEMPORAL and K % span == 0 and mode != "add"

    def again(t: Value) -> Value:
        """Whether the chunk of tokens that starts at t is added to what is there."""
        return t > 0 if keep is None else k.op("i1", f"or i1 {(t > 0).ref}, {keep.ref}")

    def put(add: bool, row: Value, col: Value, sums: list[Value], masks: list[Value | None]) -> list[Value]:
        """Store vectors of a row; gives what is stored."""
        stored = []
        for v, value in enumerate(sums):
            at = row * K + col + v * k.lanes
            value = value if scale is None else value * scale
            if add:
                value = value + dweight.load(at, masks[v])
            dweight.store(value, at, masks[v], nontemporal=nontemporal and not add)
            stored.append(value)
        return stored

    def masks_of(col: Value) -> list[Value | None]:
        return [k.mask_first(K - col - v * k.lanes) if K % span else None for v in range(tile.vectors)]

    if amx.uses_tiles(k.isa, dy.dtype):

        def put_rows(t: Value, row: Value, count: Value, col: Value, sums: Pointer) -> None:
            add, masks = again(t), masks_of(col)
            block = None if squares is None else BlockSum(k)
            for adds, chosen in ((True, k.when), (False, k.otherwise)):
                with chosen(add), k.loop(0, count) as r:
                    values = [sums.load(r * span + v * k.lanes) for v in range(tile.vectors)]
                    stored = put(adds, row + r, col, values, masks)
                    if block is not None:
                        inside = zip(stored, masks, strict=True)
                        block.add_row([x if mask is None else k.select(mask, x, 0.0) for x, mask in inside])
            if block is not None:
                block.put(squares, block_number(row, col, K))

        sizes: dict[str, Any] = {"N": N, "K": K, "dy_row": dy_row, "x_row": x_row, "choice": choice}
        gradient_tiles.multiply(k, dy, x, tokens, put=put_rows, **sizes)
        return
    assert squares is None, "blocks of squares are those of AMX tiles"
    pair = uses_vnni(k.isa, dy.dtype)
    scratch, nbytes = k.thread_scratch("i32"), panel_bytes(k.isa, dy.dtype, chunk, span)
    row_blocks, column_blocks = ceil_div(N, height), ceil_div(K, columns)
    heights = [min(height, N - n) for n in range(0, N, height)]
    rests = sorted({n % tile.mr for n in heights} - {0})  # rows of a block that are no whole tile

    def pack(into: Pointer, number: Value) -> Packing:
        """Columns number % K of the chunk of tokens that starts at number // K."""
        t, col = number // K, number % K
        ragged = K if K % span else None
        return pack_b(k, into, x.at(t * x_row), col, k.min(tokens - t, chunk), stride=x_row, width=span, cols=ragged)

    def block(number: Value) -> tuple[Pointer, Value, Value, Value]:
        """Rows number % row_blocks of the result, of the chunk of tokens that starts at number // row_blocks."""
        t, first = number // row_blocks, number % row_blocks * height
        return dy.at(t * dy_row), first, k.min(first + height, N), k.min(tokens - t, chunk)

    # Rows move through one register, so 16 are enough for packing beside a tile: gemm.py's transposes need more.
    fetch, spare = choice.ahead == "fetch", choice.ahead != "nothing"
    two = Panels(k, scratch, nbytes, pack)
    inside = all(i * height + round_up(n, tile.mr) <= N for i, n in enumerate(heights))
    left_block = LeftBlock(
        k, scratch.bytes(2 * nbytes), dtype=dy.dtype, rows=tile.mr, cols=N, stride=dy_row, most=k.min(tokens, chunk),
        inside=inside, block=block,
    )  # fmt: skip

    with k.when(tokens > 0), k.parallel_for(row_blocks * column_blocks) as unit:
        row_block, column_block = block_of(unit, choice, row_blocks, column_blocks)
        n0, k0 = row_block * height, column_block * columns
        n1, k1 = k.min(n0 + height, N), k.min(k0 + columns, K)
        whole = n1 - (n1 - n0) % tile.mr if rests else n1
        with k.loop(0, tokens, chunk) as t:
            depth = k.min(tokens - t, chunk)
            units = (depth + 1) >> 1 if pair else depth
            calls = bursts(k, tile, units)  # in each tile
            left_block.take(t * row_blocks + row_block, calls)
            adds = again(t)
            with k.loop(k0, k1, span) as col:
                number = t * K + col
                panel = two.take(number)
                same, more = col + span < k1, t + chunk < tokens
                if spare:
                    _, after = block_of(unit + 1, choice, row_blocks, column_blocks)
                    after = k.select(more, (t + chunk) * K + k0, after * columns)
                    after = k.select(same, number + span, after)
                    wanted = same | more | (unit + 1 < row_blocks * column_blocks)
                    two.follow(after, wanted, (n1 - n0) // tile.mr * calls)
                masks = masks_of(col)

                def multiply(row: Value, small: Tile, panel: Pointer = panel, col: Value = col, masks=masks) -> None:
                    """Rows from `row` on, as many as `small` has."""
                    base = left_block.tile(row - n0)

                    def left(r: int, u: Value) -> Value:
                        type_ = "i32" if pair else "float"
                        p = base.bytes(u * (tile.mr * 4) + 4 * r)
                        return k.splat(k.op(type_, f"load {type_}, ptr {p.ref}, align 4"))

                    def ahead(r: Value) -> None:
                        if not fetch:
                            return
                        target = dweight.at((row + r) * K + col)
                        with k.when(adds) if nontemporal else nullcontext():
                            prefetch_row(k, target, span, write=True)

                    def some() -> None:
                        two.some()
                        left_block.some()

                    together = {"ahead": ahead, "beside": some} if spare else {}
                    sums = tile_product(k, small, left, panel, units, pair, **together)
                    for add, chosen in ((True, k.when), (False, k.otherwise)):
                        with chosen(adds):
                            for r, values in enumerate(sums):
                                put(add, row + r, col, values, masks)

                with k.loop(n0, whole, tile.mr) as row:
                    multiply(row, tile)
                for rest in rests:
                    with k.when((n1 - whole).equals(rest)) if len(set(heights)) > 1 else nullcontext():
                        multiply(whole, Tile(rest, tile.vectors))
                if spare:
                    two.followed()


def wgrad_scratch_bytes(isa: ISA, dtype: str, tokens: int, choice: GemmConfig) -> int:
    """The scratch of a thread, in bytes. `tokens` is the largest number of tokens of a run."""
    if amx.uses_tiles(isa, dtype):
        return gradient_tiles.thread_scratch_bytes(isa, dtype, tokens, choice)
    chunk = chunk_of(isa)
    left = panel_bytes(isa, dtype, min(tokens, chunk), round_up(round_up(choice.rows, choice.tile.mr), isa.lanes))
    return 2 * panel_bytes(isa, dtype, chunk, choice.tile.nr(isa)) + left
