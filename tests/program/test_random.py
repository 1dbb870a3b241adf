"""Counter-based bits: the published generator, and independence of how a batch is cut."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.ops.pointwise import random
from barellm.runtime.reference import ReferenceSession

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_random123(key, counter, expected):
    assert tuple(int(word) for word in random.threefry(*key, *counter)) == expected


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 32, 33, 77])
def test_each_element_has_the_word_that_the_definition_names(columns):
    found = random.words(9, 8, 7, 6, np.arange(3), columns)
    key = random.threefry(9, 8, 7, 6)
    for row in range(3):
        for c in range(columns):
            call = random.threefry(*key, 16 * (c // 32) + c % 16, row)
            assert found[row, c] == call[(c // 16) % 2]


def test_words_differ_between_seeds_steps_samples_streams_rows_and_columns():
    base = {"seed": 1, "step": 2, "sample": 3, "stream": 4}
    cases = [base] + [base | {name: 99} for name in base]
    words = np.concatenate([random.words(**case, rows=np.arange(40), columns=50).ravel() for case in cases])
    # 10000 words of 32 bits: 0.01 pairs are expected to be equal by chance.
    assert len(np.unique(words)) >= len(words) - 1


def test_bits_are_fair_and_uncorrelated():
    words = random.words(5, 1, 0, 0, np.arange(512), 512)
    ones = np.array([(words >> np.uint32(b) & 1).mean() for b in range(32)])
    assert abs(ones - 0.5).max() < 5 * 0.5 / 512
    u = words / 2**32 - 0.5
    for shifted in (np.roll(u, 1, 0), np.roll(u, 1, 1), np.roll(u, 16, 1)):
        assert abs((u * shifted).mean() * 12) < 5 / 512


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5, 0.999])
def test_dropout_keeps_the_share_and_the_mean(rate):
    mask = random.keep(1, 1, 0, 0, np.arange(400), 400, rate)
    deviation = (rate * (1 - rate)) ** 0.5 / 400
    assert abs((mask == 0).mean() - rate) < 5 * deviation
    assert abs(mask.mean() - 1) < 5 * deviation / (1 - rate)
    assert set(np.unique(mask)) <= {0.0, 1 / (1 - rate)}


def test_dropout_does_not_depend_on_the_split_into_micro_batches():
    whole = random.keep_batch((6, 5, 33), 0.3, stream=2, seed=4, step=9, sample=100)
    halves = [random.keep_batch((3, 5, 33), 0.3, stream=2, seed=4, step=9, sample=100 + at) for at in (0, 3)]
    np.testing.assert_array_equal(whole, np.concatenate(halves))
    # Nor on the length: a shorter sequence sees the same bits.
    np.testing.assert_array_equal(whole[:, :3], random.keep_batch((6, 3, 33), 0.3, stream=2, seed=4, step=9, sample=100))


def test_attention_dropout_does_not_depend_on_split_or_length():
    def out(qkv, sample):
        op = ops.Attention({}, {"heads": 2, "kv_heads": 2, "rate": 0.4, "stream": 3})
        return op.reference(*np.split(qkv, 3, -1), seed=1, step=2, sample=sample)["out"]

    qkv = np.random.default_rng(0).normal(size=(4, 7, 24))
    whole = out(qkv, 10)
    np.testing.assert_array_equal(whole[2:], out(qkv[2:], 12))
    np.testing.assert_allclose(whole[:, :5], out(qkv[:, :5], 10), rtol=1e-12)
    assert abs(whole - out(qkv, 11)).max() > 0.1


def initialised(p: Program, seed: int) -> ReferenceSession:
    for stream, t in enumerate(p.store.of_role("parameter")):
        kind, number = t.init
        if kind == "normal":
            p.apply(ops.NormalInit, param=t, std=number, stream=stream, valid_rows=t.valid_rows)
        else:
            p.apply(ops.ConstantInit, param=t, value=number, valid_rows=t.valid_rows)
    session = ReferenceSession({"init": p})
    session.run("init", seed=seed)
    return session


def test_initial_weights_are_normal_with_zero_padding():
    p = Program(Store())
    p.parameter("w", (700, 130), std=0.02, valid_rows=650)
    p.parameter("again", (700, 130), std=0.02)
    p.parameter("gain", (130,), value=1.0)
    p.parameter("vector", (1001,), std=1.0)
    session = initialised(p, seed=3)
    w = session.read("w")
    assert (w[650:] == 0).all()
    z = w[:650] / 0.02
    n = z.size**0.5
    assert abs(z.mean()) < 5 / n and abs(z.var() - 1) < 5 * 2**0.5 / n and abs((z**4).mean() - 3) < 5 * 96**0.5 / n
    assert abs((abs(z) > 1.959964).mean() - 0.05) < 5 * 0.22 / n
    assert abs((z[:, :-16] * z[:, 16:]).mean()) < 5 / n  # cosine and sine of one pair
    assert abs((z[1:] * z[:-1]).mean()) < 5 / n
    assert abs((session.read("again")[:650] * w[:650]).mean() / 0.02**2) < 5 / n
    assert (session.read("gain") == 1).all()
    assert abs(session.read("vector").std() - 1) < 0.12
    assert (initialised(p, seed=3).read("w") == w).all()
    assert (initialised(p, seed=4).read("w")[:650] != w[:650]).mean() > 0.99
