"""The weight-gradient GEMM (wgrad): dweight (N, K) = dy^T x, contracted over tokens, on vector registers or AMX tiles.

    parallel_for over (MC rows, NC columns) of dweight
      for each chunk of tokens (fixed by the shape: split-K, added in order)
        pack A: MC columns of dy, tile by tile (packing.PackedA)
        for each panel of NR columns
          acquire: the packed B panel of x, (chunk, NR)
          for each tile of MR rows: micro-kernel; it overlaps packing of the next B panel and A tile, and prefetches of dweight

Both operands are packed (bf16: in VNNI layout, pairs of tokens) in the thread's scratch, so no transposed copy of an activation
exists. The packed A of a chunk stays in the L2, the B panel in the L1. Chunks are added in order: no bit depends on blocking."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile, token_chunk
from barellm.cpu.kernel import ISA, KernelBuilder, Pointer, Value
from barellm.cpu.kernels.gemm import amx, microkernel, packing
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
        return microkernel.add_previous_sums(self.k, t, self.keep)

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
    use_amx = amx.uses_tiles(k.isa, dy.dtype)
    assert use_amx or squares is None, "blocks of squares are those of AMX tiles"
    (AmxWgrad if use_amx else VectorWgrad)(k, dy, x, tokens, epilogue, **sizes).run()


@dataclass
class WgradMainloop:
    """One thread's loops over work items, chunks of tokens, panels and tiles; the subclasses have the micro-kernels.

    State of the loops: the work item `item`, of `m_blocks` x `n_blocks`: rows [n0, n1) x columns [k0, k1) of dweight; the chunk of
    `chunk` tokens from `t` on; the panel of `nr` columns of x from `col` on. `scratch`: the thread's: two packed B panels first."""

    k: KernelBuilder
    dy: Pointer  # (tokens, N)
    x: Pointer  # (tokens, K)
    tokens: Value
    epilogue: WgradEpilogue
    N: int
    K: int
    dy_row: int  # elements from a row of dy to the next
    x_row: int  # and of x
    config: GemmConfig

    def __post_init__(self) -> None:
        self.tile = self.config.tile
        self.nr = self.tile.nr(self.k.isa)
        self.chunk = token_chunk(self.k.isa)
        self.m_blocks = ceil_div(self.N, self.config.mc)
        self.n_blocks = ceil_div(self.K, self.config.nc)
        self.ragged = self.K if self.K % self.nr else None  # x's columns where the last panel exceeds them
        self.scratch = self.k.thread_scratch("i32")

    def _begin_item(self) -> Value:
        """Set the rows and columns of work item `item`; returns the number of its block of rows."""
        k, mc, nc = self.k, self.config.mc, self.config.nc
        m_block, n_block = microkernel.block_of_item(self.item, self.config, self.m_blocks, self.n_blocks)
        self.n0, self.k0 = m_block * mc, n_block * nc
        self.n1, self.k1 = k.min(self.n0 + mc, self.N), k.min(self.k0 + nc, self.K)
        return m_block


class VectorWgrad(WgradMainloop):
    """Wgrad on vector registers. More state: rows [n0, full_end) of the item are full tiles; `calls`: how often a micro-kernel
    calls `_pack_step`; `panel`: the packed B panel; `masks` of its columns; `adds`: whether this chunk is added to dweight."""

    def __post_init__(self) -> None:
        """`heights`: rows of each block of rows; `tails`: rows of a block beyond its full tiles, each number that occurs."""
        super().__post_init__()
        k, mc, mr, dtype = self.k, self.config.mc, self.tile.mr, self.dy.dtype
        self.vnni = packing.uses_vnni(k.isa, dtype)
        self.heights = [min(mc, self.N - n) for n in range(0, self.N, mc)]
        self.tails = sorted({n % mr for n in self.heights} - {0})
        # Packing goes through one register, so it overlaps the micro-kernel with 16 too: gemm.py's transposes need more.
        self.overlap = self.config.overlap != "none"
        panel_nbytes = packing.panel_bytes(k.isa, dtype, self.chunk, self.nr)
        self.b_panels = packing.PanelBuffers(k, self.scratch, panel_nbytes, self._pack_b_panel)
        # Whether no tile of A hangs over dy's last column.
        inside = all(i * mc + round_up(n, mr) <= self.N for i, n in enumerate(self.heights))
        self.packed_a = packing.PackedA(k, self.scratch.bytes(2 * panel_nbytes), dtype=dtype, mr=mr, cols=self.N,
            stride=self.dy_row, max_depth=k.min(self.tokens, self.chunk), inside=inside, block=self._block_of_a)  # fmt: skip

    def _pack_b_panel(self, into, number) -> packing.PackTask:
        """The task that packs B panel `number`, t * K + col: columns [col, col + nr) of x, tokens from t on."""
        t, col = number // self.K, number % self.K
        source = self.x.at(t * self.x_row)
        depth = self.k.min(self.tokens - t, self.chunk)
        return packing.PackB(self.k, into, source, col, depth, stride=self.x_row, width=self.nr, cols=self.ragged)

    def _block_of_a(self, number) -> tuple[Pointer, Value, Value, Value]:
        """Block `number` of A, t * m_blocks + m_block: (dy from token t on, first column, last column + 1, tokens)."""
        k = self.k
        t = number // self.m_blocks
        first = number % self.m_blocks * self.config.mc
        b = self.dy.at(t * self.dy_row)
        last = k.min(first + self.config.mc, self.N)
        return b, first, last, k.min(self.tokens - t, self.chunk)

    def run(self) -> None:
        """The loops of the module's docstring: work items, chunks of tokens, B panels of x. A, of dy, is packed once a chunk."""
        k, tile, chunk = self.k, self.tile, self.chunk
        with k.when(self.tokens > 0), k.parallel_for(self.m_blocks * self.n_blocks) as self.item:
            m_block = self._begin_item()
            self.full_end = self.n1 - (self.n1 - self.n0) % tile.mr if self.tails else self.n1
            with k.loop(0, self.tokens, chunk) as self.t:
                depth = k.min(self.tokens - self.t, chunk)
                self.k_units = (depth + 1) >> 1 if self.vnni else depth
                self.calls = microkernel.overlap_calls(k, tile, self.k_units)
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
        _, next_n = microkernel.block_of_item(self.item + 1, self.config, self.m_blocks, self.n_blocks)
        next_id = k.select(more_chunks, (t + self.chunk) * self.K + self.k0, next_n * self.config.nc)
        next_id = k.select(more_panels, number + self.nr, next_id)
        exists = more_panels | more_chunks | (self.item + 1 < self.m_blocks * self.n_blocks)
        self.b_panels.pack_next(next_id, exists, (self.n1 - self.n0) // self.tile.mr * self.calls)

    def _multiply_tile(self, row, tile: Tile) -> None:
        """The micro-kernel and the epilogue of a tile (at most MR rows) at row `row` of dweight and the panel's columns."""
        k = self.k
        load_a = microkernel.broadcast_packed(k, self.packed_a.tile(row - self.n0), 4 * self.tile.mr, 4, self.vnni)
        overlapped = {"prefetch": partial(self._prefetch_c, row), "overlap": self._pack_step} if self.overlap else {}
        sums = microkernel.microkernel(k, tile, load_a, self.panel, self.k_units, self.vnni, **overlapped)
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
            microkernel.prefetch_row(self.k, target, self.nr, write=True)

    def _pack_step(self) -> None:
        """What a micro-kernel overlaps: a piece of the next B panel, and of the next group of A's tiles."""
        self.b_panels.step()
        self.packed_a.step()


class AmxWgrad(WgradMainloop):
    """Wgrad on AMX tile registers. For each chunk of tokens an item's MC columns of dy are packed as A tiles once (transposed, VNNI
    pairs of tokens), to `packed_a`, and stay in the L2. Columns of x pass in panels of NR, in KC blocks of tokens: one (KC, NR)
    block stays in the L1 while all A tiles pass, and the thread packs the next one (VNNI) between the tile instructions.

    More state: `packed_id`: the chunk and block of rows that is packed, t * m_blocks + m_block (-1: none); `end`: last token of the
    chunk + 1; `next_n`: the next item's block of columns; `sums`: accumulators of all rows [row][NR] fp32, which wait from one KC
    block to the next where there are `several`, else those of one tile; `below`: bytes from an A tile to that 16 rows below."""

    def __post_init__(self) -> None:
        super().__post_init__()
        k = self.k
        panel_nbytes = packing.panel_bytes(k.isa, self.dy.dtype, amx.KC, self.nr)
        self.sums = self.scratch.bytes(2 * panel_nbytes).as_dtype("fp32")
        self.packed_a = self.scratch.bytes(2 * panel_nbytes + _amx_sums_bytes(self.config))
        self.packed_id = k.var(-1)
        self.b_panels = packing.PanelBuffers(k, self.scratch, panel_nbytes, self._pack_b_panel)

    def _pack_b_panel(self, into, number) -> packing.PackTask:
        """The task that packs B panel `number`, t * K + col: columns [col, col + NR) of x, KC tokens from t on."""
        t, col = number // self.K, number % self.K
        depth = self.k.min(self.tokens - t, amx.KC)
        source = self.x.at(t * self.x_row)
        return packing.PackB(self.k, into, source, col, depth, stride=self.x_row, width=self.nr, cols=self.ragged)

    def run(self) -> None:
        """The loops of the module's docstring, with one more over the KC blocks of a chunk."""
        k = self.k
        items = self.m_blocks * self.n_blocks
        with amx.tile_registers(k, used=True), k.when(self.tokens > 0), k.parallel_for(items) as self.item:
            m_block = self._begin_item()
            _, self.next_n = microkernel.block_of_item(self.item + 1, self.config, self.m_blocks, self.n_blocks)
            with k.loop(0, self.tokens, self.chunk) as self.t:
                self.end = k.min(self.tokens, self.t + self.chunk)
                self._pack_a(m_block)
                self.below = k.ceil_div(self.end - self.t, amx.TILE_K) * amx.TILE_BYTES
                self.several = self.end - self.t > amx.KC
                with k.loop(self.k0, self.k1, self.nr) as self.col, k.loop(self.t, self.end, amx.KC) as token:
                    self._multiply_panel(token)

    def _pack_a(self, m_block) -> None:
        """Pack the item's columns of dy, tokens [t, end), unless the item before had the same."""
        k, mc = self.k, self.config.mc
        width = round_up(mc, amx.MR)  # columns of dy that are packed
        ragged = self.N if self.N % mc or width != mc else None  # where these may exceed dy
        with k.when(self.packed_id.value.differs(self.t * self.m_blocks + m_block)):
            self.packed_id.value = self.t * self.m_blocks + m_block
            source = self.dy.at(self.t * self.dy_row)
            amx.pack_a(k, self.packed_a, source, self.n0, self.end - self.t, stride=self.dy_row, width=width, cols=ragged)

    def _multiply_panel(self, token) -> None:
        """All rows of the item x the KC block of the panel that begins at `token`, in tiles of MR rows."""
        k = self.k
        panel = self.b_panels.acquire(token * self.K + self.col)
        amx.pad_panel(k, panel, k.min(self.end - token, amx.KC))
        steps = k.ceil_div(k.min(self.end - token, amx.KC), amx.TILE_K)
        is_last_k = token + amx.KC >= self.end
        self._pack_next(token, is_last_k, steps)
        with k.loop(self.n0, self.n1, amx.MR) as row:
            sums = self.sums.at(k.select(self.several, (row - self.n0) * self.nr, 0))
            at = ((row - self.n0) // amx.SIDE) * self.below + ((token - self.t) // amx.TILE_K) * amx.TILE_BYTES
            left = amx.TileA(self.packed_a.bytes(at), amx.LINE, amx.TILE_BYTES, self.below)
            amx.microkernel(k, sums, panel, [(left, steps)], begun=token > self.t, overlap=lambda step: self.b_panels.step())
            with k.when(is_last_k):
                self.epilogue.store_amx_tile(self.t, row, k.min(self.n1 - row, amx.MR), self.col, sums)
        self.b_panels.commit()

    def _pack_next(self, token, is_last_k, steps) -> None:
        """Begin to pack the panel of the next KC block, else columns, else chunk, else item. `steps`: of each micro-kernel."""
        k, t, col = self.k, self.t, self.col
        more_chunks = t + self.chunk < self.tokens
        exists = self.item + 1 < self.m_blocks * self.n_blocks
        next_id = k.select(more_chunks, (t + self.chunk) * self.K + self.k0, self.next_n * self.config.nc)
        next_id = k.select(col + self.nr < self.k1, t * self.K + col + self.nr, next_id)
        next_id = k.select(is_last_k, next_id, (token + amx.KC) * self.K + col)
        exists = exists | more_chunks | (col + self.nr < self.k1) | (token + amx.KC < self.end)
        self.b_panels.pack_next(next_id, exists, k.ceil_div(self.n1 - self.n0, amx.MR) * steps)


def _amx_sums_bytes(config: GemmConfig) -> int:
    return 4 * round_up(config.mc, amx.MR) * amx.NR


def wgrad_scratch_bytes(isa: ISA, dtype: str, tokens: int, config: GemmConfig) -> int:
    """Scratch bytes of a thread: two B panels, the packed A, on AMX sums of an item's rows. `tokens`: the most of a run."""
    chunk = token_chunk(isa)
    if amx.uses_tiles(isa, dtype):
        packed_a = packing.panel_bytes(isa, dtype, min(tokens, chunk), round_up(config.mc, amx.MR))
        return 2 * packing.panel_bytes(isa, dtype, amx.KC, amx.NR) + _amx_sums_bytes(config) + packed_a
    width = round_up(round_up(config.mc, config.tile.mr), isa.lanes)
    packed_a = packing.panel_bytes(isa, dtype, min(tokens, chunk), width)
    return 2 * packing.panel_bytes(isa, dtype, chunk, config.tile.nr(isa)) + packed_a
