"""Products with block-sparse matrices, forward and for the input gradient (program/ops/gemm/block_matmul.py).

Weights are laid out first as the register tile reads them. Then a claim is a tile of tokens and a few lists: the columns of the
layout forward, its rows for the input gradient. A list's blocks follow one another in one accumulation chain per element, so
nothing is added to memory twice. The tile of tokens is copied into the thread's scratch, where it stays in the second cache from
list to list. A long list is cut into parts, and their sums are added in order.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.block_tile import Cut, accumulate, broadcast, isa_of, new_tile
from barellm.cpu.kernels.gemm.microkernel import prefetch_row
from barellm.cpu.kernels.gemm.packing import pack_b, pack_b_transposed
from barellm.cpu.kernels.loops import added, shape_of
from barellm.cpu.lang import Pointer, Value
from barellm.program.block_layouts import Lists
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div, round_up
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, weight_operand

TILE_BYTES = 1 << 18  # of the tokens of a claim, which lists share
LEAST, MOST = 24, 96  # tokens of a claim
SUMS_ROW = 4 * amx.NR  # bytes of a row of results that come from tiles
WORK = 1 << 18  # multiply-adds of a claim, about


def pack_blocks(k: KernelBuilder, packed, weight, count, *, block, turned) -> None:
    """Each block of the weight in strips of its columns, or where `turned` of its rows."""
    k.use(isa_of(k.isa, block))
    cut = Cut.of(k.isa, weight.dtype, block)
    strip = block // cut.pair * cut.span
    with k.parallel_for(count) as number:
        source = weight.at(number * (block * block))
        for i in range(cut.strips):
            to, col = packed.at((number * cut.strips + i) * strip), k.int(i * cut.span)
            shape = {"stride": block, "cols": block}
            if turned:
                packing = pack_b_transposed(k, to, source, col, depth=k.int(block), even=True, span=cut.span, **shape)
            else:
                packing = pack_b(k, to, source, col, block, width=cut.span, **shape)
            packing.at_once()


def tile_tokens(cut: Cut, width: int) -> int:
    """Tokens of a claim, a multiple of the tile's rows."""
    return max(LEAST, min(MOST, TILE_BYTES // (4 * width))) // cut.rows * cut.rows


def own_stride(cut: Cut, width: int) -> int:
    """Elements from a token to the next in scratch: one line more than there are, for at a power of two the rows of a register
    tile would displace one another in the first cache."""
    return round_up(width, 16 * cut.pair) + 16 * cut.pair


def block_product(
    k: KernelBuilder, out, partials, x, packed, table, segments, skipped, entries, grain,
    *, dims, inner, C, K, block, slots, mode,
) -> None:  # fmt: skip
    """out (tokens, K) = x (tokens, C) times the blocks that the table lists for each column of out. In the table `skipped` numbers
    lie between `segments` and `entries`. Parts of long lists go to `partials` (tokens, slots * block)."""
    k.use(isa_of(k.isa, block))
    cut = Cut.of(k.isa, x.dtype, block)
    rows = cut.rows
    others = segments * 4 + skipped
    height, tokens = tile_tokens(cut, C), k.num_elements(dims, inner)
    total = k.ceil_div(tokens, height) * segments
    wide, held = x.dtype != "fp32" and cut.pair == 1, k.var(-1)
    own, stride = k.thread_scratch("fp32" if wide else x.dtype), own_stride(cut, C)

    def put(to: Pointer, values: list[Value], mode: str) -> None:
        for v, value in enumerate(values):
            to.store(added(k, to, v * k.lanes, None, value, mode), v * k.lanes)

    sums = own.at(height * stride).as_dtype("fp32")  # of tiles
    grain = k.max(k.min(grain, total // (k.threads * 8)), 1)
    with amx.tile_registers(k, cut.tiles), k.parallel_range(total, grain) as (begin, end), k.loop(begin, end) as unit:
        number, segment = unit // segments, unit % segments
        target, slot, first, last = (table.get(segment * 4 + i) for i in range(4))
        row = number * height
        count = k.min(tokens - row, height)
        with k.when(held.value.differs(number)), k.loop(0, count) as t:
            held.value = number
            for c, mask in k.columns(C):
                source, to = x.at((row + t) * C), own.at(t * stride)
                if wide:
                    to.store(source.load(c, mask), c, mask)
                else:
                    to.store_raw(source.load_raw(c, mask), c, mask)
        with k.loop(0, cut.strips) as i, k.loop(0, count, rows) as t:
            to = out.at((row + t) * K + target * block + i * cut.span)
            for r in range(rows):
                prefetch_row(k, to.at(r * K), cut.span, write=True)
            acc = [] if cut.tiles else new_tile(k, rows, cut.vectors)
            if cut.tiles:
                amx.begin_sums(k, sums, None, row=SUMS_ROW)
            with k.loop(first, last) as entry:
                skip, block_number = table.get(others + entry) * block, table.get(others + entries + entry)
                panel = packed.at((block_number * cut.strips + i) * (block // cut.pair * cut.span))
                left = own.at(t * stride + skip)
                if cut.tiles:
                    amx.add_steps(k, amx.row_major(left, 2 * stride), panel, block // amx.TILE_K)
                else:
                    operand = broadcast(k, [left.at(r * stride) for r in range(rows)], 1, cut.pair)
                    accumulate(k, acc, operand, panel, block // cut.pair, cut.pair)

            def finish(r: Any, values: list[Value], to: Pointer = to, t: Value = t, i: Value = i) -> None:
                with k.when(slot < 0) if slots else nullcontext():
                    put(to.at(r * K), values, mode)
                if slots:
                    with k.when(slot >= 0):
                        at = (row + t + r) * (slots * block) + slot * block + i * cut.span
                        put(partials.at(at), values, "store")

            if cut.tiles:
                amx.store_sums(k, sums, row=SUMS_ROW)
                with k.loop(0, k.min(count - t, rows)) as r:
                    finish(r, [sums.load(r * cut.span + v * k.lanes) for v in range(cut.vectors)])
            for r, values in enumerate([[v.value for v in line] for line in acc]):
                with k.when(t + r < count):
                    finish(r, values)


def add_partials(k: KernelBuilder, out, partials, table, segments, cuts, *, dims, inner, K, block, slots, mode) -> None:
    """The columns of long lists: the sum of their parts, in order."""
    tokens = k.num_elements(dims, inner)
    with k.parallel_for(tokens) as row, k.loop(0, cuts) as i:
        target, first, last = (table.get(segments * 4 + i * 3 + j) for j in range(3))
        for c, mask in k.columns(block):
            to, total = out.at(row * K + target * block), k.var_vec(0.0)
            with k.loop(first, last) as slot:
                total.value = total.value + partials.at(row * (slots * block) + slot * block).load(c, mask)
            to.store(added(k, to, c, mask, total.value, mode), c, mask)


def _product(op: Op, c: Lowering, given: Tensor, out: str, table: Tensor, lists: Lists, *, turned: bool) -> None:
    layout, cut = op.layout, Cut.of(c.isa, given.dtype, op.layout.block)
    block, (C, K) = layout.block, (int(given.shape[-1]), int(op.outputs[out].shape[-1]))
    packed = c.workspace("packed", len(layout) * cut.strips * block // cut.pair * cut.span * 4)
    c.thread_scratch(4 // cut.pair * own_stride(cut, C) * tile_tokens(cut, C) + amx.MR * SUMS_ROW)
    weights = {"packed": (part(packed), "fp32"), "weight": weight_operand(op.weight), "count": len(layout)}
    c.call(pack_blocks, weights, {"block": block, "turned": turned}, writes="packed")
    segments, slots = len(lists.segments), lists.slots
    partials = None
    if slots:
        partials = (part(c.workspace("partials", 4 * given.size // C * slots * block)), "fp32")
    constants = shape_of(given) | {"K": K, "block": block, "slots": slots, "mode": op.modes[out]}
    numbers = {"segments": segments, "skipped": lists.cuts.size, "cuts": len(lists.cuts), "entries": len(layout)}
    mean = ceil_div(len(layout), segments) * block**2 * tile_tokens(cut, C)
    operands = numbers | {"out": op.outputs[out], "partials": partials, "table": table, "grain": ceil_div(WORK, mean)}
    written = "out partials" if slots else "out"
    c.call(block_product, operands | {"x": given, "packed": weights["packed"]}, constants | {"C": C}, writes=written)
    if slots:
        c.call(add_partials, operands, constants, writes="out")


@lowering("block_matmul", starts="y", also={"weight": PLANES, "columns": "i32", "rows": "i32", "places": "i32"})
def lower_block_matmul(op: Op, c: Lowering) -> None:
    _product(op, c, op.x, "y", op.columns, op.layout.columns, turned=False)


@lowering("block_matmul_dx", starts="dx", also={"weight": PLANES, "rows": "i32"})
def lower_block_matmul_dx(op: Op, c: Lowering) -> None:
    _product(op, c, op.dy, "dx", op.rows, op.layout.rows, turned=True)
