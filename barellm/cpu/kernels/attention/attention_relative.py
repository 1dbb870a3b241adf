"""Relative terms of attention by layout: q_i r_(i-j), which depends on the key's distance only.

A group of g.queries queries meets a block of keys at block + g.queries - 1 distances. Their vectors R are staged like keys, and the
product R Q^T is a tile of [distance][query] whose diagonals are the keys: the term of key j and query l of the group stands in row
block - 1 - j + l. The way back is the same: the gradient of row w and query l is that of key block - 1 - w + l, or 0 where the
block has no such key. So both directions need one operation, and nothing of queries x keys is stored but for one group and the
blocks that are staged. Huang et al. (2018), who found it, pad and reshape whole matrices; here log2(lanes) blends of
neighbouring registers make a vector along a diagonal.

Blocks that lie farther apart than any row of R cost a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.attention.attention_blocks import (
    Geometry,
    Rows,
    add_straight,
    add_transposed,
    clear,
    pack_units,
    put_along,
    round_up,
    scores,
    stage,
    unstage,
    weave,
)
from barellm.cpu.lang import Pointer, Value

Distances = tuple[int, int]  # the first that has a vector, and the last


def forward_units(g: Geometry, block: int, staged: int) -> dict[str, int]:
    """The blocks of scratch, in units, for `staged` blocks of keys."""
    return {"r_rows": g.rows_units(staged * 2 * block), "terms": staged * (block + g.queries) * g.queries}


def backward_units(g: Geometry, block: int, staged: int, distances: Distances) -> dict[str, int]:
    window, rows = block + g.queries, distances[1] - distances[0] + 1
    return forward_units(g, block, staged) | {
        "r": g.woven_units(staged * 2 * block),
        "ds_padded": staged * (window + g.queries) * g.queries,  # fp32, with zeros before and behind each block's keys
        "dterms": window * g.queries // g.pair,
        "dterms_woven": window * g.queries // g.pair,
        "dr": (rows + 2 * g.rows) * g.wide,  # a tile reaches beyond the first and the last row
    }


@dataclass(frozen=True)
class Terms:
    """The terms of one head, whose vectors are the rows `table`. Blocks of keys are staged side by side, number i after number
    i - 1; `gap` is the block of queries less that of keys, and `at` the place of a group in its block."""

    k: KernelBuilder
    g: Geometry
    s: dict[str, Pointer]
    block: int
    table: Rows
    distances: Distances

    def near(self, gap: Value) -> Value:
        """Whether some pair of the two blocks has a term."""
        first, last = self.distances
        middle = gap * self.block
        return (middle + (self.block - 1) >= first) & (middle - (self.block - 1) <= last)

    @contextmanager
    def each_near(self, some: Value, gap: Callable[[Value], Value]) -> Iterator[tuple[Value, Value]]:
        """Those of `some` staged blocks that are near: the gap and the number of each."""
        with self.k.loop(0, some) as i:
            found = gap(i)
            with self.k.when(self.near(found)):
                yield found, i

    def stage(self, gap: Value, i: Value) -> None:
        """The vectors of the distances from gap * block - (block - 1) on, 2 * block of them."""
        k, g, rows = self.k, self.g, 2 * self.block
        first, last = self.distances
        number = gap * self.block - (self.block - 1 + first)  # of the row of the table
        before = k.min(k.max(-number, 0), rows)
        behind = k.max(k.min(k.int(last - first + 1) - number, rows), before)
        to = self.s["r_rows"].at(i * (rows * g.row))
        stage(k, g, self.table, k.int(0), before, to)
        stage(k, g, self.table.start(number + before), behind - before, rows - before, to.at(before * g.row))

    def weave(self, i: Value) -> None:
        """What is staged as `backward` wants it."""
        rows = 2 * self.block
        if self.g.pair == 2:
            to = self.s["r"].at(i * self.g.woven_units(rows))
            weave(self.k, self.g, self.s["r_rows"].at(i * (rows * self.g.row)), rows, to)

    def window(self, gap: Value, at: Value) -> tuple[Value, Value, Value]:
        """The distance of row 0 of a group's tile, and the rows [begin, end) that have a vector, as whole register tiles."""
        k, g = self.k, self.g
        rows, (first, last) = self.block + g.queries, self.distances
        zero = gap * self.block - (self.block - 1) + at
        begin, end = (k.min(k.max(k.int(n) - zero, 0), rows) for n in (first, last + 1))
        return zero, begin & -g.rows, round_up(k, end, g.rows)

    def multiply(self, gap: Value, i: Value, at: Value, turned: Pointer) -> None:
        """R Q^T of a group and a block of keys."""
        k, g, rows = self.k, self.g, self.block + self.g.queries
        _, begin, end = self.window(gap, at)
        to, vectors = self.s["terms"].at(i * (rows * g.queries)), self.s["r_rows"].at(i * (2 * self.block * g.row))
        clear(k, to, begin * g.queries)
        with k.loop(begin, end, g.rows) as w:
            for r, row in enumerate(scores(k, g, vectors, at + w, turned)):
                for v, x in enumerate(row):
                    to.at(w * g.queries).store(x, r * g.queries + v * g.lanes)
        clear(k, to.at(end * g.queries), (k.int(rows) - end) * g.queries)

    def start(self, gap: Callable[[Value], Value], j: Value) -> list[list[Value]]:
        """The terms of the tile of keys from staged row j on, or zeros where its block is not near."""
        k, g, rows = self.k, self.g, self.block + self.g.queries
        tile = [[k.var_vec(0.0) for _ in range(g.vectors)] for _ in range(g.rows)]
        with k.when(self.near(gap(j // self.block))):
            terms = self.s["terms"].at(j // self.block * (rows * g.queries))
            found = diagonals(k, g, terms, k.int(self.block - 1) - j % self.block)
            for to, values in zip(tile, found, strict=True):
                for x, value in zip(to, values, strict=True):
                    x.value = value
        return [[x.value for x in row] for row in tile]

    # --- gradients ---

    def clear(self) -> None:
        """Begin a sum of gradients."""
        clear(self.k, self.s["dr"], (self.distances[1] - self.distances[0] + 1 + 2 * self.g.rows) * self.g.wide)

    def clear_padding(self, staged: int) -> None:
        clear(self.k, self.s["ds_padded"], staged * (self.block + 2 * self.g.queries) * self.g.queries)

    def keep_ds(self, j: Value, ds: list[list[Value]]) -> None:
        """dS of the tile of keys from staged row j on, as `backward` reads it."""
        g, rows = self.g, self.block + 2 * self.g.queries
        to = self.s["ds_padded"].at((j // self.block * rows + (j % self.block + g.queries)) * g.queries)
        for r, row in enumerate(ds):
            for v, x in enumerate(row):
                to.store(x, r * g.queries + v * g.lanes)

    def backward(self, gap: Value, i: Value, at: Value, dq: Pointer) -> None:
        """dQ^T of a group, before scaling, += R^T dT and dR += dT Q, where dT is the gradient of the group's terms."""
        k, g, s = self.k, self.g, self.s
        rows = self.block + 2 * g.queries
        zero, begin, end = self.window(gap, at)
        ds = s["ds_padded"].at(i * (rows * g.queries))
        straight, woven = s["dterms"], s["dterms_woven" if g.pair == 2 else "dterms"]
        with k.loop(begin, end, g.rows) as w:
            tile = diagonals(k, g, ds, k.int(self.block - 1 + g.queries) - w)
            for r, row in enumerate(tile):
                put_along(k, g, straight.at((w + r) * (g.queries // g.pair)), row)
            for r in range(0, g.rows, 2) if g.pair == 2 else ():
                to = woven.at(((w + r) >> 1) * g.queries)
                for v in range(g.vectors):
                    to.store(pack_units(k, g, tile[r][v], tile[r + 1][v]), v * g.lanes)
        vectors = s["r" if g.pair == 2 else "r_rows"].at(i * g.woven_units(2 * self.block) + at // g.pair * g.wide)
        add_transposed(k, g, dq, vectors, woven, begin, end)
        to = s["dr"].at((zero - self.distances[0] + g.rows) * g.wide)
        add_straight(k, g, to, straight, s["q"], begin, end)

    def store(self, to: Rows, root: float) -> None:
        """Write the sum of gradients."""
        count = self.k.int(self.distances[1] - self.distances[0] + 1)
        unstage(self.k, self.g, self.s["dr"].at(self.g.rows * self.g.wide), count, to, root)


def diagonals(k: KernelBuilder, g: Geometry, rows: Pointer, top: Value) -> list[list[Value]]:
    """A register tile whose row r has, in lane l of the group, element l of row top - r + l of [row][g.queries]. Blends of rows
    1, 2, 4 ... apart move each lane as far as the bits of its number say."""
    tile: list[list[Value]] = [[] for _ in range(g.rows)]
    for v in range(g.vectors):
        below = rows.at((top - (g.rows - 1) + v * g.lanes) * g.queries + v * g.lanes)
        window = [below.load(i * g.queries) for i in range(g.rows + g.lanes - 1)]
        bit = 1
        while bit < g.lanes:
            order = [lane + (g.lanes if lane & bit else 0) for lane in range(g.lanes)]
            window = [k.shuffle(a, b, order) for a, b in zip(window, window[bit:], strict=False)]
            bit *= 2
        for r, row in enumerate(reversed(window)):
            tile[r].append(row)
    return tile
