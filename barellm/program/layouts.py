"""Layouts of block-sparse attention: which keys each query of each head sees, as lists of blocks.

A layout of T positions has T / block rows of queries and as many columns of keys, in blocks of 16 to 128. What is not listed is
never computed. A listed block is seen as a whole (kind 0), or as far as one of the layout's masks says (kind i: masks[i - 1]).
Equal masks are kept once, so that a diagonal costs one mask however long it is.

A layout is made of what the queries of each head see, or from a text (`program/patterns.py`). A causal one drops every key behind
its query."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from barellm.program import patterns

SMALLEST, LARGEST = 16, 128  # positions of a block
WORD = 32

Sees = Callable[[np.ndarray, np.ndarray], np.ndarray]  # queries (n, 1), keys (1, m) -> (n, m) bool


@dataclass(frozen=True, eq=False)
class Layout:
    """The lists of blocks of `heads` heads of `length` positions. The entries of row r of head h are offsets[h, r] up to, not
    including, offsets[h, r + 1]; entry e is the block of keys keys[e], of kind kinds[e], and a row's keys rise."""

    length: int
    block: int
    offsets: np.ndarray  # (heads, rows + 1) int32
    keys: np.ndarray  # (entries,) int32
    kinds: np.ndarray  # (entries,) int32
    masks: np.ndarray  # (number, block, block) bool, [query, key]

    @property
    def heads(self) -> int:
        return len(self.offsets)

    @property
    def rows(self) -> int:
        """Blocks of queries, and of keys."""
        return self.offsets.shape[1] - 1

    @cached_property
    def causal(self) -> bool:
        """Whether no query sees a key behind itself."""
        row = self.row_of_entries()
        below = np.tril(np.ones((self.block, self.block), bool))
        late = np.array([False, *((mask & ~below).any() for mask in self.masks)])
        late[0] = True  # a whole block on the diagonal
        return bool((self.keys <= row).all() and not late[self.kinds[self.keys == row]].any())

    def row_of_entries(self) -> np.ndarray:
        """(entries,): the block of queries of each."""
        counts = np.diff(self.offsets, axis=1)
        return np.repeat(np.tile(np.arange(self.rows), self.heads), counts.reshape(-1))

    def head_of_entries(self) -> np.ndarray:
        return np.repeat(np.arange(self.heads), np.diff(self.offsets, axis=1).sum(1))

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all heads."""
        return self.pairs_within(-self.length, self.length)

    def pairs_within(self, least: int, most: int) -> int:
        """Number of visible (query, key) pairs of all heads with least <= query - key <= most. Entries of equal block distance and
        kind have equally many, and are counted once; those of the last block row apart, as it may be incomplete."""
        b, rows, total = self.block, self.row_of_entries(), 0
        masks = np.concatenate([np.ones((1, b, b), bool), self.masks])  # by kind
        inner = np.subtract.outer(np.arange(b), np.arange(b))  # distances within a block
        edge = self.length - (self.rows - 1) * b  # queries of the last row before the end
        classes = np.stack([rows - self.keys, self.kinds, rows == self.rows - 1])
        values, counts = np.unique(classes, axis=1, return_counts=True)
        for (blocks, kind, last), count in zip(values.T, counts, strict=True):
            distance = blocks * b + inner
            seen = masks[kind] & (least <= distance) & (distance <= most)
            total += int(count) * int(seen[: edge if last else b].sum())
        return total

    @property
    def density(self) -> float:
        """Pairs in listed blocks for each pair that dense attention has: of the causal half if the layout is causal."""
        T = self.length
        dense = T * (T + 1) // 2 if self.causal else T * T
        return len(self.keys) * self.block**2 / (self.heads * dense)

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits of a hash of the contents: equal layouts have equal ones, in every process."""
        found = hashlib.sha256(f"{self.length} {self.block}".encode())
        for array in (self.offsets, self.keys, self.kinds, np.packbits(self.masks)):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:12]

    def dense(self, head: int) -> np.ndarray:
        """(length, length) bool, [query, key]: what the queries of a head see."""
        b, n = self.block, self.rows
        seen = np.zeros((n, b, n, b), bool)
        at = self.head_of_entries() == head
        whole = np.concatenate([np.ones((1, b, b), bool), self.masks])
        for row, key, kind in zip(self.row_of_entries()[at], self.keys[at], self.kinds[at], strict=True):
            seen[row, :, key] = whole[kind]
        return seen.reshape(n * b, n * b)[: self.length, : self.length]

    def first(self, length: int) -> "Layout":
        """The same of the first `length` positions, for a causal layout."""
        assert self.causal and length <= self.length
        rows = -(-length // self.block)
        kept = self.row_of_entries() < rows
        counts = np.diff(self.offsets, axis=1)[:, :rows]
        return Layout(length, self.block, offsets_of(counts), self.keys[kept], self.kinds[kept], self.masks)

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        return {"rows": self.row_table(), "columns": self.column_table(), "masks": self.mask_words()}

    def row_table(self) -> np.ndarray:
        """The `table` of the keys of each row of queries."""
        return table(self.offsets, self.keys, self.kinds)

    def column_table(self) -> np.ndarray:
        """The `table` of the rows of queries that list each block of keys; they rise."""
        head, row = self.head_of_entries(), self.row_of_entries()
        order = np.lexsort((row, self.keys, head))
        counts = np.bincount(head * self.rows + self.keys, minlength=self.heads * self.rows).reshape(self.heads, -1)
        return table(offsets_of(counts), row[order], self.kinds[order])

    def mask_words(self) -> np.ndarray:
        """i32 (masks, block keys, words), flat: bit i of word w says whether query 32 w + i of the block sees the key."""
        number, b = len(self.masks), self.block
        words = -(-b // WORD)
        bits = np.zeros((number, b, words * WORD), bool)
        bits[:, :, :b] = self.masks.transpose(0, 2, 1)
        packed = np.packbits(bits.reshape(-1), bitorder="little").view("<i4")
        return packed if number else np.zeros(1, np.int32)


def table(offsets: np.ndarray, blocks: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """i32, one after the other: the first entry of each row of each head and the number of entries, `blocks`, `kinds`."""
    return np.concatenate([np.append(offsets[:, :-1].reshape(-1), len(blocks)), blocks, kinds]).astype(np.int32)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """The first entry of each row, and the end of the last: (heads, rows) numbers of entries -> (heads, rows + 1)."""
    ends = np.cumsum(counts).reshape(counts.shape)
    return np.concatenate([ends[:, :1] - counts[:, :1], ends], 1).astype(np.int32)


def layout_of(heads: Sequence[Sees], *, length: int, block: int, causal: bool) -> Layout:
    """The layout of heads, each given by a predicate `sees(queries, keys)` (equal ones are evaluated once): positions
    (n, 1) and (1, m) -> (n, m) bool. `length`: T; `block`: queries, and keys, of a block. Blocks without a
    visible pair are not listed. Work O(T^2), memory O(T). ValueError for a query that sees no key."""
    if not (SMALLEST <= block <= LARGEST and block % SMALLEST == 0):
        raise ValueError(f"the block of a layout is {block}, expected a multiple of {SMALLEST} up to {LARGEST}")
    rows = -(-length // block)
    position = np.arange(rows * block)
    masks: dict[bytes, int] = {}  # packed mask -> kind, of all heads
    distinct: list[np.ndarray] = []
    known: dict[Sees, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for sees in heads:
        if sees not in known:
            known[sees] = _lists(sees, length, block, causal, position, masks, distinct)
    lists_of = [known[sees] for sees in heads]
    keys, kinds = (np.concatenate([lists[i] for lists in lists_of]).astype(np.int32) for i in (1, 2))
    counts = np.stack([lists[0] for lists in lists_of])
    stacked = np.stack(distinct) if distinct else np.zeros((0, block, block), bool)
    return Layout(length, block, offsets_of(counts), keys, kinds, stacked)


def _lists(
    sees: Sees, length: int, block: int, causal: bool, position: np.ndarray, masks: dict[bytes, int], distinct: list
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One head's lists: (number of entries per block row, block columns of all entries, their kinds). `position`: 0, 1, ... of
    whole blocks. New masks are appended to `distinct` and registered in `masks` (packed bits -> kind)."""
    counts, keys, kinds = [], [], []
    for first in range(0, len(position), block):
        query = position[first : first + block, None]
        key = position[None, : first + block] if causal else position[None]
        seen: np.ndarray = sees(query, key) & (key < length)
        if causal:
            seen &= key <= query
        # Positions from `length` on, in the last block, are padding: keys that nobody sees, queries that need see none.
        empty = ~seen.any(1) & (query[:, 0] < length)
        if empty.any():
            raise ValueError(f"query {first + int(empty.argmax())} of a layout sees no key, expected at least one")
        blocks = seen.reshape(block, -1, block).transpose(1, 0, 2)
        some, whole = np.asarray(blocks.any((1, 2))), np.asarray(blocks.all((1, 2)))
        listed = np.flatnonzero(some)
        counts.append(len(listed))
        keys.append(listed)
        for j in listed:
            if whole[j]:
                kinds.append(0)
                continue
            mask = np.ascontiguousarray(blocks[j])
            kind = masks.setdefault(np.packbits(mask).tobytes(), len(distinct) + 1)
            if kind > len(distinct):
                distinct.append(mask)
            kinds.append(kind)
    return np.array(counts), np.concatenate(keys), np.array(kinds)


def of_blocks(adjacent: np.ndarray, block: int) -> Sees:
    """A graph on blocks, (blocks, blocks) bool."""
    return lambda q, k: adjacent[q // block, k // block]


def local(width: int) -> Sees:
    return lambda q, k: abs(q - k) < width


def banded(number: int, block: int) -> Sees:
    return lambda q, k: abs(q // block - k // block) < number


def strided(stride: int) -> Sees:
    return lambda q, k: (q - k) % stride == 0


def fixed(stride: int, columns: int) -> Sees:
    return lambda q, k: (q // stride == k // stride) | (k % stride >= stride - columns)


def either(parts: Sequence[Sees]) -> Sees:
    def sees(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.logical_or.reduce([part(q, k) for part in parts])

    return sees


def watts_strogatz(nodes: int, degree: int, rewired: float, seed: int) -> np.ndarray:
    """A small-world graph (nodes, nodes) bool, symmetric, with the diagonal: a ring, each node linked to its `degree` nearest; with
    probability `rewired` a link is moved to a random free node (Watts and Strogatz 1998)."""
    random = np.random.default_rng(seed)
    linked = np.eye(nodes, dtype=bool)
    ring = [(i, (i + step) % nodes) for step in range(1, min(degree // 2, (nodes - 1) // 2) + 1) for i in range(nodes)]
    for a, b in ring:
        linked[a, b] = linked[b, a] = True
    for a, b in ring:
        free = np.flatnonzero(~linked[a])
        if random.random() < rewired and len(free):
            linked[a, b] = linked[b, a] = False
            new = random.choice(free)
            linked[a, new] = linked[new, a] = True
    return linked


def barabasi_albert(nodes: int, links: int, seed: int) -> np.ndarray:
    """A scale-free graph (nodes, nodes) bool, symmetric, with the diagonal: each new node links to `links` earlier ones, drawn in
    proportion to their degrees (Barabasi and Albert 1999)."""
    random = np.random.default_rng(seed)
    linked = np.eye(nodes, dtype=bool)
    ends: list[int] = list(range(min(links, nodes)))  # each node as often as it has links; at first once
    for new in range(links, nodes):
        chosen: set[int] = set()
        while len(chosen) < links:
            chosen.add(int(random.choice(ends)))
        for old in chosen:
            linked[new, old] = linked[old, new] = True
        ends += [*chosen, *[new] * links]
    return linked


def spread(nodes: int, number: int, seed: int) -> np.ndarray:
    """(nodes, nodes) bool with the diagonal: each row has `number` more that are drawn evenly."""
    random = np.random.default_rng(seed)
    linked = np.eye(nodes, dtype=bool)
    for row in range(nodes):
        linked[row, random.permutation(np.flatnonzero(~linked[row]))[:number]] = True
    return linked


Pattern = Callable[..., Sees]  # blocks of a sequence, positions of a block, the pattern's numbers
PATTERNS: dict[str, Pattern] = {
    "all": lambda rows, block: local(rows * block),
    "local": lambda rows, block, width: local(width),
    "banded": lambda rows, block, number: banded(number, block),
    "strided": lambda rows, block, stride: strided(stride),
    "fixed": lambda rows, block, stride, columns: fixed(stride, columns),
    "watts-strogatz": lambda rows, block, n, p, seed: of_blocks(watts_strogatz(rows, n, p, seed), block),
    "barabasi-albert": lambda rows, block, m, seed: of_blocks(barabasi_albert(rows, m, seed), block),
    "spread": lambda rows, block, n, seed: of_blocks(spread(rows, n, seed), block),
}


@lru_cache(maxsize=8)
def parse(text: str, *, length: int, block: int, heads: int, causal: bool = True) -> Layout:
    """The layout that a text describes. The heads take its parts in turn."""
    rows = -(-length // block)
    parts = [either([PATTERNS[name](rows, block, *numbers) for name, numbers in head]) for head in patterns.parse(text)]
    return layout_of([parts[h % len(parts)] for h in range(heads)], length=length, block=block, causal=causal)
