"""Layouts of block-sparse matrices: which blocks of a matrix are there, in Morton order, and graphs to draw them from.

Morton order interleaves the bits of row and column. Blocks that follow one another in it are near one another in both senses, so
what one of them reads of x and y is still in the caches for the next."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from barellm.program import patterns
from barellm.program.integers import ceil_div

SIZES = (8, 16, 32, 64)


LONG = 1024  # rows or columns of the matrix: a list is cut only if it has more


@dataclass(frozen=True, eq=False)
class Lists:
    """The blocks of a matrix column by column, or row by row, as a matmul walks them: `other` has the row (column) of each entry
    and `number` the block's number. A segment is (list, slot, first entry, end): a whole list where its slot is -1, else a part of
    a long one, whose sum is partial and goes to that slot. A cut is (list, first slot, end): the partial sums that make a list."""

    segments: np.ndarray  # (n, 4)
    cuts: np.ndarray  # (m, 3)
    other: np.ndarray  # (blocks,)
    number: np.ndarray  # (blocks,)

    @property
    def slots(self) -> int:
        return int(self.cuts[-1, 2]) if len(self.cuts) else 0

    @property
    def table(self) -> np.ndarray:
        """i32: segments, cuts, other, number, one after the other."""
        return np.concatenate([part.reshape(-1) for part in (self.segments, self.cuts, self.other, self.number)]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """`places` (blocks, 2): row and column of each block, in Morton order."""

    block: int
    shape: tuple[int, int]  # blocks from top to bottom, and from left to right
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    @property
    def density(self) -> float:
        return len(self) / (self.shape[0] * self.shape[1])

    @cached_property
    def digest(self) -> str:
        """A name for what it holds."""
        return hashlib.sha256(f"{self.block} {self.shape}".encode() + self.places.tobytes()).hexdigest()[:12]

    @cached_property
    def columns(self) -> Lists:
        """The blocks of each column, whose rows rise."""
        return self._lists(1)

    @cached_property
    def rows(self) -> Lists:
        """The blocks of each row, whose columns rise."""
        return self._lists(0)

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """i32: the tables of `columns` and `rows`; in `places` the rows of all blocks, then their columns."""
        return {"columns": self.columns.table, "rows": self.rows.table, "places": self.places.T.reshape(-1).astype(np.int32)}

    def _lists(self, axis: int) -> Lists:
        """The `Lists` of all rows (axis 0) or columns (axis 1). A list longer than LONG elements and twice the mean is split into
        even segments for load balance. The splits, and so the bits of the sums, depend on the layout only."""
        line, across = self.places[:, axis], self.places[:, 1 - axis]  # of each block: its list, and its place in it
        order = np.lexsort((across, line))
        first = np.searchsorted(line[order], np.arange(self.shape[axis] + 1))
        lengths = np.diff(first)
        max_length = max(ceil_div(2 * len(self), int((lengths > 0).sum())), LONG // self.block)
        segments, cuts, slot = [], [], 0
        for i, length in enumerate(lengths.tolist()):
            parts = max(1, ceil_div(length, max_length))
            edges = [int(first[i]) + length * part // parts for part in range(parts + 1)]
            for part in range(parts):
                segments.append((i, slot + part if parts > 1 else -1, edges[part], edges[part + 1]))
            if parts > 1:
                cuts.append((i, slot, slot + parts))
                slot += parts
        return Lists(np.array(segments), np.array(cuts).reshape(-1, 3), across[order], order)

    def dense(self, weight: np.ndarray) -> np.ndarray:
        """The whole matrix, of its blocks (blocks * bs, bs)."""
        b = self.block
        whole = np.zeros((self.shape[0], b, self.shape[1], b), weight.dtype)
        whole[self.places[:, 0], :, self.places[:, 1]] = weight.reshape(-1, b, b)
        return whole.reshape(self.shape[0] * b, self.shape[1] * b)

    def blocks_of(self, whole: np.ndarray) -> np.ndarray:
        """The blocks (blocks * bs, bs) of a whole matrix."""
        b = self.block
        tiled = whole.reshape(self.shape[0], b, self.shape[1], b)
        return tiled[self.places[:, 0], :, self.places[:, 1]].reshape(-1, b)


def block_layout(there: np.ndarray, block: int) -> BlockLayout:
    """The layout of a matrix of blocks, (rows, columns) bool."""
    if block not in SIZES:
        raise ValueError(f"blocks of a matrix have size {block}, expected one of {', '.join(map(str, SIZES))}")
    there = np.asarray(there, bool)
    if there.ndim != 2 or not there.any():
        raise ValueError(f"a block layout expects a matrix of blocks, some of them there: {there.shape}")
    places = np.argwhere(there)
    return BlockLayout(block, there.shape, places[np.argsort(morton(places), kind="stable")])


def morton(places: np.ndarray) -> np.ndarray:
    """The Morton codes of `places` (n, 2), row and column: bit 2i is bit i of the column, bit 2i + 1 that of the row."""
    code = np.zeros(len(places), np.int64)
    for bit in range(31):
        code |= (places[:, 1] >> bit & 1) << 2 * bit | (places[:, 0] >> bit & 1) << 2 * bit + 1
    return code


def watts_strogatz(rows: int, columns: int, degree: int, rewired: float, seed: int) -> np.ndarray:
    """A bipartite small-world graph (rows, columns) bool: both lie on a ring, each column is linked to its `degree` nearest rows,
    and each link is rewired to a random row with probability `rewired` (Watts and Strogatz 1998)."""
    random = np.random.default_rng(seed)
    linked = np.zeros((rows, columns), bool)
    degree = min(degree, rows)
    for column in range(columns):
        first = round(column * rows / columns - (degree - 1) / 2)
        near = np.arange(first, first + degree) % rows
        linked[near, column] = True
        for row in near:
            free = np.flatnonzero(~linked[:, column])
            if random.random() < rewired and len(free):
                linked[row, column] = False
                linked[random.choice(free), column] = True
    return linked


def barabasi_albert(rows: int, columns: int, degree: int, seed: int) -> np.ndarray:
    """(rows, columns) bool: each column is linked to `degree` rows, drawn one column after the other in proportion to one more than
    the links that they have (Barabasi and Albert 1999, between two layers)."""
    random = np.random.default_rng(seed)
    there = np.zeros((rows, columns), bool)
    for column in range(columns):
        links = there.sum(1) + 1.0
        there[random.choice(rows, min(degree, rows), replace=False, p=links / links.sum()), column] = True
    return there


def spread(rows: int, columns: int, degree: int, seed: int) -> np.ndarray:
    """(rows, columns) bool: each column is linked to `degree` rows that are drawn evenly."""
    random = np.random.default_rng(seed)
    there = np.zeros((rows, columns), bool)
    for column in range(columns):
        there[random.permutation(rows)[:degree], column] = True
    return there


GRAPHS: dict[str, Callable[..., np.ndarray]] = {
    "watts-strogatz": watts_strogatz,
    "barabasi-albert": barabasi_albert,
    "spread": spread,
}


def parse(text: str, *, rows: int, columns: int, more: int = 0) -> np.ndarray:
    """(rows, columns) bool: the graph that a text of `program.patterns` names, with `more` added to its seed."""
    words = [word for head in patterns.parse(text) for word in head]
    if len(words) != 1 or words[0][0] not in GRAPHS:
        raise ValueError(f"{text!r} is no graph, expected one of {', '.join(GRAPHS)} with its numbers")
    name, (*numbers, seed) = words[0]
    return GRAPHS[name](rows, columns, *numbers, int(seed) + more)
