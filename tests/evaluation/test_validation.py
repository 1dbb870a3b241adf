"""The loss over windows against the loss over the whole stream at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import log

import numpy as np
import pytest

from barellm.config import TrainConfig
from barellm.data.loader import Validation
from barellm.data.shards import TokenStream
from barellm.data.sources import Dataset
from barellm.evaluation.validation import Evaluator
from barellm.models.speedrun import speedrun

RNG = np.random.default_rng(0)


class Bigrams:
    """A session whose loss of a target is cost[token, target], reported as kernels do: fp32, times inv_targets."""

    def __init__(self, vocab: int) -> None:
        self.cost = RNG.uniform(0, 5, (vocab, vocab))

    def write(self, name, array):
        setattr(self, name, array.copy())

    def run(self, entry, *, batch, seq, inv_targets):
        assert entry == "eval" and self.tokens.shape == self.targets.shape == (batch, seq)
        valid = self.targets >= 0
        losses = self.cost[self.tokens, np.maximum(self.targets, 0)]
        self.loss = np.array([losses[valid].sum() * inv_targets], np.float32)

    def read(self, name):
        return self.loss


@pytest.mark.parametrize("length", [2, 9, 64, 65, 66, 200])
@pytest.mark.parametrize("batch, seq", [(1, 1), (3, 8), (4, 64), (100, 7)])
def test_every_token_but_the_first_counts_once(length, batch, seq):
    tokens = RNG.integers(0, 11, length)
    lengths = RNG.integers(0, 4, 11)
    session = Bigrams(11)
    windows = Validation(TokenStream([tokens.astype(np.uint16)], name="test"), seq=seq)
    done = []
    result = Evaluator(windows, batch=batch, byte_lengths=lengths).run(session, report=done.append)
    assert len(done) == -(-windows.windows // batch) and done[-1] == windows.windows
    expected = session.cost[tokens[:-1], tokens[1:]].sum()
    assert result.targets == length - 1
    assert result.bytes == lengths[tokens[1:]].sum()
    assert result.nats == pytest.approx(expected / (length - 1), rel=1e-6)
    if result.bytes:
        assert result.bits_per_byte == pytest.approx(expected / log(2) / result.bytes, rel=1e-6)


def test_an_unknown_vocabulary_has_no_bits_per_byte():
    windows = Validation(TokenStream([np.arange(20, dtype=np.uint16) % 11], name="test"), seq=4)
    assert Evaluator(windows, batch=2, byte_lengths=None).run(Bigrams(11)).bits_per_byte is None


def test_a_stop_on_the_way_gives_no_result():
    windows = Validation(TokenStream([np.arange(200, dtype=np.uint16) % 11], name="test"), seq=4)
    asked = []
    assert Evaluator(windows, batch=2, byte_lengths=None).run(Bigrams(11), stop=lambda: len(asked) or asked.append(1)) is None


def test_the_text_of_the_targets_is_what_was_evaluated():
    class Letters:
        def decode_bytes(self, ids):
            return bytes(97 + i for i in ids)

    tokens = np.arange(26, dtype=np.uint16)
    windows = Validation(TokenStream([tokens], name="test"), seq=4)
    assert Evaluator(windows, batch=2, byte_lengths=None).text(Letters()) == b"bcdefghijklmnopqrstuvwxyz"


def dataset(length: int) -> Dataset:
    stream = TokenStream([RNG.integers(0, 11, length).astype(np.uint16)], name="x")
    return Dataset(name="x", tokenizer=None, train=stream, val=stream, hash="")


@pytest.mark.parametrize("count, seq", [(60, 20), (61, 20), (7, 20), (1, 1), (199, 64)])
def test_the_first_tokens_are_exactly_those(count, seq):
    """Row after row from the beginning, each of the first `count` targets once; the loss is that of the text cut there."""
    data, session = dataset(200), Bigrams(11)
    windows = data.validation(seq=seq, max_tokens=count, first=True)
    inputs, targets = windows.batch(0, windows.windows)
    tokens = data.val.array(0, count + 1)
    assert np.array_equal(inputs[targets >= 0], tokens[:-1]) and np.array_equal(targets[targets >= 0], tokens[1:])
    result = Evaluator(windows, batch=3, byte_lengths=None).run(session)
    assert result.targets == count
    assert result.nats == pytest.approx(session.cost[tokens[:-1], tokens[1:]].mean(), rel=1e-6)


def test_the_first_of_a_shorter_text_are_all_of_it():
    for count in (0, 199, 200, 1000):
        assert dataset(200).validation(seq=20, max_tokens=count, first=True).targets == 199
    assert dataset(200).validation(seq=20, max_tokens=60).targets == 60  # spread, as it was


def test_a_record_is_forty_rows():
    """Lines 1588 and 1589 of the record's code: 10,485,760 tokens, 2,097,152 at a time for 8 GPUs or 8 micro-batches."""
    train = speedrun().train
    assert (train.eval_tokens, train.eval_from, train.eval_shape(train.micro_batch_size)) == (10485760, "first", (1, 2097152 // 8))
    data = Dataset("x", None, *[TokenStream([np.zeros(100_000_000, np.uint8)], name="x")] * 2, hash="")
    windows = data.validation(seq=train.eval_seq, max_tokens=train.eval_tokens, first=True)
    assert (windows.windows, windows.targets) == (40, 10485760)


def test_rows_of_an_evaluation_have_the_tokens_of_a_micro_batch_or_one_row():
    shape = partial(replace, TrainConfig(micro_batch_size=6, seq=100))
    assert shape().eval_shape(6) == (6, 100)
    assert [shape(eval_seq=n).eval_shape(6) for n in (50, 200, 300, 601)] == [(12, 50), (3, 200), (2, 300), (1, 601)]
