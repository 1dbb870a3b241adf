"""Batches in the order of llm.c's shuffled DataLoader, token for token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from barellm.data.loader import Rows
from barellm.data.shards import TokenStream
from barellm.errors import UserError

SEED = 42  # llm.c's own, of its first process
AT_ONCE = 1 << 22  # random numbers that are skipped at once


@dataclass(frozen=True)
class DataPosition:
    """Where llm.c's loader stands: the list of shards and its place in it, the order of that shard's samples and how many of them
    were taken, the key of the Mersenne twister and how many of its numbers were drawn."""

    shards: list[int]
    shard: int
    samples: list[int]
    sample: int
    key: np.ndarray
    drawn: int


class LlmcOrder(Rows):
    """A sample is a whole micro-batch: batch x seq consecutive tokens of a shard (and one more for the targets). In each epoch
    llm.c shuffles its list of shards, as the epoch before left it, and then within each shard its samples, all with one Mersenne
    twister; what is left at a shard's end is not used.
    To resume at a sample, the random numbers before it are counted and skipped. UserError for a shard shorter than one sample."""

    def __init__(self, tokens: TokenStream, *, batch: int, seq: int) -> None:
        """`batch` x `seq` is the micro-batch that is shuffled."""
        self.tokens, self.batch_size, self.seq = tokens, batch, seq
        self.sizes = [(len(part) - 1) // (batch * seq) for part in tokens.parts]  # samples in a shard
        if not self.sizes or min(self.sizes) < 1:
            fewest = min((len(part) for part in tokens.parts), default=0)
            needed = f"at least train.micro_batch_size x train.seq + 1 = {batch * seq + 1} in each"
            raise UserError(f"{tokens.name} has a shard of {fewest} tokens, data.order 'llmc' needs {needed}")
        self._rewind()

    def _rewind(self) -> None:
        self._random = np.random.RandomState(SEED)
        self._shards = np.arange(len(self.sizes))
        self._first, self._place = 0, -1  # the first sample of the shard that is open, and its place in the list
        self._order: np.ndarray | None = None

    def start(self, sample: int) -> tuple[int, int]:
        """(shard, index of its first token there) of a sample. Going back to an earlier sample replays from the beginning."""
        if self._place < 0 or sample < self._first:
            self._rewind()
            self._advance()
        while sample >= self._first + self.sizes[self._shard]:
            self._first += self.sizes[self._shard]
            self._advance()
        if self._order is None:
            self._order = self._permuted(np.arange(self.sizes[self._shard]))
        return self._shard, int(self._order[sample - self._first]) * self.batch_size * self.seq

    def data_position(self, sample: int) -> DataPosition:
        """Before a sample is taken."""
        self.start(sample)
        assert self._order is not None
        state: Any = self._random.get_state()
        return DataPosition(self._shards.tolist(), self._place, self._order.tolist(), sample - self._first, state[1], state[2])

    def check(self, sample: int, saved: Mapping[str, Any]) -> None:
        """Compare with the saved position of llm.c's loader before the same sample: index "shard" into the permuted list "shards",
        after "sample" samples of it. UserError if they differ: the batches before were different ones."""
        ours, place, taken = self.data_position(sample), saved["shard"], saved["sample"]
        shards = saved["shards"]
        valid = sorted(shards) == list(range(len(self.sizes))) and 0 <= place < len(shards)
        if valid and taken == self.sizes[shards[place]]:
            place, taken = (place + 1) % len(shards), 0  # llm.c opens the next shard only when it needs it
            shards = shards if place else ours.shards
        if (ours.shards, ours.shard, ours.sample) != (shards, place, taken):
            their_text = f"micro-batch {taken} of shard {place} of the list {_short(shards)}"
            our_text = f"micro-batch {ours.sample} of shard {ours.shard} of {_short(ours.shards)}"
            keys = f"train.micro_batch_size {self.batch_size}, train.seq {self.seq}, train.gradient_accumulation_steps"
            found = f"llm.c's data stood at {their_text}, and by {keys} and {self.tokens.name} it stands at {our_text}"
            raise UserError(f"{found}: choose llm.c's -b, -t, -d and shards, or another data.order")

    @property
    def _shard(self) -> int:
        return int(self._shards[self._place])

    def _advance(self) -> None:
        """Open the next shard of the list; after the last, reshuffle the list for a new epoch. If no sample of the current shard
        was used, the random numbers of its shuffle are drawn and dropped."""
        if self._order is None and self._place >= 0:  # nobody has asked for a sample of this shard
            draws = self.sizes[self._shard] - 1
            while draws:
                self._draw(min(draws, AT_ONCE))
                draws -= min(draws, AT_ONCE)
        self._order = None
        self._place += 1
        if self._place in (0, len(self.sizes)):
            self._shards, self._place = self._permuted(self._shards), 0

    def _draw(self, count: int) -> np.ndarray:
        return self._random.randint(0, 1 << 32, count, dtype=np.uint32)

    def _permuted(self, items: np.ndarray) -> np.ndarray:
        """Fisher and Yates' shuffle from the last place down, each place with the next random number."""
        found, numbers = items.tolist(), self._draw(len(items) - 1).tolist()
        for i, number in zip(range(len(found) - 1, 0, -1), numbers, strict=True):
            j = number % (i + 1)
            found[i], found[j] = found[j], found[i]
        return np.array(found)

    def batch(self, first_sample: int, count: int, *, seq: int, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, each (count, seq) int32, as `Rows.batch`; the shape must be llm.c's micro-batch."""
        if (count, seq) != (self.batch_size, self.seq):
            found = f"micro-batches of {self.batch_size} x {self.seq} tokens, asked for {count} x {seq}"
            raise UserError(f"data.order 'llmc' shuffles {found}: it cannot serve a model whose rows change their length")
        shard, at = self.start(first_sample // count)
        window = self.tokens.parts[shard][at : at + count * seq + 1].astype(np.int32)
        return window[:-1].reshape(count, seq), window[1:].reshape(count, seq)


def _short(shards: list[int]) -> str:
    return f"{', '.join(map(str, shards[:8]))}{', ...' if len(shards) > 8 else ''}"
