"""The direct convolution of bf16 images by products of pairs: dot instructions, or AMX tiles where there are any.

out[n, k, p] = the sum over c and elements t of w[k, c, t] x[n, c, p + shift(t)], with positions p and shifts as in conv_planes.py.
A chunk of channels is transposed to [position][channels]: a position's pairs of channels are one vector, in a whole cache line
with 16 lanes, and so are the left rows of a product whose columns are output channels. Positions are rows, so an element of the
filter is other rows of the same matrix: no copy for each element, and never a load across two cache lines.

For a chunk (32 channels and 9 elements: depth 288) of 32 columns the filters take 18 KB and stay in the first cache while all
positions pass. Sums of several chunks are kept in fp32 between them. A result is one chain over chunks, elements and channels,
however the product is cut, and is rounded once.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from barellm.cpu.gemm_config import Tile
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels import amx
from barellm.cpu.kernels.conv_lines import Grid
from barellm.cpu.kernels.conv_planes import Pixels, Planes
from barellm.cpu.kernels.conv_product import Target
from barellm.cpu.kernels.loops import added, put_added
from barellm.cpu.kernels.microkernel import rank1_update
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up

POSITIONS = 2048  # of a claim at most, or a line: so often is each element of the filters used when it was read
SUMS = 1 << 20  # bytes of a claim's sums: half of a second cache of 2 MB
LINES = 256  # positions of the lines that are transposed at a time
DEPTH = 576  # of a part, about: one or two chunks of filters of 3 x 3


@dataclass(frozen=True)
class Blocks:
    """A claim has `images` images' blocks of `lines` lines, or less, and `columns` output channels, whole tiles of them. `chunks`
    chunks of `pairs` pairs of channels are multiplied at a time."""

    tile: Tile
    tiled: bool
    pairs: int
    chunks: int
    lines: int
    images: int
    columns: int

    def planes(self, grid: Grid) -> Planes:
        return Planes(grid, self.lines, amx.SIDE if self.tiled else self.tile.mr)


def blocks_of(
    isa: ISA, tile: Tile, tiled: bool, grid: Grid, columns: int, images: int, groups: int, threads: int
) -> Blocks:
    """Claims as large as the second cache allows, and as many as keep `threads` evenly busy with `images`."""
    P, _ = grid.outputs
    span = tile.nr(isa)
    pairs = isa.lanes
    if not tiled:
        pairs = ceil_div(grid.channels, 2 * ceil_div(grid.channels, 2 * isa.lanes))
    chunks = ceil_div(grid.channels, 2 * pairs)
    together = max(1, min(chunks, DEPTH // max(2 * pairs * grid.taps, 1)))
    together = ceil_div(chunks, ceil_div(chunks, together))
    pitch, tiles_of_columns = Planes(grid, P, 1).pitch, ceil_div(columns, span)
    most = max(1, min(P, POSITIONS // pitch))
    depth = chunks * 2 * pairs

    def cost(b: Blocks) -> float:
        planes = b.planes(grid)
        claims = ceil_div(images, b.images) * ceil_div(P, b.lines) * groups * ceil_div(columns, b.columns)
        # Cycles of a claim: products and finishing, making the panel, and filters from the third cache.
        work = planes.positions * b.images * b.columns * (depth * grid.taps / 800 + 0.5)
        work += 0.4 * depth * planes.size * len(planes.remainders()) * b.images + depth * grid.taps * b.columns / 4
        return ceil_div(claims, threads) * work

    def cuts(lines: int, several: int) -> list[Blocks]:
        """Into as few parts of the columns as their sums allow, or more."""
        least = min(ceil_div(4 * columns * lines * pitch * several, SUMS), tiles_of_columns)
        parts = {ceil_div(tiles_of_columns, splits) * span for splits in range(least, tiles_of_columns + 1)}
        return [Blocks(tile, tiled, pairs, together, lines, several, own) for own in sorted(parts)]

    fewest = ceil_div(P, most)
    lines = sorted({ceil_div(P, n) for n in range(fewest, min(2 * fewest, P) + 1)})
    several = range(1, min(images, max(1, POSITIONS // (P * pitch))) + 1)
    options = [cut for n in lines for m in (several if n == P else [1]) for cut in cuts(n, m)]
    return min(options, key=cost)


def height_of(planes: Planes) -> int:
    """Lines of a plane that are transposed at a time."""
    return min(planes.height, max(1, LINES // planes.pitch))


class Scratch:
    """The places in a thread's scratch, in bytes from its start, and their sum."""

    def __init__(self, isa: ISA, grid: Grid, b: Blocks, *, dense: bool) -> None:
        planes = b.planes(grid)
        self.panel = round_up(planes.nbytes(isa, 2 * b.pairs, height_of(planes)), 64)
        self.chunk = 4 * isa.lanes * planes.whole(isa.lanes)  # bytes of a chunk's panel
        self.sums = self.panel + b.images * b.chunks * self.chunk + 4 * isa.lanes * isa.lanes
        span = b.tile.nr(isa)
        self.image = 4 * span * planes.positions  # bytes of an image's sums for a block of columns
        self.parts = ceil_div(ceil_div(grid.channels, 2 * b.pairs), b.chunks)
        self.shifts = self.sums + b.columns // span * b.images * self.image + 4 * span * isa.lanes
        self.places = self.shifts + round_up(8 * b.chunks * grid.taps, 64)
        pixels = round_up(b.lines * grid.outputs[1], isa.lanes)
        self.targets = self.places + 8 * pixels
        self.spill = round_up(self.targets + (0 if dense else 8 * pixels), 64)
        self.nbytes = self.spill + (0 if dense else 4 * isa.lanes * isa.lanes)


class Product:
    """One thread's work."""

    def __init__(
        self, k: KernelBuilder, out: Pointer, a: Pointer, x: Pointer, *, images: Value, groups: int, columns: int, grid: Grid,
        target: Target, blocks: Blocks, mode: str,
    ) -> None:  # fmt: skip
        self.k, self.out, self.a, self.images, self.groups, self.columns = k, out, a, images, groups, columns
        self.grid, self.target, self.blocks, self.mode = grid, target, blocks, mode
        self.dense = target == Target(grid.outputs)
        self.planes, at, self.scratch = (
            blocks.planes(grid),
            k.thread_scratch(),
            Scratch(k.isa, grid, blocks, dense=self.dense),
        )
        self.pixels = Pixels(
            k, self.planes, x, at, channels=2 * blocks.pairs, groups=groups, height=height_of(self.planes)
        )
        of = self.scratch
        self.panel, self.sums, self.shifts, self.places, self.targets, self.spill = (
            at.bytes(n) for n in (of.panel, of.sums, of.shifts, of.places, of.targets, of.spill)
        )
        self.span = blocks.tile.nr(k.isa)
        self.chunks = ceil_div(grid.channels, 2 * blocks.pairs)

    def run(self) -> None:
        k, b, (P, _) = self.k, self.blocks, self.grid.outputs
        self._make_tables()
        line_blocks, splits = ceil_div(P, b.lines), ceil_div(self.columns, b.columns)
        places = k.ceil_div(self.images, b.images) * line_blocks
        claims = places * (self.groups * splits)
        with amx.tile_registers(k, b.tiled), k.parallel_for(claims) as unit:
            place, rest = unit % places, unit // places
            self.group, split = rest % self.groups, rest // self.groups
            self.image, self.line = place // line_blocks * b.images, place % line_blocks * b.lines
            self.many = k.min(self.images - self.image, b.images)
            self.first = split * b.columns
            parts = self.scratch.parts
            with k.loop(0, parts) if parts > 1 else nullcontext(k.int(0)) as part:
                self._part(part)

    def _make_tables(self) -> None:
        """Bytes of the panel from a position to what an element of the filter meets, for each chunk of a part; for each pixel,
        bytes of its position's sums, and its place in the output."""
        k, (_, Q), t, lines = self.k, self.grid.outputs, self.target, self.blocks.lines
        for chunk in range(self.blocks.chunks):
            for i, shift in enumerate(self.planes.shifts()):
                place = chunk * self.scratch.chunk + shift * 4 * k.lanes
                self.shifts.as_dtype("i64").put(k.int(place), chunk * self.grid.taps + i)
        with k.loop(0, round_up(lines * Q, k.lanes)) as pixel:
            line, column = pixel // Q, pixel % Q  # what is behind the last pixel is read, and not written
            self.places.as_dtype("i64").put((line * self.planes.pitch + column) * (4 * self.span), pixel)
            if not self.dense:
                self.targets.as_dtype("i64").put(line * (t.step[0] * t.size[1]) + column * t.step[1], pixel)

    def _part(self, part: Value) -> None:
        k, b, parts = self.k, self.blocks, self.scratch.parts
        chunk = part * b.chunks
        chunks = k.min(k.int(self.chunks) - chunk, b.chunks) if self.chunks % b.chunks else k.int(b.chunks)
        with k.loop(0, self.many) as n, k.loop(0, chunks) as c:
            self._fill(n, c, chunk + c)
        blocks = k.ceil_div(k.min(k.int(self.columns) - self.first, b.columns), self.span)
        whole = self.chunks * self.grid.taps * 4 * b.pairs * self.span  # bytes of a block's filters
        of_group = ceil_div(self.columns, self.span) * whole
        with k.loop(0, self.many) as n:
            panel = self.panel.bytes(n * (b.chunks * self.scratch.chunk))
            end = self.planes.positions
            for begin, last, rows in (
                (0, end - end % b.tile.mr, b.tile.mr),
                (end - end % b.tile.mr, end, end % b.tile.mr),
            ):
                with k.loop(begin, last, b.tile.mr) as p, k.loop(0, blocks) as block:
                    to = self.sums.bytes((block * b.images + n) * self.scratch.image + p * (4 * self.span))
                    filters = self.a.bytes(
                        self.group * of_group
                        + (self.first // self.span + block) * whole
                        + chunk * (self.grid.taps * 4 * b.pairs * self.span)
                    )
                    begun = part > 0 if parts > 1 else None
                    self._multiply(to, rows, panel.bytes(p * (4 * k.lanes)), filters, chunks, begun)
        ends = k.when((part + 1).equals(parts)) if parts > 1 else nullcontext()
        with ends, k.loop(0, blocks) as block, k.loop(0, self.many) as n:
            image = self.sums.bytes((block * b.images + n) * self.scratch.image)
            self._put(n, image, self.first + block * self.span)

    def _fill(self, n: Value, c: Value, chunk: Value) -> None:
        """The panel of a chunk of channels of an image: vectors of positions' pairs, transposed. Some lines of all channels at a
        time, which stay in the first cache."""
        k, lanes, pairs, planes = self.k, self.k.lanes, self.blocks.pairs, self.planes
        self.pixels.move(self.image + n, self.group, chunk * (2 * pairs), self.line)
        panel = self.panel.as_dtype("i32").bytes((n * self.blocks.chunks + c) * self.scratch.chunk)
        weave = [x for i in range(lanes) for x in (i, lanes + i)]
        high = height_of(planes)
        for number, (of_row, of_column) in enumerate(planes.remainders()):
            with k.loop(0, planes.height, high) as u:
                last = k.min(u + high, planes.height)
                with k.loop(0, 2 * pairs) as j:
                    to = self.pixels.at.at(j * self.pixels.pitch)
                    self.pixels.fill_lines(j, to, of_row, of_column, u, last)
                    self.pixels.clear(to.at((last - u) * planes.pitch), 0, planes.columns[2])
                to = panel.at((u * planes.pitch + number * planes.size) * lanes)
                with k.loop(0, (last - u) * planes.pitch + planes.columns[2], lanes) as p:
                    rows = [self.pixels.at.at(p + j * self.pixels.pitch).load_raw() for j in range(2 * pairs)]
                    vectors = [
                        k.bitcast(k.shuffle(a, b, weave), k.ivec) for a, b in zip(rows[::2], rows[1::2], strict=True)
                    ]
                    vectors += vectors[:1] * (lanes - pairs)  # lanes that nobody reads
                    for i, v in enumerate(transpose(k, vectors)):
                        to.store_raw(v, (p + i) * lanes)  # those behind the last line are written again

    def _multiply(
        self, to: Pointer, rows: int, panel: Pointer, filters: Pointer, chunks: Value, begun: Value | None
    ) -> None:
        """to (tile.mr, span) = positions' sums over a part of the channels, added to those before."""
        k, tile = self.k, self.blocks.tile
        pitch = 4 * k.lanes

        def shift(step: Value) -> Value:
            return self._table(self.shifts, step)

        steps = chunks * self.grid.taps
        if self.blocks.tiled:
            count = rows // amx.SIDE
            amx.multiply_column(k, to, count, lambda s: panel.bytes(shift(s)), filters, steps, begun=begun)
            return
        acc = [[k.var_vec(0.0) for _ in range(tile.vectors)] for _ in range(tile.mr)]
        flat = [var for line in acc for var in line]
        places = [to.at(r * self.span + v * k.lanes) for r in range(tile.mr) for v in range(tile.vectors)]
        if begun is not None:
            with k.when(begun):
                for var, p in zip(flat, places, strict=True):
                    var.value = p.load()
        with k.loop(0, steps) as s:
            left = panel.bytes(shift(s))
            right = filters.bytes(s * (4 * self.blocks.pairs * self.span))

            def pair(r: int, u: Value, left: Pointer = left) -> Value:
                return k.splat(k.op("i32", f"load i32, ptr {left.bytes(u * 4 + r * pitch).ref}, align 4"))

            with k.loop(0, self.blocks.pairs) as u:
                rank1_update(k, acc, pair, right, u, True)
        for var, p in zip(flat, places, strict=True):
            p.store(var.value)

    def _put(self, n: Value, sums: Pointer, column: Value) -> None:
        """The finished sums of a block of columns to an image's output, vectors of adjacent pixels. A table says which position a
        pixel is."""
        k, lanes, size = self.k, self.k.lanes, self.target.size[0] * self.target.size[1]
        (P, Q), t = self.grid.outputs, self.target
        pixels = k.min(k.int(P) - self.line, self.blocks.lines) * Q
        last = k.min(column + self.span, self.columns)
        with k.loop(column, last, lanes) as first:
            image = ((self.image + n) * self.groups + self.group) * self.columns + first
            row = self.line * t.step[0] + t.first[0]
            to = self.out.at(image * size + row * t.size[1] + t.first[1])
            vector = sums.at(first - column)
            whole = pixels & -lanes
            ends = first + lanes > self.columns
            begin: Value | int = 0
            if self.dense and self.mode == "store" and self.out.dtype == "bf16" and self.columns % lanes == 0:
                begin = pixels & -(2 * lanes)
                with k.loop(0, begin, 2 * lanes) as p:
                    self._put_pairs(to, vector, p)
            with k.loop(begin, whole, lanes) as p:
                self._put_pixels(to, vector, p, None, ends)
            with k.when(whole < pixels):
                self._put_pixels(to, vector, whole, pixels - whole, ends)

    def _put_pairs(self, to: Pointer, sums: Pointer, p: Value) -> None:
        """Twice as many pixels from p on, rounded first: half as many are to be transposed."""
        k, lanes, size = self.k, self.k.lanes, self.target.size[0] * self.target.size[1]
        weave = [x for i in range(lanes) for x in (i, lanes + i)]
        rows = [k.round_bf16(sums.bytes(self._table(self.places, p + i)).load()) for i in range(2 * lanes)]
        pairs = [k.bitcast(k.shuffle(a, b, weave), k.ivec) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        for c, value in enumerate(transpose(k, pairs)):
            k.line(f"store {value.typed}, ptr {to.at(p + c * size).ref}, align 2")

    def _put_pixels(self, to: Pointer, sums: Pointer, p: Value, count: Value | None, ends: Value) -> None:
        """A vector of pixels from p on, or `count` of them, for a vector of columns."""
        k, lanes, size = self.k, self.k.lanes, self.target.size[0] * self.target.size[1]
        turned = transpose(k, [sums.bytes(self._table(self.places, p + i)).load() for i in range(lanes)])
        mask = None if count is None else k.mask_first(count)
        if not self.dense:
            for c, value in enumerate(turned):
                self.spill.store(value, c * lanes)
            columns = k.select(ends, k.int(self.columns % lanes), lanes)
            with k.loop(0, lanes if count is None else count) as i, k.loop(0, columns) as c:
                place = to.at(self._table(self.targets, p + i) + c * size)
                put_added(k, place, 0, self.spill.get(c * lanes + i), self.mode)
            return

        def put(values: list[Value]) -> None:
            for c, value in enumerate(values):
                place = to.at(p + c * size)
                place.store(added(k, place, 0, mask, value, self.mode), 0, mask)

        ragged = self.columns % lanes
        with k.otherwise(ends) if ragged else nullcontext():
            put(turned)
        if ragged:
            with k.when(ends):
                put(turned[:ragged])

    def _table(self, table: Pointer, index: Value) -> Value:
        return self.k.op("i64", f"load i64, ptr {table.bytes(index * 8).ref}, align 8")


def conv_pairs(
    k: KernelBuilder, out, a, x, *, dims: tuple[str, ...], count: int, groups: int, columns: int, grid: Grid, target: Target,
    blocks: Blocks, mode: str,
) -> None:  # fmt: skip
    """out (N, groups columns, `target` size) = filters a (conv_filters.py) times what `grid` sees of x (N, groups channels, H, W)
    bf16. `count` images for each of the run-time sizes `dims`."""
    images = k.num_elements(dims, count)
    sizes: dict[str, Any] = {"groups": groups, "columns": columns, "grid": grid, "target": target, "blocks": blocks}
    Product(k, out, a, x, images=images, mode=mode, **sizes).run()
