"""Relative position bias of block-sparse attention (Shaw et al. 2018): q_i r_(i-j), a vector for each distance.

A group of g.queries queries meets a block of keys at block + g.queries - 1 distances. Their vectors R are packed like keys, and R
Q^T is a tile of [distance][query] whose diagonals are the keys: the bias of key j and query l of the group is in row block - 1 - j
+ l. The backward pass is the same skew: the gradient of row w and query l is that of key block - 1 - w + l, or 0 where the block
has no such key. So both directions need one operation, and nothing of queries x keys is stored but for one group and the packed
blocks. Huang et al. (2018), who found it, pad and reshape whole matrices; here log2(lanes) blends of registers make a diagonal.

Blocks beyond all distances of R cost a comparison."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from barellm.cpu.kernel import KernelBuilder, Pointer, Value
from barellm.cpu.kernels.attention import attention_microkernels as micro

Distances = tuple[int, int]  # first and last that have a vector


def forward_units(g, block: int, packed: int) -> dict[str, int]:
    """Sizes of the blocks in scratch of the forward pass, in 32-bit units, for `packed` blocks of keys."""
    return {"r_rows": g.rows_units(packed * 2 * block), "bias": packed * (block + g.queries) * g.queries}


def backward_units(g, block: int, packed: int, distances: Distances) -> dict[str, int]:
    window, rows = block + g.queries, distances[1] - distances[0] + 1
    return forward_units(g, block, packed) | {
        "r": g.vnni_units(packed * 2 * block),
        "ds_padded": packed * (window + g.queries) * g.queries,  # fp32, with zeros before and behind each block's keys
        "dbias": window * g.queries // g.pair,
        "dbias_vnni": window * g.queries // g.pair,
        "dr": (rows + 2 * g.rows) * g.padded_D,  # a tile reaches beyond the first and the last row
    }


@dataclass(frozen=True)
class RelativePositionBias:
    """The bias of one head, whose vectors R are the rows `table`, for the distances [first, last] of `distances`. Parameters of the
    methods: `i`, the index of a packed block of keys; `block_distance` = index of the block of queries minus that of the block of
    keys; `query`, the group's first query in its block."""

    k: KernelBuilder
    g: micro.Geometry
    s: dict[str, Pointer]
    block: int
    table: micro.HeadRows
    distances: Distances

    def near(self, block_distance) -> Value:
        """Whether (i1) some query and key of two blocks have a distance that has a vector."""
        first, last = self.distances
        middle = block_distance * self.block
        return (middle + (self.block - 1) >= first) & (middle - (self.block - 1) <= last)

    @contextmanager
    def for_each_near(self, num_blocks, block_distance: Callable[[Value], Value]) -> Iterator[tuple[Value, Value]]:
        """Loop over those of `num_blocks` packed blocks that have a bias; yields (block distance, index of the packed block)."""
        with self.k.loop(0, num_blocks) as i:
            distance = block_distance(i)
            with self.k.when(self.near(distance)):
                yield distance, i

    def pack_tile(self, block_distance, i) -> None:
        """s["r_rows"] = the vectors of 2 * block distances from block_distance * block - (block - 1) on; zero if there is none."""
        k, g, rows = self.k, self.g, 2 * self.block
        first, last = self.distances
        first_row = block_distance * self.block - (self.block - 1 + first)  # of the first row in the table
        before = k.min(k.max(-first_row, 0), rows)  # rows before the table's first
        behind = k.max(k.min(k.int(last - first + 1) - first_row, rows), before)
        dst = self.s["r_rows"].at(i * (rows * g.row_units))
        micro.pack_tile(k, g, self.table, k.int(0), before, dst)
        micro.pack_tile(k, g, self.table.start(first_row + before), behind - before, rows - before, dst.at(before * g.row_units))

    def vnni_pack(self, i) -> None:
        """The packed vectors in VNNI layout, for `backward`."""
        rows = 2 * self.block
        if self.g.pair == 2:
            dst = self.s["r"].at(i * self.g.vnni_units(rows))
            micro.vnni_pack(self.k, self.g, self.s["r_rows"].at(i * (rows * self.g.row_units)), rows, dst)

    def window(self, block_distance, query) -> tuple[Value, Value, Value]:
        """(distance of row 0, begin, end) of a group's tile of distances: rows [begin, end), full register tiles, have a vector."""
        k, g = self.k, self.g
        rows, (first, last) = self.block + g.queries, self.distances
        zero = block_distance * self.block - (self.block - 1) + query
        begin, end = (k.min(k.max(k.int(n) - zero, 0), rows) for n in (first, last + 1))
        return zero, begin & -g.rows, micro.round_up(k, end, g.rows)

    def bias_of_queries(self, block_distance, i, query, transposed) -> None:
        """s["bias"] [distance][g.queries] fp32 of packed block i of keys = R Q^T: R, the vectors of distances that `pack_tile` left
        in s["r_rows"]; Q, a group of queries packed as `transposed`, from `query` of its block on. Other distances: zeros."""
        k, g, rows = self.k, self.g, self.block + self.g.queries  # rows of a tile of distances
        _, begin, end = self.window(block_distance, query)
        dst, vectors = (self.s["bias"].at(i * (rows * g.queries)), self.s["r_rows"].at(i * (2 * self.block * g.row_units)))
        micro.clear(k, dst, begin * g.queries)
        with k.loop(begin, end, g.rows) as w:
            for r, row in enumerate(micro.score_tile(k, g, vectors, query + w, transposed)):
                for v, x in enumerate(row):
                    dst.at(w * g.queries).store(x, r * g.queries + v * g.lanes)
        micro.clear(k, dst.at(end * g.queries), (k.int(rows) - end) * g.queries)

    def start(self, block_distance: Callable[[Value], Value], j) -> list[list[Value]]:
        """The bias of the tile of keys from packed row j on, as values [row][vector]; zeros where its block has none."""
        k, g, rows = self.k, self.g, self.block + self.g.queries
        tile = [[k.var_vec(0.0) for _ in range(g.vectors)] for _ in range(g.rows)]
        with k.when(self.near(block_distance(j // self.block))):
            bias = self.s["bias"].at(j // self.block * (rows * g.queries))
            biases = load_diagonals(k, g, bias, k.int(self.block - 1) - j % self.block)
            for dst, values in zip(tile, biases, strict=True):
                for x, value in zip(dst, values, strict=True):
                    x.value = value
        return [[x.value for x in row] for row in tile]

    # --- gradients ---

    def clear(self) -> None:
        """Clear the sum of gradients."""
        micro.clear(self.k, self.s["dr"], (self.distances[1] - self.distances[0] + 1 + 2 * self.g.rows) * self.g.padded_D)

    def clear_padding(self, packed: int) -> None:
        micro.clear(self.k, self.s["ds_padded"], packed * (self.block + 2 * self.g.queries) * self.g.queries)

    def record_ds(self, j, ds) -> None:
        """Store dS of the tile of keys from packed row j on, for `backward`."""
        g, rows = self.g, self.block + 2 * self.g.queries
        dst = self.s["ds_padded"].at((j // self.block * rows + (j % self.block + g.queries)) * g.queries)
        micro.store_tile(g, ds, dst, g.queries)

    def backward(self, block_distance, i, query, dq) -> None:
        """dq [D][queries] fp32 += R^T dB (before scaling) and s["dr"] [distance][g.padded_D] fp32 += dB Q, for packed block i of
        keys and the group of queries from `query` of its block on. dB is dS along diagonals, s["ds_padded"] from `record_ds`, as
        s["dbias"] (units along the queries) and s["dbias_vnni"] (distances)."""
        k, g, s = self.k, self.g, self.s
        rows = self.block + 2 * g.queries  # of a padded block of dS
        zero, begin, end = self.window(block_distance, query)  # `zero`: the distance of row 0 of the tile
        ds = s["ds_padded"].at(i * (rows * g.queries))
        dbias, vnni = s["dbias"], s["dbias_vnni" if g.pair == 2 else "dbias"]
        with k.loop(begin, end, g.rows) as w:  # dB: dS along diagonals, in units along the queries and along the distances
            tile = load_diagonals(k, g, ds, k.int(self.block - 1 + g.queries) - w)
            for r, row in enumerate(tile):
                micro.store_units(k, g, dbias.at((w + r) * (g.queries // g.pair)), row)
            for r in range(0, g.rows, 2) if g.pair == 2 else ():
                dst = vnni.at(((w + r) >> 1) * g.queries)
                for v in range(g.vectors):
                    dst.store(micro.pack_units(k, g, tile[r][v], tile[r + 1][v]), v * g.lanes)
        vectors = s["r" if g.pair == 2 else "r_rows"].at(i * g.vnni_units(2 * self.block) + query // g.pair * g.padded_D)
        micro.accumulate_transposed(k, g, dq, vectors, vnni, begin, end)
        dst = s["dr"].at((zero - self.distances[0] + g.rows) * g.padded_D)
        micro.accumulate_rows(k, g, dst, dbias, s["q"], begin, end)

    def store(self, dst, softmax_scale: float) -> None:
        """Write the sum of gradients, times softmax_scale, to dst (distances, D)."""
        count = self.k.int(self.distances[1] - self.distances[0] + 1)
        micro.unpack_tile(self.k, self.g, self.s["dr"].at(self.g.rows * self.g.padded_D), count, dst, softmax_scale)


def load_diagonals(k, g, rows, top) -> list[list[Value]]:
    """A register tile of diagonals of `rows` [row][g.queries]: lane l (of the group) of tile[r] is element (top - r + l, l). Each
    step blends rows 1, 2, 4, ... apart by the next bit of the lane's index, so that lane l ends up l rows further."""
    tile: list[list[Value]] = [[] for _ in range(g.rows)]
    for v in range(g.vectors):
        below = rows.at((top - (g.rows - 1) + v * g.lanes) * g.queries + v * g.lanes)  # row of the last diagonal's lane 0
        window = [below.load(i * g.queries) for i in range(g.rows + g.lanes - 1)]
        bit = 1
        while bit < g.lanes:
            order = [lane + (g.lanes if lane & bit else 0) for lane in range(g.lanes)]
            window = [k.shuffle(a, b, order) for a, b in zip(window, window[bit:], strict=False)]
            bit *= 2
        for r, row in enumerate(reversed(window)):
            tile[r].append(row)
    return tile
