"""Weight gradients of products with block-sparse matrices (program/ops/gemm/block_matmul.py): x^T dy for the columns of each block.

The columns of a few listed blocks lie far apart in x and dy, so reading them there would fill the caches with what is not needed,
and each block of x is wanted by every block of its row. So CHUNK tokens of both are laid out in strips first, once, and then each
claim multiplies strips of one block. Claims follow the blocks' Morton order, so the next one finds strips in the caches. One
accumulation chain per element goes through the tokens, from chunk to chunk through the result.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.block_tile import Cut, accumulate, broadcast, isa_of, new_tile
from barellm.cpu.kernels.gemm.packing import pack_b
from barellm.cpu.kernels.loops import shape_of
from barellm.cpu.lang import Value
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, rows_of

CHUNK = 512  # tokens that are in strips at a time: 4 MB if x and dy have 1024 columns each, so that strips stay in the third cache
PACKED = 16  # tokens of a claim while strips are made, unless they are a step of AMX's tiles
NEAR = 256  # steps of a strip that stay in the first cache, beside those of the other operand


def strip_units(cut: Cut) -> int:
    """Units from a strip to the next. One line more than a power of two: strips would displace one another in the caches."""
    return cut.steps(CHUNK) * cut.span + 16


def pack_strips(k: KernelBuilder, packed, x, row_begin, *, dims, inner, width, block, left) -> None:
    """Up to CHUNK tokens of x (tokens, width) as strips [strip][step][column], or where they are the `left` operand of AMX tiles
    [strip][step][column][token]. Rows are read from one end to the other, for so memory is read fastest; strip by strip it took a
    fifth longer."""
    k.use(isa_of(k.isa, block))
    cut = Cut.of(k.isa, x.dtype, block)
    tokens = k.min(k.num_elements(dims, inner) - row_begin, CHUNK)
    per = amx.TILE_K if cut.tiles else PACKED
    with k.when(tokens > 0), k.parallel_for(k.ceil_div(tokens, per)) as number:
        t = number * per
        some = k.min(tokens - t, per)
        if cut.tiles:
            with k.loop(0, width // amx.NR) as strip:
                to, source, col = (
                    packed.at(strip * strip_units(cut) + t // 2 * cut.span),
                    x.at(t * width),
                    strip * amx.NR,
                )
                if left:
                    amx.pack_left(k, to, source, col, some, stride=width, width=amx.NR, cols=None)
                else:
                    pack_b(k, to, source, col, some, stride=width, width=amx.NR, cols=None, beside=True).at_once()
                    amx.pad_panel(k, to, some)
            return
        with k.loop(0, some, cut.pair) as r, k.loop(0, width // block * cut.strips) as strip:
            to = packed.at(strip * strip_units(cut) + (t + r) // cut.pair * cut.span)
            pack_b(
                k, to, x.at((t + r) * width), strip * cut.span, k.min(some - r, cut.pair), stride=width, width=cut.span,
                cols=None,
            ).at_once()  # fmt: skip


def block_gradient(
    k: KernelBuilder, dweight, x, dy, places, count, row_begin, *, dtype, dims, inner, block, mode
) -> None:
    """dweight += x^T dy over up to CHUNK tokens from `row_begin` on, both in strips."""
    k.use(isa_of(k.isa, block))
    cut, keep = Cut.of(k.isa, dtype, block), k.keep(mode)
    tokens = k.min(
        k.num_elements(dims, inner) - row_begin, CHUNK
    )  # below 0 in a planned chunk that this run does not reach
    steps = cut.steps(tokens)
    tiles = ceil_div(cut.span, cut.rows)
    edges = [cut.span * i // tiles for i in range(tiles + 1)]

    def strip(packed: Any, line: Value, i: Value) -> Any:
        return packed.at((line * cut.strips + i) * strip_units(cut))

    with amx.tile_registers(k, cut.tiles), k.when(tokens > 0), k.parallel_for(count * cut.strips) as unit:
        number, i = unit // cut.strips, unit % cut.strips
        left, column = strip(x, places.get(number), i), places.get(number + count)
        if cut.tiles:
            again, at = _again(k, row_begin, keep), dweight.at(number * (block * block) + i * (cut.span * block))
            tiles_of_x = amx.Left(left, amx.LINE, 2 * amx.TILE_BYTES, amx.TILE_BYTES)
            with k.loop(0, cut.strips) as j:
                to = at.at(j * cut.span)
                amx.begin_sums(k, to, again, row=4 * block)
                amx.add_steps(k, tiles_of_x, strip(dy, column, j), k.ceil_div(tokens, amx.TILE_K))
                amx.store_sums(k, to, row=4 * block)
            return
        with k.loop(0, steps, NEAR) as u, k.loop(0, cut.strips) as j:
            some, right = k.min(steps - u, NEAR), strip(dy, column, j).at(u * cut.span)
            again = _again(k, u + row_begin, keep)
            to = dweight.at(number * (block * block) + i * (cut.span * block) + j * cut.span)
            for top, bottom in pairwise(edges):
                acc = new_tile(k, bottom - top, cut.vectors)
                places_of = [
                    (x, r * block + v * k.lanes)
                    for r, line in zip(range(top, bottom), acc, strict=True)
                    for v, x in enumerate(line)
                ]
                with k.when(again):
                    for var, at in places_of:
                        var.value = to.load(at)
                lines = [left.at(u * cut.span + r) for r in range(top, bottom)]
                accumulate(k, acc, broadcast(k, lines, cut.span, cut.pair), right, some, cut.pair)
                for var, at in places_of:
                    to.store(var.value, at)


def _again(k: KernelBuilder, tokens: Value, keep: Value | None) -> Value:
    """Whether there are sums already: of `tokens` before these, or of an earlier micro-batch."""
    again = tokens > 0
    return again if keep is None else k.op("i1", f"or i1 {again.ref}, {keep.ref}")


@lowering("block_matmul_dw", starts="dweight", also={"places": "i32"})
def lower_block_matmul_dw(op: Op, c: Lowering) -> None:
    layout = op.layout
    block, cut = layout.block, Cut.of(c.isa, op.x.dtype, layout.block)
    strips: dict[str, Any] = {}
    for name, across in zip(("x", "dy"), layout.shape, strict=True):
        strips[name] = (part(c.workspace(name, 4 * across * cut.strips * strip_units(cut))), "fp32")
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
        c.call(block_gradient, operands, constants, writes="dweight")
