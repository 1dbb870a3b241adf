"""Depthwise convolutions, whose groups have one channel of x each, and the gradients of their filters.

The arithmetic intensity is too low for a GEMM: it would spend its time on im2col. Here a work item is some output lines of one
channel; the thread copies the input lines that these see to its scratch (L1) with the padding filled in (im2col.py). Lanes are
pixels of a line. A vector of them is loaded once for all output lines of a register tile that see it, and sums stay in registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import ISA, Value, Var
from barellm.cpu.kernels.conv.conv_implicit_gemm import OutputMap
from barellm.cpu.kernels.conv.im2col import ConvGeometry, Images, LineBuffer
from barellm.cpu.kernels.loops import accumulate, accumulate_scalar
from barellm.program.integers import ceil_div, round_up

MAX_FILTERS = 3  # of a channel: an implicit GEMM is faster with more of them
MAX_FILTER_COLUMNS = 64  # they are unrolled
MAX_UNROLLED = 400  # multiply-adds of a tile that are unrolled over the filter's rows too
MAX_COLUMNS = 1024  # outputs of a line that is one block
LINE_BYTES = 20 << 10  # of lines, about: they stay in L1
GRAIN = 1 << 16  # multiply-adds of a work item, about


def is_supported(geometry: ConvGeometry) -> bool:
    """Whether these kernels do convolutions of this shape."""
    return (
        geometry.channels == 1
        and geometry.rows <= MAX_FILTERS
        and 0 < len(geometry.column_offsets) <= MAX_FILTER_COLUMNS
        and bool(geometry.row_offsets)
    )


@dataclass(frozen=True)
class Blocking:
    """A block has `lines` lines of the output, or `columns` columns of them; a register tile has `tile_m` of these lines."""

    lines: int
    columns: int
    tile_m: int

    def input_lines(self, geometry: ConvGeometry) -> int:
        """Lines of x that a block sees."""
        return (self.lines - 1) * geometry.stride[0] + window_height(geometry)

    def scratch_nbytes(self, isa: ISA, geometry: ConvGeometry, sums: int) -> int:
        """Bytes of a thread's scratch: the lines of a block, and behind them `sums` vectors."""
        return 4 * (self.input_lines(geometry) * geometry.pitch(self.columns, isa.lanes) + sums * isa.lanes)


def select_blocking(isa: ISA, geometry: ConvGeometry, *, gradient: bool) -> Blocking:
    """Register tiles whose sums (of the filters' `gradient`: vectors of dy) fit into the registers; blocks whose lines fit L1."""
    P, Q = geometry.output_size
    columns = min(Q, MAX_COLUMNS)
    max_tile_m = 4 if gradient or isa.registers < 32 else 8  # lines of a register tile
    tile_m = ceil_div(P, ceil_div(P, max_tile_m))
    # Bytes of x that an output line adds.
    line = 4 * geometry.pitch(columns, isa.lanes) * min(geometry.stride[0], window_height(geometry))
    all_tiles = ceil_div(P, tile_m)
    max_tiles = min(max(1, LINE_BYTES // (line * tile_m)), all_tiles)  # of a block
    tiles = ceil_div(all_tiles, ceil_div(all_tiles, max_tiles))  # blocks of equal size
    return Blocking(tiles * tile_m, columns, tile_m)


def window_height(geometry: ConvGeometry) -> int:
    """Lines of x from the first to the last that one output line sees."""
    return max(geometry.row_offsets) - min(geometry.row_offsets) + 1


class LineBlock:
    """Some output lines of one channel of one image of x (N, groups, H, W), and their register tiles. In scratch: `lines`, the
    input lines that they see, and behind them `sums`, vectors of fp32. An image plane has `line_blocks` x `column_blocks` blocks.
    `load_lines` sets the block's first output pixel (`line`, `column`), and `num_lines` x `columns` that exist."""

    def __init__(self, k, x, geometry: ConvGeometry, blocking: Blocking) -> None:
        self.k, self.geometry, self.blocking = k, geometry, blocking
        self.lines = LineBuffer(k, geometry, x, k.thread_scratch(), blocking.columns)
        self.sums = self.lines.at.at(blocking.input_lines(geometry) * self.lines.pitch)
        self.line_blocks = ceil_div(geometry.output_size[0], blocking.lines)
        self.column_blocks = ceil_div(geometry.output_size[1], blocking.columns)

    def load_lines(self, plane, number) -> None:
        """Load block `number` of the image's channel `plane`, which is counted over images and channels."""
        k, b, (P, Q), (H, W) = self.k, self.blocking, self.geometry.output_size, self.geometry.input_size
        self.line = number // self.column_blocks * b.lines
        column = number % self.column_blocks * b.columns if self.column_blocks > 1 else 0
        self.column = k.int(column)
        self.num_lines, self.columns = k.min(P - self.line, b.lines), k.min(Q - self.column, b.columns)
        first = self.line * self.geometry.stride[0] + min(self.geometry.row_offsets)
        with k.loop(0, (self.num_lines - 1) * self.geometry.stride[0] + window_height(self.geometry)) as i:
            self.lines.fill(i, plane * (H * W), first + i, column)

    def tiles(self) -> Iterator[tuple[Value, int, Value, Any]]:
        """(first line, lines, first column, columns) of each kind of register tile, within loops over all of that kind. The columns
        are an int where they are known: a full vector, or the line's tail."""
        k, tile_m = self.k, self.blocking.tile_m
        full_lines, full_columns = self.num_lines - self.num_lines % tile_m, self.columns & -k.lanes
        # (first line, last, lines of a tile).
        kinds = ((k.int(0), full_lines, tile_m), (full_lines, self.num_lines, 1))[: 1 if tile_m == 1 else 2]
        for begin, end, lines in kinds:
            with k.loop(begin, end, lines) as line:
                with k.loop(0, full_columns, k.lanes) as j:
                    yield line, lines, j, k.lanes
                if self.column_blocks > 1:
                    with k.when(full_columns < self.columns):
                        yield line, lines, full_columns, self.columns - full_columns
                elif tail := self.geometry.output_size[1] % k.lanes:
                    yield line, lines, full_columns, tail

    def input_vectors(self, line, lines: int, j, rows: range | Value,
            columns: range) -> Iterator[tuple[Value, list[tuple[int, int]]]]:  # fmt: skip
        """Yield each distinct vector of `lanes` input pixels that a register tile sees, once, with all (line of the tile, number of
        the tap) that read it. The tile: `lines` output lines from `line` on, pixels from j on; the taps: filter rows `rows` x
        `columns`. `rows` may be one row that is known at run time only."""
        geometry, stride = self.geometry, self.geometry.stride[0]
        offsets = [row - min(geometry.row_offsets) for row in geometry.row_offsets]  # of filter rows, in lines of the buffer
        if isinstance(rows, Value):
            step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
            for t in range(lines):
                at = (line + t) * stride + rows * step + offsets[0]
                for i, s in enumerate(columns):
                    yield self.lines.tap(at, s, j), [(t, i)]
            return
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (line, filter column) -> who reads it
        for i, (r, s) in enumerate((r, s) for r in rows for s in columns):
            for t in range(lines):
                readers.setdefault((t * stride + offsets[r], s), []).append((t, i))
        for (at, s), users in sorted(readers.items()):
            yield self.lines.tap(line * stride + at, s, j), users


def conv_depthwise(k, out, a, x, *, images: Images, geometry: ConvGeometry, target: OutputMap, blocking: Blocking,
        mode: str) -> None:  # fmt: skip
    """The kernel: out (N, groups rows, *target.size) = depthwise convolution of x (N, groups, H, W) with `rows` filters a (groups
    rows, taps) fp32 for each channel. A work item is a block of lines of a channel. `target`: where the outputs lie in out,
    adjacent unless the convolution is one phase of a strided one's gradient. `images`: how many N are."""
    groups, rows = geometry.groups, geometry.rows
    R, S = range(len(geometry.row_offsets)), range(len(geometry.column_offsets))
    block = LineBlock(k, x, geometry, blocking)  # its scratch, for one item at a time
    blocks = block.line_blocks * block.column_blocks
    work = blocking.lines * round_up(blocking.columns, k.lanes) * geometry.taps * rows  # multiply-adds of a block
    unrolled = geometry.taps * blocking.tile_m <= MAX_UNROLLED
    with k.parallel_range(k.num_elements(*images) * (groups * blocks), max(1, GRAIN // work)) as items, k.loop(*items) as item:
        plane = item // blocks
        block.load_lines(plane, item % blocks)
        with k.loop(0, rows) as filter_:
            src = a.at((plane % groups * rows + filter_) * geometry.taps)  # the filter's taps
            dst = out.at((plane * rows + filter_) * (target.size[0] * target.size[1]))  # and its image plane
            factors = [k.splat(src.get(i)) for i in range(geometry.taps)] if unrolled else []
            for line, lines, j, wide in block.tiles():
                mask = None if wide == k.lanes else k.mask_first(wide)
                # A register tile: a vector of outputs of each of some lines. An input vector serves (line, tap) pairs.
                sums = [k.var_vec(0.0) for _ in range(lines)]
                if unrolled:
                    for v, users in block.input_vectors(line, lines, j, R, S):
                        for t, i in users:
                            sums[t].value = k.fma(factors[i], v, sums[t].value)
                else:
                    with k.loop(0, len(R)) as r:
                        filter_row = src.at(r * len(S))
                        for v, [(t, i)] in block.input_vectors(line, lines, j, r, S):
                            sums[t].value = k.fma(k.splat(filter_row.get(i)), v, sums[t].value)
                for t, total in enumerate(sums):
                    store_outputs(k, block, dst, total, block.line + line + t, block.column + j, wide, mask, target, mode)


def store_outputs(k, block: LineBlock, dst, outputs: Var, row, column, wide, mask, target: OutputMap, mode: str) -> None:
    """The epilogue of a line of a register tile: `outputs`, a vector of pixels from (row, column) of the output on, stored or added
    (`mode`) to dst, an image plane of out. Adjacent outputs are a vector, of which `wide` pixels exist (`mask`; None: all). Those
    of a strided `target` are stored one by one; a `wide` known at run time only, through scratch. `block.sums` in scratch is
    overwritten."""
    Q = block.geometry.output_size[1]
    if target == OutputMap(block.geometry.output_size):
        dst.store(accumulate(k, dst, row * Q + column, mask, outputs.value, mode), row * Q + column, mask)
        return
    row = (row * target.stride[0] + target.offset[0]) * target.size[1] + target.offset[1]
    if isinstance(wide, int):
        for q in range(wide):
            accumulate_scalar(k, dst, row + (column + q) * target.stride[1], k.lane(outputs.value, q), mode)
        return
    block.sums.store(outputs.value)
    with k.loop(0, wide) as q:
        accumulate_scalar(k, dst, row + (column + q) * target.stride[1], block.sums.get(q), mode)


def add_filter_gradient(k, block: LineBlock, src, sums, rows: range | Value, columns: range) -> None:
    """Add a block's part to the filter gradient, sums [tap][lanes] fp32 in scratch, of the taps `rows` x `columns`, all of whose
    sums are in registers: dy times the pixels that each tap sees, lane by lane. `src`: the image plane of dy."""
    Q = block.geometry.output_size[1]
    count = len(columns) * (1 if isinstance(rows, Value) else len(rows))
    acc = [k.var(sums.load(i * k.lanes)) for i in range(count)]  # [filter row][filter column] vectors
    for line, lines, j, wide in block.tiles():
        mask = None if wide == k.lanes else k.mask_first(wide)
        dy = [src.load((block.line + line + t) * Q + block.column + j, mask) for t in range(lines)]
        for v, users in block.input_vectors(line, lines, j, rows, columns):
            pixels = v if mask is None else k.select(mask, v, 0.0)  # what lies behind a line is undefined
            for t, i in users:
                acc[i].value = k.fma(dy[t], pixels, acc[i].value)
    for i, total in enumerate(acc):
        sums.store(total.value, i * k.lanes)


def conv_depthwise_wgrad(k, dw, dy, x, *, images: Images, geometry: ConvGeometry, blocking: Blocking, mode: str) -> None:
    """The kernel: dw (groups rows, taps) fp32, from dy (N, groups rows, P, Q) and x (N, groups, H, W). A work item owns a filter,
    whose sums [tap][lanes] are in scratch, and goes through all images in order; lanes are added at the very end."""
    (P, Q), R, S = geometry.output_size, range(len(geometry.row_offsets)), range(len(geometry.column_offsets))
    groups, rows = geometry.groups, geometry.rows
    block = LineBlock(k, x, geometry, blocking)
    max_sums = k.isa.registers - blocking.tile_m - 2  # in registers

    with k.parallel_for(groups * rows) as filter_:
        sums = block.sums
        with k.loop(0, geometry.taps) as i:
            sums.store(0.0, i * k.lanes)
        with k.loop(0, k.num_elements(*images)) as n, k.loop(0, block.line_blocks * block.column_blocks) as number:
            block.load_lines(n * groups + filter_ // rows, number)
            src = dy.at((n * (groups * rows) + filter_) * (P * Q))
            if geometry.taps <= max_sums:
                add_filter_gradient(k, block, src, sums, R, S)
            else:
                with k.loop(0, len(R)) as r:
                    for s in S[::max_sums]:
                        add_filter_gradient(k, block, src, sums.at((r * len(S) + s) * k.lanes), r, S[s : s + max_sums])
        with k.loop(0, geometry.taps) as i:
            accumulate_scalar(k, dw, filter_ * geometry.taps + i, k.sum(sums.load(i * k.lanes)), mode)
