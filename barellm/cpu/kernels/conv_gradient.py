"""The gradient of a convolution's filters: dw[k, d] = the sum over images and pixels of dy[n, k, pixel] seen[d, n, pixel].

Both operands lie along pixels, so lanes are pixels and nothing is transposed: a tile keeps a vector of partial sums for each
element, and their lanes are added at the very end. A claim owns its elements and walks through all pixels in order.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder, Lowering
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.conv_panel import Panel, panel_nbytes, panel_pitch
from barellm.cpu.kernels.loops import put_added
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div, round_up

PIXELS = 448  # of a block, about: enough to pay for loading and storing the partial sums
ROWS, DEPTH = 48, 72  # elements of dw that a claim owns, about: their partial sums take 110 KB
TILES = {32: (4, 6), 16: (3, 4)}  # rows and depths whose partial sums and operands fit into the registers


@dataclass(frozen=True)
class Blocks:
    """A claim owns `rows` x (`channels` of x) and goes through `lines` lines, or pieces of `columns` columns of one, at a time."""

    rows: int
    channels: int
    lines: int
    columns: int


def blocks_of(isa: ISA, grid: Grid, rows: int, images: int) -> Blocks:
    P, Q = grid.outputs
    channels = min(grid.channels, max(1, DEPTH // grid.taps))
    lines = max(1, min(PIXELS // Q, images * P))
    pieces = ceil_div(Q, 2 * PIXELS)
    columns = round_up(ceil_div(Q, pieces), isa.lanes) if pieces > 1 else Q
    even = ceil_div(rows, ceil_div(rows, ROWS))
    return Blocks(even, ceil_div(grid.channels, ceil_div(grid.channels, channels)), lines, columns)


class Scratch:
    """The places in a thread's scratch, in bytes from its start, and their sum."""

    def __init__(self, isa: ISA, grid: Grid, b: Blocks) -> None:
        self.pitch = panel_pitch(b.lines * b.columns + isa.lanes, isa.lanes)
        self.left = panel_nbytes(isa, grid, b.lines, b.columns, self.pitch, b.channels)
        self.sums = self.left + 4 * (b.rows * self.pitch + 16)
        self.nbytes = self.sums + 4 * b.rows * b.channels * grid.taps * isa.lanes


def conv_weight_gradient(
    k: KernelBuilder, dw, dy, x, *, dims, count, groups: int, rows: int, grid: Grid, blocks: Blocks, mode: str
) -> None:
    """dw (groups rows, channels taps) fp32, from dy (N, groups rows, P, Q) and what `grid` sees of x (N, groups channels, H, W)."""
    (P, Q), b, lanes = grid.outputs, blocks, k.lanes
    scratch, at = Scratch(k.isa, grid, b), k.thread_scratch()
    left, sums = at.bytes(scratch.left), at.bytes(scratch.sums)
    depth, owned = grid.channels * grid.taps, b.channels * grid.taps
    row_blocks, channel_blocks = ceil_div(rows, b.rows), ceil_div(grid.channels, b.channels)
    total, pieces = k.num_elements(dims, count) * P, ceil_div(Q, b.columns)
    panel = Panel(k, grid, x, at, b.lines, b.columns, scratch.pitch, groups)
    high, wide = (2, 4) if not k.isa.fma else TILES[k.isa.registers]

    def partial(row: Value, d: Value) -> Pointer:
        return sums.at((row * owned + d) * lanes)

    with k.parallel_for(groups * row_blocks * channel_blocks) as unit:
        group, rest = unit // (row_blocks * channel_blocks), unit % (row_blocks * channel_blocks)
        first, channel = rest // channel_blocks * b.rows, rest % channel_blocks * b.channels
        many_rows = k.min(k.int(rows) - first, b.rows)
        last = k.min(channel + b.channels, grid.channels)
        deep = (last - channel) * grid.taps
        with k.loop(0, many_rows * owned) as i:
            sums.store(0.0, i * lanes)
        with k.loop(0, total, b.lines) as line, k.loop(0, pieces) if pieces > 1 else nullcontext(0) as piece:
            many, column = k.min(total - line, b.lines), piece * b.columns
            columns = b.columns if pieces == 1 else k.min(Q - column, b.columns)
            pixels = many * columns
            panel.move(group, line, many, column)
            panel.pack(channel, last, pixels=pixels)
            with k.loop(0, many_rows) as row:
                to = left.at(row * scratch.pitch)
                with k.loop(0, many) as i:
                    n, y = (line + i) // P, (line + i) % P
                    of = dy.at((((n * groups + group) * rows + first + row) * P + y) * Q + column)
                    whole = k.int(columns) & -lanes
                    with k.loop(0, whole, lanes) as q:
                        to.store(of.load(q), i * columns + q)
                    if not (isinstance(columns, int) and columns % lanes == 0):
                        to.store(of.load(whole, k.mask_first(columns - whole)), i * columns + whole)
                to.store(0.0, pixels)

            def tile(row: Value, d: Value, rows: int, depths: int, pixels: Value = pixels) -> None:
                """Partial sums of `rows` x `depths` elements go on."""
                held = [[partial(row + r, d + c) for c in range(depths)] for r in range(rows)]
                acc = [[k.var(p.load()) for p in line] for line in held]
                a = [left.at((row + r) * scratch.pitch) for r in range(rows)]
                seen = [panel.at.at((d + c) * scratch.pitch) for c in range(depths)]
                with k.loop(0, pixels, lanes) as j:
                    factors = [p.load(j) for p in a]
                    for c, p in enumerate(seen):
                        v = p.load(j)
                        for r, factor in enumerate(factors):
                            acc[r][c].value = k.fma(factor, v, acc[r][c].value)
                for to, line in zip(held, acc, strict=True):
                    for p, var in zip(to, line, strict=True):
                        p.store(var.value)

            whole_rows, whole_deep = many_rows - many_rows % high, deep - deep % wide
            for d_range, depths in (((k.int(0), whole_deep), wide), ((whole_deep, deep), 1)):
                with k.loop(*d_range, depths) as d:
                    with k.loop(0, whole_rows, high) as row:
                        tile(row, d, high, depths)
                    with k.loop(whole_rows, many_rows) as row:
                        tile(row, d, 1, depths)
        with k.loop(0, many_rows) as row, k.loop(0, deep) as d:
            at = (group * rows + first + row) * depth + channel * grid.taps + d
            put_added(k, dw, at, k.sum(partial(row, d).load()), mode)


def append_weight_gradient(
    c: Lowering, dw: Any, dy: Any, x: Any, *, groups: int, grid: Grid, mode: str, dims: tuple[str, ...], count: int
) -> None:
    rows = int(dy.shape[1]) // groups
    blocks = blocks_of(c.isa, grid, rows, int(x.shape[0]))
    c.thread_scratch(Scratch(c.isa, grid, blocks).nbytes)
    sizes = {"groups": groups, "rows": rows, "grid": grid, "blocks": blocks, "mode": mode, "dims": dims, "count": count}
    c.call(conv_weight_gradient, {"dw": dw, "dy": dy, "x": x}, sizes, writes="dw")
