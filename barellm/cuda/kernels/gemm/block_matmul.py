"""Products with block-sparse matrices (program/ops/gemm/block_matmul.py): y = x W, dx = dy W^T, and the gradient of each block.

A program of the first two is BM tokens and one segment of the layout's lists, whose blocks it walks in one chain of additions, so
that nothing is added to memory twice; an empty list gives zeros. Parts of a long list, which would keep one multiprocessor busy
alone, go to `partials` and are added in order. A program of the last is one block and a part of the tokens. Blocks of BS are padded
to BP, 16 at least.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda import choices
from barellm.cuda.kernel import Lowering, lowering, mode
from barellm.cuda.kernels.common import store_or_add
from barellm.cuda.kernels.gemm.split_k import SplitK, reduce_splits
from barellm.cuda.lang import device, tl
from barellm.program.block_layouts import Lists
from barellm.program.dtypes import PLANES
from barellm.program.integers import ceil_div
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import weight_operand

TOKENS = 64  # of a program, or of a turn


@device
def block_gemm(
    out, partials, x, weight, table, scalars, rows, MODE: tl.constexpr, TURNED: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, OTHERS: tl.constexpr, ENTRIES: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """BM rows of one list's columns of out (rows, K), or of their slot in partials (rows, SLOTS * BS); x is (rows, C)."""
    segment, m0 = table + 4 * tl.program_id(1), tl.program_id(0) * BM
    m, b = tl.arange(0, BM), tl.arange(0, BP)
    row_in, b_in = (m < rows - m0)[:, None], b < BS
    x += tl.cast(m0, tl.int64) * C
    at = b[None, :] * BS + b[:, None] if TURNED else b[:, None] * BS + b[None, :]
    acc = tl.zeros((BM, BP), tl.float32)
    for entry in range(tl.load(segment + 2), tl.load(segment + 3)):
        source, number = tl.load(table + OTHERS + entry), tl.load(table + OTHERS + ENTRIES + entry)
        a = tl.load(x + m[:, None] * C + source * BS + b[None, :], mask=row_in & b_in[None, :], other=0.0)
        w = tl.load(weight + number.to(tl.int64) * (BS * BS) + at, mask=b_in[:, None] & b_in[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    inside, slot = row_in & b_in[None, :], tl.load(segment + 1)
    row = tl.cast(m0, tl.int64) + m[:, None]
    to = out + row * K + tl.load(segment) * BS + b[None, :]
    if SLOTS:
        tl.store(partials + row * (SLOTS * BS) + slot * BS + b[None, :], acc, mask=inside & (slot >= 0))
        inside = inside & (slot < 0)
    store_or_add(to, inside, acc, scalars, MODE)


@device
def add_slots(
    out, partials, table, scalars, rows, MODE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, CUTS: tl.constexpr,
    BS: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM rows of one long list's columns: the sum of its slots, in order."""
    cut = table + CUTS + 3 * tl.program_id(1)
    row, b = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None], tl.arange(0, BP)[None, :]
    inside = (row < rows) & (b < BS)
    total = tl.zeros((BM, BP), tl.float32)
    for slot in range(tl.load(cut + 1), tl.load(cut + 2)):
        total += tl.load(partials + row * (SLOTS * BS) + slot * BS + b, mask=inside, other=0.0)
    store_or_add(out + row * K + tl.load(cut) * BS + b, inside, total, scalars, MODE)


@device
def block_gradient(
    partials, x, dy, places, rows, chunk, C: tl.constexpr, K: tl.constexpr, ENTRIES: tl.constexpr, BS: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """x^T dy for the two columns of one block, over `chunk` rows; partials (parts, blocks, BS, BS)."""
    number, part = tl.program_id(0), tl.program_id(1)
    m, b = tl.arange(0, BM), tl.arange(0, BP)
    b_in = b < BS
    first = part * chunk
    left = x + tl.cast(first, tl.int64) * C + tl.load(places + number) * BS + m[None, :] * C + b[:, None]
    right = dy + tl.cast(first, tl.int64) * K + tl.load(places + ENTRIES + number) * BS + m[:, None] * K + b[None, :]
    acc = tl.zeros((BP, BP), tl.float32)
    for m0 in range(first, tl.minimum(first + chunk, rows), BM):
        row_in = m < rows - m0
        a = tl.load(left, mask=b_in[:, None] & row_in[None, :], other=0.0)
        d = tl.load(right, mask=row_in[:, None] & b_in[None, :], other=0.0)
        acc = tl.dot(a, d, acc, input_precision="ieee")
        left += BM * C
        right += BM * K
    to = partials + (tl.cast(part, tl.int64) * ENTRIES + number) * (BS * BS) + b[:, None] * BS + b[None, :]
    tl.store(to, acc, mask=b_in[:, None] & b_in[None, :])


def padded(block: int) -> dict[str, int]:
    return {"BS": block, "BP": max(16, block), "BM": TOKENS}


def product(op: Any, c: Lowering, given: Tensor, out: str, table: Tensor, lists: Lists, *, turned: bool) -> None:
    block, rows = op.layout.block, c.rows(given)
    C, K = int(given.shape[-1]), int(op.outputs[out].shape[-1])
    segments, slots = len(lists.segments), lists.slots
    partials = c.scratch("partials", (given.size // C, slots * block)) if slots else None
    operands = {"out": op.outputs[out], "partials": partials, "table": table, "rows": rows}
    sizes = {"K": K, "SLOTS": slots, "MODE": mode(op, out)} | padded(block)
    c.launch(
        block_gemm, operands | {"x": given, "weight": weight_operand(op.weight)},
        sizes | {"C": C, "TURNED": turned, "OTHERS": 4 * segments + lists.cuts.size, "ENTRIES": len(op.layout)},
        grid=lambda s: (ceil_div(rows(s), TOKENS), segments), writes="out partials" if slots else "out", warps=4, stages=3,
    )  # fmt: skip
    if slots:
        grid = lambda s: (ceil_div(rows(s), TOKENS), len(lists.cuts))  # noqa: E731
        c.launch(add_slots, operands, sizes | {"CUTS": 4 * segments}, grid=grid, writes="out")


@lowering("block_matmul", starts="y", also={"weight": PLANES, "columns": "i32", "rows": "i32", "places": "i32"})
def lower_block_matmul(op: Any, c: Lowering) -> None:
    product(op, c, op.x, "y", op.columns, op.layout.columns, turned=False)


@lowering("block_matmul_dx", starts="dx", also={"weight": PLANES, "rows": "i32"})
def lower_block_matmul_dx(op: Any, c: Lowering) -> None:
    product(op, c, op.dy, "dx", op.rows, op.layout.rows, turned=True)


@lowering("block_matmul_dw", starts="dweight", also={"places": "i32"})
def lower_block_matmul_dw(op: Any, c: Lowering) -> None:
    layout, rows = op.layout, c.rows(op.x)
    C, K = (n * layout.block for n in layout.shape)
    count, n = len(layout), op.dweight.size
    split = SplitK(rows, count)
    partials = c.scratch("partials", (choices.most_splits(count, op.x.size // C), n))
    c.launch(
        block_gradient, {"partials": partials, "x": op.x, "dy": op.dy, "places": op.places, "rows": rows, "chunk": split},
        {"C": C, "K": K, "ENTRIES": count} | padded(layout.block),
        grid=lambda s: (count, split.count(s)), writes="partials", warps=4, stages=3,
    )  # fmt: skip
    reduce_splits(c, op.dweight, partials, split.count, n, mode(op, "dweight"))
