"""Convolutions whose groups have one channel of x each ("depthwise"), and the gradients of their filters.

A pixel is multiplied by as many numbers as its few filters have elements, so a matrix product would spend its time on making its
operand. Here a thread copies the lines that some lines of the output see to its first cache, with what lies beyond the image filled
in. Lanes are pixels of a line. A vector of them is loaded once for all lines of the output that see it, and sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.conv_lines import Grid, Lines
from barellm.cpu.kernels.conv_product import Target
from barellm.cpu.kernels.loops import added, put_added
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div, round_up

MOST_FILTERS = 3  # of a channel: a product is faster with more of them
MOST_COLUMNS = 64  # of a filter: they are unrolled
UNROLLED = 400  # multiply-adds of a tile that are written without a loop over the filter's rows
LONGEST = 1024  # outputs of a line that is not cut into pieces
SCRATCH = 20 << 10  # bytes of lines, about: they stay in the first cache
GRAIN = 1 << 16  # multiply-adds of a claim, about


def suits(grid: Grid, filters: int) -> bool:
    """Whether these kernels do convolutions with so many filters for each group."""
    return grid.channels == 1 and filters <= MOST_FILTERS and 0 < len(grid.columns) <= MOST_COLUMNS and bool(grid.rows)


@dataclass(frozen=True)
class Blocks:
    """A turn has `lines` lines of the output, or pieces of `columns` columns of them; a tile has `tall` of these lines."""

    lines: int
    columns: int
    tall: int


def blocks_of(isa: ISA, grid: Grid, *, gradient: bool) -> Blocks:
    """Tiles whose sums, or of the filters' `gradient` whose lines of dy, fit into the registers beside the rest; and turns whose
    lines fit into the first cache."""
    P, Q = grid.outputs
    columns = Q if Q <= LONGEST else LONGEST
    most = 4 if gradient or isa.registers < 32 else 8
    tall = ceil_div(P, ceil_div(P, most))
    line = 4 * grid.pitch(columns, isa.lanes) * min(grid.stride[0], height(grid))
    tiles = min(max(1, SCRATCH // (line * tall)), ceil_div(P, tall))
    return Blocks(ceil_div(ceil_div(P, tall), ceil_div(ceil_div(P, tall), tiles)) * tall, columns, tall)


def height(grid: Grid) -> int:
    """Lines of x from the first to the last that one line of the output sees."""
    return max(grid.rows) - min(grid.rows) + 1


def lines_of(grid: Grid, blocks: Blocks) -> int:
    """Lines of x that a turn sees."""
    return (blocks.lines - 1) * grid.stride[0] + height(grid)


def nbytes(isa: ISA, grid: Grid, blocks: Blocks, sums: int) -> int:
    """Bytes of a thread's scratch: the lines of a turn, and behind them `sums` vectors."""
    return 4 * (lines_of(grid, blocks) * grid.pitch(blocks.columns, isa.lanes) + sums * isa.lanes)


class Turn:
    """What some lines of the output see of one channel of one image, and the tiles that these lines are cut into."""

    def __init__(self, k: KernelBuilder, x: Pointer, grid: Grid, blocks: Blocks) -> None:
        self.k, self.grid, self.blocks = k, grid, blocks
        self.lines = Lines(k, grid, x, k.thread_scratch(), blocks.columns)
        self.behind = self.lines.at.at(lines_of(grid, blocks) * self.lines.pitch)
        self.blocks_of_lines, self.pieces = (
            ceil_div(n, m) for n, m in zip(grid.outputs, (blocks.lines, blocks.columns), strict=True)
        )

    def begin(self, plane: Value, number: Value) -> None:
        """Turn `number` of the image's channel `plane`."""
        k, b, (P, Q), (H, W) = self.k, self.blocks, self.grid.outputs, self.grid.size
        self.line = number // self.pieces * b.lines
        column = number % self.pieces * b.columns if self.pieces > 1 else 0
        self.column = k.int(column)
        self.many, self.columns = k.min(P - self.line, b.lines), k.min(Q - self.column, b.columns)
        first = self.line * self.grid.stride[0] + min(self.grid.rows)
        with k.loop(0, (self.many - 1) * self.grid.stride[0] + height(self.grid)) as i:
            self.lines.fill(i, plane * (H * W), first + i, column)

    def tiles(self) -> Iterator[tuple[Value, int, Value, Any]]:
        """(the first line, how many lines, the first column, how many columns) of each kind of tile, within loops over all of that
        kind. A whole vector of columns, or what is left of the line, is an int where it is known."""
        k, tall = self.k, self.blocks.tall
        whole, full = self.many - self.many % tall, self.columns & -k.lanes
        for begin, end, lines in ((k.int(0), whole, tall), (whole, self.many, 1))[: 1 if tall == 1 else 2]:
            with k.loop(begin, end, lines) as line:
                with k.loop(0, full, k.lanes) as j:
                    yield line, lines, j, k.lanes
                if self.pieces > 1:
                    with k.when(full < self.columns):
                        yield line, lines, full, self.columns - full
                elif rest := self.grid.outputs[1] % k.lanes:
                    yield line, lines, full, rest

    def seen(
        self, line: Value, lines: int, j: Value, rows: range | Value, columns: range
    ) -> Iterator[tuple[Value, list[tuple[int, int]]]]:
        """Vectors of what a tile of `lines` lines sees through these elements of the filter, and for each of them (line of the
        output, number of the element) of all that see it. `rows`: all that are wanted, or one that is known at run time."""
        grid, stride = self.grid, self.grid.stride[0]
        offsets = [row - min(grid.rows) for row in grid.rows]
        if isinstance(rows, Value):
            step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
            for t in range(lines):
                at = (line + t) * stride + rows * step + offsets[0]
                for i, s in enumerate(columns):
                    yield self.lines.tap(at, s, j), [(t, i)]
            return
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, (r, s) in enumerate((r, s) for r in rows for s in columns):
            for t in range(lines):
                found.setdefault((t * stride + offsets[r], s), []).append((t, i))
        for (at, s), users in sorted(found.items()):
            yield self.lines.tap(line * stride + at, s, j), users


def conv_depthwise(
    k: KernelBuilder, out, a, x, *, dims, count, groups: int, rows: int, grid: Grid, target: Target, blocks: Blocks, mode: str
) -> None:  # fmt: skip
    """out (N, groups rows, `target` size) from filters a (groups rows, taps), fp32, and x (N, groups, H, W)."""
    Q, dense = grid.outputs[1], target == Target(grid.outputs)
    R, S = range(len(grid.rows)), range(len(grid.columns))
    turn = Turn(k, x, grid, blocks)
    turns = turn.blocks_of_lines * turn.pieces
    work = blocks.lines * round_up(blocks.columns, k.lanes) * grid.taps * rows
    unrolled = grid.taps * blocks.tall <= UNROLLED
    with (
        k.parallel_range(k.num_elements(dims, count) * (groups * turns), max(1, GRAIN // work)) as span,
        k.loop(*span) as unit,
    ):
        plane = unit // turns
        turn.begin(plane, unit % turns)
        with k.loop(0, rows) as filter_:
            of = a.at((plane % groups * rows + filter_) * grid.taps)
            to = out.at((plane * rows + filter_) * (target.size[0] * target.size[1]))
            factors = [k.splat(of.get(i)) for i in range(grid.taps)] if unrolled else []
            for line, lines, j, wide in turn.tiles():
                mask = None if wide == k.lanes else k.mask_first(wide)
                sums = [k.var_vec(0.0) for _ in range(lines)]
                if unrolled:
                    for v, users in turn.seen(line, lines, j, R, S):
                        for t, i in users:
                            sums[t].value = k.fma(factors[i], v, sums[t].value)
                else:
                    with k.loop(0, len(R)) as r:
                        row_of = of.at(r * len(S))
                        for v, [(t, i)] in turn.seen(line, lines, j, r, S):
                            sums[t].value = k.fma(k.splat(row_of.get(i)), v, sums[t].value)
                for t, total in enumerate(sums):
                    y, x_ = turn.line + line + t, turn.column + j
                    if dense:
                        to.store(added(k, to, y * Q + x_, mask, total.value, mode), y * Q + x_, mask)
                        continue
                    y = (y * target.step[0] + target.first[0]) * target.size[1] + target.first[1]
                    if isinstance(wide, int):
                        for q in range(wide):
                            put_added(k, to, y + (x_ + q) * target.step[1], k.lane(total.value, q), mode)
                        continue
                    turn.behind.store(total.value)
                    with k.loop(0, wide) as q:
                        put_added(k, to, y + (x_ + q) * target.step[1], turn.behind.get(q), mode)


def conv_depthwise_gradient(
    k: KernelBuilder, dw, dy, x, *, dims, count, groups: int, rows: int, grid: Grid, blocks: Blocks, mode: str
) -> None:  # fmt: skip
    """dw (groups rows, taps) fp32, from dy (N, groups rows, P, Q) and x (N, groups, H, W). Lanes of sums are added at the very end;
    a claim owns a filter and walks through all images in order."""
    (P, Q), R, S = grid.outputs, range(len(grid.rows)), range(len(grid.columns))
    turn = Turn(k, x, grid, blocks)
    together = k.isa.registers - blocks.tall - 2  # sums in registers

    def add(of: Pointer, first: Pointer, rows: range | Value, columns: range) -> None:
        """What all tiles of a turn add to the sums of these elements, which lie from `first` on."""
        many = len(columns) * (1 if isinstance(rows, Value) else len(rows))
        held = [k.var(first.load(i * k.lanes)) for i in range(many)]
        for line, lines, j, wide in turn.tiles():
            mask = None if wide == k.lanes else k.mask_first(wide)
            g = [of.load((turn.line + line + t) * Q + turn.column + j, mask) for t in range(lines)]
            for v, users in turn.seen(line, lines, j, rows, columns):
                pixels = v if mask is None else k.select(mask, v, 0.0)  # what lies behind a line may be anything
                for t, i in users:
                    held[i].value = k.fma(g[t], pixels, held[i].value)
        for i, total in enumerate(held):
            first.store(total.value, i * k.lanes)

    with k.parallel_for(groups * rows) as filter_:
        sums = turn.behind
        with k.loop(0, grid.taps) as i:
            sums.store(0.0, i * k.lanes)
        with k.loop(0, k.num_elements(dims, count)) as n, k.loop(0, turn.blocks_of_lines * turn.pieces) as number:
            turn.begin(n * groups + filter_ // rows, number)
            of = dy.at((n * (groups * rows) + filter_) * (P * Q))
            if grid.taps <= together:
                add(of, sums, R, S)
            else:
                with k.loop(0, len(R)) as r:
                    for s in S[::together]:
                        add(of, sums.at((r * len(S) + s) * k.lanes), r, S[s : s + together])
        with k.loop(0, grid.taps) as i:
            put_added(k, dw, filter_ * grid.taps + i, k.sum(sums.load(i * k.lanes)), mode)
