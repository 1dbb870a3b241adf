"""Block-sparse GEMM (program/ops/gemm/block_matmul.py): y = x W, dx = dy W^T, and the gradient of each block of W.

Shapes: x (rows, C), y (rows, K), weight (blocks, BS, BS): the blocks of W (C, K) that are there; blocks of BS x BS are padded to
BP, 16 at least, in registers. `table` (i32, block_layouts.Lists) has for each block column of the result a list of entries: the
block column of x and the number of the block in weight.

    4 numbers for each segment: result's block column, slot in `partials` (-1: none), first and last + 1 entry
    3 numbers for each cut (a list of several segments), from CUTS on: block column, first and last + 1 slot
    ENTRIES numbers from OTHERS on: block columns of x; then ENTRIES numbers of blocks

A program of y or dx is BM tokens and one segment, whose blocks it walks in one chain of additions, so that nothing is added to
memory twice; an empty list gives zeros. Segments of a long list, which would keep one multiprocessor busy alone, go to `partials`
and are added in order. A program of the gradient is one block and a split-K slice of the tokens."""

from typing import Any

from barellm.cuda import gemm_config
from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.lang import device, tl
from barellm.program.block_layouts import Lists
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import weight_operand

TOKENS = 64  # BM: of a program, or of a step of the gradient


@device
def block_gemm(out, partials, x, weight, table, scalars, rows, MODE, TRANSPOSED, C, K, SLOTS, OTHERS, ENTRIES, BS, BP, BM):
    """out (rows, K) = x (rows, C) W, or x W^T where TRANSPOSED (dx): BM rows of one segment, a list of blocks of one block column
    of W, into out or, of a list that is cut, into its slot of partials (rows, SLOTS * BS) fp32.

    weight (blocks, BS, BS): the blocks that are there, a parameter; table (i32): the layout's, made on the host, (module). Grid:
    blocks of rows, segments. BM and BP (BS padded) are powers of two, 16 at least."""
    segment, m0 = table + 4 * tl.program_id(1), tl.program_id(0) * BM  # the segment's four numbers
    m, b = tl.arange(0, BM), tl.arange(0, BP)
    row_in, b_in = (m < rows - m0)[:, None], b < BS
    x += tl.cast(m0, tl.int64) * C
    in_block = b[None, :] * BS + b[:, None] if TRANSPOSED else b[:, None] * BS + b[None, :]  # offsets in a block of weight
    acc = tl.zeros((BM, BP), tl.float32)  # of the segment's columns
    for entry in range(tl.load(segment + 2), tl.load(segment + 3)):
        x_column, block = tl.load(table + OTHERS + entry), tl.load(table + OTHERS + ENTRIES + entry)
        x_block = tl.load(x + m[:, None] * C + x_column * BS + b[None, :], mask=row_in & b_in[None, :], other=0.0)
        w_block = tl.load(weight + block.to(tl.int64) * (BS * BS) + in_block, mask=b_in[:, None] & b_in[None, :], other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision="ieee")
    inside, slot = row_in & b_in[None, :], tl.load(segment + 1)  # slot -1: the list is not cut
    row = tl.cast(m0, tl.int64) + m[:, None]
    out_ptrs = out + row * K + tl.load(segment) * BS + b[None, :]  # segment[0]: block column of out
    if SLOTS:
        tl.store(partials + row * (SLOTS * BS) + slot * BS + b[None, :], acc, mask=inside & (slot >= 0))
        inside = inside & (slot < 0)  # else the sum goes to out
    store_or_add(out_ptrs, inside, acc, scalars, MODE)


@device
def add_slots(out, partials, table, scalars, rows, MODE, K, SLOTS, CUTS, BS, BP, BM):
    """BM rows of one cut's columns of out: the sum of its slots of partials (rows, SLOTS * BS), in order. Grid: rows, cuts."""
    cut = table + CUTS + 3 * tl.program_id(1)
    row, b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None], tl.arange(0, BP)[None, :]
    inside = (row < rows) & (b < BS)
    total = tl.zeros((BM, BP), tl.float32)
    for slot in range(tl.load(cut + 1), tl.load(cut + 2)):
        total += tl.load(partials + row * (SLOTS * BS) + slot * BS + b, mask=inside, other=0.0)
    store_or_add(out + row * K + tl.load(cut) * BS + b, inside, total, scalars, MODE)


@device
def block_gradient(partials, x, dy, places, rows, chunk, C, K, ENTRIES, BS, BP, BM):
    """The gradient x^T dy of one block of W over `chunk` rows of x (rows, C) and dy (rows, K): partials (slices, ENTRIES, BS, BS)
    fp32. `places` (2, ENTRIES) i32: the block row and column of each block of W, so columns of x, dy. Grid: (block, slice)."""
    number, slice = tl.program_id(0), tl.program_id(1)
    m, b = tl.arange(0, BM), tl.arange(0, BP)
    b_in = b < BS
    first = slice * chunk  # row
    x_ptrs = x + tl.cast(first, tl.int64) * C + tl.load(places + number) * BS + m[None, :] * C + b[:, None]
    dy_ptrs = dy + tl.cast(first, tl.int64) * K + tl.load(places + ENTRIES + number) * BS + m[:, None] * K + b[None, :]
    acc = tl.zeros((BP, BP), tl.float32)
    for m0 in range(first, tl.minimum(first + chunk, rows), BM):
        row_in = m < rows - m0
        x_block = tl.load(x_ptrs, mask=b_in[:, None] & row_in[None, :], other=0.0)
        dy_block = tl.load(dy_ptrs, mask=row_in[:, None] & b_in[None, :], other=0.0)
        acc = tl.dot(x_block, dy_block, acc, input_precision="ieee")
        x_ptrs += BM * C
        dy_ptrs += BM * K
    to = partials + (tl.cast(slice, tl.int64) * ENTRIES + number) * (BS * BS) + b[:, None] * BS + b[None, :]
    tl.store(to, acc, mask=b_in[:, None] & b_in[None, :])


def tile_constants(block: int) -> dict[str, int]:
    """BS, BP and BM for blocks of block x block."""
    return {"BS": block, "BP": max(16, block), "BM": TOKENS}


def append_block_gemm(op: Any, c: Lowering, x: Tensor, out: str, table: Tensor, lists: Lists, *, transposed: bool) -> None:
    """Plan op.outputs[out] = x W, or x W^T if `transposed`: one launch, by the layout's `lists` in `table`; then one that adds up
    slots, if any."""
    block, rows = op.layout.block, c.rows(x)
    C, K = int(x.shape[-1]), int(op.outputs[out].shape[-1])
    segments, slots = len(lists.segments), lists.slots
    partials = c.scratch("partials", (x.size // C, slots * block)) if slots else None
    operands = {"out": op.outputs[out], "partials": partials, "table": table, "rows": rows}
    sizes = {"K": K, "SLOTS": slots, "MODE": mode(op, out)} | tile_constants(block)
    c.launch(
        block_gemm, operands | {"x": x, "weight": weight_operand(op.weight)},
        sizes | {"C": C, "TRANSPOSED": transposed, "OTHERS": 4 * segments + lists.cuts.size, "ENTRIES": len(op.layout)},
        grid=lambda s: (ceil_div(rows(s), TOKENS), segments), writes="out partials" if slots else "out", warps=4, stages=3,
    )  # fmt: skip
    if slots:
        grid = lambda s: (ceil_div(rows(s), TOKENS), len(lists.cuts))  # noqa: E731
        c.launch(add_slots, operands, sizes | {"CUTS": 4 * segments}, grid=grid, writes="out")


@lowering("block_matmul", starts="y", also={"weight": PLANES, "columns": "i32", "rows": "i32", "places": "i32"})
def lower_block_matmul(op: Any, c: Lowering) -> None:
    append_block_gemm(op, c, op.x, "y", op.columns, op.layout.columns, transposed=False)


@lowering("block_matmul_dx", starts="dx", also={"weight": PLANES, "rows": "i32"})
def lower_block_matmul_dx(op: Any, c: Lowering) -> None:
    append_block_gemm(op, c, op.dy, "dx", op.rows, op.layout.rows, transposed=True)


@lowering("block_matmul_dw", starts="dweight", also={"places": "i32"})
def lower_block_matmul_dw(op: Any, c: Lowering) -> None:
    """Plan two launches: the gradients of all blocks with split-K over the tokens, into scratch, then their sums in order."""
    layout, rows = op.layout, c.rows(op.x)
    C, K = (n * layout.block for n in layout.shape)
    count, n = len(layout), op.dweight.size
    split = SplitK(rows, count)
    partials = c.scratch("partials", (gemm_config.max_splits(count, op.x.size // C), n))
    c.launch(
        block_gradient, {"partials": partials, "x": op.x, "dy": op.dy, "places": op.places, "rows": rows, "chunk": split},
        {"C": C, "K": K, "ENTRIES": count} | tile_constants(layout.block),
        grid=lambda s: (count, split.count(s)), writes="partials", warps=4, stages=3,
    )  # fmt: skip
    reduce_splits(c, op.dweight, partials, split.count, n, mode(op, "dweight"))
