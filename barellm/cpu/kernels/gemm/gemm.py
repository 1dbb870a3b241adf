"""The GEMM kernel, activations times a weight: y = x W^T (fprop) and dx = dy W (dgrad), on vector registers or AMX tiles.

Shapes: a (rows, depth) row-major activations; weight (cols, depth) for fprop, (depth, cols) for dgrad; out (rows, cols).

The loops are gemm_mainloop.py's. Between the multiply-adds of a micro-kernel (unless the config's `overlap` says otherwise) the
thread prefetches the lines of C that the epilogue will touch and packs a piece of the next B panel. An epilogue with GELU's slope
is deferred: that of the tile before runs between them too, for its loads and table look-ups use other ports. GELU itself is slower
so: its division stalls the multiplier wherever it stands."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile, default_kc, packed_itemsize
from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.gemm import amx, epilogue, gemm_mainloop, packing
from barellm.cpu.kernels.gemm.microkernel import broadcast_a, microkernel
from barellm.cpu.kernels.loops import steps
from barellm.cpu.kernels.pointwise.activations import emitter_of
from barellm.program.ops.pointwise.elementwise import SLOPES

NONTEMPORAL_BYTES = 1 << 20  # larger results of AMX tiles leave the caches: they are stored non-temporally
DEFER_DEPTH = 512  # depth from which a micro-kernel is long enough to overlap another tile's epilogue


@dataclass
class VectorGemm(gemm_mainloop.GemmMainloop):
    """GEMM on vector registers: MR x NR accumulators. They reach the epilogue in registers or through memory: a tile's,
    where the epilogue needs the registers, or a work item's, where there are several KC blocks.

    `vnni`: units of the depth are bf16 pairs; `prefetch`, `overlap_packing`: what a micro-kernel overlaps, the lines of C and A
    that are needed next, the packing of the next B panel; `accumulators`: where they wait in memory (None: never): [MR][NR] fp32
    of a tile on the stack, or with several KC blocks those of a work item in scratch; `deferred_epilogue`: a tile's runs during
    the next tile. `panel`: the packed B panel that is multiplied; `a_rows`: A from this KC block's first column on."""

    through_memory: bool  # the epilogue reads accumulators from memory
    slope: bool  # the epilogue may overlap the next micro-kernel

    def __post_init__(self) -> None:
        super().__post_init__()
        k, dtype, overlap = self.k, self.a.dtype, self.config.overlap
        self.vnni = packing.uses_vnni(k.isa, dtype)
        self.prefetch = overlap == "prefetch"
        self.overlap_packing = overlap != "none" and packing.can_overlap_packing(k.isa, dtype)
        self.accumulators: Pointer | None = None
        if self.k_blocks > 1:
            self.accumulators = self.scratch.bytes(2 * self.panel_nbytes).as_dtype("fp32")  # behind the two B panels
        elif self.through_memory:
            self.accumulators = Pointer(k, k.alloca("float", self.tile.mr * self.nr), "fp32")
        self.deferred_epilogue = self.overlap_packing and self.slope and self.depth >= DEFER_DEPTH

    def multiply_panel(self, panel) -> None:
        """All rows of the item x one packed B panel [k unit][NR]: full tiles of MR rows, which overlap the packing of the next
        panel, then smaller tiles. A deferred epilogue runs one tile late, so the last full tile's is left after the loop."""
        k, tile = self.k, self.tile
        if self.overlap_packing:
            self.pack_next(self.full_end - self.row_begin)  # one call a row: `prefetch` of the micro-kernel
        self.panel = panel
        self.a_rows = self.a.at(self.k_block * self.kc)
        with k.loop(self.row_begin, self.full_end, tile.mr) as row:
            self._multiply_tile(row, tile, None)
        if self.deferred_epilogue:
            left = self.full_end > self.row_begin
            if self.is_last_k is not None:
                left = left & self.is_last_k
            with k.when(left), k.loop(0, tile.mr) as r:
                self._epilogue_of_row(self.full_end - tile.mr, r)
        if self.overlap_packing:
            self.b_panels.commit()
        small = tile.tail()  # fewer rows than MR: less is computed in vain
        with k.loop(self.full_end, self.row_end, small.mr) as row:
            self._multiply_tile(row, small, k.min(self.row_end - row, small.mr))

    def _multiply_tile(self, row, tile: Tile, count) -> None:
        """The micro-kernel and the epilogue of a full tile (`count` None), or of `count` rows of a small one, from row `row` on."""
        sums = self._microkernel(row, tile, count)
        if self.accumulators is None:
            self._epilogue_of_registers(row, sums, count)
            return
        self._store_accumulators(row, sums)
        if count is not None or not self.deferred_epilogue:
            rows = self.k.int(tile.mr) if count is None else count
            if self.is_last_k is not None:
                rows = self.k.select(self.is_last_k, rows, 0)  # none before the last KC block
            with self.k.loop(0, rows) as r:
                self._epilogue_of_row(row, r)

    def _microkernel(self, row, tile: Tile, count) -> list[list[Value]]:
        """The accumulators of `tile` from row `row` on, mr rows of fp32 vectors, this KC block's sums included. `count`: how many
        of the rows exist (None: all, and only then other work is overlapped); those beyond read the last one again."""
        k = self.k
        rows = [i if count is None else k.min(k.int(i), count - 1) for i in range(tile.mr)]
        load_a, tail = broadcast_a(k, self.a_rows.at(row * self.stride), rows, self.vnni, depth=self.depth, stride=self.stride)
        k_units = self.depth_here // 2 if self.vnni else self.depth_here
        # (whether a KC block came before, its sums).
        c_init = (self.k_block > 0, self._accumulator_row(row, 0)) if self.k_blocks > 1 else None
        overlaps = count is None and (self.prefetch or self.overlap_packing)
        overlapped = partial(self._overlap_with_microkernel, row) if overlaps else None
        return microkernel(k, tile, load_a, self.panel, k_units, self.vnni, tail=tail, prefetch=overlapped, c_init=c_init,
            is_last_k=self.is_last_k)  # fmt: skip

    def _overlap_with_microkernel(self, row, r) -> None:
        """What piece r (of MR) of the micro-kernel at `row` overlaps: prefetches of C and A, the last tile's epilogue, packing."""
        k = self.k
        with k.when(self.is_last_k) if self.is_last_k is not None else nullcontext():
            if self.prefetch:
                self.epilogue.prefetch(row + r)
            if self.deferred_epilogue:
                with k.when(row > self.row_begin):
                    self._epilogue_of_row(row - self.tile.mr, r)
        if self.prefetch and self.k_blocks > 1:
            # The next tile's rows of A, each a stream too short for the hardware prefetcher.
            for line in range(0, self.kc * self.a.itemsize, packing.LINE):
                k.prefetch(self.a_rows.at((row + self.tile.mr + r) * self.stride).bytes(line), near=False)
        if self.overlap_packing:
            self.b_panels.step()

    def _accumulator_row(self, row, r) -> Pointer:
        """Where the accumulators of row `row` + r of the current panel are in memory: NR fp32. With several KC blocks there are
        those of a whole work item, [panel][row][NR], else of one tile."""
        assert self.accumulators is not None
        if self.k_blocks == 1:
            return self.accumulators.at(self.k.int(r) * self.nr)
        return self.accumulators.at(((self.panel_index - self.first_panel) * self.mc + (row - self.row_begin) + r) * self.nr)

    def _store_accumulators(self, row, sums) -> None:
        """Store sums[r][v], NR columns of each row in vectors, as [row][NR] fp32 where the accumulators of row `row` on lie."""
        for r, values in enumerate(sums):
            for v, x in enumerate(values):
                self._accumulator_row(row, 0).store(x, r * self.nr + v * self.k.lanes)

    def _epilogue_of_registers(self, row, sums, count) -> None:
        """The epilogue of `count` rows (None: all) from registers, `sums` [row of the tile][vector]; row 0 is row `row` of C."""
        k = self.k
        for r, values in enumerate(sums):
            with k.when(k.int(r) < count) if count is not None else nullcontext():
                for v, x in enumerate(values):
                    self.epilogue.put(row + r, v, x)

    def _epilogue_of_row(self, row, r) -> None:
        """The epilogue of row `row` + r, whose NR accumulators are in memory (`_accumulator_row`)."""
        # Deferred: all of a row at once would need more registers than the next tile leaves.
        for v in steps(self.k, 0, self.tile.vectors, unrolled=not self.deferred_epilogue):
            self.epilogue.put(row + r, v, self._accumulator_row(row, r).load(v * self.k.lanes))


class AmxGemm(gemm_mainloop.GemmMainloop):
    """GEMM on AMX tile registers (amx.MR x amx.NR a tile). A (KC, NR) panel of B stays in the L1 while all rows of the item pass;
    the next one is packed between the tile instructions. Accumulators go through scratch, also between two KC blocks."""

    def __post_init__(self) -> None:
        """Scratch: two B panels; `padded_a`, a zero-padded tile of A's rows; `accumulators` [tile][MR][NR] fp32."""
        super().__post_init__()
        self.padded_a = self.scratch.bytes(2 * self.panel_nbytes)
        self.accumulators = self.padded_a.bytes(amx.padded_a_bytes(self.kc)).as_dtype("fp32")

    def run(self) -> None:
        with amx.tile_registers(self.k, used=True):
            super().run()

    def multiply_panel(self, panel) -> None:
        """All rows of the item x one packed B panel (VNNI), in tiles of MR; full ones overlap packing, a call a step."""
        k, rows = self.k, self.tile.mr
        amx.pad_panel(k, panel, self.depth_here)
        self.pack_next((self.full_end - self.row_begin) // rows * (k.int(self.depth_here) // amx.TILE_K))
        with k.loop(self.row_begin, self.full_end, rows) as row:
            self._row_tile(panel, row, None)
        self.b_panels.commit()
        with k.loop(self.full_end, self.row_end, rows) as row:
            self._row_tile(panel, row, k.min(self.row_end - row, rows))

    def _row_tile(self, panel, row, count) -> None:
        """The micro-kernel for a tile of MR rows, or the first `count` of one, from row `row` on; after the last KC block its
        epilogue. The accumulators [MR][NR] fp32 wait in scratch."""
        k = self.k
        a = self.a.at(row * self.stride + self.k_block * self.kc)
        sums = self._accumulators_of(row)
        last_kc = self.depth - (self.k_blocks - 1) * self.kc  # depth of the last KC block
        options: dict[str, Any] = {"begun": self.k_block > 0 if self.k_blocks > 1 else None, "stride": self.stride}
        if count is None:
            options["overlap"] = partial(self._overlap_with_step, row)

        # The depth of a block is a constant of the code: a shorter last block gets code of its own.
        depths = [(self.kc if self.k_blocks > 1 else self.depth, nullcontext())]
        if self.is_last_k is not None and last_kc != self.kc:
            depths = [(last_kc, k.when(self.is_last_k)), (self.kc, k.otherwise(self.is_last_k))]
        for depth, branch in depths:
            with branch:
                amx.microkernel_rows(k, sums, a, count, panel, self.padded_a, depth=depth, **options)
        with (
            nullcontext() if self.is_last_k is None else k.when(self.is_last_k),
            k.loop(0, self.tile.mr if count is None else count) as r,
        ):
            self.epilogue.store_row(row + r, [sums.load(r * self.nr + v * k.lanes) for v in range(self.tile.vectors)])

    def _overlap_with_step(self, row, step) -> None:
        """What overlaps a step of the tile at `row`: packing, and in the last KC block prefetches of C."""
        k, rows_per_step = self.k, self.tile.mr * amx.TILE_K // self.kc  # all MR rows in the KC / TILE_K steps
        self.b_panels.step()
        with nullcontext() if self.is_last_k is None else k.when(self.is_last_k):
            for i in range(max(rows_per_step, 1)):
                self.epilogue.prefetch(row + step * rows_per_step + i)

    def _accumulators_of(self, row) -> Pointer:
        """The accumulators of a tile of rows; one set for each panel where they wait for the next K group."""
        at = (row - self.row_begin) // self.tile.mr  # number of the tile
        if self.k_groups > 1:
            at = at + (self.panel_index - self.first_panel) * (self.mc // self.tile.mr)
        return self.accumulators.at(at * (self.tile.mr * self.nr))


def gemm(k, out, second, a, weight, bias, other, row_begin, row_limit, *, dims: tuple[str, ...], inner: int,
        strides: tuple[tuple[str, int], ...] = (), least: int = 0, **options) -> None:  # fmt: skip
    """The kernel: out (rows, cols) = a (rows, depth) @ weight, then the `epilogues` (epilogue.py), which may read `bias` (cols) and
    `other` (rows, cols) and write `second` (rows, cols). Rows are [row_begin, row_begin + row_limit) of the run's
    `k.num_elements(dims, inner)`; pointers are to the first of them. `strides`: (name, row stride in elements) of operands that are
    views. `least`: a run with fewer rows does nothing, since the skinny GEMM does them. `options`: as in `run_mainloop`."""
    assert a.dtype == weight.dtype, "both operands of a GEMM have the program's compute dtype"
    planned = k.num_elements(dims, inner)
    rows = k.min(planned - row_begin, row_limit)
    if least:
        rows = k.select(planned < least, 0, rows)
    run_mainloop(k, out, second, a, weight, rows, bias, other, strides=dict(strides), **options)


def run_mainloop(k, out, second, a, weight, rows, bias, other, *, cols: int, depth: int, transposed: bool,
        epilogues: tuple[str, ...], mode: str, config: GemmConfig, strides: Mapping[str, int], scale=None, factor: float = 1.0,
        streams: bool = True) -> None:  # fmt: skip
    """The GEMM of `rows` rows: its epilogue and its main loop, on AMX tiles or vector registers, what this ISA has for the dtype of
    a. `weight`: (cols, depth) where `transposed`, else (depth, cols); a pointer, or an object that packs itself (`GemmMainloop`).
    "scaled" and "times" use `scale`, "rescale" uses `factor`. `streams`: results of AMX tiles that exceed the caches are stored
    non-temporally. Other operands as in `gemm`. `mode`: out is stored ("store") or added to ("add"). `strides`: (name: row stride
    in elements) of operands that are views."""
    kc = kc_of(k.isa, a.dtype, depth, config)
    long = [name for name in epilogues if (emitter := emitter_of(name)) and emitter.long]
    through_memory = bool(long)  # a long epilogue needs the accumulators' registers
    use_amx = amx.uses_tiles(k.isa, a.dtype)
    nontemporal = None
    if use_amx and streams and mode == "store" and cols % config.tile.nr(k.isa) == 0:
        results = {"out": out, "second": second}
        if not results.keys() & strides.keys():
            nontemporal = rows * (cols * sum(p.itemsize for p in results.values() if p is not None)) > NONTEMPORAL_BYTES

    make_epilogue = partial(epilogue.Epilogue, k, config.tile, out, second, bias, other, cols=cols, epilogues=epilogues, mode=mode,
        scale=scale, bias_in_registers=not use_amx and not through_memory and kc == depth, strides=strides, factor=factor,
        nontemporal=nontemporal)  # fmt: skip
    sizes: dict[str, Any] = {"cols": cols, "depth": depth, "transposed": transposed, "kc": kc, "config": config}
    sizes["stride"] = strides.get("a", depth)
    if use_amx:
        AmxGemm(k, a, weight, rows, make_epilogue, **sizes).run()
    else:
        slope = any(name in SLOPES for name in long)
        VectorGemm(k, a, weight, rows, make_epilogue, through_memory=through_memory, slope=slope, **sizes).run()


def kc_of(isa: ISA, dtype: str, depth: int, config: GemmConfig) -> int:
    """KC: the depth of a packed block."""
    if amx.uses_tiles(isa, dtype):
        return amx.kc_of(depth)
    return config.kc or default_kc(isa, depth, packed_itemsize(isa, dtype))


def gemm_scratch_bytes(isa: ISA, dtype: str, depth: int, config: GemmConfig) -> int:
    """A thread's scratch bytes: two B panels; the item's accumulators (on vectors: of several KC blocks); AMX's padded rows."""
    kc, nr = kc_of(isa, dtype, depth, config), config.tile.nr(isa)
    use_amx = amx.uses_tiles(isa, dtype)
    sums = 4 * max(config.mc, config.long_mc) * config.nc if kc < depth or use_amx else 0
    return 2 * packing.panel_bytes(isa, dtype, kc, nr) + sums + (amx.padded_a_bytes(kc) if use_amx else 0)
