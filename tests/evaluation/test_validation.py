"""The loss over windows against the loss over the whole stream at once."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from barellm.data.loader import Validation
from barellm.data.shards import TokenStream
from barellm.evaluation.validation import Evaluator

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
    assert (
        Evaluator(windows, batch=2, byte_lengths=None).run(Bigrams(11), stop=lambda: len(asked) or asked.append(1))
        is None
    )


def test_the_text_of_the_targets_is_what_was_evaluated():
    class Letters:
        def decode_bytes(self, ids):
            return bytes(97 + i for i in ids)

    tokens = np.arange(26, dtype=np.uint16)
    windows = Validation(TokenStream([tokens], name="test"), seq=4)
    assert Evaluator(windows, batch=2, byte_lengths=None).text(Letters()) == b"bcdefghijklmnopqrstuvwxyz"
