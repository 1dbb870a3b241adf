"""The decoder against a session that answers from the text it has seen: what is fed, and at which position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest

from barellm.assembly.build import build_programs, open_model
from barellm.config import Config as Run
from barellm.config import ModelConfig, TrainConfig
from barellm.generation.decode import Decoder, cache_positions, kept
from barellm.generation.samplers import Sampling
from barellm.generation.writing import unseen
from barellm.models.gpt2 import Config as Gpt2
from barellm.models.llama3 import Config

VOCAB = 97


def test_a_prompt_is_said_to_be_cut_only_when_it_is():
    assert unseen(range(8), 8) == "" and list(kept(range(8), 8)) == list(range(8))
    assert unseen(range(9), 8) == "the prompt has 9 tokens: the model has 8 positions and sees the last 4"


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


@pytest.mark.parametrize("tokens, most, positions", [
    (1, 1024, 256), (256, 1024, 256), (257, 1024, 512), (513, 1024, 1024), (900, 1000, 1000), (5000, 1000, 1000), (3, 16, 16),
])  # fmt: skip
def test_the_cache_holds_the_prompt_and_what_follows(tokens, most, positions):
    assert cache_positions(tokens, most) == positions


@contextmanager
def opened(model: ModelConfig, dtype: str, **sizes: int) -> Iterator[Decoder]:
    """A decoder of random weights with a cache of these rows and positions."""
    config = Run(preset="", model=model, train=TrainConfig(micro_batch_size=1, seq=8, dtype=dtype))
    with open_model(config, device="cpu", training=False, **sizes) as compiled:
        for name, t in compiled.session.tensors.items():
            if t.role == "parameter":
                values = np.random.default_rng(len(name)).normal(size=t.shape).astype(np.float32)
                compiled.session.write(name, 0.2 * values)
        yield Decoder(compiled.session, max_seq=sizes["positions"], vocab_size=VOCAB)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [
    Config(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=56, vocab_size=VOCAB, max_seq=32),
    Gpt2(layers=2, heads=3, d_model=39, vocab_size=VOCAB, max_seq=32),
], ids=["llama", "gpt2"])  # fmt: skip
@pytest.mark.extended
def test_a_text_is_the_same_alone_and_in_a_batch(model, dtype):
    """Of prompts of odd lengths, one there twice, one that fills the cache, one that does not fit; and beyond the cache's end."""
    r = np.random.default_rng(1)
    prompts = [r.integers(0, VOCAB, n).tolist() for n in (5, 31, 1, 9, 32, 40)]
    prompts.insert(2, prompts[0])
    hows = [Sampling(temperature=1.0, seed=i, repetition_penalty=1.3, top_k=50) for i in range(7)]
    with opened(model, dtype, positions=32) as decoder:
        alone = [list(decoder.tokens(p, count=41, how=how)) for p, how in zip(prompts, hows, strict=True)]
    assert len(set(map(tuple, alone))) == 7
    found: list[list[int]] = [[] for _ in prompts]
    ended = set()
    with opened(model, dtype, positions=32, rows=7) as decoder:
        for number, token in decoder.together(prompts, count=41, hows=hows, ended=ended):
            found[number].append(token)
            if number in (0, 4) and len(found[number]) == 3 + number:
                ended.add(number)
    assert [len(tokens) for tokens in found] == [3, 41, 41, 41, 7, 41, 41]
    assert all(tokens == whole[: len(tokens)] for tokens, whole in zip(found, alone, strict=True))


def test_texts_side_by_side_share_their_runs():
    class Counted:
        tensors: ClassVar[dict] = {}

        def __init__(self) -> None:
            self.runs = []

        def write(self, name, array):
            self.tokens = array

        def run(self, entry, *, batch, seq, pos):
            self.runs.append((batch, seq, pos))

        def read(self, name):
            return np.zeros((len(self.tokens), 1, VOCAB), np.float32)

    session = Counted()
    decoder = Decoder(session, max_seq=16, vocab_size=VOCAB)
    list(decoder.together([[7, 8], [5, 6], [7, 8]], count=1, hows=[GREEDY] * 3))
    assert session.runs == [(1, 2, 0), (1, 2, 0)], "prompts that are equal are fed once"
    session.runs.clear()
    found = list(decoder.together([[1, 2, 3, 4], [7, 8], [7, 8]], count=3, hows=[GREEDY] * 3))
    assert sorted(found) == [(row, 0) for row in range(3) for _ in range(3)]
    assert session.runs == [(1, 4, 0), (1, 2, 0), (2, 1, 2), (2, 1, 3), (3, 1, 4), (3, 1, 5)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_a_shorter_cache_gives_the_same_text_in_less_memory(dtype):
    model = Config(layers=2, heads=4, kv_heads=2, d_model=64, d_ff=96, vocab_size=VOCAB, max_seq=4096)
    config = Run(preset="", model=model, train=TrainConfig(micro_batch_size=1, seq=8, dtype=dtype))
    texts, arenas = [], []
    for positions in (cache_positions(40 + 230, model.max_seq), None):
        with open_model(config, device="cpu", training=False, positions=positions) as compiled:
            session = compiled.session
            for name, t in session.tensors.items():
                if t.role == "parameter":
                    session.write(name, np.random.default_rng(len(name)).normal(size=t.shape))
            decoder = Decoder(session, max_seq=positions or model.max_seq, vocab_size=VOCAB)
            texts.append(list(decoder.tokens(list(range(40)), count=230, how=Sampling(temperature=1.0, seed=3))))
            arenas.append(session.plan.arena_bytes)
    assert texts[0] == texts[1] and len(set(texts[0])) > 10
    caches = 2 * 2 * 32 * {"fp32": 4, "bf16": 2}[dtype]  # bytes of a position: keys and values of both blocks
    assert arenas[1] - arenas[0] >= (4096 - 512) * caches


def test_eval_plans_no_cache():
    model = Config(layers=1, heads=2, kv_heads=2, d_model=8, d_ff=8, vocab_size=VOCAB, max_seq=64)
    config = Run(preset="", model=model, train=TrainConfig(micro_batch_size=1, seq=8, dtype="fp32"))
    assert set(build_programs(config, training=False, positions=0)) == {"init", "eval"}
