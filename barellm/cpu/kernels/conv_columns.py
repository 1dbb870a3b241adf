"""What some lines of a convolution's output see of some channels, and the columns of a register tile that are made of it.

A copy of every line that the filter's rows see is in a thread's scratch. What an element of the filter multiplies for a vector of
pixels is such a line, shifted; or some lines, where the pixels are not all of one, blended. So columns are made when a tile needs
them, side by side and in the first cache, and a matrix of all columns is in no memory.
"""

from __future__ import annotations

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.conv_lines import Grid, Lines, Moved, strided
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import round_up


def lines_nbytes(isa: ISA, grid: Grid, lines: int, columns: int, channels: int) -> int:
    """Bytes of the lines that `lines` lines of `columns` outputs see of `channels`."""
    return _before(isa, grid, lines) + round_up(
        4 * (channels * len(grid.rows) * lines * grid.span(columns) + _slack(isa, grid)), 64
    )


def _slack(isa: ISA, grid: Grid) -> int:
    """Elements before and behind the lines that a vector may reach, whose lanes count for nothing there."""
    return (grid.stride[1] + 1) * isa.lanes


def _before(isa: ISA, grid: Grid, lines: int) -> int:
    """Bytes before the first line."""
    return round_up(16 * lines + 4 * _slack(isa, grid), 64)


class Columns(Moved):
    """At most `lines` lines of `columns` outputs each, in the scratch from `scratch` on."""

    def __init__(
        self, k: KernelBuilder, grid: Grid, x: Pointer, scratch: Pointer, lines: int, columns: int, groups: int
    ) -> None:  # fmt: skip
        super().__init__(k, grid, scratch, lines, columns, groups)
        self.most = lines
        self.pitch = grid.span(columns)  # what a line's last vector writes too far, the next line writes again
        self.lines = Lines(k, grid, x, scratch.bytes(_before(k.isa, grid, lines)), columns, self.pitch)

    def fill(self, channel: Value, last: Value) -> None:
        """The lines of the channels [channel, last), of each channel by rows of the filter. They are read when all are written: a
        load of what several stores on their way have written would wait for them."""
        k, grid, (H, W) = self.k, self.grid, self.grid.size
        if not grid.taps:
            return
        step = grid.rows[1] - grid.rows[0] if len(grid.rows) > 1 else 0
        with k.loop(channel, last) as c, k.loop(0, len(grid.rows)) as r, k.loop(0, self.many) as line:
            plane, row = self.place(line)
            number = ((c - channel) * len(grid.rows) + r) * self.most + line
            self.lines.fill(number, plane + c * (H * W), row + r * step + grid.rows[0], self.first_column)

    def gather(self, to: Pointer, channels: Value, pixel: Value, pixels: Value, vectors: int) -> None:
        """`to` (channels, taps, vectors): what the pixels from `pixel` on see, of which there are `pixels` in all."""
        k, grid, lanes, stride = self.k, self.grid, self.k.lanes, self.grid.stride[1]
        if not grid.taps:
            return
        wanted = []  # for each vector its pieces: (mask of the lanes that are of lines before, place in the lines)
        for v in range(vectors):
            first = k.min(pixel + v * lanes, pixels - 1)
            line, column = first // self.columns, first % self.columns
            pieces = [(None, line * self.pitch + column * stride)]
            for t in range(1, self._pieces()):
                begins = t * self.columns - column
                place = (line + t) * self.pitch - begins * stride
                pieces.append((k.mask_first(begins), k.select(line + t < self.many, place, pieces[0][1])))
            wanted.append(pieces)
        width = len(grid.columns)
        with k.loop(0, channels * len(grid.rows)) as row:
            at = self.lines.at.at(row * (self.most * self.pitch))
            for s, offset in enumerate(grid.columns):
                for v, pieces in enumerate(wanted):
                    value = None
                    for before, place in pieces:
                        found = strided(k, at.at(place + (offset - grid.first_column)), stride)
                        value = found if before is None or value is None else k.select(before, value, found)
                    assert value is not None
                    to.store(value, (row * width + s) * (vectors * lanes) + v * lanes)

    def _pieces(self) -> int:
        """Of how many lines a vector of pixels may be."""
        if self.columns % self.k.lanes == 0 or self.most == 1:
            return 1
        return min((self.k.lanes - 2) // self.columns + 2, self.most)
