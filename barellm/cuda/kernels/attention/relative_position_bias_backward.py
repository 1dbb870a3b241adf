"""The gradient of the relative terms' vectors, of attention by layout. Shapes as in relative_position_bias.py.

A program has one gap between a tile of queries and one of keys, and looks through the rows for tiles that far apart. It writes 2 BT
distances, the lower half of which the program of the gap before has too. So two halves are added, and no sum meets another
program's. It does 10 BT^2 D operations for each tile that it finds, for it computes the scores and their gradient again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from barellm.cuda.choices import AttentionTile, padded
from barellm.cuda.kernel import Count, Lowering, Sizes, mode
from barellm.cuda.kernels.attention.attention import options
from barellm.cuda.kernels.attention.attention_backward import STATS, stats_of
from barellm.cuda.kernels.attention.attention_tiles import kv_pointer, load_rows
from barellm.cuda.kernels.attention.block_sparse_attention import axis_size, seen
from barellm.cuda.kernels.attention.relative_position_bias import to_distances, to_keys, vectors_of
from barellm.cuda.kernels.gemm.split_k import reduce_splits
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div

MOST_PARTS = 16  # sums of the gradient, of at least PART tiles of queries each
PART = 16


@device
def kind_of_block(rows, row, key, LISTS: tl.constexpr, ENTRIES: tl.constexpr, LONGEST: tl.constexpr):
    """The kind of the entry of a row of all heads' rows that names the block `key`, -1 if none does."""
    begin, end = tl.load(rows + row), tl.load(rows + row + 1)
    at = rows + LISTS + 1 + begin + tl.arange(0, LONGEST)
    inside = begin + tl.arange(0, LONGEST) < end
    match = tl.load(at, mask=inside, other=-1) == key
    return tl.sum(tl.where(match, tl.load(at + ENTRIES, mask=match, other=0) + 1, 0), 0) - 1


@dataclass(frozen=True)
class Tiles:
    """The number of tiles of queries of all sequences, which is cut into parts."""

    batch: Count
    length: Count
    tile: int

    def __call__(self, sizes: Sizes) -> int:
        return self.batch(sizes) * ceil_div(self.length(sizes), self.tile)

    def most(self, sizes: Sizes) -> int:
        """At most so many parts: also of fewer tiles."""
        return min(MOST_PARTS, ceil_div(self(sizes), PART))

    def chunk(self, sizes: Sizes) -> int:
        return ceil_div(self(sizes), self.most(sizes))

    def halves(self, sizes: Sizes) -> int:
        """Sums to be added, two for each part."""
        return 2 * ceil_div(self(sizes), self.chunk(sizes))


@device
def layout_attention_drelative(
    partials, q, k, v, dout, stats, rows, masks, relative, chunk, count, seq,
    UNIT: tl.constexpr, ROOT: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    BLOCK: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    LEAST: tl.constexpr, LONGEST: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """partials (parts, 2, M, H * D). A program is one gap, in tiles, one head, and `chunk` of the `count` tiles of queries of all
    sequences."""
    C: tl.constexpr = H * D
    gap, head, part = LEAST + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = (seq + BT - 1) // BT
    shared = head // SHARE * D
    vectors = vectors_of(relative + head * D, gap * BT, BT, FIRST, COUNT, C, D, DP)
    total = tl.zeros((2 * BT, DP), tl.float32)
    place = tl.arange(0, BT)
    for i in range(part * chunk, tl.minimum(part * chunk + chunk, count)):
        sequence, m0, n0 = i // tiles, i % tiles * BT, (i % tiles - gap) * BT
        if (n0 >= 0) & (n0 < seq):
            kind = kind_of_block(rows, head * (LISTS // H) + m0 // BLOCK, n0 // BLOCK, LISTS, ENTRIES, LONGEST)
            if kind >= 0:
                token = sequence.to(tl.int64) * seq
                queries = load_rows(q + token * Q_ROW + head * D, m0, seq, Q_ROW, BT, D, DP)
                keys = load_rows(kv_pointer(q, k, K_AT) + token * K_ROW + shared, n0, seq, K_ROW, BT, D, DP)
                values = load_rows(kv_pointer(q, v, V_AT) + token * V_ROW + shared, n0, seq, V_ROW, BT, D, DP)
                do = load_rows(dout + token * C + head * D, m0, seq, C, BT, D, DP)
                s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
                s += to_keys(tl.dot(queries, tl.trans(vectors), input_precision="ieee"), BT)
                top, delta, _ = stats_of(stats + STATS * ((sequence * H + head).to(tl.int64) * seq), m0, seq, False, BT)
                sees = seen(masks, kind, (m0 % BLOCK + place)[:, None], (n0 % BLOCK + place)[None, :], BLOCK)
                p = tl.where(sees, tl.math.exp2(s * UNIT - top[:, None]), 0.0)
                dp = tl.dot(do, tl.trans(values), input_precision="ieee")
                dt = to_distances(p * (dp - delta[:, None]), BT).to(queries.dtype)
                total = tl.dot(tl.trans(dt), queries, total, input_precision="ieee")
    w, d = tl.arange(0, 2 * BT), tl.arange(0, DP)
    row = (gap - 1) * BT - FIRST + w
    at = (2 * part + w // BT).to(tl.int64) * (COUNT * C) + row * C + head * D
    inside = ((row >= 0) & (row < COUNT))[:, None] & (d < D)[None, :]
    tl.store(partials + at[:, None] + d[None, :], total * ROOT, mask=inside)


def append_gradient(
    c: Lowering, op: Any, tile: AttentionTile, operands: dict[str, Any], constants: dict[str, Any]
) -> None:
    """Append drelative, by square tiles; of heads wider than 64 columns larger ones than 16 spill."""
    BT = tile.keys if constants["DP"] <= 64 else min(tile.keys, 16)
    first, last = op.distances
    gaps = range(first // BT, last // BT + 2)
    count = Tiles(axis_size(op.q, 0), axis_size(op.q, 1), BT)
    planned = Sizes(int(op.q.shape[0]), int(op.q.shape[1]))
    partials = c.scratch("partials", (count.most(planned), 2, op.relative.size))
    longest = padded(int(np.diff(op.layout.offsets, axis=1).max()))
    c.launch(
        layout_attention_drelative,
        operands | {"partials": partials, "chunk": count.chunk, "count": count},
        constants | {"LEAST": gaps.start, "LONGEST": longest, "BT": BT},
        grid=lambda s: (len(gaps), op.heads, count.halves(s) // 2), writes="partials", **options(tile),
    )  # fmt: skip
    reduce_splits(c, op.drelative, partials, count.halves, op.relative.size, mode(op, "drelative"))
