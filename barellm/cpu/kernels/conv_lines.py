"""Lines of images as convolutions read them: fp32, with what lies beyond the image filled in.

A *line* is what one row of the filter sees of the image for one row of the output, as far as a block of output columns reaches. A
copy of it in this thread's scratch makes every element of the filter a shift: output j reads the line's element offset + j stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.lang import Pointer, Value

UNROLLED = 16  # vectors of a line that is made without loops


@dataclass(frozen=True)
class Grid:
    """Which pixels of a source (N, channels, H, W) an output's pixel (i, j) of a P x Q grid sees: those at i stride + offset, for
    each of the row offsets and column offsets. Beyond the image is zero, or its mirror image."""

    size: tuple[int, int]
    channels: int
    outputs: tuple[int, int]
    stride: tuple[int, int]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    reflect: bool = False

    @property
    def taps(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def first_column(self) -> int:
        """The column at which the line of the block from output column 0 on begins."""
        return min(self.columns, default=0)

    def span(self, outputs: int) -> int:
        """Elements of the line of so many outputs of a row."""
        return (outputs - 1) * self.stride[1] + 1 + max(self.columns, default=0) - self.first_column

    def pitch(self, outputs: int, lanes: int) -> int:
        """Elements from a line to the next: what vectors reach beyond its end may be overwritten or read."""
        return -(-self.span(outputs) // lanes) * lanes + (self.stride[1] + 1) * lanes


class Moved:
    """What is about at most `lines` lines of `columns` outputs each of one group at a time. For each of the lines it keeps, in the
    scratch from `scratch` on, where its image's channels begin in x and which row of them it begins to see."""

    def __init__(self, k: KernelBuilder, grid: Grid, scratch: Pointer, lines: int, columns: int, groups: int) -> None:
        self.k, self.grid, self.columns, self.groups = k, grid, columns, groups
        self.plane_of, self.row_of = scratch, scratch.bytes(8 * lines)

    def move(self, group: Value, first: Value, many: Value, column: Any) -> None:
        """From now on it is about the lines [first, first + many) of all images' output, from `column` on."""
        k, (P, _), (H, W) = self.k, self.grid.outputs, self.grid.size
        self.many, self.first_column = many, column
        with k.loop(0, many) as line:
            n, i = (first + line) // P, (first + line) % P
            plane = (n * self.groups + group) * (self.grid.channels * H * W)
            for to, value in ((self.plane_of, plane), (self.row_of, i * self.grid.stride[0])):
                k.line(f"store {value.typed}, ptr {to.bytes(line * 8).ref}, align 8")

    def place(self, line: Value) -> tuple[Value, Value]:
        """(element of x, row) of a line."""
        plane, row = (
            self.k.op("i64", f"load i64, ptr {p.bytes(line * 8).ref}, align 8") for p in (self.plane_of, self.row_of)
        )
        return plane, row


class Lines:
    """Makes lines of `outputs` columns at `at`, `pitch` elements from one to the next. Where that is less than what vectors need,
    lines must be filled in the order in which they lie."""

    def __init__(
        self, k: KernelBuilder, grid: Grid, x: Pointer, at: Pointer, outputs: int, pitch: int | None = None
    ) -> None:
        self.k, self.grid, self.x, self.at, self.outputs = k, grid, x, at, outputs
        self.pitch = grid.pitch(outputs, k.lanes) if pitch is None else pitch

    def fill(self, number: Any, plane: Value, row: Value, first: Any) -> None:
        """Line `number` becomes row `row` of the channel whose pixels begin at element `plane` of x, for outputs from column
        `first` on. The rows that are not in the image are zeros or mirror images."""
        k, grid = self.k, self.grid
        H, W = grid.size
        to, span = self.at.at(k.int(number) * self.pitch), grid.span(self.outputs)
        if isinstance(first, int) and not grid.reflect and span <= UNROLLED * k.lanes:
            self._fill_unrolled(to, plane, row, first * grid.stride[1] + grid.first_column, span)
            return
        begin = k.int(first) * grid.stride[1] + grid.first_column
        if grid.reflect:
            row = mirrored(k, row, H)
        zero = k.to(0.0, k.vec)
        with k.loop(0, span, k.lanes) as c:
            to.store(zero, c)
        inside = (row >= 0) & (row < H)
        with k.when(inside):
            source = self.x.at(plane + row * W)
            low, high = k.max(begin, 0), k.min(begin + span, W)
            whole = low + ((k.max(high - low, 0)) & -k.lanes)
            with k.loop(low, whole, k.lanes) as c:
                to.store(source.load(c), c - begin)
            with k.when(whole < high):
                to.store(source.load(whole, k.mask_first(high - whole)), whole - begin)
            if grid.reflect:
                for low, high in ((begin, k.min(begin + span, 0)), (k.max(begin, W), begin + span)):
                    with k.loop(low, high) as c:
                        at = k.max(
                            k.min(mirrored(k, c, W), W - 1), 0
                        )  # of a stride, elements that nobody reads may lie far out
                        to.put(source.get(at), c - begin)

    def _fill_unrolled(self, to: Pointer, plane: Value, row: Value, begin: int, span: int) -> None:
        """The same of a short line that begins at a known column: no loop whose end a processor would have to guess."""
        k, (H, W) = self.k, self.grid.size
        low, high = max(begin, 0), min(begin + span, W)
        inside, zero = (row >= 0) & (row < H), k.to(0.0, k.vec)
        with k.otherwise(inside):
            for c in range(0, span, k.lanes):
                to.store(zero, c)
        with k.when(inside):
            for c in range(0, min(low - begin, span), k.lanes):
                to.store(zero, c)
            source = self.x.at(plane + row * W)
            end = 0
            for c in range(low, high, k.lanes):
                whole = c + k.lanes <= high
                to.store(source.load(c, None if whole else k.mask_first(high - c)), c - begin)
                end = c - begin + k.lanes
            for c in range(max(end, 0), span, k.lanes):
                to.store(zero, c)

    def tap(self, number: Any, column: int, first: Any) -> Value:
        """What the filter's column `column` multiplies for the outputs [first, first + lanes) of a line."""
        k, stride = self.k, self.grid.stride[1]
        start = self.grid.columns[column] - self.grid.first_column
        p = self.at.at(k.int(number) * self.pitch + start + k.int(first) * stride)
        return strided(k, p, stride)


def strided(k: KernelBuilder, p: Pointer, stride: int) -> Value:
    """Each `stride`-th element from `p` on."""
    if stride == 1:
        return p.load()
    if stride in (2, 4):
        vectors = [p.load(i * k.lanes) for i in range(stride)]
        while len(vectors) > 1:
            each = list(range(0, 2 * k.lanes, 2))
            vectors = [k.shuffle(a, b, each) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]
    v = k.to(0.0, k.vec)
    for i in range(k.lanes):
        v = k.op(k.vec, f"insertelement {v.typed}, {p.get(i * stride).typed}, i64 {i}")
    return v


def mirrored(k: KernelBuilder, at: Value, size: int) -> Value:
    """The index that a reflected one stands for."""
    at = k.max(at, 0 - at)
    return k.min(at, 2 * (size - 1) - at)
