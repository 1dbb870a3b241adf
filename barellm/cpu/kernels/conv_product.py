"""The direct convolution: a product whose right operand is never in memory.

out[n, k, pixel] = the sum over d of a[k, d] seen[d, n, pixel], with a row of a for each output channel and a depth d = (channel,
row and column of the filter). A thread copies the lines of x that some lines of the output see of some channels; for each register
tile of pixels it makes the columns of seen in its first cache (conv_columns.py) and multiplies a with them. Each element of the
filter is there a shift of the same lines, so stride, padding and dilation cost nothing. Each result is a sum of the sums of parts
of the channels, whatever the other blocks.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from barellm.cpu.gemm_config import Tile, tiles
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.conv_columns import Columns, lines_nbytes
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.loops import added, put_added
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div, round_up

DEPTH = 288  # of a part: with the pixels of a register tile it stays in the first cache
PIXELS = 352  # of a claim's lines, about, for all of which a is read once; with a part's channels they take 150 KB
ROWS = 256  # of a whose part of the depth is multiplied with all of these pixels before the next ones


@dataclass(frozen=True)
class Blocks:
    """How a product is cut. A claim has `lines` rows of the output or, where a row has several `pieces`, a piece of one; `columns`
    columns of each; and one of `splits` parts of the output's channels. `channels` of x are packed at a time."""

    tile: Tile
    lines: int
    columns: int
    pieces: int
    channels: int
    splits: int

    def pitch(self, isa: ISA) -> int:
        """Pixels of a claim in whole tiles."""
        return round_up(self.lines * self.columns, self.tile.nr(isa))


def blocks_of(isa: ISA, grid: Grid, rows: int, images: int, groups: int, threads: int) -> Blocks:
    """The tile and the lines that compute least beyond the result, and as many claims as keep `threads` busy with `images`."""
    P, Q = grid.outputs
    total = images * P
    channels = max(1, min(grid.channels, DEPTH // max(grid.taps, 1)))
    channels = ceil_div(grid.channels, ceil_div(grid.channels, channels))

    def cut(tile: Tile, lines: int) -> Blocks:
        pieces = 1 if lines > 1 else ceil_div(Q, PIXELS * 3 // 2)
        columns = round_up(ceil_div(Q, pieces), tile.nr(isa)) if pieces > 1 else Q
        pieces = ceil_div(Q, columns)
        claims = ceil_div(total, lines) * pieces * groups
        splits = min(ceil_div(2 * threads, claims), ceil_div(rows, tile.mr)) if claims < 4 * threads else 1
        return Blocks(tile, lines, columns, pieces, channels, splits)

    def cost(b: Blocks) -> float:
        span = b.tile.nr(isa)
        pixels = b.lines * b.columns
        last = total % b.lines * b.columns
        tiles_of_pixels = total // b.lines * b.pieces * ceil_div(pixels, span) + ceil_div(last, span)
        high = ceil_div(rows, b.tile.mr) * b.tile.mr
        claims = ceil_div(total, b.lines) * b.pieces * groups * b.splits
        idle = round_up(claims, threads) / claims
        waits = 1.2 if b.tile.vectors == 1 else 1  # for its loads: measured
        # Packing takes about as long as four rows of a do.
        return tiles_of_pixels * span * (high + 4 * b.splits) * idle * waits * (1 + 0.02 * (pixels < PIXELS // 2))

    most = max(1, min(total, PIXELS * 3 // 2 // Q))
    return min((cut(tile, lines) for tile in tiles(isa, "fp32") for lines in range(1, most + 1)), key=cost)


@dataclass(frozen=True)
class Target:
    """Where results go: output (i, j) of channel k to pixel (first + i step, likewise of j) of images of `size`."""

    size: tuple[int, int]
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (1, 1)


class Scratch:
    """The places in a thread's scratch, in bytes from its start, and their sum."""

    def __init__(self, isa: ISA, grid: Grid, blocks: Blocks, rows: int) -> None:
        pitch = blocks.pitch(isa)
        own = ceil_div(ceil_div(rows, blocks.tile.mr), blocks.splits) * blocks.tile.mr
        parts = ceil_div(grid.channels, blocks.channels)
        self.sums = lines_nbytes(isa, grid, blocks.lines, blocks.columns, blocks.channels)
        span = blocks.tile.nr(isa)
        self.tile = self.sums + (4 * own * pitch if parts > 1 else 0)
        self.column = self.tile + round_up(4 * blocks.tile.mr * span, 64)
        self.nbytes = self.column + 4 * blocks.channels * grid.taps * span


class Product:
    """One thread's work."""

    def __init__(
        self, k: KernelBuilder, out: Pointer, a: Pointer, x: Pointer, *, images: Value, groups: int, rows: int, grid: Grid,
        target: Target, blocks: Blocks, mode: str,
    ) -> None:  # fmt: skip
        self.k, self.out, self.a, self.images, self.mode = k, out, a, images, mode
        self.groups, self.rows, self.grid, self.target, self.blocks = groups, rows, grid, target, blocks
        self.span, self.pitch = blocks.tile.nr(k.isa), blocks.pitch(k.isa)
        at, scratch = k.thread_scratch(), Scratch(k.isa, grid, blocks, rows)
        self.columns = Columns(k, grid, x, at, blocks.lines, blocks.columns, groups)
        self.sums, self.spill, self.column = (at.bytes(n) for n in (scratch.sums, scratch.tile, scratch.column))
        self.parts = ceil_div(grid.channels, blocks.channels)
        self.depth = grid.channels * grid.taps
        P, Q = grid.outputs
        self.dense = target == Target((P, Q))

    def run(self) -> None:
        k, b, (P, Q) = self.k, self.blocks, self.grid.outputs
        total, channels, tile = self.images * P, self.grid.channels, b.tile
        tiles_of_rows = ceil_div(self.rows, tile.mr)
        with k.parallel_for(k.ceil_div(total, b.lines) * (b.pieces * self.groups * b.splits)) as unit:
            split, rest = unit % b.splits, unit // b.splits
            piece, rest = rest % b.pieces, rest // b.pieces
            self.group, self.first_line = rest % self.groups, rest // self.groups * b.lines
            self.many = k.min(total - self.first_line, b.lines)
            self.first_column = piece * b.columns if b.pieces > 1 else 0
            self.pixels = self.many * b.columns if b.pieces == 1 else k.min(Q - self.first_column, b.columns)
            self.first_row = split * tiles_of_rows // b.splits * tile.mr
            self.last_row = k.min((split + 1) * tiles_of_rows // b.splits * tile.mr, self.rows)
            self.columns.move(self.group, self.first_line, self.many, self.first_column)
            with k.loop(0, self.parts) if self.parts > 1 else nullcontext(k.int(0)) as self.part:
                self.channel = self.part * b.channels
                last = k.min(self.channel + b.channels, channels)
                self.many_channels = last - self.channel
                self.columns.fill(self.channel, last)
                self._multiply()

    def _multiply(self) -> None:
        k, rows, tile = self.k, self.rows, self.blocks.tile
        rest = rows % tile.mr
        with k.loop(self.first_row, self.last_row, round_up(ROWS, tile.mr)) as first:
            last = k.min(first + round_up(ROWS, tile.mr), self.last_row)
            whole = k.min(last, rows - rest) if rest else last
            with k.loop(0, self.pixels, self.span) as j:
                self.columns.gather(self.column, self.many_channels, j, self.pixels, tile.vectors)
                with k.loop(first, whole, tile.mr) as row:
                    self._tile(row, j, tile)
                if rest:
                    with k.when(last > rows - rest):
                        self._tile(k.int(rows - rest), j, Tile(rest, tile.vectors))

    def _tile(self, row: Value, j: Value, tile: Tile) -> None:
        k = self.k
        acc = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]
        place = self.sums.at((row - self.first_row) * self.pitch + j * self.blocks.tile.mr)
        sums = [place.at(r * self.span) for r in range(tile.mr)]
        begin = self.a.at((self.group * self.rows + row) * self.depth + self.channel * self.grid.taps)
        left = [begin.at(r * self.depth) for r in range(tile.mr)]
        with k.loop(0, self.many_channels * self.grid.taps) as d:
            right = [self.column.load(d * self.span + v * k.lanes) for v in range(tile.vectors)]
            for p, line in zip(left, acc, strict=True):
                factor = k.splat(p.get(d))
                for v, var in enumerate(line):
                    var.value = k.fma(factor, right[v], var.value)
        values = [[var.value for var in line] for line in acc]
        if self.parts == 1:
            self._put(row, j, values)
            return
        later = self.part > 0
        values = [
            [value + k.select(later, to.load(v * k.lanes), 0.0) for v, value in enumerate(line)]
            for to, line in zip(sums, values, strict=True)
        ]
        ends = (self.part + 1).equals(self.parts)
        with k.when(ends):
            self._put(row, j, values)
        with k.otherwise(ends):
            for to, line in zip(sums, values, strict=True):
                for v, value in enumerate(line):
                    to.store(value, v * k.lanes)

    def _put(self, row: Value, j: Value, values: list[list[Value]]) -> None:
        """The finished sums of a tile to where they belong: by vectors where they are adjacent pixels of one image."""
        k, (P, Q) = self.k, self.grid.outputs
        if not self.dense:
            self._put_pixels(row, j, values)
            return
        flat = self.first_line * Q + self.first_column + j
        n, at = flat // (P * Q), flat % (P * Q)
        fits = (at + self.span <= P * Q) & (j + self.span <= self.pixels)
        with k.when(fits):
            to = (n * self.groups + self.group) * (self.rows * P * Q) + at
            for r, line in enumerate(values):
                for v, value in enumerate(line):
                    self._store(value, to + (row + r) * (P * Q) + v * k.lanes)
        with k.otherwise(fits):
            self._put_pixels(row, j, values)

    def _put_pixels(self, row: Value, j: Value, values: list[list[Value]]) -> None:
        k, (P, _), t = self.k, self.grid.outputs, self.target
        for r, line in enumerate(values):
            for v, value in enumerate(line):
                self.spill.store(value, r * self.span + v * k.lanes)
        with k.loop(0, k.min(self.pixels - j, self.span)) as pixel:
            line = self.first_line + (j + pixel) // self.blocks.columns
            column = self.first_column + (j + pixel) % self.blocks.columns
            y, x = line % P * t.step[0] + t.first[0], column * t.step[1] + t.first[1]
            image = (line // P * self.groups + self.group) * self.rows + row
            at = image * (t.size[0] * t.size[1]) + y * t.size[1] + x
            for r in range(len(values)):
                to = self.out.at(at + r * (t.size[0] * t.size[1]))
                put_added(k, to, 0, self.spill.get(pixel + r * self.span), self.mode)

    def _store(self, value: Value, at: Value) -> None:
        self.out.store(added(self.k, self.out, at, None, value, self.mode), at)


def conv_product(
    k: KernelBuilder, out, a, x, *, dims: tuple[str, ...], count: int, groups: int, rows: int, grid: Grid, target: Target,
    blocks: Blocks, mode: str,
) -> None:  # fmt: skip
    """out (N, groups rows, `target` size) = a (groups rows, channels taps) fp32 times what `grid` sees of x (N, groups channels, H,
    W).
    `count` images for each of the run-time sizes `dims`."""
    images = k.num_elements(dims, count)
    sizes: dict[str, Any] = {"groups": groups, "rows": rows, "grid": grid, "target": target, "blocks": blocks}
    Product(k, out, a, x, images=images, mode=mode, **sizes).run()
