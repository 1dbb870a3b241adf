"""The register tile, which is the inner loop of every product: MR rows x NV vectors of accumulators.

Its left operand is broadcast element by element, its right one is a packed panel of NV vectors of columns (packing.py). Each
element of the result is one accumulation chain over the depth, so its bits do not depend on the blocking (gemm_config.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm.packing import LINE
from barellm.cpu.lang import Pointer, Value, Var

BURST = 16  # units between two calls of what is done beside a product
Left = Callable[[int, Value], Value]  # (row of the tile, unit of depth) -> broadcast lanes


def tile_product(
    k: KernelBuilder, tile: Tile, left: Left, panel: Pointer, units: Any, pair: bool, *, tail: Left | None = None,
    ahead: Callable[[Value], None] | None = None, beside: Callable[[], None] | None = None,
    sums: tuple[Value, Pointer] | None = None, ends: Value | None = None,
) -> list[list[Value]]:  # fmt: skip
    """MR x NV accumulators: the sum over `units` of left x panel; `tail` gives the left operand of one unit more, where `ends`.
    `sums`: (whether, from where) they start with what is in memory. `ahead(r)` is called for each row r of the tile at even
    distances on the way, to prefetch what comes next: all at once would fill the buffers that the product's own loads wait for.
    `beside()` is called `bursts` times, for what is more."""
    lanes = k.lanes
    acc: list[list[Var]] = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]
    if sums is not None:
        with k.when(sums[0]):
            for i, x in enumerate(x for row in acc for x in row):
                x.value = sums[1].load(i * lanes)

    def step(u: Value, operand: Left) -> None:
        add_unit(k, acc, operand, panel, u, pair)

    if ahead is None:
        with k.loop(0, units) as u:
            step(u, left)
    else:
        turn = (units + (tile.mr - 1)) // tile.mr
        with k.loop(0, tile.mr) as r:
            start = r * turn
            ahead(r)
            if beside is None:
                with k.loop(start, k.min(start + turn, units)) as u:
                    step(u, left)
            else:
                with k.loop(start, start + turn, BURST) as first:
                    beside()
                    with k.loop(first, k.min(k.min(first + BURST, start + turn), units)) as u:
                        step(u, left)
    if tail is not None:
        with k.when(ends) if ends is not None else nullcontext():
            step(k.int(units), tail)
    return [[x.value for x in row] for row in acc]


def add_unit(k: KernelBuilder, acc: list[list[Var]], left: Left, panel: Pointer, u: Value, pair: bool) -> None:
    """acc += left x panel of unit `u` of the depth."""
    vectors, lanes = len(acc[0]), k.lanes
    right = [panel.as_dtype("i32").load_raw(u * (vectors * lanes) + v * lanes) for v in range(vectors)]
    for r, row in enumerate(acc):
        a = left(r, u)
        for x, b in zip(row, right, strict=True):
            x.value = k.dot(x.value, a, b) if pair else k.fma(a, k.bitcast(b, k.vec), x.value)


def bursts(k: KernelBuilder, tile: Tile, units: Value) -> Value:
    """How often `tile_product` calls `beside`."""
    return k.ceil_div(k.ceil_div(units, tile.mr), BURST) * tile.mr


def left_rows(
    k: KernelBuilder, a: Pointer, rows: list[Any], pair: bool, *, depth: int, stride: int
) -> tuple[Left, Left | None]:
    """The left operand read from row-major memory, `stride` elements from a row to the next: (operand of whole units, operand of a
    last odd one)."""
    bases = [a.at(row * stride) for row in rows]
    if not pair:
        return (lambda r, u: k.splat(bases[r].get(u))), None

    def whole(r: int, u: Value) -> Value:
        p = bases[r].bytes(u << 2)
        return k.splat(k.op("i32", f"load i32, ptr {p.ref}, align 2"))

    def half(r: int, u: Value) -> Value:
        p = bases[r].bytes(u << 2)
        return k.splat(k.op("i32", f"zext i16 {k.op('i16', f'load i16, ptr {p.ref}, align 2').ref} to i32"))

    return whole, half if depth % 2 else None


def block_of(unit: Value, choice: GemmConfig, row_blocks: Any, column_blocks: Any) -> tuple[Value, Value]:
    """(row block, column block) of a claimed unit."""
    if choice.order == "rows":
        return unit // column_blocks, unit % column_blocks
    return unit % row_blocks, unit // row_blocks


def prefetch_row(k: KernelBuilder, p: Pointer, count: int, *, write: bool) -> None:
    """`count` elements from `p`."""
    for line in range(0, count * p.itemsize, LINE):
        k.prefetch(p.bytes(line), write=write)
