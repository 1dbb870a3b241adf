"""Block-sparse GEMM (BSR weight), fprop and dgrad (program/ops/gemm/block_matmul.py).

Protocol: the blocks of the weight are packed first, once, as B panels. A work item is a tile of tokens and a few segments: block
columns of the layout in fprop, block rows in dgrad. A segment's blocks form one accumulation chain per element, so nothing is added
to memory twice. The item's tokens, all of their depth, are copied into the thread's scratch (A), and stay in the L2 from segment to
segment. Long segments are split (split-K), and their partial sums added in order."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import Lowering, Op, Tensor, Value, Var, lowering, part, weight_operand
from barellm.cpu.kernels.gemm import amx, block_tile, microkernel
from barellm.cpu.kernels.gemm.packing import PackB, PackBTransposed
from barellm.cpu.kernels.loops import accumulate, shape_of
from barellm.program import block_layouts, dtypes
from barellm.program.integers import ceil_div, round_up

TILE_BYTES = 1 << 18  # of an item's tokens, which its segments share
LEAST, MOST = 24, 96  # tokens of a work item
SUMS_ROW = 4 * amx.NR  # bytes of a row of results that come from tiles
WORK = 1 << 18  # multiply-adds of a work item, about


@dataclass(frozen=True)
class BlockShape:
    """A block-sparse GEMM (tokens, C) @ (C, K) with square blocks; `slots`: partial sums of split segments a token."""

    C: int
    K: int
    block: int
    slots: int


def pack_blocks(k, packed, weight, count, *, block, transposed) -> None:
    """The kernel: packed = each stored block of the weight (count, block, block) as B panels of nr columns, [block number][strip][k
    unit] [nr]; of its columns, or where `transposed` of its rows."""
    k.use(block_tile.isa_of(k.isa, block))
    tiling = block_tile.Tiling.of(k.isa, weight.dtype, block)
    strip = block // tiling.pair * tiling.nr  # units of a strip: [k unit][nr]
    with k.parallel_for(count) as number:
        source = weight.at(number * (block * block))
        for i in range(tiling.strips):
            dst, col = packed.at((number * tiling.strips + i) * strip), k.int(i * tiling.nr)
            shape = {"stride": block, "cols": block}
            if transposed:
                packing = PackBTransposed(k, dst, source, col, depth=k.int(block), even=True, nr=tiling.nr, **shape)
            else:
                packing = PackB(k, dst, source, col, block, width=tiling.nr, **shape)
            packing.run()


def tile_tokens(tiling: block_tile.Tiling, width: int) -> int:
    """MC: tokens of a work item, a multiple of MR."""
    return max(LEAST, min(MOST, TILE_BYTES // (4 * width))) // tiling.rows * tiling.rows


def own_stride(tiling: block_tile.Tiling, width: int) -> int:
    """Row stride of A in scratch: one cache line of padding, for at a power of two the rows of a tile would conflict in the L1."""
    return round_up(width, 16 * tiling.pair) + 16 * tiling.pair


def block_sparse_gemm(k, out, partials, x, packed, table, segments, skipped, entries, grain, *, dims, inner, shape: BlockShape,
        mode) -> None:  # fmt: skip
    """The kernel: out (tokens, K) = x (tokens, C) @ the blocks that `table` (i32) lists for each segment: (target block column,
    slot or -1, first and last entry) of each segment, then `skipped` numbers, then of each of `entries` entries its block row of x,
    then its block number in `packed` (`pack_blocks`). Sums of split segments go to `partials` (tokens, slots * block) fp32.
    `grain`: items taken at a time."""
    C, K, block, slots = shape.C, shape.K, shape.block, shape.slots
    k.use(block_tile.isa_of(k.isa, block))
    tiling = block_tile.Tiling.of(k.isa, x.dtype, block)
    rows, first_entry = tiling.rows, segments * 4 + skipped
    height, tokens = tile_tokens(tiling, C), k.num_elements(dims, inner)
    total = k.ceil_div(tokens, height) * segments  # work items
    x_tile_number = k.var(-1)  # the tile of tokens in x_tile; -1: none
    x_tile, stride = k.thread_scratch("fp32" if tiling.pair == 1 else x.dtype), own_stride(tiling, C)
    sums = x_tile.at(height * stride).as_dtype("fp32")  # of AMX tiles
    grain = k.max(k.min(grain, total // (k.threads * 8)), 1)  # at least 8 takes a thread, for load balance
    with amx.tile_registers(k, tiling.tiles), k.parallel_range(total, grain) as (begin, end), k.loop(begin, end) as unit:
        number, segment = unit // segments, unit % segments
        target, slot, first, last = (table.get(segment * 4 + i) for i in range(4))
        row = number * height
        count = k.min(tokens - row, height)
        with k.when(x_tile_number.value.differs(number)), k.loop(0, count) as t:  # unless the item before had the same tokens
            x_tile_number.value = number
            copy_token(k, x_tile, x, t, row, stride=stride, C=C)
        # Each strip of nr columns of the target block, for each register tile of rows.
        with k.loop(0, tiling.strips) as i, k.loop(0, count, rows) as t:
            dst = out.at((row + t) * K + target * block + i * tiling.nr)
            for r in range(rows):
                microkernel.prefetch_row(k, dst.at(r * K), tiling.nr, write=True)
            acc = [] if tiling.tiles else microkernel.zero_tile(k, Tile(rows, tiling.vectors))
            if tiling.tiles:
                amx.load_accumulators(k, sums, None, row=SUMS_ROW)
            with k.loop(first, last) as entry:
                skip, block_number = table.get(first_entry + entry) * block, table.get(first_entry + entries + entry)
                panel = packed.at((block_number * tiling.strips + i) * (block // tiling.pair * tiling.nr))
                left = x_tile.at(t * stride + skip)  # the tokens' columns of the block
                if tiling.tiles:
                    amx.accumulate_steps(k, amx.row_major(left, 2 * stride), panel, block // amx.TILE_K)
                else:
                    operand = block_tile.broadcast(k, [left.at(r * stride) for r in range(rows)], 1, tiling.pair)
                    block_tile.multiply_accumulate(k, acc, operand, panel, block // tiling.pair, tiling.pair)
            for r, values in finished_rows(k, tiling, acc, sums, t, count):  # to out, or to the segment's slot
                with k.when(slot < 0) if slots else nullcontext():
                    store_row(k, dst.at(r * K), values, mode)
                if slots:
                    with k.when(slot >= 0):
                        at = (row + t + r) * (slots * block) + slot * block + i * tiling.nr
                        store_row(k, partials.at(at), values, "store")


def copy_token(k, x_tile, x, t, first, *, stride: int, C: int) -> None:
    """Row t of x_tile (row stride `stride`) = row first + t of x (tokens, C), as it is or converted to fp32."""
    for c, mask in k.columns(C):
        source, dst = x.at((first + t) * C), x_tile.at(t * stride)
        if dst.dtype != source.dtype:
            dst.store(source.load(c, mask), c, mask)
        else:
            dst.store_raw(source.load_raw(c, mask), c, mask)


def finished_rows(k, tiling: block_tile.Tiling, acc: list[list[Var]], sums, t, count) -> Iterator[tuple[Any, list[Value]]]:
    """`for row, values in ...`: the accumulators of a register tile's rows, of the tile from row t on those before `count`: from
    `acc`, or on AMX by way of `sums` [row][nr] fp32 in scratch."""
    if tiling.tiles:
        amx.store_accumulators(k, sums, row=SUMS_ROW)
        with k.loop(0, k.min(count - t, tiling.rows)) as r:
            yield r, [sums.load(r * tiling.nr + v * k.lanes) for v in range(tiling.vectors)]
    for r, values in enumerate([[v.value for v in line] for line in acc]):
        with k.when(t + r < count):
            yield r, values


def store_row(k, dst, values, mode: str) -> None:
    """The vectors `values` to dst, one after the other, stored or added (`mode`)."""
    for v, value in enumerate(values):
        dst.store(accumulate(k, dst, v * k.lanes, None, value, mode), v * k.lanes)


def add_partials(k, out, partials, table, segments, cuts, *, dims, inner, shape: BlockShape, mode) -> None:
    """The kernel: the block columns of `out` whose segment is split = the sums of their `partials`, which `block_sparse_gemm`
    wrote, added in order. In the table, `cuts` entries (block column, first slot, last slot + 1) follow the `segments`."""
    K, block, slots = shape.K, shape.block, shape.slots
    tokens = k.num_elements(dims, inner)
    with k.parallel_for(tokens) as row, k.loop(0, cuts) as i:
        target, first, last = (table.get(segments * 4 + i * 3 + j) for j in range(3))
        for c, mask in k.columns(block):
            dst, total = out.at(row * K + target * block), k.var_vec(0.0)
            with k.loop(first, last) as slot:
                total.value = total.value + partials.at(row * (slots * block) + slot * block).load(c, mask)
            dst.store(accumulate(k, dst, c, mask, total.value, mode), c, mask)


def _append_block_gemm(op: Op, c: Lowering, given: Tensor, out: str, table: Tensor, lists: block_layouts.Lists, *,
        transposed: bool) -> None:  # fmt: skip
    """Append the calls for the output `out` = `given` times the block-sparse weight, or its transpose: pack the blocks, multiply
    along `lists` (whose `table` the kernel reads), and sum the partial results of the lists that are cut."""
    layout, tiling = op.layout, block_tile.Tiling.of(c.isa, given.dtype, op.layout.block)
    block, (C, K) = layout.block, (int(given.shape[-1]), int(op.outputs[out].shape[-1]))
    packed = c.workspace("packed", len(layout) * tiling.strips * block // tiling.pair * tiling.nr * 4)
    c.thread_scratch(4 // tiling.pair * own_stride(tiling, C) * tile_tokens(tiling, C) + amx.MR * SUMS_ROW)
    weights = {"packed": (part(packed), "fp32"), "weight": weight_operand(op.weight), "count": len(layout)}
    c.call(pack_blocks, weights, {"block": block, "transposed": transposed}, writes="packed")
    segments, slots = len(lists.segments), lists.slots
    partials = None
    if slots:
        partials = (part(c.workspace("partials", 4 * given.size // C * slots * block)), "fp32")
    constants = shape_of(given) | {"shape": BlockShape(C, K, block, slots), "mode": op.modes[out]}
    numbers = {"segments": segments, "skipped": lists.cuts.size, "cuts": len(lists.cuts), "entries": len(layout)}
    mean = ceil_div(len(layout), segments) * block**2 * tile_tokens(tiling, C)  # multiply-adds of a work item
    operands = numbers | {"out": op.outputs[out], "partials": partials, "table": table, "grain": ceil_div(WORK, mean)}
    written = "out partials" if slots else "out"
    c.call(block_sparse_gemm, operands | {"x": given, "packed": weights["packed"]}, constants, writes=written)
    if slots:
        c.call(add_partials, operands, constants, writes="out")


@lowering("block_matmul", starts="y", also={"weight": dtypes.PLANES, "columns": "i32", "rows": "i32", "places": "i32"})
def lower_block_matmul(op: Op, c: Lowering) -> None:
    _append_block_gemm(op, c, op.x, "y", op.columns, op.layout.columns, transposed=False)


@lowering("block_matmul_dx", starts="dx", also={"weight": dtypes.PLANES, "rows": "i32"})
def lower_block_matmul_dx(op: Op, c: Lowering) -> None:
    _append_block_gemm(op, c, op.dy, "dx", op.rows, op.layout.rows, transposed=True)
