"""Filter gradient (wgrad) of a direct convolution in fp32: dw[k, d] = the sum over images and pixels of dy[n, k, p] im2col[d, n,
p].

A GEMM whose K dimension is pixels. Both operands lie along pixels, so lanes are pixels and nothing is transposed: a tile has a
vector of partial sums for each element of dw, and lanes are added at the very end. A work item owns some rows (output channels) x
some depths of dw, whose partial sums stay in its scratch (L2), and goes through the pixels of all images in order, a K block of
some lines at a time: it packs dy and the im2col panel of these lines, then runs the micro-kernel over its tiles.

Names: a `row` is an output channel of the group; a `depth` d is (channel, filter row, filter column), an element of a filter."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Im2colPanel, Images, panel_nbytes, panel_pitch
from barellm.cpu.kernels.loops import accumulate_scalar
from barellm.program.integers import ceil_div, round_up

KC = 448  # pixels of a K block, about: enough to pay for loading and storing the partial sums
MC, NC = 48, 72  # rows and depths of dw that a work item owns, about: their partial sums take 110 KB
TILES = {32: (4, 6), 16: (3, 4)}  # by registers: rows x depths of a tile whose partial sums and operands fit


@dataclass(frozen=True)
class Blocking:
    """A work item owns `rows` x (`channels` of x). A K block is `lines` lines, or `columns` columns of one."""

    rows: int
    channels: int
    lines: int
    columns: int


def select_blocking(isa: ISA, geometry: ConvGeometry, images: int) -> Blocking:
    """Even blocks of some MC x NC, and K blocks of some KC pixels, by the shape alone: they are the order of summation."""
    (P, Q), rows = geometry.output_size, geometry.rows
    channels = min(geometry.channels, max(1, NC // geometry.taps))  # of a work item
    lines = max(1, min(KC // Q, images * P))
    column_blocks = ceil_div(Q, 2 * KC)  # a long line is several K blocks
    columns = round_up(ceil_div(Q, column_blocks), isa.lanes) if column_blocks > 1 else Q
    even_rows = ceil_div(rows, ceil_div(rows, MC))
    even_channels = ceil_div(geometry.channels, ceil_div(geometry.channels, channels))
    return Blocking(even_rows, even_channels, lines, columns)


class ScratchLayout:
    """Offsets in a thread's scratch, in bytes, and its size `nbytes`. The panel is first; then `dy`, packed rows; then `sums`, a
    vector for each element of the item's part of dw. `pitch`: elements of a row of packed dy and of a depth of the panel: a K
    block's pixels, a vector of zeros, padding."""

    def __init__(self, isa: ISA, geometry: ConvGeometry, b: Blocking) -> None:
        self.pitch = panel_pitch(b.lines * b.columns + isa.lanes, isa.lanes)
        self.dy = panel_nbytes(isa, geometry, b.lines, b.columns, self.pitch, b.channels)
        self.sums = self.dy + 4 * (b.rows * self.pitch + 16)
        self.nbytes = self.sums + 4 * b.rows * b.channels * geometry.taps * isa.lanes


def register_tiles(k, rows: tuple[Any, Value], columns: tuple[Any, Value]) -> Iterator[tuple[Value, Value, int, int]]:
    """`for row, column, rows, columns in ...`: the register tiles of dw's rows [rows) x columns [columns): whole ones, then the
    rows and columns that remain, one by one. A loop as those of loops.py."""
    (row0, row1), (column0, column1) = rows, columns
    tile_m, tile_n = TILES[k.isa.registers] if k.isa.fma else (2, 4)
    # Where the whole tiles end.
    full_rows = row1 - (row1 - row0) % tile_m
    full_columns = column1 - (column1 - column0) % tile_n
    for begin, end, step in ((column0, full_columns, tile_n), (full_columns, column1, 1)):
        with k.loop(begin, end, step) as column:
            with k.loop(row0, full_rows, tile_m) as row:
                yield row, column, tile_m, step
            with k.loop(full_rows, row1) as row:
                yield row, column, 1, step


def multiply_lanes(k, acc, left, right: Iterable[Value]) -> None:
    """acc[r][c] += left[r] * right[c], lane by lane; a vector of `right` is loaded when it is needed."""
    for c, b in enumerate(right):
        for a, line in zip(left, acc, strict=True):
            line[c].value = k.fma(a, b, line[c].value)


class WeightGradient:
    """One thread's work item. `rows`: output channels of a group; `total_lines`: of all images' outputs; `max_depths`: depths of a
    work item. In scratch, fp32: `panel`, im2col [depth][pitch]; `packed_dy` [row][pitch]; `sums` [row][max_depths][lanes].

    `seek` sets the item's `group`, its `num_rows` rows from `first_row` on, and its `num_depths` depths, of the input channels
    [channel, last_channel)."""

    def __init__(self, k, dw, dy, x, *, images: Images, geometry: ConvGeometry, blocking: Blocking, mode: str) -> None:
        self.k, self.dw, self.dy, self.geometry, self.blocking, self.mode = k, dw, dy, geometry, blocking, mode
        self.rows = geometry.rows
        layout, scratch = ScratchLayout(k.isa, geometry, blocking), k.thread_scratch()
        self.packed_dy, self.sums, self.pitch = scratch.bytes(layout.dy), scratch.bytes(layout.sums), layout.pitch
        self.max_depths = blocking.channels * geometry.taps
        self.total_lines = k.num_elements(*images) * geometry.output_size[0]
        self.panel = Im2colPanel(k, geometry, x, scratch, blocking.lines, blocking.columns, layout.pitch)

    def seek(self, item, row_blocks: int, channel_blocks: int) -> None:
        """Find the parts of work item number `item`, and zero its sums."""
        k, b, geometry = self.k, self.blocking, self.geometry
        self.group, rest = item // (row_blocks * channel_blocks), item % (row_blocks * channel_blocks)
        self.first_row, self.channel = rest // channel_blocks * b.rows, rest % channel_blocks * b.channels
        self.num_rows = k.min(k.int(self.rows) - self.first_row, b.rows)
        self.last_channel = k.min(self.channel + b.channels, geometry.channels)
        self.num_depths = (self.last_channel - self.channel) * geometry.taps
        with k.loop(0, self.num_rows * self.max_depths) as i:
            self.sums.store(0.0, i * k.lanes)

    def add_k_block(self, line, column_block, column_blocks: int) -> None:
        """Pack both operands of the K block of the lines from `line` on, and add their products to the partial sums."""
        k, b = self.k, self.blocking
        lines, column = k.min(self.total_lines - line, b.lines), column_block * b.columns
        columns = b.columns if column_blocks == 1 else k.min(self.geometry.output_size[1] - column, b.columns)
        pixels = lines * columns
        self.panel.seek(self.group, line, lines, column)
        self.panel.pack(self.channel, self.last_channel, pixels=pixels)
        self._pack_dy(line, lines, column, columns, pixels)
        for tile in register_tiles(k, (0, self.num_rows), (0, self.num_depths)):
            self._micro_kernel(pixels, *tile)

    def _pack_dy(self, line, lines, column, columns, pixels) -> None:
        """packed_dy [row][pitch] fp32 = dy of the K block of `lines` lines from `line` on, `columns` pixels each from `column` on;
        a vector of zeros lies behind the last pixel. Vectors may reach beyond a line: the next one overwrites that."""
        k, lanes, (P, Q) = self.k, self.k.lanes, self.geometry.output_size
        with k.loop(0, self.num_rows) as row:
            dst = self.packed_dy.at(row * self.pitch)
            with k.loop(0, lines) as i:
                n, y = (line + i) // P, (line + i) % P  # image, line in it
                channel = (n * self.geometry.groups + self.group) * self.rows + self.first_row + row
                source = self.dy.at((channel * P + y) * Q + column)
                vectors_end = k.int(columns) & -lanes
                with k.loop(0, vectors_end, lanes) as q:
                    dst.store(source.load(q), i * columns + q)
                if not (isinstance(columns, int) and columns % lanes == 0):
                    tail = source.load(vectors_end, k.mask_first(columns - vectors_end))
                    dst.store(tail, i * columns + vectors_end)
            dst.store(0.0, pixels)

    def _micro_kernel(self, pixels, row, d, rows: int, depths: int) -> None:
        """The partial sums [lanes] of `rows` x `depths` elements of dw, from (row, d) on, += dy im2col^T over the K block's pixels,
        lane by lane: packed_dy [row][pixel] times the im2col panel [depth][pixel]. The last vector may reach beyond `pixels`: both
        operands are zero there."""
        k = self.k
        sums = [[self._partial(row + r, d + c) for c in range(depths)] for r in range(rows)]
        acc = [[k.var(p.load()) for p in line] for line in sums]
        a = [self.packed_dy.at((row + r) * self.pitch) for r in range(rows)]
        b = [self.panel.at.at((d + c) * self.pitch) for c in range(depths)]
        with k.loop(0, pixels, k.lanes) as j:
            multiply_lanes(k, acc, [p.load(j) for p in a], (p.load(j) for p in b))
        for dst, line in zip(sums, acc, strict=True):
            for p, var in zip(dst, line, strict=True):
                p.store(var.value)

    def _partial(self, row, d) -> Pointer:
        """The vector of partial sums of an element of dw."""
        return self.sums.at((row * self.max_depths + d) * self.k.lanes)

    def store_gradients(self) -> None:
        """The epilogue: dw (rows, depths) = the sums of the lanes of the partial sums."""
        k, geometry = self.k, self.geometry
        with k.loop(0, self.num_rows) as row, k.loop(0, self.num_depths) as d:
            channel = self.group * self.rows + self.first_row + row
            at = channel * (geometry.channels * geometry.taps) + self.channel * geometry.taps + d
            accumulate_scalar(k, self.dw, at, k.sum(self._partial(row, d).load()), self.mode)


def conv_wgrad(k, dw, dy, x, *, geometry: ConvGeometry, blocking: Blocking, **sizes) -> None:
    """The kernel: dw (groups rows, channels taps) fp32, from dy (N, groups rows, P, Q) and x (N, groups channels, H, W). `sizes`:
    images, and the mode of dw."""
    gradient = WeightGradient(k, dw, dy, x, geometry=geometry, blocking=blocking, **sizes)
    row_blocks, channel_blocks = ceil_div(gradient.rows, blocking.rows), ceil_div(geometry.channels, blocking.channels)
    column_blocks = ceil_div(geometry.output_size[1], blocking.columns)
    with k.parallel_for(geometry.groups * row_blocks * channel_blocks) as item:
        gradient.seek(item, row_blocks, channel_blocks)
        with (
            k.loop(0, gradient.total_lines, blocking.lines) as line,
            k.loop(0, column_blocks) if column_blocks > 1 else nullcontext(0) as column_block,
        ):
            gradient.add_k_block(line, column_block, column_blocks)
        gradient.store_gradients()
