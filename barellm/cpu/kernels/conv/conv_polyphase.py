"""Polyphase planes of bf16 images for direct convolutions: in them every filter tap is a constant shift.

The output pixels of some lines are numbered as *positions*, lines of `pitch` positions after each other: those behind a line's last
pixel are computed and thrown away. For each phase (remainder by the stride) of row offsets and of column offsets that a tap has,
there is a plane of the input pixels of that phase. In it output position p meets position p + shift, a constant of the tap, so a
GEMM may take any run of positions, whether they are of one line or of several. The padding is filled in: zeros or the mirror
image. The zeros behind a line serve the next line as those before it."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.conv.im2col import ConvGeometry, reflect_index
from barellm.cpu.kernels.loops import steps
from barellm.program.integers import round_up

UNROLLED = 16  # vectors of a line that are copied without a loop


class AxisTaps(NamedTuple):
    """Of the taps along an axis: their phases, the least shift, and how far from it the largest is."""

    phases: list[int]
    first: int
    reach: int


@dataclass(frozen=True)
class PolyphaseLayout:
    """The planes of blocks of `lines` lines of an image's output. Positions are padded to a multiple of `tile_m`; from a line to
    the next there are `min_pitch` positions or more."""

    geometry: ConvGeometry
    lines: int
    tile_m: int
    min_pitch: int = 0

    def _axis(self, axis: int) -> AxisTaps:
        """The taps along rows (0) or columns (1): offset o is phase o % stride, shifted by o // stride."""
        stride = self.geometry.stride[axis]
        offsets = (self.geometry.row_offsets, self.geometry.column_offsets)[axis]
        shifts = [o // stride for o in offsets]
        return AxisTaps(sorted({o % stride for o in offsets}), min(shifts), max(shifts) - min(shifts))

    @cached_property
    def rows(self) -> AxisTaps:
        return self._axis(0)

    @cached_property
    def columns(self) -> AxisTaps:
        return self._axis(1)

    @cached_property
    def pitch(self) -> int:
        """The least number of positions from a line to the next at which all that two lines share is zero."""
        (phases, first, reach), Q, stride = self.columns, self.geometry.output_size[1], self.geometry.stride[1]
        for pitch in range(max(Q, self.min_pitch), Q + reach):
            behind = (pitch + first) * stride + phases[0] >= self.geometry.input_size[1]  # what follows a line is outside the image
            # And so is, before the next line, what a line's taps reach.
            before = (Q + reach - 1 - pitch + first) * stride + phases[-1] < 0
            if behind and before and not self.geometry.reflect:
                return pitch
        return max(Q + reach, self.min_pitch)

    @property
    def height(self) -> int:
        """Lines of a plane."""
        return self.lines + self.rows.reach

    @property
    def positions(self) -> int:
        """Those of the output, padded to `tile_m`."""
        return round_up(self.lines * self.pitch, self.tile_m)

    @cached_property
    def size(self) -> int:
        """Positions of a plane: what the last tile reaches too."""
        return max(self.height * self.pitch, self.positions + self.rows.reach * self.pitch + self.columns.reach)

    def shifts(self) -> list[int]:
        """The shift of each tap: how far its input pixel lies from the output's position, in the planes, one after the other."""
        phases = self.phases()
        found = []
        for row in self.geometry.row_offsets:
            for column in self.geometry.column_offsets:
                # Shifts y, x in the plane of phases i, j.
                (y, i), (x, j) = divmod(row, self.geometry.stride[0]), divmod(column, self.geometry.stride[1])
                plane = phases.index((i, j)) * self.size
                found.append(plane + (y - self.rows.first) * self.pitch + x - self.columns.first)
        return found

    def phases(self) -> list[tuple[int, int]]:
        """(of rows, of columns) of each plane."""
        return [(i, j) for i in self.rows.phases for j in self.columns.phases]

    def padded_size(self, lanes: int) -> int:
        """Positions of all planes, in whole vectors."""
        return round_up(len(self.phases()) * self.size, lanes)

    def channel_pitch(self, lanes: int, height: int | None = None) -> int:
        """Elements from a channel's planes to the next's, or from `height` lines to the next channel's: behind them is room for a
        vector, and one position of all channels lies in different sets of L1."""
        positions = self.padded_size(lanes) if height is None else height * self.pitch + self.columns.reach
        lines = round_up(positions + lanes, 32) // 32
        return 32 * (lines + 1 - lines % 2)

    def zeros_nbytes(self, lanes: int) -> int:
        return round_up(2 * (self.geometry.input_size[1] + lanes * (self.geometry.stride[1] + 1)), 64)

    def nbytes(self, isa: ISA, channels: int, height: int | None = None) -> int:
        """Bytes of the planes of so many channels, or of `height` of their lines, and of a line of zeros."""
        return self.zeros_nbytes(isa.lanes) + 2 * channels * self.channel_pitch(isa.lanes, height)


class PolyphaseBuffer:
    """The planes of `channels` channels at a time, or `height` lines of a plane (None: all of all), packed from images x (N, groups
    channels, H, W), bf16, in `layout.nbytes` bytes of scratch. `at`: the first channel's; `pitch`: elements to the next channel's;
    `zeros`: a line before them, which stands for the rows outside the image. `seek` sets the channels from `first` of a group on,
    the output lines from `line` on, and `source`, the number of the first channel's plane in x."""

    def __init__(self, k, layout: PolyphaseLayout, x, scratch, *, channels: int, height: int | None = None) -> None:
        self.k, self.layout, self.geometry, self.x, self.channels = k, layout, layout.geometry, x, channels
        self.zeros = scratch.as_dtype("bf16")
        nbytes = layout.zeros_nbytes(k.lanes)
        self.at, self.pitch = self.zeros.bytes(nbytes), layout.channel_pitch(k.lanes, height)
        for i in range(0, nbytes // 2, k.lanes):
            self.zeros.store_raw(0, i)

    def seek(self, image, group, first, line) -> None:
        """Select the channels and the block of output lines that `pack` and `pack_lines` read."""
        self.first, self.line = first, line
        self.source = (image * self.geometry.groups + group) * self.geometry.channels + first

    def pack(self, number=0) -> None:
        """Pack all planes, as channel `number` of the buffer and those behind it. What lies behind a plane's lines is zero."""
        k, layout = self.k, self.layout
        with k.loop(0, self.channels) as j:
            for plane, (row_phase, column_phase) in enumerate(layout.phases()):
                dst = self.at.at((j + number) * self.pitch + plane * layout.size)
                self.pack_lines(j, dst, row_phase, column_phase, 0, layout.height)
                self.clear(dst, layout.height * layout.pitch, layout.size)

    def pack_lines(self, j, dst, row_phase: int, column_phase: int, first, last) -> None:
        """Pack lines [first, last) of the plane (`row_phase`, `column_phase`) of channel `self.first` + j into dst, bf16
        [line][pitch], in ascending order: what a line's last vector writes too far, up to `lanes` - 1 elements, the next line
        overwrites, or the caller. Line u of a plane is input row (self.line + u + rows.first) stride + row_phase; rows outside the
        image are read from the line of zeros, or reflected. Channels behind the group's last: zero."""
        k, layout, geometry, (H, W) = self.k, self.layout, self.geometry, self.geometry.input_size
        exists = self.first + j < self.geometry.channels
        plane = self.x.at((self.source + j) * (H * W))
        with k.loop(first, last) as u:
            row = (self.line + u + layout.rows.first) * geometry.stride[0] + row_phase
            if geometry.reflect:
                row = k.max(k.min(reflect_index(k, row, H), H - 1), 0)  # clamped: lines behind the last output may lie outside
            inside = exists & (row >= 0) & (row < H)
            source = k.op("ptr", f"select {inside.typed}, ptr {plane.at(row * W).ref}, ptr {self.zeros.ref}")
            self._pack_line(dst.at((u - first) * layout.pitch), Pointer(k, source.ref, "bf16"), column_phase)

    def _pack_line(self, dst, source, phase: int) -> None:
        """A line of a plane: dst[v] = source[(v + first) * stride + phase] for `pitch` positions v, zeros or mirror images outside
        the image. Vectors may reach beyond the line: what follows is written later."""
        k, layout, stride, W = self.k, self.layout, self.geometry.stride[1], self.geometry.input_size[1]
        first, pitch = layout.columns.first, layout.pitch
        inside = [v for v in range(pitch) if 0 <= (v + first) * stride + phase < W]
        low, high = (inside[0], inside[-1] + 1) if inside else (pitch, pitch)  # positions whose pixels exist
        column = (low + first) * stride + phase  # input column of the first of them
        self.clear(dst, 0, low)
        vectors = (high - low) // k.lanes
        for v in steps(k, 0, vectors * k.lanes, k.lanes, unrolled=vectors <= UNROLLED):
            dst.store_raw(self._vector(source, v * stride + column, k.lanes), v + low)
        end = low + vectors * k.lanes
        if end < high:
            dst.store_raw(self._vector(source, column + vectors * k.lanes * stride, high - end), end)
            end += k.lanes
        self.clear(dst, end, pitch)
        if self.geometry.reflect:
            for v in (*range(low), *range(high, pitch)):
                at = abs((v + first) * stride + phase)
                at = max(min(at, 2 * (W - 1) - at), 0)  # with a stride, some that no tap reads lie far outside
                p = source.at(at)
                bits = k.op("i16", f"load i16, ptr {p.ref}, align 2")
                k.line(f"store {bits.typed}, ptr {dst.at(v).ref}, align 2")

    def clear(self, dst, begin: int, end: int) -> None:
        """Zero the elements [begin, end) of dst, in whole vectors, so up to `lanes` - 1 elements more: clear before what follows is
        written."""
        lanes = self.k.lanes
        for v in steps(self.k, begin, end, lanes, unrolled=end - begin <= UNROLLED * lanes):
            dst.store_raw(0, v)

    def _vector(self, source, column, count: int) -> Value:
        """A vector of `count` pixels (bf16 bits), every stride-th from input column `column` of `source` on; zeros behind them.
        Strides of 2 and 4: loads of adjacent pixels, of which shuffles keep every second."""
        k, stride = self.k, self.geometry.stride[1]
        if stride == 1:
            return source.load_raw(column, None if count == k.lanes else k.mask_first(count))
        if stride in (2, 4):
            # Pixels that each of `stride` loads may touch.
            counts = [max(0, min((count - 1) * stride + 1 - i * k.lanes, k.lanes)) for i in range(stride)]
            vectors = [
                source.load_raw(source.k.int(column) + i * k.lanes, None if n == k.lanes else k.mask_first(n))
                for i, n in enumerate(counts)
            ]
            even = list(range(0, 2 * k.lanes, 2))
            while len(vectors) > 1:
                vectors = [k.shuffle(a, b, even) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            return vectors[0]
        v = k.const(0, f"<{k.lanes} x i16>")
        for i in range(count):
            bits = k.op("i16", f"load i16, ptr {source.at(k.int(column) + i * stride).ref}, align 2")
            v = k.op(v.type, f"insertelement {v.typed}, {bits.typed}, i64 {i}")
        return v
