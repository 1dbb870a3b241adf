"""Batches of token windows: the rows (samples) of training and validation batches, by sample index. For `Batches` the tokens of
sample i are a pure function of (seed, i): nothing is shuffled or stored, so resuming, gradient accumulation and splitting a batch
among ranks all mean asking for other sample indices."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Protocol

import numpy as np

from barellm.config import ORDERS
from barellm.data.shards import TokenStream
from barellm.errors import UserError

ROUNDS = 6
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 1 << 22  # tokens that are looked through at once


def mix(x: int) -> int:
    """A bijection of 64-bit numbers that looks random: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def draw(key: int, index: int) -> int:
    """Draw `index` of the stream of 64-bit numbers that a key names (splitmix64)."""
    return mix(key + (index + 1) * GOLDEN & MASK)


@lru_cache(maxsize=16)
def round_keys(key: int) -> tuple[int, ...]:
    return tuple(draw(key, r) for r in range(ROUNDS))


def permuted(index: int, size: int, key: int) -> int:
    """Position of `index` under a pseudo-random permutation of range(size) that `key` selects (0 <= index < size).
    A Feistel network permutes the smallest power of two that holds `size`; it is applied again until the result is below `size`
    (cycle walking, Black and Rogaway 2002), fewer than twice on average. No table is stored. Plain integers take 3 us per sample;
    NumPy on the few samples of a batch took five times as long."""
    bits = (size - 1).bit_length()
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    keys = round_keys(key)
    while True:
        high, low = index >> low_bits, index & low_mask
        for r in range(0, ROUNDS, 2):
            high ^= mix(low ^ keys[r]) & high_mask
            low ^= mix(high ^ keys[r + 1]) & low_mask
        index = high << low_bits | low
        if index < size:
            return index


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Where each token's document begins in its row: the last `separator` up to it, or 0. tokens (B, T) -> (B, T) int32."""
    return np.maximum.accumulate(np.where(tokens == separator, np.arange(tokens.shape[1], dtype=np.int32), 0), axis=1)


class Rows(Protocol):
    """A source of training rows. `separator`: the token that begins each document if attention is masked by document, else None."""

    separator: int | None = None

    def starts(self, first_sample: int, count: int, tokens: np.ndarray) -> np.ndarray | None:
        """Per token, where its document begins in its row, (count, seq) int32; None: attention is not masked by document."""
        return None if self.separator is None else document_starts(tokens, self.separator)

    def batch(self, first_sample: int, count: int, *, seq: int, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and next-token targets of samples [first_sample, first_sample + count), each (count, seq) int32. `document` is the
        most tokens taken of one document (0: no limit); sources whose rows are windows of the stream ignore it."""
        ...

    def counted(self, first_sample: int, count: int, *, seq: int) -> int:
        """Number of these samples' targets that enter the loss: all but the masked ones (-1)."""
        return count * seq


class Repeated(Rows):
    """Another source's first `samples` samples, repeated endlessly: sample i is its sample i % samples."""

    def __init__(self, rows: Rows, samples: int) -> None:
        self.rows, self.samples = rows, samples

    def _runs(self, first_sample: int, count: int) -> Iterator[tuple[int, int]]:
        """Split a range of samples into (first, count) ranges of the underlying source, which do not wrap around."""
        while count:
            first = first_sample % self.samples
            size = min(count, self.samples - first)
            yield first, size
            first_sample, count = first_sample + size, count - size

    def batch(self, first_sample: int, count: int, *, seq: int, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, as `Rows.batch`: one batch of the underlying source for each range, concatenated."""
        batches = [self.rows.batch(first, size, seq=seq, document=document) for first, size in self._runs(first_sample, count)]
        return np.concatenate([inputs for inputs, _ in batches]), np.concatenate([targets for _, targets in batches])

    def starts(self, first_sample: int, count: int, tokens: np.ndarray) -> np.ndarray | None:
        """Document starts, as `Rows.starts`; `tokens` are the inputs of these samples."""
        parts, row = [], 0
        for first, size in self._runs(first_sample, count):
            parts.append(self.rows.starts(first, size, tokens[row : row + size]))
            row += size
        return None if parts[0] is None else np.concatenate(parts)

    def counted(self, first_sample: int, count: int, *, seq: int) -> int:
        return sum(self.rows.counted(first, size, seq=seq) for first, size in self._runs(first_sample, count))


class Batches(Rows):
    """Windows of a token stream: inputs are `seq` tokens, targets the same shifted by one.
    `order` "epoch": adjacent windows, each once per epoch, permuted anew in each epoch; "sequential": the same windows in the order
    of the stream; "random": windows with random starts (with replacement), as in nanoGPT. UserError if the stream is shorter than
    one window. A stage of the schedule with another sequence length has windows of its own."""

    def __init__(self, tokens: TokenStream, *, seq: int, seed: int, order: str = "epoch") -> None:
        """`order` is one of ORDERS, as in the class's docstring; the permutations depend on `seed` and it."""
        assert order in ("epoch", "random", "sequential") and seq >= 1
        if len(tokens) < seq + 1:
            found = f"{tokens.name} has {len(tokens)} tokens, one sequence of {seq} needs {seq + 1}"
            raise UserError(f"{found}: more text, or a smaller train.seq")
        self.tokens, self.seq, self.seed, self.order = tokens, seq, seed, order
        self.windows = (len(tokens) - 1) // seq  # side by side: the samples of an epoch
        self._key = draw(seed & MASK, ORDERS.index(order))
        self._others: dict[int, Batches] = {}  # by the length of their windows

    def start(self, sample: int) -> int:
        """The first token of a sample's window."""
        if self.order == "random":
            return draw(self._key, sample) % (len(self.tokens) - self.seq)
        epoch, index = divmod(sample, self.windows)
        if self.order == "sequential":
            return index * self.seq
        return permuted(index, self.windows, draw(self._key, epoch)) * self.seq

    def batch(self, first_sample: int, count: int, *, seq: int = 0, document: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, each (count, seq) int32, as `Rows.batch`; seq 0 means the length given to the constructor. `document`
        is ignored: windows cross document boundaries."""
        if seq not in (0, self.seq):
            other = self._others.setdefault(seq, Batches(self.tokens, seq=seq, seed=self.seed, order=self.order))
            return other.batch(first_sample, count)
        inputs, targets = np.empty((count, self.seq), np.int32), np.empty((count, self.seq), np.int32)
        window = np.empty(self.seq + 1, np.int32)
        for row in range(count):
            self.tokens.read(self.start(first_sample + row), window)
            inputs[row], targets[row] = window[:-1], window[1:]
        return inputs, targets


class Documents(Rows):
    """Sequence packing: a row takes documents in the order of the stream until it has seq + 1 tokens (inputs and targets overlap by
    seq), of each the first `document` tokens (0: all) or fewer where the row ends; the rest of a document is dropped. After the
    last document comes the first again.
    Which documents a row has depends on all rows before it; `shape(sample)` gives their (seq, document), so a resumed run finds its
    place by replaying the packing. UserError without a `separator` token, which must begin each document.
    `span` False: no row crosses the boundary between shards, as in modded-nanogpt on one GPU; the documents of an unfinished row
    are dropped, and so is what precedes a shard's first separator."""

    def __init__(
        self, tokens: TokenStream, *, separator: int | None, shape: Callable[[int], tuple[int, int]], span: bool = True
    ) -> None:
        """Find all documents of the stream, in blocks of tokens. `separator` begins each; `shape(row)`: its (seq, most tokens of a
        document, 0: all); `span` False: no document or row goes from one shard to the next. UserError without any document."""
        if separator is None:
            raise UserError(f"data.order is 'documents', and the vocabulary of {tokens.name} has no token between them")
        blocks = range(0, len(tokens), BLOCK)
        found = [lo + np.flatnonzero(tokens.array(lo, min(lo + BLOCK, len(tokens))) == separator) for lo in blocks]
        begins = np.concatenate(found)
        if not len(begins):
            raise UserError(f"data.order is 'documents', and {tokens.name} has no token {separator}, which begins one")
        self.tokens, self.shape = tokens, shape
        self._begins: list[int] = begins.tolist()
        self._ends = [*self._begins[1:], len(tokens)]
        self._shards = [0] * len(begins)  # that of each document
        if not span:
            shards = np.searchsorted(tokens.ends, begins, side="right")
            self._ends, self._shards = np.minimum(self._ends, tokens.ends[shards]).tolist(), shards.tolist()
        self._sample, self._document = 0, 0  # the next row, and the document that it begins with

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """The token ranges [first, last) of a row's documents, seq + 1 tokens in all. An earlier sample replays from 0."""
        if sample < self._sample:
            self._sample, self._document = 0, 0
        while True:
            row = self._next(*self.shape(self._sample))
            self._sample += 1
            if self._sample > sample:
                return row

    def _next(self, seq: int, document: int) -> list[tuple[int, int]]:
        """Pack the next row: its documents' token ranges [first, last), seq + 1 tokens in all; `document`: most of each, 0: all."""
        row, room = [], seq + 1
        wraps = 0  # how often the stream's end was reached: twice means that no row can be filled
        while room:
            wrapped = self._document == len(self._begins)
            # A row does not go on at the beginning of the text, nor in another shard (without `span`): what it has is dropped.
            if wrapped or (row and self._shards[self._document] != self._shards[self._document - 1]):
                row, room = [], seq + 1
            if wrapped:
                self._document = 0
                wraps += 1
                if wraps == 2:
                    within = " in a shard" * (len(set(self._shards)) > 1)
                    found = f"its documents{within} have fewer than {seq + 1} tokens, of each at most {document or 'all'}"
                    raise UserError(f"{self.tokens.name} fills no row: {found}; more text, or a smaller seq")
            begin, end = self._begins[self._document], self._ends[self._document]
            end = min(end, begin + room, begin + document if document else end)
            row.append((begin, end))
            room -= end - begin
            self._document += 1
        return row

    def batch(self, first_sample: int, count: int, *, seq: int, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, as `Rows.batch`; (seq, document) must be what `shape` gives for these samples."""
        assert self.shape(first_sample) == (seq, document)
        rows = np.empty((count, seq + 1), np.int32)
        for row in range(count):
            filled = 0
            for begin, end in self.spans(first_sample + row):
                self.tokens.read(begin, rows[row, filled : filled + end - begin])
                filled += end - begin
        return rows[:, :-1].copy(), rows[:, 1:].copy()


class Validation:
    """Adjacent windows of `seq` targets over a whole stream, in order: every token but the first is a target exactly once. The last
    window is padded with token 0 and target -1, which the loss ignores. `max_tokens` > 0: only that many targets, in whole windows
    spread evenly over the stream, so that a short evaluation samples all of it. `separator`: as in `Rows`."""

    def __init__(self, tokens: TokenStream, *, seq: int, max_tokens: int = 0, separator: int | None = None) -> None:
        self.separator = separator
        if len(tokens) < 2:
            raise UserError(f"{tokens.name} has {len(tokens)} tokens, expected at least 2")
        self.tokens, self.seq = tokens, seq
        windows = -(-(len(tokens) - 1) // seq)
        self.windows = min(windows, max(max_tokens // seq, 1)) if max_tokens else windows
        self._starts = [window * windows // self.windows * seq for window in range(self.windows)]
        self.targets = sum(self._valid(window) for window in range(self.windows))

    def _valid(self, window: int) -> int:
        """Number of real (not padded) targets in a window."""
        return min(self.seq, len(self.tokens) - 1 - self._starts[window])

    def batch(
        self, first: int, count: int, inputs: np.ndarray | None = None, targets: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Windows [first, first + count), up to the last: inputs and targets (windows, seq) int32, in the given arrays if any."""
        count = min(count, self.windows - first)
        inputs = np.empty((count, self.seq), np.int32) if inputs is None else inputs[:count]
        targets = np.empty((count, self.seq), np.int32) if targets is None else targets[:count]
        for row in range(count):
            valid = self._valid(first + row)
            window = self.tokens.array(self._starts[first + row], self._starts[first + row] + valid + 1)
            inputs[row], targets[row] = 0, -1
            inputs[row, :valid], targets[row, :valid] = window[:-1], window[1:]
        return inputs, targets

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All windows, `count` at a time; the last batch may have fewer."""
        for first in range(0, self.windows, count):
            yield self.batch(first, count)

    def starts(self, first: int, tokens: np.ndarray) -> np.ndarray | None:
        """Document starts of the tokens, as `Rows.starts`."""
        return None if self.separator is None else document_starts(tokens, self.separator)

    def text_bytes(self, byte_lengths: np.ndarray) -> int:
        """Number of UTF-8 bytes of all targets: the summed loss divided by it and by ln 2 gives bits per byte."""
        return round(sum(float(byte_lengths[targets[targets >= 0]].sum()) for _, targets in self.batches(256)))
