"""The kernel that multiplies activations with a weight, on register tiles or on AMX tiles.

Shapes: a (rows, depth) row-major activations; weight (cols, depth) forward, (depth, cols) for the input gradient; out (rows, cols).

The arithmetic hides the memory, unless the choice says otherwise: while a tile is multiplied, the lines that it will write or read
are prefetched and a part of the next panel is packed. Where GELU's slope comes behind, the tile before is finished meanwhile too:
its loads and look-ups fill what the multiplier leaves. GELU itself is slower so: its division holds the multiplier up wherever it
stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile, packed_itemsize, part_of
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.epilogue import Epilogue
from barellm.cpu.kernels.gemm.gemm_mainloop import GemmMainloop
from barellm.cpu.kernels.gemm.microkernel import left_rows, tile_product
from barellm.cpu.kernels.gemm.packing import LINE, beside, panel_bytes, uses_vnni
from barellm.cpu.kernels.pointwise.activations import emitter_of
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.pointwise.elementwise import SLOPES

PAST_BYTES = 1 << 20  # results of AMX tiles that are larger leave the caches: they are written past them
LATER = 512  # depth of a tile that is long enough to finish another one beside it


class RegisterProduct(GemmMainloop):
    """Tiles of rows in registers. Their sums go to the epilogue at once, or are held in memory before: those of a tile, where the
    epilogue needs the registers, or those of the whole claim, where the depth goes in parts."""

    def __init__(
        self, k: KernelBuilder, a: Pointer, *operands: Any, through_memory: bool, slope: bool, **sizes: Any
    ) -> None:
        """`through_memory`: the epilogue wants sums from memory. `slope`: a tile may be finished beside the next one."""
        super().__init__(k, a, *operands, **sizes)
        ahead = self.choice.ahead
        self.pair, self.fetch = uses_vnni(k.isa, a.dtype), ahead == "fetch"
        self.spare = ahead != "nothing" and beside(k.isa, a.dtype)
        self.held: Pointer | None = None
        if self.parts > 1:
            self.held = self.scratch.bytes(2 * self.nbytes).as_dtype("fp32")
        elif through_memory:
            self.held = Pointer(k, k.alloca("float", self.tile.mr * self.span), "fp32")
        self.later = self.spare and slope and self.depth >= LATER

    def multiply_panel(self, panel: Pointer) -> None:
        k, tile = self.k, self.tile
        if self.spare:
            self.follow(self.whole - self.first)
        self.panel, self.left = panel, self.a.at(self.p * self.part)
        with k.loop(self.first, self.whole, tile.mr) as row:
            self._whole_tile(row)
        if self.later:
            any_tile = self.whole > self.first
            with k.when(any_tile if self.ends is None else any_tile & self.ends), k.loop(0, tile.mr) as r:
                self._finish_row(self.whole - tile.mr, r)
        if self.spare:
            self.two.followed()
        small = tile.tail()
        with k.loop(self.whole, self.last, small.mr) as row:
            self._rest(row, small, k.min(self.last - row, small.mr))

    def _whole_tile(self, row: Value) -> None:
        sums = self._sums(row, self.tile, None)
        if self.held is None:
            self._finish_sums(row, sums)
            return
        self._hold(row, sums)
        if not self.later:
            self._finish_rows(row, self.k.int(self.tile.mr))

    def _rest(self, row: Value, small: Tile, count: Value) -> None:
        """`count` rows of the tile `small`: what hangs over computes the last row again."""
        sums = self._sums(row, small, count)
        if self.held is None:
            self._finish_sums(row, sums, count)
            return
        self._hold(row, sums)
        self._finish_rows(row, count)

    def _sums(self, row: Value, tile: Tile, count: Value | None) -> list[list[Value]]:
        k = self.k
        rows = [i if count is None else k.min(k.int(i), count - 1) for i in range(tile.mr)]
        left, tail = left_rows(
            k, self.left.at(row * self.stride), rows, self.pair, depth=self.depth, stride=self.stride
        )
        units = self.length // 2 if self.pair else self.length
        begun = (self.p > 0, self._held_row(row, 0)) if self.parts > 1 else None
        ahead = partial(self._ahead, row) if count is None and (self.fetch or self.spare) else None
        return tile_product(
            k, tile, left, self.panel, units, self.pair, tail=tail, ahead=ahead, sums=begun, ends=self.ends
        )

    def _ahead(self, row: Value, r: Value) -> None:
        """Do the work beside row r of the tile at `row`: fetch ahead, finish rows of the tile before, and pack."""
        k = self.k
        with k.when(self.ends) if self.ends is not None else nullcontext():
            if self.fetch:
                self.finish.fetch(row + r)
            if self.later:
                with k.when(row > self.first):
                    self._finish_row(row - self.tile.mr, r)
        if self.fetch and self.parts > 1:
            # The next tile's rows; each is a stream of its own, too short for the processor to see it.
            for line in range(0, self.part * self.a.itemsize, LINE):
                k.prefetch(self.left.at((row + self.tile.mr + r) * self.stride).bytes(line), near=False)
        if self.spare:
            self.two.some()

    def _held_row(self, row: Value, r: Any) -> Pointer:
        """The place in which the sums of row `row` + r are held."""
        assert self.held is not None
        if self.parts == 1:
            return self.held.at(self.k.int(r) * self.span)
        return self.held.at(((self.index - self.first_panel) * self.block + (row - self.first) + r) * self.span)

    def _hold(self, row: Value, sums: list[list[Value]]) -> None:
        for r, values in enumerate(sums):
            for v, x in enumerate(values):
                self._held_row(row, 0).store(x, r * self.span + v * self.k.lanes)

    def _finish_sums(self, row: Value, sums: list[list[Value]], count: Value | None = None) -> None:
        """Finish sums that are in registers: `count` rows of them, or all."""
        k = self.k
        for r, values in enumerate(sums):
            with k.when(k.int(r) < count) if count is not None else nullcontext():
                for v, x in enumerate(values):
                    self.finish.put(row + r, v, x)

    def _finish_rows(self, row: Value, many: Value) -> None:
        """Finish sums that are in memory, where the last part of the depth has been added."""
        k = self.k
        with k.loop(0, many if self.ends is None else k.select(self.ends, many, 0)) as r:
            self._finish_row(row, r)

    def _finish_row(self, row: Value, r: Any) -> None:
        k = self.k

        def put(v: Any) -> None:
            self.finish.put(row + r, v, self._held_row(row, r).load(v * k.lanes))

        if self.later:  # all of a row at once need more registers than the next tile leaves
            with k.loop(0, self.tile.vectors) as v:
                put(v)
        else:
            for v in range(self.tile.vectors):
                put(v)


class AmxProduct(GemmMainloop):
    """Tiles of rows in AMX tile registers, a part of the depth at a time: a panel's part stays in the first cache while all rows of
    the claim pass, and the next one is packed beside. Sums wait in scratch, tile by tile, for the next part."""

    def __init__(self, k: KernelBuilder, *operands: Any, **sizes: Any) -> None:
        super().__init__(k, *operands, **sizes)
        self.copied = self.scratch.bytes(2 * self.nbytes)
        self.held = self.copied.bytes(amx.left_bytes(self.part)).as_dtype("fp32")

    def run(self) -> None:
        amx.configure(self.k)
        super().run()
        amx.release(self.k)

    def multiply_panel(self, panel: Pointer) -> None:
        k, rows = self.k, self.tile.mr
        amx.pad_panel(k, panel, self.length)
        self.follow((self.whole - self.first) // rows * (k.int(self.length) // amx.TILE_K))
        with k.loop(self.first, self.whole, rows) as row:
            self._rows(panel, row, None)
        self.two.followed()
        with k.loop(self.whole, self.last, rows) as row:
            self._rows(panel, row, k.min(self.last - row, rows))

    def _rows(self, panel: Pointer, row: Value, count: Value | None) -> None:
        """A tile of rows, or the first `count` of one."""
        k = self.k
        a = self.a.at(row * self.stride + self.p * self.part)
        sums = self._held(row)
        rest = self.depth - (self.parts - 1) * self.part
        how: dict[str, Any] = {"begun": self.p > 0 if self.parts > 1 else None, "stride": self.stride}
        if count is None:
            how["beside"] = partial(self._beside, row)

        def multiply(depth: int) -> None:
            amx.multiply_rows(k, sums, a, count, panel, self.copied, depth=depth, **how)

        if self.ends is None or rest == self.part:
            multiply(self.part if self.parts > 1 else self.depth)
        else:
            with k.when(self.ends):
                multiply(rest)
            with k.otherwise(self.ends):
                multiply(self.part)
        with (
            nullcontext() if self.ends is None else k.when(self.ends),
            k.loop(0, self.tile.mr if count is None else count) as r,
        ):
            self.finish.put_row(row + r, [sums.load(r * self.span + v * k.lanes) for v in range(self.tile.vectors)])

    def _beside(self, row: Value, step: Value) -> None:
        """What is done in a step of the tile at `row`: packing, and fetching the lines of the result in the last part."""
        k, each = self.k, self.tile.mr * amx.TILE_K // self.part
        self.two.some()
        with nullcontext() if self.ends is None else k.when(self.ends):
            for i in range(max(each, 1)):
                self.finish.fetch(row + step * each + i)

    def _held(self, row: Value) -> Pointer:
        """The sums of a tile of rows, those of other panels beside them where they wait for the next turn."""
        at = (row - self.first) // self.tile.mr
        if self.turns > 1:
            at = at + (self.index - self.first_panel) * (self.block // self.tile.mr)
        return self.held.at(at * (self.tile.mr * self.span))


def product(
    k: KernelBuilder, out, second, a, weight, bias, other, row_begin, row_limit,
    *, cols: int, depth: int, transposed: bool, dims: tuple[str, ...], inner: int, epilogues: tuple[str, ...], mode: str,
    choice: GemmConfig, strides: tuple[tuple[str, int], ...] = (), scale: Value | None = None, factor: float = 1.0, least: int = 0,
) -> None:  # fmt: skip
    """out (rows, cols) = a (rows, depth) @ weight, and then the `epilogues` (epilogue.py), of which "scaled" and "times" want
    `scale` and "rescale" a `factor`. Rows
    are [row_begin, row_begin + row_limit) of the run's `k.num_elements(dims, inner)`; pointers are to the first of them.
    `strides`: elements from a row to the next, of operands that are views. A run that has fewer rows than `least` does nothing."""
    assert a.dtype == weight.dtype, "both operands of a product have the program's compute dtype"
    extent = k.num_elements(dims, inner)
    rows = k.min(extent - row_begin, row_limit)
    if least:
        rows = k.select(extent < least, 0, rows)

    def run(kind: type[GemmMainloop], *operands: Any, **sizes: Any) -> None:
        kind(k, a, weight, rows, *operands, transposed=transposed, **sizes).run()

    multiply(
        k, (RegisterProduct, AmxProduct), run, out, second, a, bias, other, cols=cols, depth=depth, epilogues=epilogues,
        mode=mode, choice=choice, strides=dict(strides), scale=scale, factor=factor, rows=rows,
    )  # fmt: skip


def multiply(
    k: KernelBuilder, kinds: tuple[type[RegisterProduct], type[AmxProduct]], run: Callable[..., None], out, second, a, bias, other,
    *, cols: int, depth: int, epilogues: tuple[str, ...], mode: str, choice: GemmConfig, strides: Mapping[str, int],
    scale: Value | None = None, factor: float = 1.0, rows: Value | None = None,
) -> None:  # fmt: skip
    """Calls `run(kind, finish, **sizes)` of the kind, on register tiles or on AMX tiles, that this machine has for the dtype
    of a. `rows` is given where the results are rows of (rows, cols) that begin with a cache line."""
    part = kc_of(k.isa, a.dtype, depth, choice)
    long = [name for name in epilogues if (emitter := emitter_of(name)) and emitter.long]
    through_memory = bool(long)
    tiles = amx.uses_tiles(k.isa, a.dtype)
    past = None
    if tiles and rows is not None and mode == "store" and cols % choice.tile.nr(k.isa) == 0:
        results = {"out": out, "second": second}
        if not results.keys() & strides.keys():
            past = rows * (cols * sum(p.itemsize for p in results.values() if p is not None)) > PAST_BYTES

    def finish(col: Value) -> Epilogue:
        early = not tiles and not through_memory and part == depth
        how: dict[str, Any] = {"cols": cols, "epilogues": epilogues, "mode": mode, "early": early, "scale": scale}
        how |= {"strides": strides, "factor": factor, "past": past}
        return Epilogue(k, col, choice.tile, out, second, bias, other, **how)

    sizes: dict[str, Any] = {"cols": cols, "depth": depth, "part": part, "choice": choice}
    sizes["stride"] = strides.get("a", depth)
    if tiles:
        run(kinds[1], finish, **sizes)
    else:
        slope = any(name in SLOPES for name in long)
        run(kinds[0], finish, through_memory=through_memory, slope=slope, **sizes)


def kc_of(isa: ISA, dtype: str, depth: int, choice: GemmConfig) -> int:
    """Depth that is packed and multiplied at a time."""
    if amx.uses_tiles(isa, dtype):
        return amx.kc_of(depth)
    return choice.part or part_of(isa, depth, packed_itemsize(isa, dtype))


def gemm_scratch_bytes(isa: ISA, dtype: str, depth: int, choice: GemmConfig) -> int:
    """Bytes: two packed panels; the sums of a claim, those of vector registers only between two parts of the depth; the copied
    left operand of AMX."""
    part, span = kc_of(isa, dtype, depth, choice), choice.tile.nr(isa)
    tiles = amx.uses_tiles(isa, dtype)
    sums = 4 * max(choice.rows, choice.long_rows) * choice.columns if part < depth or tiles else 0
    return 2 * panel_bytes(isa, dtype, part, span) + sums + (amx.left_bytes(part) if tiles else 0)
