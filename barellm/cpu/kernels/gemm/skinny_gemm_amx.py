"""Products of a few rows on AMX tiles (amx.py): the weight is the left operand, so its rows are read where they lie.

Vectors multiply two rows with each number of the weight that they load, and are slower than memory from about eight rows on. A tile
multiplies it with 16. What has to be woven into pairs is x, which every thread does for itself, and at the end the sums, rows of
which are columns of the result, are transposed. An element is one chain along the depth, in the order of the tile instruction: its
bits do not depend on the other rows.
"""

from __future__ import annotations

from barellm.cpu.gemm_config import SkinnyGemmConfig
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import transpose
from barellm.program.integers import round_up

MOST = 64  # rows of x
NR = 64  # columns of the result that a claim has
TOGETHER = (1, 2, 4)  # tiles of the weight that are multiplied side by side where x is one tile wide, the best first
WIDTHS = (amx.SIDE, amx.NR, MOST)  # rows of x as packed


def fits(isa: ISA, dtype: str, cols: int, depth: int) -> bool:
    """Whether a product is done so: no tile hangs over a side of the weight."""
    return amx.uses_tiles(isa, dtype) and cols >= NR and depth % amx.TILE_K == 0


def tiles_private(isa: ISA, depth: int) -> int:
    """Bytes of scratch for x, and for a claim's sums, behind which as many may be read."""
    return 2 * MOST * depth + 4 * MOST * (2 * NR) if isa.tiles else 0


class FewTiles:
    """One thread's part of a product of `rows` rows of a (rows, depth), `stride` elements apart, with a weight (cols, depth)."""

    def __init__(
        self, k: KernelBuilder, a: Pointer, weight: Pointer, rows: Value, scratch: Pointer, *, cols: int, depth: int, stride: int,
        choice: SkinnyGemmConfig,
    ) -> None:  # fmt: skip
        self.k, self.a, self.weight, self.rows, self.choice = k, a, weight, rows, choice
        self.cols, self.depth, self.stride = cols, depth, stride
        self.x = scratch.as_dtype("i32")
        self.out = scratch.bytes(round_up(2 * MOST * depth, 64)).as_dtype("fp32")

    def begin(self) -> None:
        """x as pairs along the depth: (depth / 2, WIDTHS) of which those behind the last row are zero."""
        k, side = self.k, amx.SIDE
        amx.configure(k)
        zero = k.const(0, k.ivec)
        for width, wanted in self._widths():
            with k.when(wanted):
                for first in range(0, width, side):
                    some = self.rows > first
                    with k.when(some), k.loop(0, self.depth, amx.TILE_K) as d:
                        lines = []
                        for r in range(first, first + side):
                            at = self.a.at(k.min(self.rows - 1, r) * self.stride + d)
                            line = k.op(k.ivec, f"load {k.ivec}, ptr {at.ref}, align {at.itemsize}")
                            lines.append(k.select(self.rows > r, line, zero))
                        for i, pairs in enumerate(transpose(k, lines)):
                            self.x.store_raw(pairs, (d // 2 + i) * width + first)
                    with k.otherwise(some), k.loop(0, self.depth // 2) as pair:
                        self.x.store_raw(zero, pair * width + first)

    def multiply(self, column: Value, sums: Pointer, pitch: int) -> None:
        """sums (rows, NR), `pitch` elements apart: the columns of the result from `column` on. Where they would hang over,
        the last ones are computed again, and put where they belong."""
        k, side = self.k, amx.SIDE
        start = k.min(column, self.cols - NR) if self.cols % NR else column
        for width, wanted in self._widths():
            with k.when(wanted):
                self._product(self.weight.at(start * self.depth), width)
                for first in range(0, width, side):
                    with k.when(self.rows > first):
                        for half in range(0, NR, side):
                            at = self.out.at((column - start + half) * width + first)
                            square = transpose(k, [at.load(i * width) for i in range(side)])
                            for i, line in enumerate(square):
                                sums.store(line, (first + i) * pitch + half)

    def _product(self, at: Pointer, width: int) -> None:
        """The sums of NR rows of the weight. With few tiles at a time they are read nearly as they lie, which the processor sees
        and reads ahead. Where it is asked to, it fetches as many bytes behind them, which this thread most likely claims next."""
        k, side = self.k, amx.SIDE
        high, wide = (self.choice.together, 1) if width == side else (2, 2)  # tiles of the weight, and of x
        behind = NR * 2 * self.depth
        for top in range(0, NR, high * side):
            for first in range(0, width, wide * side):
                for tile in range(high * wide):
                    amx._tile(k, "tilezero", tile)
                with k.loop(0, self.depth // amx.TILE_K) as s:
                    if first == 0 and self.choice.fetch:
                        fetched = high * amx.TILE_BYTES
                        ahead = at.bytes(behind + top * 2 * self.depth + s * fetched)
                        for line in range(0, fetched, amx.LINE):
                            k.prefetch(ahead.bytes(line), near=self.choice.fetch == 1)
                    b = self.x.bytes(s * (amx.LINE * width) + 4 * first)
                    for j in range(wide):
                        amx._tile(k, "tileloadd64", 7 - j, ("ptr", b.bytes(amx.LINE * j).ref), ("i64", str(4 * width)))
                    for i in range(high):
                        a = at.bytes((top + i * side) * 2 * self.depth + s * amx.LINE)
                        which = 4 + i % (4 - wide)
                        amx._tile(k, "tileloadd64", which, ("ptr", a.ref), ("i64", str(2 * self.depth)))
                        for j in range(wide):
                            amx._tile(k, "tdpbf16ps", i * wide + j, which, 7 - j)
                for i in range(high):
                    for j in range(wide):
                        where = self.out.bytes(4 * ((top + i * side) * width + first + side * j))
                        amx._tile(k, "tilestored64", i * wide + j, ("ptr", where.ref), ("i64", str(4 * width)))

    def end(self) -> None:
        amx.release(self.k)

    def _widths(self) -> list[tuple[int, Value]]:
        """How wide x is packed, and whether it is."""
        bounds = zip((0, *WIDTHS), WIDTHS, strict=False)
        return [(width, (self.rows > below) & (self.rows <= width)) for below, width in bounds]
