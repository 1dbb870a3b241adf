"""Weight gradients on AMX tiles: dweight = dy.T @ x, what weight_gradient.py does with vector registers.

A claim's columns of dy are transposed into tiles once for a chunk of tokens. Its columns of x pass panel by panel, and a panel goes
in parts of the tokens as deep as amx.KC: one stays in the first cache while all tiles of dy pass, and the next is woven beside.
"""

from __future__ import annotations

from collections.abc import Callable

from barellm.cpu.gemm_config import GemmConfig, chunk_of
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm import amx
from barellm.cpu.kernels.gemm.microkernel import block_of
from barellm.cpu.kernels.gemm.packing import Packing, Panels, pack_b, panel_bytes
from barellm.cpu.lang import Pointer, Value
from barellm.program.integers import ceil_div, round_up


def multiply(
    k: KernelBuilder, dy: Pointer, x: Pointer, tokens: Value, *, N: int, K: int, dy_row: int, x_row: int, choice: GemmConfig,
    put: Callable[[Value, Value, Value, Value, Pointer], None],
) -> None:  # fmt: skip
    """dy.T @ x for each chunk of tokens, of dy (tokens, N) and x (tokens, K), whose rows lie `dy_row` and `x_row` elements apart.
    `put(t, row, count, col, sums)` takes the sums (count, amx.NR) of the chunk that starts at t, of which `row` and `col` are the
    first in the result. A later chunk's follow those of the earlier."""
    height, columns, span, rows, chunk = choice.rows, choice.columns, amx.NR, amx.MR, chunk_of(k.isa)
    nbytes = panel_bytes(k.isa, dy.dtype, amx.KC, span)
    scratch = k.thread_scratch("i32")
    sums_at = scratch.bytes(2 * nbytes).as_dtype("fp32")
    left_at = scratch.bytes(2 * nbytes + _sums_bytes(choice))
    row_blocks, column_blocks = ceil_div(N, height), ceil_div(K, columns)
    width = round_up(height, rows)
    hangs = N if N % height or width != height else None
    held = k.var(-1)

    def pack(into: Pointer, number: Value) -> Packing:
        """Columns number % K of a part of the tokens, which begins at number // K."""
        t, col = number // K, number % K
        ragged = K if K % span else None
        depth = k.min(tokens - t, amx.KC)
        return pack_b(k, into, x.at(t * x_row), col, depth, stride=x_row, width=span, cols=ragged)

    two = Panels(k, scratch, nbytes, pack)
    amx.configure(k)
    with k.when(tokens > 0), k.parallel_for(row_blocks * column_blocks) as unit:
        row_block, column_block = block_of(unit, choice, row_blocks, column_blocks)
        n0, k0 = row_block * height, column_block * columns
        n1, k1 = k.min(n0 + height, N), k.min(k0 + columns, K)
        _, after_claim = block_of(unit + 1, choice, row_blocks, column_blocks)
        with k.loop(0, tokens, chunk) as t:
            end = k.min(tokens, t + chunk)
            with k.when(held.value.differs(t * row_blocks + row_block)):
                held.value = t * row_blocks + row_block
                amx.pack_left(k, left_at, dy.at(t * dy_row), n0, end - t, stride=dy_row, width=width, cols=hangs)
            below = k.ceil_div(end - t, amx.TILE_K) * amx.TILE_BYTES
            several = end - t > amx.KC
            with k.loop(k0, k1, span) as col, k.loop(t, end, amx.KC) as p:
                panel = two.take(p * K + col)
                amx.pad_panel(k, panel, k.min(end - p, amx.KC))
                steps, ends = k.ceil_div(k.min(end - p, amx.KC), amx.TILE_K), p + amx.KC >= end
                more, wanted = t + chunk < tokens, unit + 1 < row_blocks * column_blocks
                after = k.select(more, (t + chunk) * K + k0, after_claim * columns)
                after = k.select(col + span < k1, t * K + col + span, after)
                after = k.select(ends, after, (p + amx.KC) * K + col)
                wanted = wanted | more | (col + span < k1) | (p + amx.KC < end)
                two.follow(after, wanted, k.ceil_div(n1 - n0, rows) * steps)
                with k.loop(n0, n1, rows) as row:
                    sums = sums_at.at(k.select(several, (row - n0) * span, 0))
                    at = ((row - n0) // amx.SIDE) * below + ((p - t) // amx.TILE_K) * amx.TILE_BYTES
                    left = amx.Left(left_at.bytes(at), amx.LINE, amx.TILE_BYTES, below)
                    amx.multiply(k, sums, panel, [(left, steps)], begun=p > t, beside=lambda step: two.some())
                    with k.when(ends):
                        put(t, row, k.min(n1 - row, rows), col, sums)
                two.followed()
    amx.release(k)


def _sums_bytes(choice: GemmConfig) -> int:
    return 4 * round_up(choice.rows, amx.MR) * amx.NR


def thread_scratch_bytes(isa: ISA, dtype: str, tokens: int, choice: GemmConfig) -> int:
    """The scratch of a thread: two parts of panels, the sums of a claim's rows, its columns of dy."""
    left = panel_bytes(isa, dtype, min(tokens, chunk_of(isa)), round_up(choice.rows, amx.MR))
    return 2 * panel_bytes(isa, dtype, amx.KC, amx.NR) + _sums_bytes(choice) + left
