"""How one thread walks through a product: it claims a block of rows and a group of panels of columns, and multiplies each panel, a
part of the depth at a time, with the rows of the block. How a panel is multiplied is said by the subclasses in gemm.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from barellm.cpu.gemm_config import BUSY, TILE_BUSY, TILE_TURN, GemmConfig, Tile
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.epilogue import Epilogue
from barellm.cpu.kernels.gemm.microkernel import block_of
from barellm.cpu.kernels.gemm.packing import LINE, Packing, Panels, pack_b, pack_b_transposed, panel_bytes
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div


class GemmMainloop(ABC):
    """One thread's part of out (rows, cols) = epilogue(a (rows, depth) @ weight).

    During a claim `first`, `whole` and `last` are its first row, the row behind its last whole tile and the row behind its last
    one. A panel is multiplied with `turn` parts of the depth one after the other, from `begin` on, then the next panel with its;
    `turns` of these go over the whole depth. During the multiplication of a panel, `col` is its first column, `p` the part of the
    depth, `length` how deep that is, `ends` whether it is the last one (None where there is only one), and `finish` what becomes
    of the sums.
    """

    def __init__(
        self, k: KernelBuilder, a: Pointer, weight: Pointer, rows: Value, finish: Callable[[Value], Epilogue],
        *, cols: int, depth: int, stride: int, part: int, transposed: bool, choice: GemmConfig,
    ) -> None:  # fmt: skip
        """`stride`: elements from a row of a to the next. `part` is the depth that is multiplied at a time; `finish(col)` makes the
        epilogue of a panel's columns."""
        self.k, self.a, self.weight, self.make_finish = k, a, weight, finish
        self.cols, self.depth, self.stride, self.part = cols, depth, stride, part
        self.transposed, self.choice = transposed, choice
        self.tile, self.span = choice.tile, choice.tile.nr(k.isa)
        self.panels, self.parts = ceil_div(cols, self.span), ceil_div(depth, part)
        long_blocks = k.ceil_div(rows, choice.long_rows)
        few = long_blocks * self.panels < k.threads * BUSY
        self.rows = rows
        self.blocks = k.max(k.select(few, k.ceil_div(rows, choice.rows), long_blocks), 0)
        self.block = even_rows(k, rows, self.blocks, self.tile)
        self.tiles = amx.uses_tiles(k.isa, a.dtype)
        self.turn = min(TILE_TURN, self.parts) if self.tiles and transposed else 1
        self.turns = ceil_div(self.parts, self.turn)
        busy = TILE_BUSY if self.tiles else BUSY // 2
        self.groups = panel_groups(k, self.panels, choice.columns // self.span, self.blocks, busy)
        self.scratch, self.nbytes = k.thread_scratch("i32"), panel_bytes(k.isa, a.dtype, part, self.span)

    @abstractmethod
    def multiply_panel(self, panel: Pointer) -> None:
        """Multiply the rows of the claim with a packed panel."""

    def run(self) -> None:
        k = self.k
        self.two = Panels(k, self.scratch, self.nbytes, self._pack)
        with k.parallel_for(self.blocks * self.groups) as self.unit:
            row_block, group = self._blocks_of(self.unit)
            self.first_panel = group * self.panels // self.groups
            self.last_panel = (group + 1) * self.panels // self.groups
            self.first = row_block * self.block
            self.last = k.min(self.first + self.block, self.rows)
            self.whole = self.last - (self.last - self.first) % self.tile.mr
            turns = k.loop(0, self.parts, self.turn) if self.turns > 1 else nullcontext(k.int(0))
            with turns as self.begin, k.loop(self.first_panel, self.last_panel) as self.index, self._parts() as self.p:
                self.col = self.index * self.span
                self.finish = self.make_finish(self.col)
                self.ends = (self.p + 1).equals(self.parts) if self.parts > 1 else None
                self.length = self._length(self.ends)
                self.number = self.index * self.parts + self.p
                self.multiply_panel(self.two.take(self.number))

    def _parts(self) -> Any:
        """The parts of a turn, one after the other."""
        k = self.k
        if self.turn == 1:
            return nullcontext(self.begin)
        return k.loop(self.begin, k.min(self.begin + self.turn, self.parts))

    def follow(self, calls: Value) -> None:
        """Have what is multiplied next packed beside the whole tiles of this panel, in `calls` calls: the next part of the turn,
        then the group's other panels, then the next turn, then the next claim."""
        k = self.k
        _, after = self._blocks_of(self.unit + 1)
        wanted, after = self.unit + 1 < self.blocks * self.groups, after * self.panels // self.groups * self.parts
        if self.turns > 1:
            more = self.begin + self.turn < self.parts
            wanted, after = wanted | more, k.select(more, self.first_panel * self.parts + self.begin + self.turn, after)
        same = self.index + 1 < self.last_panel
        wanted, after = wanted | same, k.select(same, (self.index + 1) * self.parts + self.begin, after)
        if self.turn > 1:
            within = self.p + 1 < k.min(self.begin + self.turn, self.parts)
            wanted, after = wanted | within, k.select(within, self.number + 1, after)
        self.two.follow(after, wanted, calls)

    def _blocks_of(self, unit: Value) -> tuple[Value, Value]:
        return block_of(unit, self.choice, self.blocks, self.groups)

    def _length(self, ends: Value | None) -> Any:
        """The depth of a part, of which the last may be shorter."""
        rest = self.depth - (self.parts - 1) * self.part
        return self.depth if ends is None else self.k.select(ends, self.k.int(rest), self.part)

    def _pack(self, into: Pointer, number: Value) -> Packing:
        """Part number % parts of the depth, of panel number // parts."""
        k, parts, part = self.k, self.parts, self.part
        col, p = number // parts * self.span, number % parts
        length = self._length((p + 1).equals(parts) if parts > 1 else None)
        if self.transposed:
            even = part % 8 == 0 and self.depth % 8 == 0
            sizes = {"cols": self.cols, "stride": self.depth, "depth": length, "even": even, "span": self.span}
            fetch = partial(self._fetch, col + self.span, p) if self.tiles else None
            return pack_b_transposed(k, into, self.weight.at(p * part), col, fetch=fetch, **sizes)
        ragged = self.cols if self.cols % self.span else None
        w = self.weight.at(p * (part * self.cols))
        return pack_b(k, into, w, col, length, stride=self.cols, width=self.span, cols=ragged, beside=self.tiles)

    def _fetch(self, col: Value, p: Value, i: Value) -> None:
        """Beside chunk i of the packing of part p: fetch lines of the next panel, from column `col` on, which is packed a turn
        later. They are fetched in the order in which they lie in memory, so that the processor sees a stream and fetches on."""
        k, each = self.k, self.turn * self.part * self.weight.itemsize // LINE
        at = (p % self.turn) * (self.part * self.span * self.weight.itemsize // LINE) + i * 4
        piece = self.weight.at((col + at // each) * self.depth + p // self.turn * (self.turn * self.part))
        for line in range(4):
            k.prefetch(piece.bytes((at % each + line) * LINE), near=False)


def panel_groups(k: KernelBuilder, panels: int, most: int, blocks: Value, busy: int) -> Value:
    """Groups of at most `most` panels, about as large as each other: one is a claim's. Enough of them for each thread to have
    `busy` claims, and as many for each thread."""
    if most == 1:
        return k.int(panels)
    wanted = k.max(k.ceil_div(k.threads * busy, k.max(blocks, 1)), ceil_div(panels, most))
    return k.min(k.ceil_div(wanted, k.threads) * k.threads, panels)


def even_rows(k: KernelBuilder, rows: Value, blocks: Value, tile: Tile) -> Value:
    """Rows of each of `blocks` blocks, a multiple of the tile's: as even as can be."""
    many = k.max(blocks, 1) * tile.mr
    return (rows + (many - 1)) // many * tile.mr
