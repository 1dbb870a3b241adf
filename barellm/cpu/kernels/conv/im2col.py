"""im2col for convolutions: input lines with their padding, and the columns (depth, pixels) that are gathered from them, in fp32.

A *line* is the part of an input row that a block of output columns sees. Its copy in the thread's scratch has the padding filled
in, so every filter tap is a shift of the line: output j of a tap reads element offset + j stride. From lines are made

    `Im2colTiles`   the columns of one register tile, when it needs them: they stay in L1, and the im2col matrix is in no memory
    `Im2colPanel`   the im2col matrix of some output lines and some channels, for kernels whose lanes are pixels

The depth is (channel, filter row, filter column)."""

from dataclasses import dataclass

from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.loops import steps
from barellm.program.integers import ceil_div, round_up

UNROLLED_LINE = 16  # vectors of a line that is copied without loops
UNROLLED_COPY = 8  # and of a line's copy into a panel

# How many images there are, a constant of code: `count` for each of the run-time sizes `dims`, `k.num_elements(dims, count)`.
Images = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class ConvGeometry:
    """The shape of a convolution of x (N, groups channels, H, W) to (N, groups rows, P, Q): (H, W) is `input_size`, (P, Q) is
    `output_size`. Output pixel (i, j) sees the pixels at (i, j) stride + offset, for each row offset and column offset of the
    filter's taps. Beyond the image is zero or, with `reflect`, its mirror image."""

    input_size: tuple[int, int]
    channels: int
    output_size: tuple[int, int]
    stride: tuple[int, int]
    row_offsets: tuple[int, ...]
    column_offsets: tuple[int, ...]
    reflect: bool = False
    groups: int = 1
    rows: int = 1  # output channels of a group

    @property
    def taps(self) -> int:
        return len(self.row_offsets) * len(self.column_offsets)

    @property
    def flipped(self) -> bool:
        """Whether the filter is read from its end."""
        return any(offsets[:2] != tuple(sorted(offsets[:2])) for offsets in (self.row_offsets, self.column_offsets))

    @property
    def first_column(self) -> int:
        """The input column at which the line of a block from output column 0 on begins."""
        return min(self.column_offsets, default=0)

    def tiled(self, m: int, n: int) -> "ConvGeometry":
        """Tiles of m x m outputs as the outputs, each of which sees n x n pixels from the filter's first on."""
        offsets = (tuple(range(min(taps), min(taps) + n)) for taps in (self.row_offsets, self.column_offsets))
        size = ceil_div(self.output_size[0], m), ceil_div(self.output_size[1], m)
        return ConvGeometry(self.input_size, self.channels, size, (m, m), *offsets, self.reflect, self.groups, self.rows)

    def pixelwise(self) -> "ConvGeometry":
        """The outputs as images that are packed as they are: each pixel sees itself."""
        return ConvGeometry(self.output_size, self.rows, self.output_size, (1, 1), (0,), (0,), groups=self.groups)

    def line_length(self, outputs: int) -> int:
        """Elements of the line of so many outputs of a row."""
        return (outputs - 1) * self.stride[1] + 1 + max(self.column_offsets, default=0) - self.first_column

    def pitch(self, outputs: int, lanes: int) -> int:
        """Elements from a line to the next: what vectors reach beyond its end may be overwritten or read."""
        return -(-self.line_length(outputs) // lanes) * lanes + (self.stride[1] + 1) * lanes


class OutputLines:
    """The output lines of a work item: at most `lines` lines of `columns` outputs each, of one group. Two tables in scratch have an
    i64 for each: `plane_table` the offset of its image's channels in x, `row_table` the input row at which its window begins."""

    def __init__(self, k, geometry: ConvGeometry, scratch, lines: int, columns: int) -> None:
        self.k, self.geometry, self.columns = k, geometry, columns
        self.plane_table, self.row_table = scratch, scratch.bytes(8 * lines)

    def seek(self, group, first_line, num_lines, first_column) -> None:
        """Fill the tables for the lines [first_line, first_line + num_lines) of all images' output, from `first_column` on."""
        k, (P, _), (H, W) = self.k, self.geometry.output_size, self.geometry.input_size
        self.num_lines, self.first_column = num_lines, first_column
        with k.loop(0, num_lines) as line:
            n, i = (first_line + line) // P, (first_line + line) % P
            plane = (n * self.geometry.groups + group) * (self.geometry.channels * H * W)
            for dst, value in ((self.plane_table, plane), (self.row_table, i * self.geometry.stride[0])):
                k.line(f"store {value.typed}, ptr {dst.bytes(line * 8).ref}, align 8")

    def load(self, lines: "LineBuffer", number, line, c, r) -> None:
        """Line `number` of `lines` = what filter row r of channel c sees for output line `line`. `row_offsets` are evenly spaced,
        `step` apart."""
        offsets, (H, W) = self.geometry.row_offsets, self.geometry.input_size
        step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
        tables = (self.plane_table, self.row_table)  # the line's offset in x, and its input row
        plane, row = (self.k.op("i64", f"load i64, ptr {p.bytes(line * 8).ref}, align 8") for p in tables)
        lines.fill(number, plane + c * (H * W), row + r * step + offsets[0], self.first_column)


class LineBuffer:
    """Lines of `outputs` output columns at `at`, `pitch` elements from one to the next. Where that is less than what vectors need,
    lines must be filled in ascending order. x (N, groups channels, H, W) is read; a line is [pitch] fp32, of which
    line_length(outputs) elements belong to it."""

    def __init__(self, k, geometry: ConvGeometry, x, at, outputs: int, pitch: int | None = None) -> None:
        self.k, self.geometry, self.x, self.at, self.outputs = k, geometry, x, at, outputs
        self.pitch = geometry.pitch(outputs, k.lanes) if pitch is None else pitch

    def fill(self, number, plane, row, first) -> None:
        """Write line `number` of the buffer = input row `row` of the channel at offset `plane` (in elements) of x, for outputs from
        column `first` on, with its padding: zeros or mirror images. Rows outside the image are the same. Stores may reach up to
        `lanes` - 1 elements past the line's length: the pitch has room for them, or the next line is filled later."""
        k, geometry = self.k, self.geometry
        H, W = geometry.input_size
        dst, length = self.at.at(k.int(number) * self.pitch), geometry.line_length(self.outputs)
        if isinstance(first, int) and not geometry.reflect and length <= UNROLLED_LINE * k.lanes:
            self._fill_unrolled(dst, plane, row, first * geometry.stride[1] + geometry.first_column, length)
            return
        # Input column of the line's first element; may be negative.
        begin = k.int(first) * geometry.stride[1] + geometry.first_column
        if geometry.reflect:
            row = reflect_index(k, row, H)
        zero = k.to(0.0, k.vec)
        with k.loop(0, length, k.lanes) as c:
            dst.store(zero, c)
        inside = (row >= 0) & (row < H)
        with k.when(inside):
            source = self.x.at(plane + row * W)
            low, high = k.max(begin, 0), k.min(begin + length, W)  # input columns that exist
            vectors_end = low + ((k.max(high - low, 0)) & -k.lanes)  # of the unmasked vectors
            with k.loop(low, vectors_end, k.lanes) as c:
                dst.store(source.load(c), c - begin)
            with k.when(vectors_end < high):
                dst.store(source.load(vectors_end, k.mask_first(high - vectors_end)), vectors_end - begin)
            if geometry.reflect:
                for low, high in ((begin, k.min(begin + length, 0)), (k.max(begin, W), begin + length)):
                    with k.loop(low, high) as c:
                        # With a stride, elements that no tap reads may lie far outside.
                        at = k.max(k.min(reflect_index(k, c, W), W - 1), 0)
                        dst.put(source.get(at), c - begin)

    def _fill_unrolled(self, dst, plane, row, begin: int, length: int) -> None:
        """`fill` for a line short enough to be unrolled, without a loop that mispredicts: dst[c - begin] = x[plane + row W + c] for
        the `length` input columns c from `begin` on, zero where c is outside [0, W), all zero where `row` (i64) is outside [0, H).
        `begin`, `length` are known here, so which vectors are zero is. Order matters: the zeros before the image are whole vectors
        and reach into its first pixels, which are stored after them; the last vector of pixels is zero behind the image. Stores may
        reach up to `lanes` - 1 elements past `length`, as in `fill`."""
        k, (H, W) = self.k, self.geometry.input_size
        low, high = max(begin, 0), min(begin + length, W)  # input columns of the line inside the image
        inside, zero = (row >= 0) & (row < H), k.to(0.0, k.vec)
        with k.otherwise(inside):
            for c in range(0, length, k.lanes):
                dst.store(zero, c)
        with k.when(inside):
            for c in range(0, min(low - begin, length), k.lanes):
                dst.store(zero, c)
            source = self.x.at(plane + row * W)
            end = 0  # elements of the line that are written so far
            for c in range(low, high, k.lanes):
                full = c + k.lanes <= high  # else the mask keeps the load inside the image
                dst.store(source.load(c, None if full else k.mask_first(high - c)), c - begin)
                end = c - begin + k.lanes
            for c in range(max(end, 0), length, k.lanes):
                dst.store(zero, c)

    def tap(self, number, column: int, first) -> Value:
        """What the filter's column `column` multiplies for the outputs [first, first + lanes) of a line."""
        k, stride = self.k, self.geometry.stride[1]
        start = self.geometry.column_offsets[column] - self.geometry.first_column
        p = self.at.at(k.int(number) * self.pitch + start + k.int(first) * stride)
        return load_strided(k, p, stride)


def load_strided(k, p, stride: int) -> Value:
    """A vector of `lanes` elements `stride` apart, from p on. Strides of 2 and 4 load what lies between too and shuffle. Reads up
    to p + stride lanes - 1, also where the last of these elements are not needed."""
    if stride == 1:
        return p.load()
    if stride in (2, 4):
        vectors = [p.load(i * k.lanes) for i in range(stride)]
        while len(vectors) > 1:
            even = list(range(0, 2 * k.lanes, 2))
            vectors = [k.shuffle(a, b, even) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]
    v = k.to(0.0, k.vec)
    for i in range(k.lanes):
        v = k.op(k.vec, f"insertelement {v.typed}, {p.get(i * stride).typed}, i64 {i}")
    return v


def reflect_index(k, at, size: int) -> Value:
    """The index inside an axis of `size` that reflection padding maps `at` to."""
    at = k.max(at, 0 - at)
    return k.min(at, 2 * (size - 1) - at)


def tiles_nbytes(isa: ISA, geometry: ConvGeometry, lines: int, columns: int, channels: int) -> int:
    """Scratch bytes of `Im2colTiles` for `lines` lines of `columns` outputs and `channels` channels."""
    elements = channels * len(geometry.row_offsets) * lines * geometry.line_length(columns)
    return _head_nbytes(isa, geometry, lines) + round_up(4 * (elements + _slack(isa, geometry)), 64)


def _slack(isa: ISA, geometry: ConvGeometry) -> int:
    """Elements before and behind the lines that a vector may reach; their lanes are not used."""
    return (geometry.stride[1] + 1) * isa.lanes


def _head_nbytes(isa: ISA, geometry: ConvGeometry, lines: int) -> int:
    """Bytes of the tables and the slack before the first line."""
    return round_up(16 * lines + 4 * _slack(isa, geometry), 64)


class Im2colTiles(OutputLines):
    """The lines of some channels in scratch, and the im2col columns of a register tile gathered from them. A vector of pixels is a
    shifted line or, where its pixels lie in several output lines, several of them blended by masks."""

    def __init__(self, k, geometry: ConvGeometry, x, scratch, lines: int, columns: int) -> None:
        """`scratch`: tables, then the lines [channel][filter row][line] (`tiles_nbytes`), with slack that vectors may read or
        write."""
        super().__init__(k, geometry, scratch, lines, columns)
        self.max_lines = lines
        self.pitch = geometry.line_length(columns)  # what a line's last vector writes too far, the next line overwrites
        self.lines = LineBuffer(k, geometry, x, scratch.bytes(_head_nbytes(k.isa, geometry, lines)), columns, self.pitch)

    def load_lines(self, channel, last) -> None:
        """Copy the lines of the channels [channel, last): (channel, filter row, line). No tile is gathered before all are
        written: store forwarding fails for a load that overlaps several stores in flight."""
        k, rows = self.k, len(self.geometry.row_offsets)
        if not self.geometry.taps:
            return
        with k.loop(channel, last) as c, k.loop(0, rows) as r, k.loop(0, self.num_lines) as line:
            self.load(self.lines, ((c - channel) * rows + r) * self.max_lines + line, line, c, r)

    def gather(self, dst, channels, pixel, pixels, vectors: int) -> None:
        """dst [channels * taps][vectors * lanes] fp32 = the im2col columns of `vectors` vectors of pixels, from pixel `pixel` of
        the work item's `pixels` on, for the channels of `load_lines`. Lanes behind the last pixel repeat it."""
        k, geometry, lanes, stride = self.k, self.geometry, self.k.lanes, self.geometry.stride[1]
        if not geometry.taps:
            return
        sources = [self._pieces(k.min(pixel + v * lanes, pixels - 1)) for v in range(vectors)]
        S = len(geometry.column_offsets)  # filter columns
        with k.loop(0, channels * len(geometry.row_offsets)) as row:
            at = self.lines.at.at(row * (self.max_lines * self.pitch))  # all lines of a channel and filter row
            for s, column_offset in enumerate(geometry.column_offsets):
                for v, pieces in enumerate(sources):
                    value = None
                    for earlier, offset in pieces:
                        loaded = load_strided(k, at.at(offset + (column_offset - geometry.first_column)), stride)
                        value = loaded if earlier is None or value is None else k.select(earlier, value, loaded)
                    assert value is not None
                    dst.store(value, (row * S + s) * (vectors * lanes) + v * lanes)

    def _pieces(self, first) -> list[tuple[Value | None, Value]]:
        """The lines that a vector of pixels from number `first` of the work item on lies in: for each (mask of the lanes that an
        earlier line fills, None: none; the offset in the lines at which it is loaded for all lanes)."""
        k, stride = self.k, self.geometry.stride[1]
        line, column = first // self.columns, first % self.columns
        begin = line * self.pitch + column * stride
        pieces: list[tuple[Value | None, Value]] = [(None, begin)]
        for t in range(1, self._lines_per_vector()):
            begins = t * self.columns - column  # the lane at which line + t begins
            offset = (line + t) * self.pitch - begins * stride
            pieces.append((k.mask_first(begins), k.select(line + t < self.num_lines, offset, begin)))
        return pieces

    def _lines_per_vector(self) -> int:
        """Over how many lines a vector of pixels may reach."""
        if self.columns % self.k.lanes == 0 or self.max_lines == 1:
            return 1
        return min((self.k.lanes - 2) // self.columns + 2, self.max_lines)


def panel_pitch(pixels: int, multiple: int) -> int:
    """Elements from one depth to the next: an odd number of cache lines, so that columns have no conflict misses in L1."""
    padded = round_up(pixels, max(multiple, 16))
    return padded + 16 * (padded // 16 % 2 == 0)


def panel_nbytes(isa: ISA, geometry: ConvGeometry, lines: int, columns: int, pitch: int, channels: int) -> int:
    """Scratch bytes of an `Im2colPanel` with the lines that it is gathered from."""
    line_bytes = round_up(16 * lines, 64) + round_up(4 * lines * geometry.pitch(columns, isa.lanes), 64)
    return line_bytes + round_up(4 * (max(channels * geometry.taps, 1) * pitch + isa.lanes), 64)


class Im2colPanel(OutputLines):
    """The im2col matrix (depth, pixels) of at most `lines` lines of `columns` outputs each, in the scratch from `scratch` on."""

    def __init__(self, k, geometry: ConvGeometry, x, scratch, lines: int, columns: int, pitch: int) -> None:
        """`at` [depth][pitch] fp32, `pitch` elements a depth, lies behind the tables and the `lines` of one channel and filter
        row."""
        super().__init__(k, geometry, scratch, lines, columns)
        self.pitch = pitch
        tables = round_up(16 * lines, 64)
        self.lines = LineBuffer(k, geometry, x, scratch.bytes(tables), columns)
        self.at = scratch.bytes(tables + round_up(4 * lines * self.lines.pitch, 64))

    def pack(self, channel, last, *, pixels, zero_vectors: int = 1) -> None:
        """Make the im2col matrix [depth][pitch] fp32 of the channels [channel, last): load each channel's and filter row's lines,
        copy each tap's pixels. `zero_vectors` vectors of zeros follow the first `pixels` of each depth, those of the lines
        of `seek`. Ascending depths overwrite what vectors write too far."""
        k, geometry, S = self.k, self.geometry, len(self.geometry.column_offsets)
        if not geometry.taps:
            return
        with k.loop(channel, last) as c, k.loop(0, len(geometry.row_offsets)) as r:
            with k.loop(0, self.num_lines) as line:
                self.load(self.lines, line, line, c, r)
            for s in range(S):
                depth = (c - channel) * geometry.taps + r * S + s
                dst = self.at.at(depth * self.pitch)
                # What a line's last vector writes too far, the next line or depth overwrites.
                with k.loop(0, self.num_lines) as line:
                    for first in steps(k, 0, self.columns, k.lanes, unrolled=self.columns <= UNROLLED_COPY * k.lanes):
                        dst.store(self.lines.tap(line, s, first), line * self.columns + first)
                for v in range(zero_vectors):
                    dst.store(0.0, pixels + v * k.lanes)
