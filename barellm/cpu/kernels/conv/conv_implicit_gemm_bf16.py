"""Direct convolution of bf16 images as an implicit GEMM: bf16 dot products (vdpbf16ps, bfdot), or AMX tiles where there are any.

out[n, k, p] = the sum over c and taps t of w[k, c, t] x[n, c, p + shift(t)], with positions p and shifts as in conv_polyphase.py:
M is positions, N is output channels. A chunk of channels is packed to [position][channels], NHWC in VNNI layout: a position's
pairs of channels are one vector, with 16 lanes one cache line. A tap is other rows of the same matrix: no copy for each tap (no
im2col), and never a load that splits cache lines.

A work item owns some images' lines x some output channels; its fp32 sums stay in L2. For each K block of chunks it packs the panel,
then runs the micro-kernel over all positions. For a chunk (32 channels and 9 taps: depth 288) of 32 columns the filters take 18 KB
and stay in L1 meanwhile. A result is one accumulation chain over chunks, taps and channels, whatever the blocking is, and is
rounded once.

Names: `n` is an image of the work item, `p` a position of it; `column` is an output channel of the group, in blocks of tile_n."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.conv import conv_implicit_gemm, conv_polyphase, im2col
from barellm.cpu.kernels.gemm import amx, microkernel
from barellm.cpu.kernels.loops import accumulate, accumulate_scalar
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import ceil_div, round_up

MAX_POSITIONS = 2048  # of a work item, or a line: so often is each filter element used when it was read
SUM_BYTES = 1 << 20  # of a work item: half of an L2 of 2 MB
PACK_POSITIONS = 256  # of the lines that are packed at a time
# Cycles, fitted: multiply-adds in one, an output's epilogue, packing an element, and elements of the filters read from L3 in one.
MULTIPLY_ADDS, EPILOGUE, PACKING, L3_ELEMENTS = 800, 0.5, 0.4, 4
KC = 576  # depth of a K block, about: one or two chunks of filters of 3 x 3


@dataclass(frozen=True)
class Blocking:
    """A work item has blocks of `lines` lines of `images` images, or less, and `columns` output channels, whole tiles of them. A K
    block is `chunks` chunks of `pairs` pairs of channels."""

    tile: Tile
    use_amx: bool
    pairs: int
    chunks: int
    lines: int
    images: int
    columns: int

    def layout(self, geometry: im2col.ConvGeometry) -> conv_polyphase.PolyphaseLayout:
        """Positions of a block of lines, padded to tiles."""
        return conv_polyphase.PolyphaseLayout(geometry, self.lines, amx.SIDE if self.use_amx else self.tile.mr)


def select_blocking(isa: ISA, tile: Tile, use_amx: bool, geometry: im2col.ConvGeometry, images: int, threads: int) -> Blocking:
    """Work items as large as L2 allows, and as many as keep `threads` evenly busy on `images` images, by estimated cycles."""
    (P, _), columns, groups = geometry.output_size, geometry.rows, geometry.groups
    tile_n = tile.nr(isa)
    pairs = isa.lanes  # of channels of a chunk: a vector of VNNI pairs
    if not use_amx:
        pairs = ceil_div(geometry.channels, 2 * ceil_div(geometry.channels, 2 * isa.lanes))
    chunks = ceil_div(geometry.channels, 2 * pairs)
    chunks_per_block = max(1, min(chunks, KC // max(2 * pairs * geometry.taps, 1)))
    chunks_per_block = ceil_div(chunks, ceil_div(chunks, chunks_per_block))
    pitch, column_tiles = conv_polyphase.PolyphaseLayout(geometry, P, 1).pitch, ceil_div(columns, tile_n)
    max_lines = max(1, min(P, MAX_POSITIONS // pitch))
    depth = chunks * 2 * pairs  # input channels, padded

    def cost(b: Blocking) -> float:
        layout = b.layout(geometry)
        items = ceil_div(images, b.images) * ceil_div(P, b.lines) * groups * ceil_div(columns, b.columns)
        # Cycles of a work item: multiplying and the epilogue, packing the panel, and filters from L3.
        work = layout.positions * b.images * b.columns * (depth * geometry.taps / MULTIPLY_ADDS + EPILOGUE)
        work += PACKING * depth * layout.size * len(layout.phases()) * b.images + depth * geometry.taps * b.columns / L3_ELEMENTS
        return ceil_div(items, threads) * work

    def candidates(lines: int, num_images: int) -> list[Blocking]:
        """As few splits of the columns as their sums allow, or more."""
        least = min(ceil_div(4 * columns * lines * pitch * num_images, SUM_BYTES), column_tiles)
        widths = {ceil_div(column_tiles, splits) * tile_n for splits in range(least, column_tiles + 1)}
        return [Blocking(tile, use_amx, pairs, chunks_per_block, lines, num_images, width) for width in sorted(widths)]

    line_blocks = ceil_div(P, max_lines)
    lines = sorted({ceil_div(P, n) for n in range(line_blocks, min(2 * line_blocks, P) + 1)})
    image_counts = range(1, min(images, max(1, MAX_POSITIONS // (P * pitch))) + 1)
    options = [b for n in lines for m in (image_counts if n == P else [1]) for b in candidates(n, m)]
    return min(options, key=cost)


def pack_height(layout: conv_polyphase.PolyphaseLayout) -> int:
    """Lines of a plane that are packed at a time."""
    return min(layout.height, max(1, PACK_POSITIONS // layout.pitch))


class ScratchLayout:
    """Offsets in a thread's scratch, in bytes, and its size `nbytes`: polyphase planes, packed panels [image][chunk], sums [column
    block][image], the tables `shifts`, `pixel_sums` and `pixel_targets` of 8-byte entries (`make_tables`), `spill`; the last two
    only if not `dense`. `chunk`, `image`: bytes of a panel and of an image's sums; `k_blocks`: how many there are."""

    def __init__(self, isa: ISA, geometry: im2col.ConvGeometry, b: Blocking, *, dense: bool) -> None:
        layout = b.layout(geometry)
        self.panel = round_up(layout.nbytes(isa, 2 * b.pairs, pack_height(layout)), 64)  # behind the planes of a chunk
        self.chunk = 4 * isa.lanes * layout.padded_size(isa.lanes)
        # Packing stores `lanes` positions at a time, so up to as many behind the last panel.
        self.sums = self.panel + b.images * b.chunks * self.chunk + 4 * isa.lanes * isa.lanes
        tile_n = b.tile.nr(isa)
        self.image = 4 * tile_n * layout.positions  # for a block of columns
        self.k_blocks = ceil_div(ceil_div(geometry.channels, 2 * b.pairs), b.chunks)
        self.shifts = self.sums + b.columns // tile_n * b.images * self.image + 4 * tile_n * isa.lanes
        self.pixel_sums = self.shifts + round_up(8 * b.chunks * geometry.taps, 64)
        pixels = round_up(b.lines * geometry.output_size[1], isa.lanes)  # of an image of the work item
        self.pixel_targets = self.pixel_sums + 8 * pixels
        self.spill = round_up(self.pixel_targets + (0 if dense else 8 * pixels), 64)
        self.nbytes = self.spill + (0 if dense else 4 * isa.lanes * isa.lanes)


class ImplicitGemm:
    """One thread's work item. `columns`: output channels of a group, `tile_n` of a block; `chunks`: of a group's input channels;
    `dense`: whether outputs are adjacent pixels of `out`. `scratch` has the offsets of `panel`, `sums`, the tables and `spill`;
    `input`: the polyphase planes of one chunk, of `layout`.

    `seek` sets the item's `group`, its `num_images` images from `image` on, the lines of a block from `line` on, and the columns
    of a block from `first_column` on."""

    def __init__(self, k, out, a, x, *, images: im2col.Images, geometry: im2col.ConvGeometry, target: conv_implicit_gemm.OutputMap,
            blocking: Blocking, mode: str) -> None:  # fmt: skip
        self.k, self.out, self.a, self.images = k, out, a, k.num_elements(*images)
        self.columns = geometry.rows
        self.geometry, self.target, self.blocking, self.mode = geometry, target, blocking, mode
        self.dense = target == conv_implicit_gemm.OutputMap(geometry.output_size)
        self.layout, at = blocking.layout(geometry), k.thread_scratch()
        self.scratch = ScratchLayout(k.isa, geometry, blocking, dense=self.dense)
        height = pack_height(self.layout)
        self.input = conv_polyphase.PolyphaseBuffer(k, self.layout, x, at, channels=2 * blocking.pairs, height=height)
        s = self.scratch
        self.panel, self.sums, self.shifts, self.pixel_sums, self.pixel_targets, self.spill = (
            at.bytes(n) for n in (s.panel, s.sums, s.shifts, s.pixel_sums, s.pixel_targets, s.spill)
        )
        self.tile_n = blocking.tile.nr(k.isa)
        self.chunks = ceil_div(geometry.channels, 2 * blocking.pairs)

    def seek(self, item, blocks, line_blocks: int) -> None:
        """Find the parts of work item number `item`: one of `blocks` blocks of lines, `line_blocks` of an image, x columns."""
        b = self.blocking
        block, rest = item % blocks, item // blocks
        self.group, split = rest % self.geometry.groups, rest // self.geometry.groups
        self.image, self.line = block // line_blocks * b.images, block % line_blocks * b.lines
        self.num_images = self.k.min(self.images - self.image, b.images)
        self.first_column = split * b.columns

    def make_tables(self) -> None:
        """Fill the tables of i64 in scratch. `shifts`: byte shifts in the panel of each tap of each chunk of a K block;
        `pixel_sums`: of each pixel the byte offset of its position's sums; `pixel_targets`: its offset in the output."""
        k, (_, Q), t, lines = self.k, self.geometry.output_size, self.target, self.blocking.lines
        for chunk in range(self.blocking.chunks):
            for i, shift in enumerate(self.layout.shifts()):
                offset = chunk * self.scratch.chunk + shift * 4 * k.lanes
                self.shifts.as_dtype("i64").put(k.int(offset), chunk * self.geometry.taps + i)
        with k.loop(0, round_up(lines * Q, k.lanes)) as pixel:
            line, column = pixel // Q, pixel % Q  # entries behind the last pixel are read, and not written
            self.pixel_sums.as_dtype("i64").put((line * self.layout.pitch + column) * (4 * self.tile_n), pixel)
            if not self.dense:
                self.pixel_targets.as_dtype("i64").put(line * (t.stride[0] * t.size[1]) + column * t.stride[1], pixel)

    def multiply_k_block(self, k_block) -> None:
        """A K block of a work item: pack all images' chunks, run the micro-kernel over all tiles; at the end the epilogue."""
        k, b, k_blocks = self.k, self.blocking, self.scratch.k_blocks
        chunk = k_block * b.chunks
        chunks = k.min(k.int(self.chunks) - chunk, b.chunks) if self.chunks % b.chunks else k.int(b.chunks)
        with k.loop(0, self.num_images) as n, k.loop(0, chunks) as c:
            self._pack_chunk(n, c, chunk + c)
        blocks = k.ceil_div(k.min(k.int(self.columns) - self.first_column, b.columns), self.tile_n)  # of tile_n output channels
        # Filters lie as [group][column block][chunk][tap][pair][tile_n][2] (conv_filter_packing.py).
        chunk_bytes = self.geometry.taps * 4 * b.pairs * self.tile_n
        filter_bytes = self.chunks * chunk_bytes  # of a column block
        group_bytes = ceil_div(self.columns, self.tile_n) * filter_bytes
        with k.loop(0, self.num_images) as n:
            panel = self.panel.bytes(n * (b.chunks * self.scratch.chunk))
            end = self.layout.positions
            for begin, last, rows in ((0, end - end % b.tile.mr, b.tile.mr), (end - end % b.tile.mr, end, end % b.tile.mr)):
                with k.loop(begin, last, b.tile.mr) as p, k.loop(0, blocks) as block:
                    dst = self.sums.bytes((block * b.images + n) * self.scratch.image + p * (4 * self.tile_n))
                    first_filter = self.group * group_bytes + (self.first_column // self.tile_n + block) * filter_bytes
                    filters = self.a.bytes(first_filter + chunk * chunk_bytes)
                    add_previous = k_block > 0 if k_blocks > 1 else None
                    self._micro_kernel(dst, rows, panel.bytes(p * (4 * k.lanes)), filters, chunks, add_previous)
        is_last_k = k.when((k_block + 1).equals(k_blocks)) if k_blocks > 1 else nullcontext()
        with is_last_k, k.loop(0, blocks) as block, k.loop(0, self.num_images) as n:
            image = self.sums.bytes((block * b.images + n) * self.scratch.image)
            self._store_columns(n, image, self.first_column + block * self.tile_n)

    def _pack_chunk(self, n, c, chunk) -> None:
        """Pack chunk `chunk` of the channels of image n as chunk c of the panel, [position][lanes] pairs of channels: vectors of
        positions, one for each channel, are interleaved to pairs and transposed. A few lines at a time stay in L1."""
        k, lanes, pairs, layout = self.k, self.k.lanes, self.blocking.pairs, self.layout
        self.input.seek(self.image + n, self.group, chunk * (2 * pairs), self.line)
        panel = self.panel.as_dtype("i32").bytes((n * self.blocking.chunks + c) * self.scratch.chunk)
        height = pack_height(layout)
        for plane, (row_phase, column_phase) in enumerate(layout.phases()):
            with k.loop(0, layout.height, height) as u:
                last = k.min(u + height, layout.height)
                with k.loop(0, 2 * pairs) as j:
                    dst = self.input.at.at(j * self.input.pitch)
                    self.input.pack_lines(j, dst, row_phase, column_phase, u, last)
                    self.input.clear(dst.at((last - u) * layout.pitch), 0, layout.columns.reach)
                dst = panel.at((u * layout.pitch + plane * layout.size) * lanes)
                with k.loop(0, (last - u) * layout.pitch + layout.columns.reach, lanes) as p:
                    # Channels of positions p, p + 1, ...
                    rows = [self.input.at.at(p + j * self.input.pitch).load_raw() for j in range(2 * pairs)]
                    vectors = [k.bitcast(k.interleave(a, b), k.ivec) for a, b in zip(rows[::2], rows[1::2], strict=True)]
                    vectors += vectors[:1] * (lanes - pairs)  # unused lanes
                    for i, v in enumerate(transpose(k, vectors)):
                        dst.store_raw(v, (p + i) * lanes)  # what lies behind the last line is overwritten

    def _micro_kernel(self, dst, rows: int, panel, filters, chunks, add_previous) -> None:
        """dst [tile.mr][tile_n] fp32 = the sums of positions x output channels over a K block of `chunks` chunks and all taps, plus
        the old dst where `add_previous` (None: never). `panel`: packed positions; `filters`: [chunk][tap][pair][tile_n][2] bf16; a
        step is a tap of a chunk, whose byte offset in the panel is in `shifts`. `rows` positions are computed."""
        k, tile = self.k, self.blocking.tile
        pitch = 4 * k.lanes  # bytes of a position's pairs
        shift = partial(self._table_entry, self.shifts)
        steps = chunks * self.geometry.taps
        if self.blocking.use_amx:
            count = rows // amx.SIDE
            amx.microkernel_column(k, dst, count, lambda s: panel.bytes(shift(s)), filters, steps, begun=add_previous)
            return
        with microkernel.accumulators(k, tile, dst, self.tile_n, add_previous) as acc, k.loop(0, steps) as s:
            load_positions = microkernel.broadcast_packed(k, panel.bytes(shift(s)), 4, pitch)
            right = filters.bytes(s * (4 * self.blocking.pairs * self.tile_n))
            with k.loop(0, self.blocking.pairs) as u:
                microkernel.rank1_update(k, acc, load_positions, right, u, True)

    def _store_columns(self, n, sums, column) -> None:
        """The epilogue of image n and the column block from `column` on, whose `sums` [position][tile_n] fp32 are transposed: out
        is stored in vectors of adjacent pixels, `lanes` columns at a time. The table `pixel_sums` has each pixel's position."""
        k, lanes, size = self.k, self.k.lanes, self.target.size[0] * self.target.size[1]
        (P, Q), t = self.geometry.output_size, self.target
        pixels = k.min(k.int(P) - self.line, self.blocking.lines) * Q  # that exist
        last = k.min(column + self.tile_n, self.columns)
        with k.loop(column, last, lanes) as first:
            image = ((self.image + n) * self.geometry.groups + self.group) * self.columns + first
            row = self.line * t.stride[0] + t.offset[0]
            dst = self.out.at(image * size + row * t.size[1] + t.offset[1])
            vector = sums.at(first - column)  # of the first of these `lanes` columns
            vectors_end = pixels & -lanes
            is_last = first + lanes > self.columns  # fewer than `lanes` columns exist
            begin: Value | int = 0
            if self.dense and self.mode == "store" and self.out.dtype == "bf16" and self.columns % lanes == 0:
                begin = pixels & -(2 * lanes)
                with k.loop(0, begin, 2 * lanes) as p:
                    self._store_bf16(dst, vector, p)
            with k.loop(begin, vectors_end, lanes) as p:
                self._store_pixels(dst, vector, p, None, is_last)
            with k.when(vectors_end < pixels):
                self._store_pixels(dst, vector, vectors_end, pixels - vectors_end, is_last)

    def _store_bf16(self, dst, sums, p) -> None:
        """Store two vectors of pixels from pixel p on, of `lanes` columns, rounded to bf16 before the transpose."""
        k, lanes, size = self.k, self.k.lanes, self.target.size[0] * self.target.size[1]
        rows = [k.round_bf16(sums.bytes(self._table_entry(self.pixel_sums, p + i)).load()) for i in range(2 * lanes)]
        pairs = [k.bitcast(k.interleave(a, b), k.ivec) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        for c, value in enumerate(transpose(k, pairs)):
            k.line(f"store {value.typed}, ptr {dst.at(p + c * size).ref}, align 2")

    def _store_pixels(self, dst, sums, p, count, is_last) -> None:
        """Store a vector of pixels from pixel p on, or the first `count` of it, for `lanes` columns of `sums` [position][tile_n],
        to dst, the first column's image plane; where `is_last` (i1) only those columns that exist."""
        k, lanes, size = self.k, self.k.lanes, self.target.size[0] * self.target.size[1]
        columns_first = transpose(k, [sums.bytes(self._table_entry(self.pixel_sums, p + i)).load() for i in range(lanes)])
        mask = None if count is None else k.mask_first(count)
        if not self.dense:
            for c, value in enumerate(columns_first):
                self.spill.store(value, c * lanes)
            columns = k.select(is_last, k.int(self.columns % lanes), lanes)
            with k.loop(0, lanes if count is None else count) as i, k.loop(0, columns) as c:
                place = dst.at(self._table_entry(self.pixel_targets, p + i) + c * size)
                accumulate_scalar(k, place, 0, self.spill.get(c * lanes + i), self.mode)
            return

        def store_columns(values) -> None:
            for c, value in enumerate(values):
                place = dst.at(p + c * size)
                place.store(accumulate(k, place, 0, mask, value, self.mode), 0, mask)

        tail = self.columns % lanes
        with k.otherwise(is_last) if tail else nullcontext():
            store_columns(columns_first)
        if tail:
            with k.when(is_last):
                store_columns(columns_first[:tail])

    def _table_entry(self, table, index) -> Value:
        """An i64 of a table in scratch."""
        return self.k.op("i64", f"load i64, ptr {table.bytes(index * 8).ref}, align 8")


def conv_implicit_gemm_bf16(k, out, a, x, *, blocking: Blocking, geometry: im2col.ConvGeometry, **sizes) -> None:
    """The kernel: out (N, groups columns, *target.size) = packed filters a (conv_filter_packing.py) convolved with x (N, groups
    channels, H, W) bf16. `sizes`: images, target, and the mode of out."""
    gemm = ImplicitGemm(k, out, a, x, blocking=blocking, geometry=geometry, **sizes)
    gemm.make_tables()
    line_blocks, splits = ceil_div(geometry.output_size[0], blocking.lines), ceil_div(gemm.columns, blocking.columns)
    blocks = k.ceil_div(gemm.images, blocking.images) * line_blocks  # of lines of images
    items = blocks * (geometry.groups * splits)
    k_blocks = gemm.scratch.k_blocks
    with amx.tile_registers(k, blocking.use_amx), k.parallel_for(items) as item:
        gemm.seek(item, blocks, line_blocks)
        with k.loop(0, k_blocks) if k_blocks > 1 else nullcontext(k.int(0)) as k_block:
            gemm.multiply_k_block(k_block)
