"""Direct convolution as an implicit GEMM in fp32: the im2col matrix is never in memory.

out[n, k, pixel] = the sum over d of a[k, d] im2col[d, n, pixel]: M is output channels, N is pixels, and the depth K is (channel,
filter row, filter column). Loops, from the outside: a work item is (NC pixels: whole lines) x (a split of the output channels);
for each K block of channels a thread copies the input lines that these pixels see (im2col.py, some 150 KB in L2); for each MC
rows of a and each register tile of pixels it gathers the tile's im2col columns (they stay in L1 for these rows) and runs the
micro-kernel, an outer product per depth. Each tap is a shift of the same lines, so stride, padding and dilation cost nothing.
Partial sums of several K blocks are kept in scratch; a result is the sum of its K blocks' sums, whatever the other blocking is.

Names: a `line` is a row of outputs, counted over all images; `row` is an output channel of the group; `j` a pixel of the item."""

from contextlib import nullcontext
from dataclasses import dataclass

from barellm.cpu.gemm_config import Tile, tiles
from barellm.cpu.kernel import ISA
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Im2colTiles, Images, tiles_nbytes
from barellm.cpu.kernels.gemm.microkernel import broadcast_a, microkernel, row_tiles
from barellm.cpu.kernels.loops import accumulate, accumulate_scalar
from barellm.program.integers import ceil_div, round_up

KC = 288  # depth of a K block: with the pixels of a register tile it stays in L1
NC = 352  # pixels of a work item, about, for all of which a is read once; with a K block's channels they take 150 KB
STALLS = 1.2  # on loads, of a tile of one vector: measured
PACKING_ROWS = 4  # packing takes about as long as multiplying so many rows of the filters
FEW_PIXELS = 0.02  # more time where a is read for few pixels
MC = 256  # rows of a whose K block is multiplied with all of these pixels before the next ones


@dataclass(frozen=True)
class Blocking:
    """Cache blocking. A work item has `lines` rows of the output or, where a row has several `column_blocks`, one of those;
    `columns` columns of each; and one of `splits` parts of the output channels. A K block has `channels` of x."""

    tile: Tile
    lines: int
    columns: int
    column_blocks: int
    channels: int
    splits: int

    def pitch(self, isa: ISA) -> int:
        """Pixels of a work item in whole tiles."""
        return round_up(self.lines * self.columns, self.tile.nr(isa))


def select_blocking(isa: ISA, geometry: ConvGeometry, images: int, threads: int) -> Blocking:
    """The register tile and the lines of a work item with the least estimated time, for so many images and threads."""
    rows, groups = geometry.rows, geometry.groups
    P, Q = geometry.output_size
    total = images * P  # lines
    channels = max(1, min(geometry.channels, KC // max(geometry.taps, 1)))  # of a K block
    channels = ceil_div(geometry.channels, ceil_div(geometry.channels, channels))

    def candidate(tile: Tile, lines: int) -> Blocking:
        column_blocks = 1 if lines > 1 else ceil_div(Q, NC * 3 // 2)
        columns = round_up(ceil_div(Q, column_blocks), tile.nr(isa)) if column_blocks > 1 else Q
        column_blocks = ceil_div(Q, columns)
        items = ceil_div(total, lines) * column_blocks * groups
        splits = min(ceil_div(2 * threads, items), ceil_div(rows, tile.mr)) if items < 4 * threads else 1
        return Blocking(tile, lines, columns, column_blocks, channels, splits)

    def cost(b: Blocking) -> float:
        """An estimate of a thread's time, in multiply-adds of the micro-kernel: padded tiles, packing, imbalance, stalls."""
        tile_n = b.tile.nr(isa)
        pixels = b.lines * b.columns
        last = total % b.lines * b.columns
        # Tiles of pixels in all work items, of which the last ones may have fewer lines.
        pixel_tiles = total // b.lines * b.column_blocks * ceil_div(pixels, tile_n) + ceil_div(last, tile_n)
        padded_rows = ceil_div(rows, b.tile.mr) * b.tile.mr
        items = ceil_div(total, b.lines) * b.column_blocks * groups * b.splits
        imbalance = round_up(items, threads) / items
        stalls = STALLS if b.tile.vectors == 1 else 1
        few_pixels = 1 + FEW_PIXELS * (pixels < NC // 2)
        return pixel_tiles * tile_n * (padded_rows + PACKING_ROWS * b.splits) * imbalance * stalls * few_pixels

    max_lines = max(1, min(total, NC * 3 // 2 // Q))
    return min((candidate(tile, lines) for tile in tiles(isa, "fp32") for lines in range(1, max_lines + 1)), key=cost)


@dataclass(frozen=True)
class OutputMap:
    """Where results go: output (i, j) to pixel (i, j) stride + offset of images of `size`. A strided dgrad writes a phase."""

    size: tuple[int, int]
    offset: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)


class ScratchLayout:
    """Offsets in a thread's scratch, in bytes, and its size `nbytes`: the lines of `Im2colTiles`; `sums` of the item's rows x
    pixels, if there are several K blocks; `spill`, a tile [mr][tile_n]; `im2col`, a tile's columns [depth of a K block][tile_n]."""

    def __init__(self, isa: ISA, geometry: ConvGeometry, blocking: Blocking) -> None:
        pitch = blocking.pitch(isa)
        rows_of_split = ceil_div(ceil_div(geometry.rows, blocking.tile.mr), blocking.splits) * blocking.tile.mr
        k_blocks = ceil_div(geometry.channels, blocking.channels)
        self.sums = tiles_nbytes(isa, geometry, blocking.lines, blocking.columns, blocking.channels)
        tile_n = blocking.tile.nr(isa)
        self.spill = self.sums + (4 * rows_of_split * pitch if k_blocks > 1 else 0)
        self.im2col = self.spill + round_up(4 * blocking.tile.mr * tile_n, 64)
        self.nbytes = self.im2col + 4 * blocking.channels * geometry.taps * tile_n


class ImplicitGemm:
    """One thread's work item. `rows`: output channels of a group; `depth`: elements of a filter; `k_blocks`: K blocks of channels;
    `tile_n`, `pitch`: pixels of a register tile, and of a work item in whole tiles; `dense`: whether outputs are adjacent pixels of
    `out`. In scratch: `im2col`, the input lines of a K block; `sums`; `spill`, a tile stored pixel by pixel; `tile_columns`, the
    im2col columns of a tile [depth of a K block][tile_n].

    `seek` sets the item's `group`, its output channels [first_row, last_row), and its `pixels` pixels of `num_lines` lines from
    `first_line` and `first_column` on; `multiply_k_block` sets the `k_block`, its `num_channels` channels from `channel` on."""

    def __init__(self, k, out, a, x, *, images: Images, geometry: ConvGeometry, target: OutputMap, blocking: Blocking,
            mode: str) -> None:  # fmt: skip
        self.k, self.out, self.a, self.mode = k, out, a, mode
        self.geometry, self.target, self.blocking, self.images = geometry, target, blocking, k.num_elements(*images)
        self.rows = geometry.rows
        self.tile_n, self.pitch = blocking.tile.nr(k.isa), blocking.pitch(k.isa)
        at, scratch = k.thread_scratch(), ScratchLayout(k.isa, geometry, blocking)
        self.im2col = Im2colTiles(k, geometry, x, at, blocking.lines, blocking.columns)
        self.sums, self.spill, self.tile_columns = (at.bytes(n) for n in (scratch.sums, scratch.spill, scratch.im2col))
        self.k_blocks = ceil_div(geometry.channels, blocking.channels)
        self.depth = geometry.channels * geometry.taps
        self.dense = target == OutputMap(geometry.output_size)

    def seek(self, item, lines) -> None:
        """Find the parts of work item number `item`, of all images' `lines` lines, and the input lines that it sees."""
        k, b, Q = self.k, self.blocking, self.geometry.output_size[1]
        row_tiles = ceil_div(self.rows, b.tile.mr)  # splits are whole tiles of rows
        split, rest = item % b.splits, item // b.splits  # part of the output channels
        column_block, rest = rest % b.column_blocks, rest // b.column_blocks
        self.group, self.first_line = rest % self.geometry.groups, rest // self.geometry.groups * b.lines
        self.num_lines = k.min(lines - self.first_line, b.lines)
        self.first_column = column_block * b.columns if b.column_blocks > 1 else 0
        self.pixels = self.num_lines * b.columns if b.column_blocks == 1 else k.min(Q - self.first_column, b.columns)
        self.first_row = split * row_tiles // b.splits * b.tile.mr
        self.last_row = k.min((split + 1) * row_tiles // b.splits * b.tile.mr, self.rows)
        self.im2col.seek(self.group, self.first_line, self.num_lines, self.first_column)

    def multiply_k_block(self, k_block) -> None:
        """Load the input lines of the K block's channels, and multiply."""
        self.k_block = k_block
        self.channel = k_block * self.blocking.channels
        last = self.k.min(self.channel + self.blocking.channels, self.geometry.channels)
        self.num_channels = last - self.channel
        self.im2col.load_lines(self.channel, last)
        self._macro_kernel()

    def _macro_kernel(self) -> None:
        """A K block of a work item: for each MC rows of a and each tile of pixels, gather its im2col columns once and run the
        micro-kernel over the row tiles; the last may be shorter."""
        k, rows, tile = self.k, self.rows, self.blocking.tile
        tail = rows % tile.mr  # rows of the last, partial tile
        with k.loop(self.first_row, self.last_row, round_up(MC, tile.mr)) as first:
            last = k.min(first + round_up(MC, tile.mr), self.last_row)
            full = k.min(last, rows - tail) if tail else last
            with k.loop(0, self.pixels, self.tile_n) as j:
                self.im2col.gather(self.tile_columns, self.num_channels, j, self.pixels, tile.vectors)
                for row, row_tile in row_tiles(k, first, full, last, rows, tile):
                    self._micro_kernel(row, j, row_tile)

    def _micro_kernel(self, row, j, tile: Tile) -> None:
        """The tile of tile.mr output channels from `row` on x tile_n pixels from pixel j on: a (tile.mr, depth) @ tile_columns
        [depth][tile_n] over the K block, plus the sums of the K blocks before. After the last K block it is stored to out, else to
        `sums`, where the tile is contiguous, [tile.mr][tile_n] fp32: a row of tiles takes pitch * mr elements."""
        k = self.k
        partial = self.sums.at((row - self.first_row) * self.pitch + j * self.blocking.tile.mr)
        sums = [partial.at(r * self.tile_n) for r in range(tile.mr)]  # where the tile's rows wait
        a = self.a.at((self.group * self.rows + row) * self.depth + self.channel * self.geometry.taps)
        load_a, _ = broadcast_a(k, a, list(range(tile.mr)), False, depth=self.depth, stride=self.depth)
        values = microkernel(k, tile, load_a, self.tile_columns, self.num_channels * self.geometry.taps, False)
        if self.k_blocks == 1:
            self._store_tile(row, j, values)
            return
        add_previous = self.k_block > 0
        values = [
            [value + k.select(add_previous, dst.load(v * k.lanes), 0.0) for v, value in enumerate(acc_row)]
            for dst, acc_row in zip(sums, values, strict=True)
        ]
        is_last_k = (self.k_block + 1).equals(self.k_blocks)
        with k.when(is_last_k):
            self._store_tile(row, j, values)
        with k.otherwise(is_last_k):
            for dst, acc_row in zip(sums, values, strict=True):
                for v, value in enumerate(acc_row):
                    dst.store(value, v * k.lanes)

    def _store_tile(self, row, j, values) -> None:
        """The epilogue of the tile at output channel `row` and pixel j, values [row][vector of pixels]: whole vectors where all its
        pixels are adjacent in one image, else pixel by pixel."""
        k, (P, Q) = self.k, self.geometry.output_size
        if not self.dense:
            self._store_pixels(row, j, values)
            return
        flat = self.first_line * Q + self.first_column + j  # the first pixel, counted over all images
        n, pixel = flat // (P * Q), flat % (P * Q)  # image, pixel in it
        fits = (pixel + self.tile_n <= P * Q) & (j + self.tile_n <= self.pixels)
        with k.when(fits):
            dst = (n * self.geometry.groups + self.group) * (self.rows * P * Q) + pixel
            for r, line in enumerate(values):
                for v, value in enumerate(line):
                    at = dst + (row + r) * (P * Q) + v * k.lanes
                    self.out.store(accumulate(k, self.out, at, None, value, self.mode), at)
        with k.otherwise(fits):
            self._store_pixels(row, j, values)

    def _store_pixels(self, row, j, values) -> None:
        """The epilogue of the same tile through `spill`, pixel by pixel, to where `target` puts each."""
        k, (P, _), t = self.k, self.geometry.output_size, self.target
        for r, line in enumerate(values):
            for v, value in enumerate(line):
                self.spill.store(value, r * self.tile_n + v * k.lanes)
        with k.loop(0, k.min(self.pixels - j, self.tile_n)) as pixel:
            line = self.first_line + (j + pixel) // self.blocking.columns
            column = self.first_column + (j + pixel) % self.blocking.columns
            y, x = line % P * t.stride[0] + t.offset[0], column * t.stride[1] + t.offset[1]  # where `target` puts it
            image = (line // P * self.geometry.groups + self.group) * self.rows + row  # image plane of channel `row`
            at = image * (t.size[0] * t.size[1]) + y * t.size[1] + x
            for r in range(len(values)):
                dst = self.out.at(at + r * (t.size[0] * t.size[1]))
                accumulate_scalar(k, dst, 0, self.spill.get(pixel + r * self.tile_n), self.mode)


def conv_implicit_gemm(k, out, a, x, *, blocking: Blocking, geometry: ConvGeometry, **sizes) -> None:
    """The kernel: out (N, groups rows, *target.size) = a (groups rows, channels taps) fp32 times the im2col matrix of x (N, groups
    channels, H, W). `sizes`: images, target, and the mode of out."""
    gemm = ImplicitGemm(k, out, a, x, blocking=blocking, geometry=geometry, **sizes)
    lines = gemm.images * geometry.output_size[0]
    with k.parallel_for(k.ceil_div(lines, blocking.lines) * (blocking.column_blocks * geometry.groups * blocking.splits)) as item:
        gemm.seek(item, lines)
        with k.loop(0, gemm.k_blocks) if gemm.k_blocks > 1 else nullcontext(k.int(0)) as k_block:
            gemm.multiply_k_block(k_block)
