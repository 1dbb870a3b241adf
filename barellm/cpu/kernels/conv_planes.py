"""What a block of a convolution's output sees of bf16 images, as planes in a thread's scratch in which every element of the filter
is a shift.

The pixels of some lines of an image's output are numbered as they lie in lines of `pitch` *positions*: those behind a line's last
pixel are computed and thrown away. For each remainder of rows and of columns by the stride that the filter's elements have there
is a plane of the pixels with it. In it output position p meets position p + shift, a constant of the filter's element, so a
product may take any positions in a row, whether they are of one line or of several. What lies beyond the image is zero or its
mirror image. The zeros behind a line serve the next line as those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.conv_lines import Grid, mirrored
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import round_up

UNROLLED = 16  # vectors of a line that are copied without a loop


@dataclass(frozen=True)
class Planes:
    """The planes of blocks of `lines` lines of an image's output. Products take `together` positions at a time; from a line to the
    next there are `least` positions or more."""

    grid: Grid
    lines: int
    together: int
    least: int = 0

    def _axis(self, axis: int) -> tuple[list[int], int, int]:
        """(remainders, least shift, how much further the largest is) of the filter's elements along an axis."""
        stride = self.grid.stride[axis]
        offsets = (self.grid.rows, self.grid.columns)[axis]
        shifts = [o // stride for o in offsets]
        return sorted({o % stride for o in offsets}), min(shifts), max(shifts) - min(shifts)

    @cached_property
    def rows(self) -> tuple[list[int], int, int]:
        return self._axis(0)

    @cached_property
    def columns(self) -> tuple[list[int], int, int]:
        return self._axis(1)

    @cached_property
    def pitch(self) -> int:
        """The least number of positions from a line to the next at which all that two lines share is zero."""
        (remainders, first, reach), Q, stride = self.columns, self.grid.outputs[1], self.grid.stride[1]
        for pitch in range(max(Q, self.least), Q + reach):
            behind = (pitch + first) * stride + remainders[0] >= self.grid.size[1]
            before = (Q + reach - 1 - pitch + first) * stride + remainders[-1] < 0
            if behind and before and not self.grid.reflect:
                return pitch
        return max(Q + reach, self.least)

    @property
    def height(self) -> int:
        """Lines of a plane."""
        return self.lines + self.rows[2]

    @property
    def positions(self) -> int:
        """Those of the output, in whole products."""
        return round_up(self.lines * self.pitch, self.together)

    @cached_property
    def size(self) -> int:
        """Positions of a plane: what the last product reaches too."""
        return max(self.height * self.pitch, self.positions + self.rows[2] * self.pitch + self.columns[2])

    def shifts(self) -> list[int]:
        """The shift of each element of the filter, from a position of the output to one of all planes."""
        planes, first_row, first_column = self.remainders(), self.rows[1], self.columns[1]
        found = []
        for row in self.grid.rows:
            for column in self.grid.columns:
                (y, i), (x, j) = divmod(row, self.grid.stride[0]), divmod(column, self.grid.stride[1])
                found.append(planes.index((i, j)) * self.size + (y - first_row) * self.pitch + x - first_column)
        return found

    def remainders(self) -> list[tuple[int, int]]:
        """(of rows, of columns) of each plane."""
        return [(i, o) for i in self.rows[0] for o in self.columns[0]]

    def whole(self, lanes: int) -> int:
        """Positions of all planes, in whole vectors."""
        return round_up(len(self.remainders()) * self.size, lanes)

    def line_pitch(self, lanes: int, height: int | None = None) -> int:
        """Elements from a channel's planes to the next's, or from `height` lines to the next channel's: behind them is room for a
        vector, and what is of one position in all channels lies in different sets of the first cache."""
        positions = self.whole(lanes) if height is None else height * self.pitch + self.columns[2]
        lines = round_up(positions + lanes, 32) // 32
        return 32 * (lines + 1 - lines % 2)

    def zeros_nbytes(self, lanes: int) -> int:
        return round_up(2 * (self.grid.size[1] + lanes * (self.grid.stride[1] + 1)), 64)

    def nbytes(self, isa: ISA, channels: int, height: int | None = None) -> int:
        """Bytes of the planes of so many channels, or of `height` of their lines, and of a line of zeros."""
        return self.zeros_nbytes(isa.lanes) + 2 * channels * self.line_pitch(isa.lanes, height)


class Pixels:
    """Planes of `channels` channels at a time at `at`, or `height` of their lines, made of x (N, groups `of`, H, W); `of` is
    grid.channels where it is not said."""

    def __init__(
        self, k: KernelBuilder, planes: Planes, x: Pointer, scratch: Pointer, *, channels: int, groups: int, of: int = 0,
        height: int | None = None,
    ) -> None:  # fmt: skip
        self.k, self.planes, self.grid, self.x, self.channels, self.groups = k, planes, planes.grid, x, channels, groups
        self.of = of or self.grid.channels
        self.zeros = scratch.as_dtype("bf16")
        nbytes = planes.zeros_nbytes(k.lanes)
        self.at, self.pitch = self.zeros.bytes(nbytes), planes.line_pitch(k.lanes, height)
        for i in range(0, nbytes // 2, k.lanes):
            self.zeros.store_raw(0, i)

    def move(self, image: Value, group: Value, first: Value, line: Value) -> None:
        """From now on it is about the channels from `first` of a group on, and the block of lines from `line` on."""
        self.first, self.line = first, line
        self.source = (image * self.groups + group) * self.of + first

    def fill(self, number: Any = 0) -> None:
        """All planes, as channel `number` and those behind it at `at`. What lies behind a plane's lines is zero."""
        k, planes = self.k, self.planes
        with k.loop(0, self.channels) as j:
            for plane, (i, o) in enumerate(planes.remainders()):
                to = self.at.at((j + number) * self.pitch + plane * planes.size)
                self.fill_lines(j, to, i, o, 0, planes.height)
                self.clear(to, planes.height * planes.pitch, planes.size)

    def fill_lines(self, j: Value, to: Pointer, of_row: int, of_column: int, first: Any, last: Any) -> None:
        """The lines [first, last) of one plane of channel j. A channel that is not there is zero."""
        k, planes, grid, (H, W) = self.k, self.planes, self.grid, self.grid.size
        there = self.first + j < self.of
        plane = self.x.at((self.source + j) * (H * W))
        with k.loop(first, last) as u:
            row = (self.line + u + planes.rows[1]) * grid.stride[0] + of_row
            if grid.reflect:
                row = k.max(k.min(mirrored(k, row, H), H - 1), 0)
            inside = there & (row >= 0) & (row < H)
            source = k.op("ptr", f"select {inside.typed}, ptr {plane.at(row * W).ref}, ptr {self.zeros.ref}")
            self._fill_line(to.at((u - first) * planes.pitch), Pointer(k, source.ref, "bf16"), of_column)

    def _fill_line(self, to: Pointer, source: Pointer, remainder: int) -> None:
        """Vectors may reach beyond the line: what follows is written later."""
        k, planes, stride, W = self.k, self.planes, self.grid.stride[1], self.grid.size[1]
        first, pitch = planes.columns[1], planes.pitch
        inside = [v for v in range(pitch) if 0 <= (v + first) * stride + remainder < W]
        low, high = (inside[0], inside[-1] + 1) if inside else (pitch, pitch)
        column = (low + first) * stride + remainder
        self.clear(to, 0, low)
        whole = (high - low) // k.lanes
        if whole <= UNROLLED:
            for v in range(whole):
                to.store_raw(self._vector(source, column + v * k.lanes * stride, k.lanes), low + v * k.lanes)
        else:
            with k.loop(0, whole * k.lanes, k.lanes) as v:
                to.store_raw(self._vector(source, v * stride + column, k.lanes), v + low)
        end = low + whole * k.lanes
        if end < high:
            to.store_raw(self._vector(source, column + whole * k.lanes * stride, high - end), end)
            end += k.lanes
        self.clear(to, end, pitch)
        if self.grid.reflect:
            for v in (*range(low), *range(high, pitch)):
                at = abs((v + first) * stride + remainder)
                at = max(min(at, 2 * (W - 1) - at), 0)  # of a stride, some that nobody reads lie far out
                p = source.at(at)
                bits = k.op("i16", f"load i16, ptr {p.ref}, align 2")
                k.line(f"store {bits.typed}, ptr {to.at(v).ref}, align 2")

    def clear(self, to: Pointer, begin: int, end: int) -> None:
        k = self.k
        if end - begin <= UNROLLED * k.lanes:
            for v in range(begin, end, k.lanes):
                to.store_raw(0, v)
        else:
            with k.loop(begin, end, k.lanes) as v:
                to.store_raw(0, v)

    def _vector(self, source: Pointer, column: Any, count: int) -> Value:
        """`count` pixels from `column` on, the stride apart; zeros behind them."""
        k, stride = self.k, self.grid.stride[1]
        if stride == 1:
            return source.load_raw(column, None if count == k.lanes else k.mask_first(count))
        if stride in (2, 4):
            left = [max(0, min((count - 1) * stride + 1 - i * k.lanes, k.lanes)) for i in range(stride)]
            parts = [
                source.load_raw(source.k.int(column) + i * k.lanes, None if n == k.lanes else k.mask_first(n))
                for i, n in enumerate(left)
            ]
            even = list(range(0, 2 * k.lanes, 2))
            while len(parts) > 1:
                parts = [k.shuffle(a, b, even) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]
        v = k.const(0, f"<{k.lanes} x i16>")
        for i in range(count):
            bits = k.op("i16", f"load i16, ptr {source.at(k.int(column) + i * stride).ref}, align 2")
            v = k.op(v.type, f"insertelement {v.typed}, {bits.typed}, i64 {i}")
        return v
