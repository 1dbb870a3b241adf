"""Tokens one after the other, through the program "decode" and its KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from barellm import models
from barellm.config import ModelConfig
from barellm.generation.samplers import Sampling, draw
from barellm.runtime.session import Session

LEAST_POSITIONS = 256


def cache_positions(tokens: int, most: int) -> int:
    """Positions of a KV cache for a text of so many tokens in a model that has at most `most`. It is a power of two, since each
    other number is another constant of the kernels, which are then compiled again."""
    return min(most, max(LEAST_POSITIONS, 1 << (tokens - 1).bit_length()))


def kept(text: Sequence[int], positions: int) -> Sequence[int]:
    """The part of a text that a model with so many positions sees: all of it if it fits, else as much of its end as fills half of
    the positions, so that there is room for what follows."""
    return text if len(text) <= positions else text[-max(1, positions // 2) :]


class Decoder:
    """Feeds a prompt at once, then each drawn token. When all `max_seq` positions of the cache are used, the newer half of the text
    is fed again from position 0: positions are absolute, so a cache cannot be moved. A `whole` model has no cache: for each token
    it is fed all that it sees. Ids from `vocab_size` on are padding."""

    def __init__(self, session: Session, *, max_seq: int, vocab_size: int, whole: bool = False) -> None:
        self.session, self.max_seq, self.vocab_size, self.whole = session, max_seq, vocab_size, whole

    def tokens(self, prompt: Sequence[int], *, count: int, how: Sampling) -> Iterator[int]:
        """`count` tokens that follow the prompt (at least one token), each as soon as it is known."""
        limit = self.max_seq
        text = list(prompt)
        fresh = kept(text, limit)
        used = 0
        for index in range(count):
            logits = self._logits(fresh, pos=used)
            used += len(fresh)
            token = draw(logits, how, index=index)
            yield token
            text.append(token)
            if used < limit and not self.whole:
                fresh = [token]
            else:
                fresh, used = kept(text, limit), 0

    def _logits(self, tokens: Sequence[int], *, pos: int) -> np.ndarray:
        """(vocab_size,) after `tokens` at positions pos .. pos + len(tokens)."""
        self.session.write("tokens", np.array([tokens], np.int32))
        self.session.run("decode", batch=1, seq=len(tokens), pos=pos)
        return self.session.read("logits").reshape(-1)[: self.vocab_size]


def open_decoder(session: Session, model: ModelConfig, *, positions: int) -> Decoder:
    """A model's decoder. `positions`: those that the session's "decode" was planned for."""
    whole = getattr(models.of(model), "WHOLE", False)
    return Decoder(session, max_seq=positions, vocab_size=model.vocab_size, whole=whole)
