"""The gradient of the relative terms' vectors in block-sparse attention. Shapes as in relative_position_bias.py.

A program has one gap, in tiles, between a tile of queries and one of keys, and searches the layout for tiles that far apart. It has
the sums of 2 BT distances, the lower half of which the program of the gap before has, too. Each half goes to partials of its own,
(slices, 2, M, H * D), which are added in order, so no program adds to another's sums. It does 10 BT^2 D operations for each tile
that it finds, because it recomputes the scores and their gradient."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from barellm.cuda.attention_config import AttentionConfig, padded_head_size
from barellm.cuda.kernel import Count, Lowering, Sizes, mode
from barellm.cuda.kernels.attention.attention import options_of
from barellm.cuda.kernels.attention.attention_backward import STATS, load_query_stats
from barellm.cuda.kernels.attention.attention_tiles import kv_rows, load_rows
from barellm.cuda.kernels.attention.block_sparse_attention import is_visible
from barellm.cuda.kernels.attention.relative_position_bias import to_distances, to_keys, vectors_of
from barellm.cuda.kernels.common import axis_size
from barellm.cuda.kernels.gemm.split_k import reduce_splits
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div

MAX_SLICES = 16  # partial sums over the tiles of queries (as split-K), of at least MIN_TILES tiles each
MIN_TILES = 16


@device
def kind_of_block(rows, row, key, LISTS, ENTRIES, LONGEST):
    """The kind of the block of keys `key` in list `row` of the table `rows` (block_sparse_attention.py); -1 if it is not listed."""
    begin, end = tl.load(rows + row), tl.load(rows + row + 1)
    pointers = rows + LISTS + 1 + begin + tl.arange(0, LONGEST)
    inside = begin + tl.arange(0, LONGEST) < end
    match = tl.load(pointers, mask=inside, other=-1) == key  # at most one entry of the list
    return tl.sum(tl.where(match, tl.load(pointers + ENTRIES, mask=match, other=0) + 1, 0), 0) - 1


@dataclass(frozen=True)
class Tiles:
    """A function of the run's sizes: the number of tiles of `tile` queries of all sequences; `chunk` of them make a slice."""

    batch: Count
    length: Count
    tile: int

    def __call__(self, sizes: Sizes) -> int:
        return self.batch(sizes) * ceil_div(self.length(sizes), self.tile)

    def most(self, sizes: Sizes) -> int:
        """An upper bound of the slices, for these and for smaller sizes."""
        return min(MAX_SLICES, ceil_div(self(sizes), MIN_TILES))

    def chunk(self, sizes: Sizes) -> int:
        """Tiles of a slice."""
        return ceil_div(self(sizes), self.most(sizes))

    def halves(self, sizes: Sizes) -> int:
        """Partial sums to be added: two for each slice."""
        return 2 * ceil_div(self(sizes), self.chunk(sizes))


@device
def block_sparse_attention_drelative(
    partials, q, k, v, dout, stats, rows, masks, relative, chunk, count, seq,
    SCALE_LOG2, SOFTMAX_SCALE, H, GROUP_SIZE, D, DP, STRIDES, OFFSETS, BLOCK, LISTS, ENTRIES, TERMS, LEAST, LONGEST, BT,
):  # fmt: skip
    """The gradient of the relative vectors, sum over (i, j) with i - j = m of scale ds_ij q_i, for the 2 BT distances between a
    tile of BT queries and the tile of keys `gap` tiles before: partials (slices, 2, M, H * D) fp32, of the tiles of a slice.

    Reads q, k, v, dout, stats and the tables as block_sparse_attention_dq; `relative` (M, H * D). Grid: gaps from LEAST tiles on,
    heads, slices of `chunk` of the `count` tiles of queries of all sequences. BT: a power of two that divides BLOCK."""
    C: tl.constexpr = H * D
    gap, head, slice = LEAST + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = (seq + BT - 1) // BT  # of a sequence
    kv_column = head // GROUP_SIZE * D
    vectors = vectors_of(relative + head * D, gap * BT, BT, TERMS, C, D, DP)
    total = tl.zeros((2 * BT, DP), tl.float32)
    index = tl.arange(0, BT)  # in a tile
    for i in range(slice * chunk, tl.minimum(slice * chunk + chunk, count)):
        sequence, m0, n0 = i // tiles, i % tiles * BT, (i % tiles - gap) * BT  # of tile i of queries
        if (n0 >= 0) & (n0 < seq):
            kind = kind_of_block(rows, head * (LISTS // H) + m0 // BLOCK, n0 // BLOCK, LISTS, ENTRIES, LONGEST)
            if kind >= 0:
                token0 = sequence.to(tl.int64) * seq
                queries = load_rows(q + token0 * STRIDES[0] + head * D, m0, seq, STRIDES[0], BT, D, DP)
                k_rows, v_rows = kv_rows(q, k, v, token0, kv_column, STRIDES, OFFSETS)
                keys = load_rows(k_rows, n0, seq, STRIDES[1], BT, D, DP)
                values = load_rows(v_rows, n0, seq, STRIDES[2], BT, D, DP)
                do = load_rows(dout + token0 * C + head * D, m0, seq, C, BT, D, DP)
                s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
                s += to_keys(tl.dot(queries, tl.trans(vectors), input_precision="ieee"), BT)
                lse, delta, _ = load_query_stats(stats + STATS * ((sequence * H + head).to(tl.int64) * seq), m0, seq, False, BT)
                visible = is_visible(masks, kind, (m0 % BLOCK + index)[:, None], (n0 % BLOCK + index)[None, :], BLOCK)
                p = tl.where(visible, tl.math.exp2(s * SCALE_LOG2 - lse[:, None]), 0.0)
                dp = tl.dot(do, tl.trans(values), input_precision="ieee")
                distance_grads = to_distances(p * (dp - delta[:, None]), BT).to(queries.dtype)
                total = tl.dot(tl.trans(distance_grads), queries, total, input_precision="ieee")
    w, d = tl.arange(0, 2 * BT), tl.arange(0, DP)
    row = (gap - 1) * BT - TERMS[0] + w  # of the relative vectors; the half w // BT has its own partials
    offset = (2 * slice + w // BT).to(tl.int64) * (TERMS[1] * C) + row * C + head * D
    inside = ((row >= 0) & (row < TERMS[1]))[:, None] & (d < D)[None, :]
    tl.store(partials + offset[:, None] + d[None, :], total * SOFTMAX_SCALE, mask=inside)


def append_drelative(c: Lowering, op: Any, tile: AttentionConfig, operands: dict[str, Any], constants: dict[str, Any]) -> None:
    """Plan two launches: `block_sparse_attention_drelative` by square tiles, into scratch, and the sum of these partials into
    drelative (M, H * D). With heads wider than 64 columns, tiles larger than 16 spill. `operands`, `constants`: those of dq."""
    BT = tile.keys if constants["DP"] <= 64 else min(tile.keys, 16)
    first, last = op.distances
    gaps = range(first // BT, last // BT + 2)
    count = Tiles(axis_size(op.q, 0), axis_size(op.q, 1), BT)
    planned = Sizes(int(op.q.shape[0]), int(op.q.shape[1]))
    partials = c.scratch("partials", (count.most(planned), 2, op.relative.size))
    longest = padded_head_size(int(np.diff(op.layout.offsets, axis=1).max()))
    c.launch(
        block_sparse_attention_drelative, operands | {"partials": partials, "chunk": count.chunk, "count": count},
        constants | {"LEAST": gaps.start, "LONGEST": longest, "BT": BT},
        grid=lambda s: (len(gaps), op.heads, count.halves(s) // 2), writes="partials", **options_of(tile),
    )  # fmt: skip
    reduce_splits(c, op.drelative, partials, count.halves, op.relative.size, mode(op, "drelative"))
