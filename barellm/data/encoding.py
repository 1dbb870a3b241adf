"""Tokenization of a corpus in groups of blocks: all cores encode one group while the next is read."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from barellm.data import reading, tokenizers
from barellm.data.corpus import Corpus, Piece

GROUP = 1 << 22  # characters in a group


@dataclass(frozen=True)
class Place:
    """Where to go on: a piece by its number, and a place in it, where a document begins or goes on. -1: the piece's start."""

    piece: int = 0
    at: int = -1
    begins: bool = True


@dataclass
class Group:
    """Consecutive blocks, from piece `first` on, and the place behind them. `empty`: documents without text, left out."""

    first: int
    next: Place
    blocks: list[reading.Block] = field(default_factory=list)
    characters: int = 0
    documents: int = 0
    empty: int = 0
    bytes: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def add(self, block: reading.Block) -> None:
        nothing = block.begins and block.closed and not block.text
        self.empty += nothing
        self.documents += block.begins and not nothing
        if block.text:
            self.blocks.append(block)
            self.characters += len(block.text)


def encoded(corpus: Corpus, tokenizer: tokenizers.Tokenizer, pieces: Sequence[Piece], place: Place) -> Iterator[Group]:
    """Iterate over tokenized groups from a place on. Each document is preceded by the end-of-text id if the tokenizer has one."""
    worker = ThreadPoolExecutor(1)
    pending: Future[Group] | None = None
    try:
        for group in _groups(corpus, pieces, place):
            next_group = worker.submit(_encode, tokenizer, group)
            if pending:
                yield pending.result()
            pending = next_group
        if pending:
            yield pending.result()
    finally:
        worker.shutdown(wait=False, cancel_futures=True)


def _groups(corpus: Corpus, pieces: Sequence[Piece], place: Place) -> Iterator[Group]:
    """Collect blocks into groups of about GROUP characters that do not span the split. `group.next` is where to resume."""
    group = Group(place.piece, place)
    for number in range(place.piece, len(pieces)):
        if number == len(corpus.val) and group.first < number:
            yield group
            group = Group(number, Place(number))
        start, begins = (place.at, place.begins) if number == place.piece else (-1, True)
        for block in corpus.blocks(pieces[number], start=start, begins=begins):
            group.add(block)
            if group.characters >= GROUP and block.end >= 0:
                group.next = Place(number, block.end, block.closed)
                yield group
                group = Group(number, group.next)
        group.next = Place(number + 1)
    yield group


def _encode(tokenizer: tokenizers.Tokenizer, group: Group) -> Group:
    """Set a group's tokens and byte count from its blocks, and drop their text."""
    before = np.array([] if tokenizer.eot is None else [tokenizer.eot], np.int32)
    texts = [block.text for block in group.blocks]
    parts = []
    for block, ids in zip(group.blocks, tokenizer.encode_many(texts), strict=True):
        parts += [before, ids] if block.begins else [tokenizer.encode_continued(block.text) if tokenizer.prefixed else ids]
    group.tokens = np.concatenate(parts) if parts else group.tokens
    group.bytes = sum(len(text.encode()) for text in texts)
    group.blocks = []
    return group
