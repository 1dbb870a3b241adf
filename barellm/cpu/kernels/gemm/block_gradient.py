"""The weight gradient of a block-sparse GEMM (SDDMM; program/ops/gemm/block_matmul.py): x^T dy for each stored block.

The columns of the stored blocks lie far apart in x and dy, so unpacked reads would fill the caches with what is not needed, and
each block of x is used by every block of its row. So CHUNK tokens of both are packed as panels (strips) first, once; then a work
item is one block. Items follow the blocks' Morton order, so the next one finds strips in the caches. One accumulation chain per
element goes through the tokens, from chunk to chunk through dweight."""

from itertools import pairwise
from typing import Any

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import Lowering, Op, Tensor, lowering, part, rows_of
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.block_tile import Tiling, broadcast, isa_of, multiply_accumulate
from barellm.cpu.kernels.gemm.microkernel import accumulators, add_previous_sums
from barellm.cpu.kernels.gemm.packing import PackB
from barellm.cpu.kernels.loops import shape_of
from barellm.program.integers import ceil_div

CHUNK = 512  # tokens that are in strips at a time: 4 MB if x and dy have 1024 columns each, so that strips stay in the L3
PACKED = 16  # tokens of a work item that packs, unless they are an AMX step
NEAR = 256  # KC: steps of both strips that stay in the L1


def strip_units(tiling: Tiling) -> int:
    """32-bit units from a strip to the next: one cache line of padding, for powers of two would conflict in caches."""
    return tiling.steps(CHUNK) * tiling.nr + 16


def pack_strips(k, packed, x, row_begin, *, dims, inner, width, block, left) -> None:
    """The kernel: packed = up to CHUNK tokens of x (tokens, width), from `row_begin` on, as strips of nr columns, [strip][step][nr]
    units; with `left` on AMX as A tiles, [strip][step][column][token]. Rows are read sequentially, which is fastest."""
    k.use(isa_of(k.isa, block))
    tiling = Tiling.of(k.isa, x.dtype, block)
    tokens = k.min(k.num_elements(dims, inner) - row_begin, CHUNK)
    item_tokens = amx.TILE_K if tiling.tiles else PACKED
    with k.when(tokens > 0), k.parallel_for(k.ceil_div(tokens, item_tokens)) as number:
        t = number * item_tokens  # the item's first token
        some = k.min(tokens - t, item_tokens)
        if tiling.tiles:
            with k.loop(0, width // amx.NR) as strip:
                dst, source, col = packed.at(strip * strip_units(tiling) + t // 2 * tiling.nr), x.at(t * width), strip * amx.NR
                if left:
                    amx.pack_a(k, dst, source, col, some, stride=width, width=amx.NR, cols=None)
                else:
                    PackB(k, dst, source, col, some, stride=width, width=amx.NR, cols=None, columns_next=True).run()
                    amx.pad_panel(k, dst, some)
            return
        with k.loop(0, some, tiling.pair) as r, k.loop(0, width // block * tiling.strips) as strip:
            dst = packed.at(strip * strip_units(tiling) + (t + r) // tiling.pair * tiling.nr)
            source, col, depth = x.at((t + r) * width), strip * tiling.nr, k.min(some - r, tiling.pair)
            PackB(k, dst, source, col, depth, stride=width, width=tiling.nr, cols=None).run()


def block_sparse_wgrad(k, dweight, x, dy, places, count, row_begin, *, dtype, dims, inner, block, mode) -> None:
    """The kernel: dweight (blocks, block, block) fp32 += x^T dy over up to CHUNK tokens from `row_begin` on; x and dy: their
    strips, written by `pack_strips`, of tensors of `dtype`. `places` i32: the block rows of the `count` stored blocks, then their
    block columns. A work item is a strip of a block's rows."""
    k.use(isa_of(k.isa, block))
    tiling, keep = Tiling.of(k.isa, dtype, block), k.keep(mode)
    # Rows of this chunk: below 0 in a planned chunk that this run does not reach.
    tokens = k.min(k.num_elements(dims, inner) - row_begin, CHUNK)
    steps = tiling.steps(tokens)
    tiles = ceil_div(tiling.nr, tiling.rows)  # register tiles in a strip's columns
    edges = [tiling.nr * i // tiles for i in range(tiles + 1)]  # first columns of these, as even as can be

    def strip(packed, line, i) -> Any:
        return packed.at((line * tiling.strips + i) * strip_units(tiling))

    with amx.tile_registers(k, tiling.tiles), k.when(tokens > 0), k.parallel_for(count * tiling.strips) as unit:
        number, i = unit // tiling.strips, unit % tiling.strips
        left, column = strip(x, places.get(number), i), places.get(number + count)
        if tiling.tiles:
            again, at = add_previous_sums(k, row_begin, keep), dweight.at(number * (block * block) + i * (tiling.nr * block))
            tiles_of_x = amx.TileA(left, amx.LINE, 2 * amx.TILE_BYTES, amx.TILE_BYTES)
            with k.loop(0, tiling.strips) as j:
                dst = at.at(j * tiling.nr)
                amx.load_accumulators(k, dst, again, row=4 * block)
                amx.accumulate_steps(k, tiles_of_x, strip(dy, column, j), k.ceil_div(tokens, amx.TILE_K))
                amx.store_accumulators(k, dst, row=4 * block)
            return
        with k.loop(0, steps, NEAR) as u, k.loop(0, tiling.strips) as j:
            some, right = k.min(steps - u, NEAR), strip(dy, column, j).at(u * tiling.nr)
            again = add_previous_sums(k, u + row_begin, keep)
            dst = dweight.at(number * (block * block) + i * (tiling.nr * block) + j * tiling.nr)
            for top, bottom in pairwise(edges):
                with accumulators(k, Tile(bottom - top, tiling.vectors), dst.at(top * block), block, again) as acc:
                    lines = [left.at(u * tiling.nr + r) for r in range(top, bottom)]
                    multiply_accumulate(k, acc, broadcast(k, lines, tiling.nr, tiling.pair), right, some, tiling.pair)


@lowering("block_matmul_dw", starts="dweight", also={"places": "i32"})
def lower_block_matmul_dw(op: Op, c: Lowering) -> None:
    """Append, for chunks of CHUNK tokens: `pack_strips` of x and of dy, then `block_sparse_wgrad` into dweight."""
    layout = op.layout
    block, tiling = layout.block, Tiling.of(c.isa, op.x.dtype, layout.block)
    strips: dict[str, Any] = {}
    for name, across in zip(("x", "dy"), layout.shape, strict=True):
        strips[name] = (part(c.workspace(name, 4 * across * tiling.strips * strip_units(tiling))), "fp32")
    where = shape_of(op.x)
    for first in range(0, op.x.size // int(op.x.shape[-1]), CHUNK):
        for name in ("x", "dy"):
            given: Tensor = op.inputs[name]
            width = int(given.shape[-1])
            operands = {"packed": strips[name], "x": rows_of(given, first, CHUNK, width), "row_begin": first}
            constants = where | {"width": width, "block": block, "left": name == "x"}
            c.call(pack_strips, operands, constants, writes="packed")
        operands = strips | {"dweight": op.dweight, "places": op.places, "count": len(layout), "row_begin": first}
        constants = where | {"dtype": op.x.dtype, "block": block, "mode": op.modes["dweight"]}
        c.call(block_sparse_wgrad, operands, constants, writes="dweight")
