"""The weight-gradient GEMM (wgrad): dweight (N, K) = dy^T x, contracted over tokens.

    parallel_for over (MC rows, NC columns) of dweight
      for each chunk of tokens (fixed by the shape: split-K, added in order)
        pack A: MC columns of dy, tile by tile (packing.PackedA)
        for each panel of NR columns
          acquire: the packed B panel of x, (chunk, NR)
          for each tile of MR rows: micro-kernel; it overlaps packing of the next B panel and A tile, and prefetches of dweight

Both operands are packed (bf16: in VNNI layout, pairs of tokens) in the thread's scratch, so no transposed copy of an activation
exists. The packed A of a chunk stays in the L2, the B panel in the L1. Chunks are added in order, so the bits do not depend on the
blocking (gemm_config.py)."""

from contextlib import nullcontext
from functools import partial
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile, token_chunk
from barellm.cpu.kernel import ISA, Value
from barellm.cpu.kernels.gemm import amx, packing, weight_gradient_amx
from barellm.cpu.kernels.gemm.microkernel import (
    add_previous_sums,
    block_of_item,
    broadcast_packed,
    microkernel,
    overlap_calls,
    prefetch_row,
)
from barellm.cpu.kernels.optim.squares import BlockSum, block_number
from barellm.program.integers import ceil_div, round_up

NONTEMPORAL_BYTES = 1 << 20  # a gradient of this many bytes that is stored, not added to, leaves the caches anyway


class WgradEpilogue:
    """The epilogue of both wgrad kernels: accumulators, times `scale` (None: 1), are stored or added to dweight (N, K) fp32, a row
    of a tile at a time. `keep`: whether (i1; None: no) the op adds to dweight; chunks of tokens after the first always do."""

    def __init__(self, k, dweight, squares, tile: Tile, *, K: int, keep, scale, nontemporal: bool) -> None:
        """`squares`: sums of squares of the stored blocks (squares.py), None: not wanted. `nontemporal`: of rows that are only
        stored, whose vectors are whole."""
        self.k, self.dweight, self.squares, self.tile, self.K = k, dweight, squares, tile, K
        self.keep, self.scale, self.nontemporal = keep, scale, nontemporal

    def adds(self, t) -> Value:
        """Whether (i1) the chunk of tokens that starts at t is added to dweight."""
        return add_previous_sums(self.k, t, self.keep)

    def masks_of(self, col) -> list[Value | None]:
        """The masks of the vectors of a panel, from column `col` on; None: all lanes."""
        k, nr = self.k, self.tile.nr(self.k.isa)
        return [k.mask_first(self.K - col - v * k.lanes) if self.K % nr else None for v in range(self.tile.vectors)]

    def store_row(self, add: bool, row, col, sums, masks) -> list[Value]:
        """dweight[row, col ...] = `sums`, a vector for each of `masks`, scaled, with `add` plus the old one. Returns it."""
        stored = []
        for v, value in enumerate(sums):
            at = row * self.K + col + v * self.k.lanes
            value = value if self.scale is None else value * self.scale
            if add:
                value = value + self.dweight.load(at, masks[v])
            self.dweight.store(value, at, masks[v], nontemporal=self.nontemporal and not add)
            stored.append(value)
        return stored

    def store_amx_tile(self, t, row, count, col, sums) -> None:
        """The first `count` rows of an AMX tile at (row, col) of dweight, of the chunk of tokens that starts at t; `sums` (MR, NR)
        fp32 in scratch, written by amx.microkernel. Also the tile's sum of squares, where these are wanted."""
        k, nr = self.k, self.tile.nr(self.k.isa)
        adds, masks = self.adds(t), self.masks_of(col)
        block = None if self.squares is None else BlockSum(k)
        for add, branch in ((True, k.when), (False, k.otherwise)):  # code of its own without the load
            with branch(adds), k.loop(0, count) as r:
                values = [sums.load(r * nr + v * k.lanes) for v in range(self.tile.vectors)]
                stored = self.store_row(add, row + r, col, values, masks)
                if block is not None:
                    inside = zip(stored, masks, strict=True)
                    block.add_row([x if mask is None else k.select(mask, x, 0.0) for x, mask in inside])
        if block is not None:
            block.put(self.squares, block_number(row, col, self.K))


def weight_gradient(k, dweight, dy, x, row_begin, row_limit, squares=None, *, N: int, K: int, dims: tuple[str, ...], inner: int,
        mode: str, config: GemmConfig, strides: tuple[tuple[str, int], ...] = (), scale=None) -> None:  # fmt: skip
    """The wgrad kernel: dweight (N, K) fp32 = dy (tokens, N).T @ x (tokens, K), stored or accumulated as `mode` says. Tokens are
    [row_begin, row_begin + row_limit) of the run's `k.num_elements(dims, inner)`; dy and x point to the first. `strides`: row
    strides, in elements, of operands that are views. `scale` multiplies the sums of each chunk. `squares`: sums of squares of the
    stored blocks (squares.py); the blocks are AMX tiles, so only these give them."""
    dy_row, x_row = (dict(strides).get(name, width) for name, width in (("dy", N), ("x", K)))
    tokens = k.min(k.num_elements(dims, inner) - row_begin, row_limit)
    nontemporal = N * K * 4 >= NONTEMPORAL_BYTES and K % config.tile.nr(k.isa) == 0 and mode != "add"
    epilogue = WgradEpilogue(k, dweight, squares, config.tile, K=K, keep=k.keep(mode), scale=scale, nontemporal=nontemporal)
    sizes: dict[str, Any] = {"N": N, "K": K, "dy_row": dy_row, "x_row": x_row, "config": config}
    if amx.uses_tiles(k.isa, dy.dtype):
        weight_gradient_amx.weight_gradient_amx(k, dy, x, tokens, store=epilogue.store_amx_tile, **sizes)
        return
    assert squares is None, "blocks of squares are those of AMX tiles"
    WeightGradient(k, dy, x, tokens, epilogue, **sizes).run()


class WeightGradient:
    """One thread's loops over work items, chunks of tokens, panels and tiles, on vector registers. State of the loops: the work
    item `item`, rows [n0, n1) x columns [k0, k1) of dweight, of which rows [n0, full_end) are full tiles; the chunk of tokens from
    `t` on; `calls`, how often a micro-kernel calls `_pack_step`; the panel `panel` from column `col` on."""

    def __init__(self, k, dy, x, tokens, epilogue: WgradEpilogue, *, N: int, K: int, dy_row: int, x_row: int,
            config: GemmConfig) -> None:  # fmt: skip
        """dy (tokens, N) and x (tokens, K), row strides `dy_row` and `x_row` elements. Scratch: two B panels, then the packed A.
        Attributes: `chunk`: tokens that are packed at a time; `m_blocks` x `n_blocks` work items; `heights`: rows of each block."""
        self.k, self.dy, self.x, self.tokens, self.epilogue = k, dy, x, tokens, epilogue
        self.N, self.K, self.dy_row, self.x_row, self.config, self.tile = N, K, dy_row, x_row, config, config.tile
        self.nr, self.chunk, self.vnni = self.tile.nr(k.isa), token_chunk(k.isa), packing.uses_vnni(k.isa, dy.dtype)
        self.m_blocks, self.n_blocks = ceil_div(N, config.mc), ceil_div(K, config.nc)
        self.heights = [min(config.mc, N - n) for n in range(0, N, config.mc)]
        self.tails = sorted({n % self.tile.mr for n in self.heights} - {0})  # rows of a block beyond its full tiles
        # Packing goes through one register, so it overlaps the micro-kernel with 16 too: gemm.py's transposes need more.
        self.overlap = config.overlap != "none"
        scratch, nbytes = k.thread_scratch("i32"), packing.panel_bytes(k.isa, dy.dtype, self.chunk, self.nr)
        self.b_panels = packing.PanelBuffers(k, scratch, nbytes, self._pack_b_panel)
        # Whether no tile of A hangs over dy's last column.
        inside = all(i * config.mc + round_up(n, self.tile.mr) <= N for i, n in enumerate(self.heights))
        self.packed_a = packing.PackedA(k, scratch.bytes(2 * nbytes), dtype=dy.dtype, mr=self.tile.mr, cols=N, stride=dy_row,
            max_depth=k.min(tokens, self.chunk), inside=inside, block=self._block_of_a)  # fmt: skip

    def _pack_b_panel(self, into, number) -> packing.PackTask:
        """The task that packs B panel `number`, t * K + col: columns [col, col + nr) of x, tokens from t on."""
        t, col = number // self.K, number % self.K
        ragged = self.K if self.K % self.nr else None
        source, depth = self.x.at(t * self.x_row), self.k.min(self.tokens - t, self.chunk)
        return packing.PackB(self.k, into, source, col, depth, stride=self.x_row, width=self.nr, cols=ragged)

    def _block_of_a(self, number) -> packing.BlockOfA:
        """Block `number` of A, t * m_blocks + m_block: MC columns of dy, tokens from t on."""
        k = self.k
        t = number // self.m_blocks
        first = number % self.m_blocks * self.config.mc
        b = self.dy.at(t * self.dy_row)
        last = k.min(first + self.config.mc, self.N)
        return packing.BlockOfA(b, first, last, depth=k.min(self.tokens - t, self.chunk))

    def run(self) -> None:
        """The loops of the module's docstring: work items, chunks of tokens, B panels of x. A, of dy, is packed once a chunk."""
        k, tile, chunk, mc, nc = self.k, self.tile, self.chunk, self.config.mc, self.config.nc
        with k.when(self.tokens > 0), k.parallel_for(self.m_blocks * self.n_blocks) as self.item:
            m_block, n_block = block_of_item(self.item, self.config, self.m_blocks, self.n_blocks)
            self.n0, self.k0 = m_block * mc, n_block * nc
            self.n1, self.k1 = k.min(self.n0 + mc, self.N), k.min(self.k0 + nc, self.K)
            self.full_end = self.n1 - (self.n1 - self.n0) % tile.mr if self.tails else self.n1
            with k.loop(0, self.tokens, chunk) as self.t:
                depth = k.min(self.tokens - self.t, chunk)
                self.k_units = (depth + 1) >> 1 if self.vnni else depth
                self.calls = overlap_calls(k, tile, self.k_units)
                self.packed_a.acquire(self.t * self.m_blocks + m_block, self.calls)
                self.adds = self.epilogue.adds(self.t)
                with k.loop(self.k0, self.k1, self.nr) as self.col:
                    self._multiply_panel()

    def _multiply_panel(self) -> None:
        """All rows of the item x the B panel of x from column `col` on, [k unit][NR]: full tiles, then the tail."""
        k, tile = self.k, self.tile
        number = self.t * self.K + self.col
        self.panel = self.b_panels.acquire(number)
        if self.overlap:
            self._pack_next(number)
        self.masks = self.epilogue.masks_of(self.col)
        with k.loop(self.n0, self.full_end, tile.mr) as row:
            self._multiply_tile(row, tile)
        for tail in self.tails:
            with k.when((self.n1 - self.full_end).equals(tail)) if len(set(self.heights)) > 1 else nullcontext():
                self._multiply_tile(self.full_end, Tile(tail, tile.vectors))
        if self.overlap:
            self.b_panels.commit()

    def _pack_next(self, number) -> None:
        """Begin to pack the panel that follows panel `number`: in this chunk, in the next chunk, or the next item's first."""
        k, t, col = self.k, self.t, self.col
        more_panels, more_chunks = col + self.nr < self.k1, t + self.chunk < self.tokens
        _, next_n = block_of_item(self.item + 1, self.config, self.m_blocks, self.n_blocks)
        next_id = k.select(more_chunks, (t + self.chunk) * self.K + self.k0, next_n * self.config.nc)
        next_id = k.select(more_panels, number + self.nr, next_id)
        exists = more_panels | more_chunks | (self.item + 1 < self.m_blocks * self.n_blocks)
        self.b_panels.pack_next(next_id, exists, (self.n1 - self.n0) // self.tile.mr * self.calls)

    def _multiply_tile(self, row, tile: Tile) -> None:
        """The micro-kernel and the epilogue of a tile (at most MR rows) at row `row` of dweight and the panel's columns."""
        k = self.k
        load_a = broadcast_packed(k, self.packed_a.tile(row - self.n0), 4 * self.tile.mr, 4, self.vnni)
        overlapped = {"prefetch": partial(self._prefetch_c, row), "overlap": self._pack_step} if self.overlap else {}
        sums = microkernel(k, tile, load_a, self.panel, self.k_units, self.vnni, **overlapped)
        for add, branch in ((True, k.when), (False, k.otherwise)):
            with branch(self.adds):
                for r, values in enumerate(sums):
                    self.epilogue.store_row(add, row + r, self.col, values, self.masks)

    def _prefetch_c(self, row, r) -> None:
        """Prefetch the lines of row `row` + r of dweight that the epilogue touches; not those that it stores non-temporally."""
        if self.config.overlap != "prefetch":
            return
        target = self.epilogue.dweight.at((row + r) * self.K + self.col)
        with self.k.when(self.adds) if self.epilogue.nontemporal else nullcontext():
            prefetch_row(self.k, target, self.nr, write=True)

    def _pack_step(self) -> None:
        """What a micro-kernel overlaps: a piece of the next B panel, and of the next group of A's tiles."""
        self.b_panels.step()
        self.packed_a.step()


def wgrad_scratch_bytes(isa: ISA, dtype: str, tokens: int, config: GemmConfig) -> int:
    """Scratch bytes of a thread. `tokens`: the largest number of a run."""
    if amx.uses_tiles(isa, dtype):
        return weight_gradient_amx.thread_scratch_bytes(isa, dtype, tokens, config)
    chunk = token_chunk(isa)
    left = packing.panel_bytes(isa, dtype, min(tokens, chunk), round_up(round_up(config.mc, config.tile.mr), isa.lanes))  # packed A
    return 2 * packing.panel_bytes(isa, dtype, chunk, config.tile.nr(isa)) + left
