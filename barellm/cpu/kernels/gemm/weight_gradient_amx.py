"""The weight-gradient GEMM on AMX tiles: dweight = dy^T x, as weight_gradient.py does it on vector registers.

Protocol: for each chunk of tokens an item's MC columns of dy are packed as A tiles once (transposed, VNNI pairs of tokens) and stay
in the L2. Columns of x pass in panels of NR, in KC blocks of tokens: one (KC, NR) block stays in the L1 while all A tiles pass, and
the thread packs the next one (VNNI) between the tile instructions. Sums wait in scratch from one KC block to the next."""

from collections.abc import Callable

from barellm.cpu.gemm_config import GemmConfig, token_chunk
from barellm.cpu.kernel import ISA, Pointer, Value
from barellm.cpu.kernels.gemm import amx, microkernel, packing
from barellm.program.integers import ceil_div, round_up


def weight_gradient_amx(k, dy, x, tokens, *, N: int, K: int, dy_row: int, x_row: int, config: GemmConfig,
        store: Callable[[Value, Value, Value, Value, Pointer], None]) -> None:  # fmt: skip
    """dweight = dy.T @ x for each chunk of tokens, of dy (tokens, N) and x (tokens, K) bf16, row strides `dy_row` and `x_row`
    elements. The epilogue `store(t, row, count, col, sums)` gets the accumulators `sums` [count][NR] fp32 of rows from `row` on and
    columns from `col` on, of the chunk of tokens that starts at t; chunks come in order. Scratch: two B panels (KC, NR), the
    accumulators of an item's rows, A packed by amx.pack_a."""
    mc, nc, nr, mr, chunk = config.mc, config.nc, amx.NR, amx.MR, token_chunk(k.isa)
    nbytes = packing.panel_bytes(k.isa, dy.dtype, amx.KC, nr)
    scratch = k.thread_scratch("i32")
    sums_at = scratch.bytes(2 * nbytes).as_dtype("fp32")
    a_at = scratch.bytes(2 * nbytes + _sums_bytes(config))
    m_blocks, n_blocks = ceil_div(N, mc), ceil_div(K, nc)
    width = round_up(mc, mr)  # columns of dy that are packed
    ragged_n = N if N % mc or width != mc else None  # where these may exceed dy
    packed = k.var(-1)  # (chunk, block) that is packed at a_at; -1: none

    def pack(into, number) -> packing.PackTask:
        """The task that packs B panel `number`, t * K + col: columns [col, col + NR) of x, KC tokens from t on."""
        t, col = number // K, number % K
        ragged = K if K % nr else None
        depth = k.min(tokens - t, amx.KC)
        return packing.PackB(k, into, x.at(t * x_row), col, depth, stride=x_row, width=nr, cols=ragged)

    b_panels = packing.PanelBuffers(k, scratch, nbytes, pack)
    amx.configure(k)
    with k.when(tokens > 0), k.parallel_for(m_blocks * n_blocks) as item:
        m_block, n_block = microkernel.block_of_item(item, config, m_blocks, n_blocks)
        n0, k0 = m_block * mc, n_block * nc
        n1, k1 = k.min(n0 + mc, N), k.min(k0 + nc, K)
        _, next_n = microkernel.block_of_item(item + 1, config, m_blocks, n_blocks)
        with k.loop(0, tokens, chunk) as t:
            end = k.min(tokens, t + chunk)
            with k.when(packed.value.differs(t * m_blocks + m_block)):
                packed.value = t * m_blocks + m_block
                amx.pack_a(k, a_at, dy.at(t * dy_row), n0, end - t, stride=dy_row, width=width, cols=ragged_n)
            below = k.ceil_div(end - t, amx.TILE_K) * amx.TILE_BYTES  # from a tile to the one of the next 16 rows
            # Several KC blocks: the sums of all rows wait in scratch between them. With one, the place of one tile is enough.
            several = end - t > amx.KC
            with k.loop(k0, k1, nr) as col, k.loop(t, end, amx.KC) as p:
                panel = b_panels.acquire(p * K + col)
                amx.pad_panel(k, panel, k.min(end - p, amx.KC))
                steps, is_last_k = k.ceil_div(k.min(end - p, amx.KC), amx.TILE_K), p + amx.KC >= end
                more_chunks, exists = t + chunk < tokens, item + 1 < m_blocks * n_blocks
                # Which panel is next: of the next KC block, else of the next columns, else of the next chunk, else of the next
                # item.
                next_id = k.select(more_chunks, (t + chunk) * K + k0, next_n * nc)
                next_id = k.select(col + nr < k1, t * K + col + nr, next_id)
                next_id = k.select(is_last_k, next_id, (p + amx.KC) * K + col)
                exists = exists | more_chunks | (col + nr < k1) | (p + amx.KC < end)
                b_panels.pack_next(next_id, exists, k.ceil_div(n1 - n0, mr) * steps)
                with k.loop(n0, n1, mr) as row:
                    sums = sums_at.at(k.select(several, (row - n0) * nr, 0))
                    at = ((row - n0) // amx.SIDE) * below + ((p - t) // amx.TILE_K) * amx.TILE_BYTES
                    left = amx.TileA(a_at.bytes(at), amx.LINE, amx.TILE_BYTES, below)
                    amx.microkernel(k, sums, panel, [(left, steps)], begun=p > t, overlap=lambda step: b_panels.step())
                    with k.when(is_last_k):
                        store(t, row, k.min(n1 - row, mr), col, sums)
                b_panels.commit()
    amx.release(k)


def _sums_bytes(config: GemmConfig) -> int:
    return 4 * round_up(config.mc, amx.MR) * amx.NR


def thread_scratch_bytes(isa: ISA, dtype: str, tokens: int, config: GemmConfig) -> int:
    """Scratch bytes of a thread: two (KC, NR) panels, the sums of an item's rows, its packed A."""
    left = packing.panel_bytes(isa, dtype, min(tokens, token_chunk(isa)), round_up(config.mc, amx.MR))
    return 2 * packing.panel_bytes(isa, dtype, amx.KC, amx.NR) + _sums_bytes(config) + left
