"""The decoder against a session that answers from the text it has seen: what is fed, and at which position."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.generation.decode import Decoder, kept
from barellm.generation.samplers import Sampling

VOCAB = 97


class Echo:
    """A cache of the tokens at each position; the most likely next token is a function of all of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cache: list[int] = []
        self.fed: list[tuple[int, int]] = []

    def write(self, name: str, array: np.ndarray) -> None:
        assert name == "tokens" and array.dtype == np.int32 and array.shape[0] == 1
        self.tokens = array[0].tolist()

    def run(self, entry: str, *, batch: int, seq: int, pos: int) -> None:
        assert entry == "decode" and batch == 1 and seq == len(self.tokens) and pos + seq <= self.limit
        assert pos <= len(self.cache)
        self.cache = self.cache[:pos] + self.tokens
        self.fed.append((pos, seq))

    def read(self, name: str) -> np.ndarray:
        logits = np.zeros((1, 1, VOCAB + 15), np.float32)
        logits[0, 0, expected(self.cache)] = 5
        logits[0, 0, VOCAB:] = 100  # padded ids: never to be drawn
        return logits


def expected(text: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(text)) % VOCAB


GREEDY = Sampling(temperature=0)


def test_each_token_follows_from_all_before_it():
    session = Echo(64)
    text = [3, 5, 8]
    found = list(Decoder(session, max_seq=64, vocab_size=VOCAB).tokens(text, count=10, how=GREEDY))
    for token in found:
        assert token == expected(text)
        text.append(token)
    assert session.fed == [(0, 3), *[(3 + i, 1) for i in range(9)]]


def test_tokens_come_one_at_a_time():
    session = Echo(64)
    stream = Decoder(session, max_seq=64, vocab_size=VOCAB).tokens([1], count=50, how=GREEDY)
    next(stream)
    assert len(session.fed) == 1


def test_what_a_model_sees_of_a_text():
    assert kept([1, 2, 3, 4], 4) == [1, 2, 3, 4]
    assert kept([1, 2, 3, 4, 5], 4) == [4, 5] and kept([1, 2], 1) == [2]


@pytest.mark.parametrize("limit", [1, 2, 7, 8])
def test_a_full_cache_starts_again_with_the_newer_half(limit):
    session = Echo(limit)
    text = [4]
    for token in Decoder(session, max_seq=limit, vocab_size=VOCAB).tokens(text, count=40, how=GREEDY):
        seen = session.cache
        assert token == expected(seen)
        assert seen == text[-len(seen) :]
        assert len(seen) >= max(1, limit // 2) or len(text) < limit
        text.append(token)
    assert len(text) == 41


def test_a_prompt_longer_than_the_model_is_cut_from_the_left():
    session = Echo(8)
    text = list(range(20))
    (token,) = Decoder(session, max_seq=8, vocab_size=VOCAB).tokens(text, count=1, how=GREEDY)
    assert session.cache == text[-4:]
    assert token == expected(text[-4:])
