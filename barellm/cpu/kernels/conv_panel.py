"""The panel of a convolution: what some lines of the output see of some channels, (depth, pixels) in fp32, in a thread's scratch.

A depth is a channel, a row and a column of the filter; pixels are those of the lines, side by side.
"""

from __future__ import annotations

from contextlib import nullcontext

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.conv_lines import Grid, Lines, Moved
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import round_up

UNROLLED = 8  # vectors of a line that are copied without a loop


def panel_pitch(pixels: int, multiple: int) -> int:
    """Elements from one depth to the next: an odd number of cache lines, so that a column of vectors meets in no set of the first
    cache."""
    whole = round_up(pixels, max(multiple, 16))
    return whole + 16 * (whole // 16 % 2 == 0)


def panel_nbytes(isa: ISA, grid: Grid, lines: int, columns: int, pitch: int, channels: int) -> int:
    """Bytes of a panel and of what it is made from."""
    made_from = round_up(16 * lines, 64) + round_up(4 * lines * grid.pitch(columns, isa.lanes), 64)
    return made_from + round_up(4 * (max(channels * grid.taps, 1) * pitch + isa.lanes), 64)


class Panel(Moved):
    """A panel of at most `lines` lines of `columns` outputs each, in the scratch from `scratch` on."""

    def __init__(
        self,
        k: KernelBuilder,
        grid: Grid,
        x: Pointer,
        scratch: Pointer,
        lines: int,
        columns: int,
        pitch: int,
        groups: int,
    ) -> None:
        super().__init__(k, grid, scratch, lines, columns, groups)
        self.pitch = pitch
        at_lines = round_up(16 * lines, 64)
        self.lines = Lines(k, grid, x, scratch.bytes(at_lines), columns)
        self.at = scratch.bytes(at_lines + round_up(4 * lines * self.lines.pitch, 64))

    def pack(self, channel: Value, last: Value, *, pixels: Value | None = None, zeros: int = 1) -> None:
        """The channels [channel, last). So many vectors of `zeros` follow the first `pixels` of each depth."""
        k, grid, (H, W) = self.k, self.grid, self.grid.size
        if not grid.taps:
            return
        step = grid.rows[1] - grid.rows[0] if len(grid.rows) > 1 else 0
        with k.loop(channel, last) as c, k.loop(0, len(grid.rows)) as r:
            with k.loop(0, self.many) as line:
                plane, row = self.place(line)
                self.lines.fill(line, plane + c * (H * W), row + r * step + grid.rows[0], self.first_column)
            for s in range(len(grid.columns)):
                depth = (c - channel) * grid.taps + r * len(grid.columns) + s
                to = self.at.at(depth * self.pitch)
                # What a line's last vector writes too far, the next line or depth writes again.
                with k.loop(0, self.many) as line:
                    self._copy(line, s, to)
                if pixels is not None:
                    for v in range(zeros):
                        to.store(0.0, pixels + v * k.lanes)

    def _copy(self, line: Value, s: int, to: Pointer) -> None:
        k, few = self.k, self.columns <= UNROLLED * self.k.lanes
        for q in range(0, self.columns, k.lanes) if few else [0]:
            with nullcontext(q) if few else k.loop(0, self.columns, k.lanes) as first:
                to.store(self.lines.tap(line, s, first), line * self.columns + first)
