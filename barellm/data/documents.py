"""Rows that are filled with whole documents, as modded-nanogpt does: each begins with the first token of a document."""

from collections.abc import Callable

import numpy as np

from barellm.data.loader import Rows
from barellm.data.shards import TokenStream
from barellm.errors import UserError

BLOCK = 1 << 22  # tokens that are looked through at once


class Documents(Rows):
    """A row of `seq` inputs takes documents in the order of the stream until it has seq + 1 tokens. It takes
    the first `document` tokens of each, or fewer where the row ends, and drops the rest. After the last document comes the first.

    Which documents are in a row depends on all rows before it. `shape(sample)` tells their (seq, document), so that a resumed run
    finds its place by counting. UserError where the text has no `separator`, the token that begins a document.

    Without `span` each shard is a text of its own, as modded-nanogpt has it on one GPU: no row and no document goes on in the next
    shard. The documents of an unfinished row are dropped, and so is what a shard has before its first separator."""

    def __init__(
        self, tokens: TokenStream, *, separator: int | None, shape: Callable[[int], tuple[int, int]], span: bool = True
    ) -> None:
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
        """The tokens [first, last) of each document in a row, seq + 1 of them in all."""
        if sample < self._sample:
            self._sample, self._document = 0, 0
        while True:
            found = self._next(*self.shape(self._sample))
            self._sample += 1
            if self._sample > sample:
                return found

    def _next(self, seq: int, document: int) -> list[tuple[int, int]]:
        found, room = [], seq + 1
        tried = 0
        while room:
            over = self._document == len(self._begins)
            # A row does not go on at the beginning of the text.
            if over or (found and self._shards[self._document] != self._shards[self._document - 1]):
                found, room = [], seq + 1
            if over:
                self._document = 0
                tried += 1
                if tried == 2:
                    apart = " in a shard" * (len(set(self._shards)) > 1)
                    raise UserError(
                        f"{self.tokens.name} fills no row: its documents{apart} have fewer than {seq + 1} tokens, "
                        f"of each at most {document or 'all'}; more text, or a smaller seq"
                    )
            begin, end = self._begins[self._document], self._ends[self._document]
            end = min(end, begin + room, begin + document if document else end)
            found.append((begin, end))
            room -= end - begin
            self._document += 1
        return found

    def batch(self, first_sample: int, count: int, *, seq: int, document: int) -> tuple[np.ndarray, np.ndarray]:
        """A `Rows`."""
        assert self.shape(first_sample) == (seq, document)
        rows = np.empty((count, seq + 1), np.int32)
        for row in range(count):
            at = 0
            for begin, end in self.spans(first_sample + row):
                self.tokens.read(begin, rows[row, at : at + end - begin])
                at += end - begin
        return rows[:, :-1].copy(), rows[:, 1:].copy()
