"""GemmMainloop: one thread's loop over output tiles of a GEMM, dynamically scheduled; gemm.py has the micro-kernels.

    parallel_for over (MC rows, NC columns):         work items; threads take them from a shared counter
      for each group of KC blocks                    one KC block, or all of them where K is short
        for each panel of NR columns of the item
          for each KC block of the group             acquire: the packed B panel, (KC, NR)
            for each tile of MR rows                 micro-kernel; between its steps the thread packs the next B panel

Who packs: each thread its own B panels, in two buffers of its scratch (double-buffered, no barrier). Resident: a B panel in the
L1, the item's MC x KC of A, unpacked, in the L2. Sums of several KC blocks wait in fp32 in the thread's scratch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from barellm.cpu.gemm_config import AMX_ITEMS_PER_THREAD, AMX_K_GROUP, ITEMS_PER_THREAD, GemmConfig, Tile
from barellm.cpu.kernel import KernelBuilder, Pointer, Value
from barellm.cpu.kernels.gemm import amx, epilogue, microkernel, packing
from barellm.program.integers import ceil_div


@dataclass
class GemmMainloop(ABC):
    """out (rows, cols) = epilogue(a (rows, depth) @ weight). There are `panels` B panels of `nr` columns, `k_blocks` KC blocks, and
    `m_blocks` x `n_groups` work items of `mc` rows (MR's multiple) x a group of panels. `scratch`: the thread's, which begins with
    two packed panels of `panel_nbytes` bytes. A `k_group` is the number of KC blocks that one panel passes before the next panel
    does; there are `k_groups`.

    State of the loops: an item's rows are [row_begin, row_end), of which [row_begin, full_end) are full tiles; `panel_index` and
    its first column `col`; `k_block` and its depth `depth_here`; `is_last_k`, None where there is one KC block."""

    k: KernelBuilder
    a: Pointer
    # A pointer to a row-major matrix (depth, cols), or (cols, depth) where `transposed`; or an object whose
    # `pack(mainloop, into, panel_id)` is the task that packs a KC block of a panel of it, as `_pack` here does.
    weight: Any
    rows: Value
    make_epilogue: Callable[[Value], epilogue.Epilogue]  # make_epilogue(col): of the panel from column `col` on
    cols: int
    depth: int
    stride: int  # lda, elements from a row of a to the next
    kc: int  # depth of a block
    transposed: bool
    config: GemmConfig

    def __post_init__(self) -> None:
        k, config = self.k, self.config
        self.tile = config.tile
        self.nr = self.tile.nr(k.isa)
        self.panels = ceil_div(self.cols, self.nr)
        self.k_blocks = ceil_div(self.depth, self.kc)
        # The M side of work items: blocks of LONG_MC rows, or of MC rows where a thread would get too few items.
        long_blocks = k.ceil_div(self.rows, config.long_mc)
        too_few = long_blocks * self.panels < k.threads * ITEMS_PER_THREAD
        self.m_blocks = k.max(k.select(too_few, k.ceil_div(self.rows, config.mc), long_blocks), 0)
        self.mc = even_rows(k, self.rows, self.m_blocks, self.tile)
        self.use_amx = amx.uses_tiles(k.isa, self.a.dtype)
        self.k_group = min(AMX_K_GROUP, self.k_blocks) if self.use_amx and self.transposed else 1
        self.k_groups = ceil_div(self.k_blocks, self.k_group)
        min_items = AMX_ITEMS_PER_THREAD if self.use_amx else ITEMS_PER_THREAD // 2
        self.n_groups = panel_groups(k, self.panels, config.nc // self.nr, self.m_blocks, min_items)
        self.scratch = k.thread_scratch("i32")
        self.panel_nbytes = packing.panel_bytes(k.isa, self.a.dtype, self.kc, self.nr)

    @abstractmethod
    def multiply_panel(self, panel) -> None:
        """Run the micro-kernel over the rows of the item with a packed B panel (KC, NR)."""

    def run(self) -> None:
        """The loops of the module's docstring, which set the class's state. Loops that run once are left out. An item reads a, the
        weight and its own scratch, and writes its own rows and columns of out, so items run in any order, in parallel."""
        k = self.k
        self.b_panels = packing.PanelBuffers(k, self.scratch, self.panel_nbytes, self._pack)
        with k.parallel_for(self.m_blocks * self.n_groups) as self.item:
            row_block, group = self._block_of(self.item)
            self.first_panel = group * self.panels // self.n_groups
            self.last_panel = (group + 1) * self.panels // self.n_groups
            self.row_begin = row_block * self.mc
            self.row_end = k.min(self.row_begin + self.mc, self.rows)
            self.full_end = self.row_end - (self.row_end - self.row_begin) % self.tile.mr
            k_loop = k.loop(0, self.k_blocks, self.k_group) if self.k_groups > 1 else nullcontext(k.int(0))
            with (
                k_loop as self.k_begin,
                k.loop(self.first_panel, self.last_panel) as self.panel_index,
                self._k_blocks() as self.k_block,
            ):
                self.col = self.panel_index * self.nr
                self.epilogue = self.make_epilogue(self.col)
                self.is_last_k = (self.k_block + 1).equals(self.k_blocks) if self.k_blocks > 1 else None
                self.depth_here = self._kc_of(self.is_last_k)
                self.panel_id = self.panel_index * self.k_blocks + self.k_block
                self.multiply_panel(self.b_panels.acquire(self.panel_id))

    def _k_blocks(self) -> Any:
        """Loop over the KC blocks of a group."""
        if self.k_group == 1:
            return nullcontext(self.k_begin)
        return self.k.loop(self.k_begin, self.k.min(self.k_begin + self.k_group, self.k_blocks))

    def pack_next(self, calls) -> None:
        """Pack the B panel that is needed next during this panel's full tiles, in `calls` calls of `b_panels.step`. Its id is panel
        index * k_blocks + KC block. The innermost loop that goes on decides, so it selects last."""
        k = self.k
        # The next item's first panel: this thread takes that item most likely (if not, the panel is packed again).
        _, next_group = self._block_of(self.item + 1)
        exists = self.item + 1 < self.m_blocks * self.n_groups
        next_id = next_group * self.panels // self.n_groups * self.k_blocks
        if self.k_groups > 1:  # the first panel of the next group of KC blocks
            more_groups = self.k_begin + self.k_group < self.k_blocks
            exists = exists | more_groups
            next_id = k.select(more_groups, self.first_panel * self.k_blocks + self.k_begin + self.k_group, next_id)
        more_panels = self.panel_index + 1 < self.last_panel
        exists = exists | more_panels
        next_id = k.select(more_panels, (self.panel_index + 1) * self.k_blocks + self.k_begin, next_id)
        if self.k_group > 1:  # the same panel's next KC block
            more_blocks = self.k_block + 1 < k.min(self.k_begin + self.k_group, self.k_blocks)
            exists = exists | more_blocks
            next_id = k.select(more_blocks, self.panel_id + 1, next_id)
        self.b_panels.pack_next(next_id, exists, calls)

    def block_of_panel(self, panel_id) -> tuple[Value, Value, Any]:
        """(first column, number, depth) of KC block panel_id % k_blocks of panel panel_id // k_blocks."""
        col, k_block = panel_id // self.k_blocks * self.nr, panel_id % self.k_blocks
        return col, k_block, self._kc_of((k_block + 1).equals(self.k_blocks) if self.k_blocks > 1 else None)

    def _block_of(self, item) -> tuple[Value, Value]:
        """(block of MC rows, group of panels) of a work item."""
        return microkernel.block_of_item(item, self.config, self.m_blocks, self.n_groups)

    def _kc_of(self, is_last_k) -> Any:
        """The depth of a KC block; the last may be shorter."""
        last_kc = self.depth - (self.k_blocks - 1) * self.kc
        return self.depth if is_last_k is None else self.k.select(is_last_k, self.k.int(last_kc), self.kc)

    def _pack(self, into, panel_id) -> packing.PackTask:
        """The task that packs KC block panel_id % k_blocks of panel panel_id // k_blocks of the weight to `into`, [k unit][NR]."""
        if not isinstance(self.weight, Pointer):
            return self.weight.pack(self, into, panel_id)
        k, kc = self.k, self.kc
        col, k_block, depth = self.block_of_panel(panel_id)
        if self.transposed:
            even = kc % 8 == 0 and self.depth % 8 == 0  # 8: elements of a chunk of VNNI pairs
            sizes = {"cols": self.cols, "stride": self.depth, "depth": depth, "even": even, "nr": self.nr}
            fetch = partial(self._prefetch, col + self.nr, k_block) if self.use_amx else None
            return packing.PackBTransposed(k, into, self.weight.at(k_block * kc), col, fetch=fetch, **sizes)
        ragged = self.cols if self.cols % self.nr else None  # the last panel is zero-padded
        w = self.weight.at(k_block * (kc * self.cols))
        return packing.PackB(k, into, w, col, depth, stride=self.cols, width=self.nr, cols=ragged, columns_next=self.use_amx)

    def _prefetch(self, col, k_block, i) -> None:
        """With chunk i of the packing of KC block `k_block`: prefetch into the L2 four lines of the next panel, from column `col`
        on, packed a group later. In memory order, so that the hardware prefetcher sees a stream."""
        k, row_lines = self.k, self.k_group * self.kc * self.weight.itemsize // packing.LINE  # of a group, of one column
        # Which line of the group's panel, counted column after column.
        at = (k_block % self.k_group) * (self.kc * self.nr * self.weight.itemsize // packing.LINE) + i * 4
        piece = self.weight.at((col + at // row_lines) * self.depth + k_block // self.k_group * (self.k_group * self.kc))
        for line in range(4):
            k.prefetch(piece.bytes((at % row_lines + line) * packing.LINE), near=False)


def panel_groups(k, panels: int, max_panels: int, m_blocks, min_items: int) -> Value:
    """The number of groups into which `panels` are divided, the N side of work items: groups of at most `max_panels` panels, at
    least `min_items` items a thread together with `m_blocks`, and a multiple of the thread count."""
    if max_panels == 1:
        return k.int(panels)
    wanted = k.max(k.ceil_div(k.threads * min_items, k.max(m_blocks, 1)), ceil_div(panels, max_panels))
    return k.min(k.ceil_div(wanted, k.threads) * k.threads, panels)


def even_rows(k, rows, blocks, tile: Tile) -> Value:
    """MC such that `blocks` blocks of rows are as even as can be: a multiple of MR."""
    tile_rows = k.max(blocks, 1) * tile.mr  # rows of one tile of each block
    return (rows + (tile_rows - 1)) // tile_rows * tile.mr
