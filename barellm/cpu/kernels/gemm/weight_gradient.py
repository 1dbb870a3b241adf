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
from typing import Any

from barellm.cpu.gemm_config import GemmConfig, Tile, token_chunk
from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.gemm import amx, gradient_tiles, packing
from barellm.cpu.kernels.gemm.microkernel import block_of_item, microkernel, overlap_calls, prefetch_row
from barellm.cpu.kernels.optim.squares import BlockSum, block_number
from barellm.program.integers import ceil_div, round_up

NONTEMPORAL_BYTES = 1 << 20  # a gradient of this many bytes that is stored, not added to, leaves the caches anyway


def weight_gradient(
    k, dweight, dy, x, row_begin, row_limit, squares=None, *, N: int, K: int, dims: tuple[str, ...], inner: int, mode: str,
    config: GemmConfig, strides: tuple[tuple[str, int], ...] = (), scale=None,
) -> None:  # fmt: skip
    """dweight (N, K) = dy (tokens, N).T @ x (tokens, K), stored or accumulated as `mode` says. Tokens are [row_begin, row_begin +
    row_limit) of the run's `k.num_elements(dims, inner)`; dy and x point to the first. `strides`: row strides, in elements, of
    operands that are views. `scale` multiplies the sums of each chunk. `squares`: sums of squares of the stored blocks
    (squares.py); the blocks are AMX tiles, so only these give them."""
    dy_row, x_row = (dict(strides).get(name, width) for name, width in (("dy", N), ("x", K)))
    tile, mc, nc = config.tile, config.mc, config.nc
    nr, chunk = tile.nr(k.isa), token_chunk(k.isa)
    tokens = k.min(k.num_elements(dims, inner) - row_begin, row_limit)
    keep = k.keep(mode)
    nontemporal = N * K * 4 >= NONTEMPORAL_BYTES and K % nr == 0 and mode != "add"

    def accumulates(t) -> Value:
        """Whether the chunk of tokens that starts at t is added to dweight."""
        return t > 0 if keep is None else k.op("i1", f"or i1 {(t > 0).ref}, {keep.ref}")

    def store_row(add: bool, row, col, sums, masks: list[Value | None]) -> list[Value]:
        """The epilogue of a row's vectors: scale, accumulate (`add`), store; returns what is stored."""
        stored = []
        for v, value in enumerate(sums):
            at = row * K + col + v * k.lanes
            value = value if scale is None else value * scale
            if add:
                value = value + dweight.load(at, masks[v])
            dweight.store(value, at, masks[v], nontemporal=nontemporal and not add)
            stored.append(value)
        return stored

    def masks_of(col) -> list[Value | None]:
        return [k.mask_first(K - col - v * k.lanes) if K % nr else None for v in range(tile.vectors)]

    if amx.uses_tiles(k.isa, dy.dtype):

        def store_rows(t, row, count, col, sums) -> None:
            """The epilogue of an AMX tile: of its first `count` rows, from `sums` (rows, nr) in memory."""
            adds, masks = accumulates(t), masks_of(col)
            block = None if squares is None else BlockSum(k)
            for add, branch in ((True, k.when), (False, k.otherwise)):  # code of its own without the load
                with branch(adds), k.loop(0, count) as r:
                    values = [sums.load(r * nr + v * k.lanes) for v in range(tile.vectors)]
                    stored = store_row(add, row + r, col, values, masks)
                    if block is not None:
                        inside = zip(stored, masks, strict=True)
                        block.add_row([x if mask is None else k.select(mask, x, 0.0) for x, mask in inside])
            if block is not None:
                block.put(squares, block_number(row, col, K))

        sizes: dict[str, Any] = {"N": N, "K": K, "dy_row": dy_row, "x_row": x_row, "config": config}
        gradient_tiles.multiply(k, dy, x, tokens, store=store_rows, **sizes)
        return
    assert squares is None, "blocks of squares are those of AMX tiles"
    pair = packing.uses_vnni(k.isa, dy.dtype)
    scratch, nbytes = k.thread_scratch("i32"), packing.panel_bytes(k.isa, dy.dtype, chunk, nr)
    m_blocks, n_blocks = ceil_div(N, mc), ceil_div(K, nc)
    heights = [min(mc, N - n) for n in range(0, N, mc)]
    tails = sorted({n % tile.mr for n in heights} - {0})  # rows of a block beyond its full tiles

    def pack(into, number) -> packing.PackTask:
        """The task that packs B panel `number`, t * K + col: columns [col, col + nr) of x, tokens from t on."""
        t, col = number // K, number % K
        ragged = K if K % nr else None
        return packing.pack_b(k, into, x.at(t * x_row), col, k.min(tokens - t, chunk), stride=x_row, width=nr, cols=ragged)

    def block(number) -> tuple[Pointer, Value, Value, Value]:
        """Block `number` of A, t * m_blocks + m_block: (dy, first and last column of dy, tokens), from token t on."""
        t, first = number // m_blocks, number % m_blocks * mc
        return dy.at(t * dy_row), first, k.min(first + mc, N), k.min(tokens - t, chunk)

    # Packing goes through one register, so it overlaps the micro-kernel with 16 too: gemm.py's transposes need more.
    prefetch, overlap = config.overlap == "prefetch", config.overlap != "none"
    b_panels = packing.PanelBuffers(k, scratch, nbytes, pack)
    inside = all(i * mc + round_up(n, tile.mr) <= N for i, n in enumerate(heights))
    packed_a = packing.PackedA(
        k, scratch.bytes(2 * nbytes), dtype=dy.dtype, rows=tile.mr, cols=N, stride=dy_row, max_depth=k.min(tokens, chunk),
        inside=inside, block=block,
    )  # fmt: skip

    with k.when(tokens > 0), k.parallel_for(m_blocks * n_blocks) as item:
        m_block, n_block = block_of_item(item, config, m_blocks, n_blocks)
        n0, k0 = m_block * mc, n_block * nc
        n1, k1 = k.min(n0 + mc, N), k.min(k0 + nc, K)
        full_end = n1 - (n1 - n0) % tile.mr if tails else n1
        with k.loop(0, tokens, chunk) as t:
            depth = k.min(tokens - t, chunk)
            k_units = (depth + 1) >> 1 if pair else depth
            calls = overlap_calls(k, tile, k_units)  # in each micro-kernel
            packed_a.acquire(t * m_blocks + m_block, calls)
            adds = accumulates(t)
            with k.loop(k0, k1, nr) as col:
                number = t * K + col
                panel = b_panels.acquire(number)
                more_panels, more_chunks = col + nr < k1, t + chunk < tokens
                if overlap:  # which panel is next: in this chunk, in the next chunk, or the next item's first
                    _, next_n = block_of_item(item + 1, config, m_blocks, n_blocks)
                    next_id = k.select(more_chunks, (t + chunk) * K + k0, next_n * nc)
                    next_id = k.select(more_panels, number + nr, next_id)
                    exists = more_panels | more_chunks | (item + 1 < m_blocks * n_blocks)
                    b_panels.pack_next(next_id, exists, (n1 - n0) // tile.mr * calls)
                masks = masks_of(col)

                def multiply(row, small: Tile, panel=panel, col=col, masks=masks) -> None:
                    """The micro-kernel and epilogue of the tile `small` (of at most MR rows) at row `row`."""
                    base = packed_a.tile(row - n0)

                    def load_a(r: int, u) -> Value:
                        type_ = "i32" if pair else "float"
                        p = base.bytes(u * (tile.mr * 4) + 4 * r)  # a unit has MR words of 4 bytes
                        return k.splat(k.op(type_, f"load {type_}, ptr {p.ref}, align 4"))

                    def prefetch_c(r) -> None:
                        if not prefetch:
                            return
                        target = dweight.at((row + r) * K + col)
                        with k.when(adds) if nontemporal else nullcontext():
                            prefetch_row(k, target, nr, write=True)

                    def pack_step() -> None:
                        b_panels.step()
                        packed_a.step()

                    overlapped = {"prefetch": prefetch_c, "overlap": pack_step} if overlap else {}
                    sums = microkernel(k, small, load_a, panel, k_units, pair, **overlapped)
                    for add, branch in ((True, k.when), (False, k.otherwise)):
                        with branch(adds):
                            for r, values in enumerate(sums):
                                store_row(add, row + r, col, values, masks)

                with k.loop(n0, full_end, tile.mr) as row:
                    multiply(row, tile)
                for tail in tails:
                    with k.when((n1 - full_end).equals(tail)) if len(set(heights)) > 1 else nullcontext():
                        multiply(full_end, Tile(tail, tile.vectors))
                if overlap:
                    b_panels.commit()


def wgrad_scratch_bytes(isa: ISA, dtype: str, tokens: int, config: GemmConfig) -> int:
    """Scratch bytes of a thread. `tokens`: the largest number of a run."""
    if amx.uses_tiles(isa, dtype):
        return gradient_tiles.thread_scratch_bytes(isa, dtype, tokens, config)
    chunk = token_chunk(isa)
    left = packing.panel_bytes(isa, dtype, min(tokens, chunk), round_up(round_up(config.mc, config.tile.mr), isa.lanes))
    return 2 * packing.panel_bytes(isa, dtype, chunk, config.tile.nr(isa)) + left
