"""The gradient of a convolution's filters from bf16 images by products of pairs: dw[k, c, t] = the sum over n and p of dy[n, k, p]
x[n, c, p + shift(t)].

Pairs are of adjacent positions (conv_planes.py). dy's lines are copied with zeros between them, so a row of the left operand is an
output channel as it lies in memory. Of x, vectors of channels are transposed to [pair of positions][channels]; a second copy has
the pairs that begin at odd positions, for the filter's elements with odd shifts. Sums of a claim stay in fp32 in its second cache
while it walks through all images in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from barellm.cpu.gemm_config import Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.conv_planes import Pixels, Planes
from barellm.cpu.kernels.loops import added
from barellm.cpu.kernels.microkernel import rank1_update
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up

POSITIONS = (
    256  # of a block, about: what a tile multiplies of them stays in the first cache for all of the filter's elements
)
SUMS = 3 << 18  # bytes of a claim's sums


@dataclass(frozen=True)
class Blocks:
    """A claim owns the gradients of `rows` output channels x `columns` input channels, and goes through `images` images' `lines`
    lines at a time."""

    tile: Tile
    tiled: bool
    rows: int
    columns: int
    lines: int
    images: int

    def planes(self, grid: Grid) -> tuple[Planes, Planes]:
        """Of x and of dy."""
        together = amx.TILE_K if self.tiled else 2
        x = Planes(grid, self.lines, together)
        own = Grid(grid.outputs, grid.channels, grid.outputs, (1, 1), (0,), (0,))
        return x, Planes(own, self.lines, together, x.pitch)


def blocks_of(
    isa: ISA, tile: Tile, tiled: bool, grid: Grid, rows: int, images: int, groups: int, threads: int
) -> Blocks:
    """The claims that take least time, packing counted. Lines and images of a block depend on the shape alone: they say in which
    order sums are added."""
    P, _ = grid.outputs
    pitch, span = Planes(grid, P, 1).pitch, tile.nr(isa)
    lines = ceil_div(P, ceil_div(P, max(1, min(P, POSITIONS // pitch))))
    several = max(1, min(images, POSITIONS // (P * pitch))) if lines == P else 1

    def cost(size: tuple[int, int]) -> float:
        own_rows, columns = size
        claims = groups * ceil_div(rows, own_rows) * ceil_div(grid.channels, columns)
        work = own_rows * columns * grid.taps / 400 + 0.4 * own_rows + columns
        return ceil_div(claims, threads) * work

    sizes = [
        (r, c)
        for r in range(tile.mr, round_up(rows, tile.mr) + 1, tile.mr)
        for c in range(span, round_up(grid.channels, span) + 1, span)
        if 4 * r * c * grid.taps <= SUMS
    ] or [(tile.mr, span)]
    own_rows, columns = min(sizes, key=cost)
    return Blocks(tile, tiled, own_rows, columns, lines, several)


class Scratch:
    """The places in a thread's scratch, in bytes from its start, and their sum."""

    def __init__(self, isa: ISA, grid: Grid, b: Blocks) -> None:
        x, dy = b.planes(grid)
        span = b.tile.nr(isa)
        self.parities = sorted({shift % 2 for shift in x.shifts()})
        self.pairs = round_up(ceil_div(x.whole(isa.lanes), 2), isa.lanes)  # of an image's planes
        self.copy = 4 * self.pairs * span  # bytes of such pairs of a block of columns
        self.lines = dy.zeros_nbytes(isa.lanes) + 2 * b.rows * b.images * dy.line_pitch(isa.lanes)  # of x
        self.panel = self.lines + x.nbytes(isa, span) + 64 * isa.lanes
        self.sums = self.panel + b.columns // span * b.images * len(self.parities) * self.copy
        self.nbytes = self.sums + 4 * b.rows * b.columns * grid.taps


class Gradient:
    """One thread's work."""

    def __init__(
        self, k: KernelBuilder, dw: Pointer, dy: Pointer, x: Pointer, *, images: Value, groups: int, rows: int, grid: Grid,
        blocks: Blocks, mode: str,
    ) -> None:  # fmt: skip
        self.k, self.dw, self.images, self.groups, self.rows, self.grid = k, dw, images, groups, rows, grid
        self.blocks, self.mode, self.scratch, at = blocks, mode, Scratch(k.isa, grid, blocks), k.thread_scratch()
        self.span = blocks.tile.nr(k.isa)
        self.planes, of_dy = blocks.planes(grid)
        self.steps = of_dy.positions // (amx.TILE_K if blocks.tiled else 2)  # of an image
        self.dy = Pixels(k, of_dy, dy, at, channels=blocks.rows, groups=groups, of=rows)
        self.x = Pixels(k, self.planes, x, at.bytes(self.scratch.lines), channels=self.span, groups=groups)
        self.panel, self.sums = at.bytes(self.scratch.panel), at.bytes(self.scratch.sums)

    def run(self) -> None:
        k, b, grid = self.k, self.blocks, self.grid
        row_blocks, column_blocks = ceil_div(self.rows, b.rows), ceil_div(grid.channels, b.columns)
        claims = self.groups * row_blocks * column_blocks
        with amx.tile_registers(k, b.tiled), k.parallel_for(claims) as unit:
            self.group, rest = unit // (row_blocks * column_blocks), unit % (row_blocks * column_blocks)
            self.row, self.column = rest // column_blocks * b.rows, rest % column_blocks * b.columns
            self.own_rows = k.min(k.int(self.rows) - self.row, b.rows)
            self.own_columns = k.min(k.int(grid.channels) - self.column, b.columns)
            with k.loop(0, self.images, b.images) as image, k.loop(0, grid.outputs[0], b.lines) as line:
                self._pack(image, k.min(self.images - image, b.images), line)
                self._multiply(k.min(self.images - image, b.images), (image + line).differs(0))
            self._put()

    def _pack(self, image: Value, many: Value, line: Value) -> None:
        k, lanes = self.k, self.k.lanes
        with k.loop(0, many) as n:
            self.dy.move(image + n, self.group, self.row, line)
            self.dy.fill(n * self.blocks.rows)
            with k.loop(0, self.own_columns, self.span) as c:
                self.x.move(image + n, self.group, self.column + c, line)
                self.x.fill()
                for parity in self.scratch.parities:
                    to = self._panel(c // self.span, n, parity)
                    with k.loop(0, self.scratch.pairs, lanes) as pair, k.loop(0, self.span, lanes) as v:
                        at = self.x.at.at(pair * 2 + v * self.x.pitch + parity)
                        vectors = []
                        for i in range(lanes):
                            p = at.at(i * self.x.pitch)
                            vectors.append(k.op(k.ivec, f"load {k.ivec}, ptr {p.ref}, align 2"))
                        for i, value in enumerate(transpose(k, vectors)):
                            to.store_raw(value, (pair + i) * self.span + v)

    def _panel(self, block: Value, n: Value, parity: int) -> Pointer:
        """The pairs of a block of columns of an image."""
        number = (block * self.blocks.images + n) * len(self.scratch.parities) + self.scratch.parities.index(parity)
        return self.panel.as_dtype("i32").bytes(number * self.scratch.copy)

    def _sums(self, row: Value, column: Value, t: int) -> Pointer:
        """The sums (tile.mr, span) of an element of the filter."""
        blocks = self.blocks.columns // self.span
        tile = (row // self.blocks.tile.mr * blocks + column // self.span) * self.grid.taps + t
        return self.sums.bytes(tile * (4 * self.blocks.tile.mr * self.span))

    def _multiply(self, many: Value, begun: Value) -> None:
        k, tile = self.k, self.blocks.tile
        with k.loop(0, self.own_columns, self.span) as c, k.loop(0, self.own_rows, tile.mr) as r:
            for t, shift in enumerate(self.planes.shifts()):
                panel = self._panel(c // self.span, k.int(0), shift % 2).bytes(shift // 2 * (4 * self.span))
                self._tile(self._sums(r, c, t), self.dy.at.at(r * self.dy.pitch), panel, many, begun)

    def _tile(self, to: Pointer, left: Pointer, panel: Pointer, many: Value, begun: Value) -> None:
        """to (tile.mr, span) += the sum over a block's positions."""
        k, tile, steps = self.k, self.blocks.tile, self.steps
        of_left = 2 * self.blocks.rows * self.dy.pitch  # bytes from an image to the next
        of_panel = len(self.scratch.parities) * self.scratch.copy
        row = 2 * self.dy.pitch
        if self.blocks.tiled:
            amx.load_accumulators(k, to, begun, row=4 * self.span)
            with k.loop(0, many) as n:
                of = amx.TileA(left.bytes(n * of_left), row, amx.LINE, amx.SIDE * row)
                amx.accumulate_steps(k, of, panel.bytes(n * of_panel), k.int(steps))
            amx.store_accumulators(k, to, row=4 * self.span)
            return
        acc = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]
        places = [to.at(r * self.span + v * k.lanes) for r in range(tile.mr) for v in range(tile.vectors)]
        flat = [var for line in acc for var in line]
        with k.when(begun):
            for var, p in zip(flat, places, strict=True):
                var.value = p.load()
        with k.loop(0, many) as n:
            of, right = left.bytes(n * of_left), panel.bytes(n * of_panel)

            def pair(r: int, u: Value, of: Pointer = of) -> Value:
                return k.splat(k.op("i32", f"load i32, ptr {of.bytes(u * 4 + r * row).ref}, align 4"))

            with k.loop(0, steps) as u:
                rank1_update(k, acc, pair, right, u, True)
        for var, p in zip(flat, places, strict=True):
            p.store(var.value)

    def _put(self) -> None:
        """The finished sums, where a channel's elements lie side by side."""
        k, lanes, taps, C = self.k, self.k.lanes, self.grid.taps, self.grid.channels
        rows = self.blocks.tile.mr
        with k.loop(0, self.own_rows) as r, k.loop(0, self.own_columns, lanes) as c:
            first = self._sums(r, c, 0).at(r % rows * self.span + c % self.span)
            to = self.dw.at(((self.group * self.rows + self.row + r) * C + self.column + c) * taps)
            count = k.min(self.own_columns - c, lanes)
            for t in range(0, taps, lanes):
                n = min(lanes, taps - t)
                found = [first.at((t + min(i, n - 1)) * (rows * self.span)).load() for i in range(lanes)]
                mask = None if n == lanes else k.mask_first(n)
                for i, value in enumerate(transpose(k, found)):
                    with k.when(count > i):
                        place = to.at(i * taps + t)
                        place.store(added(k, place, 0, mask, value, self.mode), 0, mask)


def conv_pairs_gradient(
    k: KernelBuilder, dw, dy, x, *, dims: tuple[str, ...], count: int, groups: int, rows: int, grid: Grid, blocks: Blocks, mode: str
) -> None:  # fmt: skip
    """dw (groups rows, channels taps) fp32, from dy (N, groups rows, P, Q) bf16 and what `grid` sees of x (N, groups channels, H,
    W) bf16. `count` images for each of the run-time sizes `dims`."""
    Gradient(
        k, dw, dy, x, images=k.num_elements(dims, count), groups=groups, rows=rows, grid=grid, blocks=blocks, mode=mode
    ).run()
