"""The order of llm.c's training: its shuffled DataLoader, to the token."""

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
    """A sample of llm.c is a whole micro-batch: batch x seq tokens that stand one after the other in a shard,
    and one more. Each epoch it shuffles the list of shards as the epoch before has left it, and then, shard for shard, the
    samples in it, all with one Mersenne twister; what is left at a shard's end is not used.

    To go on at a sample, the random numbers before it are counted and skipped. UserError where a shard has not one sample."""

    def __init__(self, tokens: TokenStream, *, batch: int, seq: int) -> None:
        self.tokens, self.batch_size, self.seq = tokens, batch, seq
        self.sizes = [(len(part) - 1) // (batch * seq) for part in tokens.parts]  # samples in a shard
        if not self.sizes or min(self.sizes) < 1:
            fewest = min((len(part) for part in tokens.parts), default=0)
            raise UserError(
                f"{tokens.name} has a shard of {fewest} tokens, data.order 'llmc' needs at least "
                f"train.micro_batch_size x train.seq + 1 = {batch * seq + 1} in each"
            )
        self._rewind()

    def _rewind(self) -> None:
        self._random = np.random.RandomState(SEED)
        self._shards = np.arange(len(self.sizes))
        self._first, self._place = 0, -1  # the first sample of the shard that is open, and its place in the list
        self._order: np.ndarray | None = None

    def start(self, sample: int) -> tuple[int, int]:
        """Gives the shard of a sample and its first token there."""
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

    def check(self, sample: int, found: Mapping[str, Any]) -> None:
        """Compare with where llm.c's loader stood before the same sample: at the place "shard" of the list "shards", after so many
        samples as "sample". UserError where that is elsewhere: the batches that came before were others."""
        here, place, taken = self.data_position(sample), found["shard"], found["sample"]
        shards = found["shards"]
        known = sorted(shards) == list(range(len(self.sizes))) and 0 <= place < len(shards)
        if known and taken == self.sizes[shards[place]]:
            place, taken = (place + 1) % len(shards), 0  # it opens the next one when it needs it
            shards = shards if place else here.shards
        if (here.shards, here.shard, here.sample) != (shards, place, taken):
            stood = f"micro-batch {taken} of shard {place} of the list {_short(shards)}"
            ours = f"micro-batch {here.sample} of shard {here.shard} of {_short(here.shards)}"
            keys = f"train.micro_batch_size {self.batch_size}, train.seq {self.seq}, train.gradient_accumulation_steps"
            raise UserError(
                f"llm.c's data stood at {stood}, and by {keys} and {self.tokens.name} it stands at {ours}: choose "
                "llm.c's -b, -t, -d and shards, or another data.order"
            )

    @property
    def _shard(self) -> int:
        return int(self._shards[self._place])

    def _advance(self) -> None:
        """Open the next shard of the list, or of the next epoch's."""
        if self._order is None and self._place >= 0:  # nobody has asked for a sample of this shard
            left = self.sizes[self._shard] - 1
            while left:
                self._draw(min(left, AT_ONCE))
                left -= min(left, AT_ONCE)
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
        """A `Rows`."""
        if (count, seq) != (self.batch_size, self.seq):
            raise UserError(
                f"data.order 'llmc' shuffles micro-batches of {self.batch_size} x {self.seq} tokens, asked for {count} x {seq}: "
                "it cannot serve a model whose rows change their length"
            )
        shard, at = self.start(first_sample // count)
        window = self.tokens.parts[shard][at : at + count * seq + 1].astype(np.int32)
        return window[:-1].reshape(count, seq), window[1:].reshape(count, seq)


def _short(shards: list[int]) -> str:
    return f"{', '.join(map(str, shards[:8]))}{', ...' if len(shards) > 8 else ''}"
