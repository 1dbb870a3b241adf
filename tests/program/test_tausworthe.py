"""Tausworthe generators: the published numbers, their structure over GF(2), and streams that follow from counters."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.config import DROPOUT_BITS
from barellm.program.ops.pointwise.random import keep_scale, threefry, threshold
from barellm.program.ops.pointwise.tausworthe import GENERATORS, draws, keep_stream, stream_words
from benchmarks.generators import PUBLISHED, cycle, linear_complexity, rank, top_bits

TAUS88, LFSR113 = GENERATORS["taus88"], GENERATORS["lfsr113"]
each_generator = pytest.mark.parametrize("bits", GENERATORS)


@pytest.mark.parametrize("bits, skipped, number, expected", [
    ("taus88", 6, 10_000, 2733957125),
    ("lfsr113", 10, 1000, 1925420673),
])  # fmt: skip
def test_draws_are_those_that_the_gnu_scientific_library_tests_for(bits, skipped, number, expected):
    """Its generators taus and taus113 with seed 1, whose components it seeds by s = 69069 s."""
    generator, seed, states = GENERATORS[bits], 1, []
    for component in generator:
        seed = 69069 * seed & 0xFFFFFFFF
        seed += component.least if seed < component.least else 0
        states.append(np.array([seed], np.uint32))
    assert draws(generator, states, skipped + number)[-1, 0] == expected


def test_the_options_are_threefry_and_these_generators():
    assert ("threefry", *GENERATORS) == DROPOUT_BITS


@each_generator
def test_each_component_has_the_rank_and_the_complexity_of_its_register(bits):
    for component, size in zip(GENERATORS[bits], (31, 29, 28, 25), strict=False):
        assert 32 - (component.least.bit_length() - 1) == size == rank(component)
        assert linear_complexity(top_bits((component,), 256)) == size
        assert cycle(component, 0xF39CC060) is None
    assert linear_complexity(top_bits(GENERATORS[bits], 512)) == {"taus88": 88, "lfsr113": 113}[bits]


def test_the_published_constant_c_11_is_broken():
    """The step of the third component loses four more dimensions, and after a few steps at most four states are left. The mean of
    the draws does not show it."""
    broken = PUBLISHED[2]
    assert rank(broken) == 24
    for seed in (0x9E3779B9, 0xF39CC060, 0x12345678):
        tail, length = cycle(broken, seed) or (99, 99)
        assert tail <= 4 and length <= 4
    assert linear_complexity(top_bits(PUBLISHED, 512)) <= 31 + 29 + 4
    mean = np.mean(top_bits(PUBLISHED, 4096))
    assert abs(mean - 0.5) < 4 * 0.5 / 64


def test_berlekamp_and_massey_find_a_register_of_known_length():
    bits = [1, 0, 0, 0, 0]
    for _ in range(100):
        bits.append(bits[-5] ^ bits[-3])  # x^5 + x^2 + 1
    assert linear_complexity(bits) == 5
    assert linear_complexity([0] * 20) == 0 and linear_complexity([0] * 19 + [1]) == 20


@each_generator
def test_after_one_step_the_bits_outside_the_mask_are_forgotten(bits):
    for component in GENERATORS[bits]:
        s = np.arange(1 << 10, dtype=np.uint32) * np.uint32(2654435761)
        inside = component.advance(s & np.uint32(component.mask))
        np.testing.assert_array_equal(component.advance(s), inside)


@each_generator
def test_no_seed_is_stuck_at_zero(bits):
    for component in GENERATORS[bits]:
        low = np.arange(component.least, dtype=np.uint32)
        assert (component.begin(low) == low + np.uint32(component.least)).all()
        above = np.array([component.least, 0x80000000], np.uint32)
        np.testing.assert_array_equal(component.begin(above), above)


@each_generator
@pytest.mark.parametrize("column", [0, 15, 16, 511, 512, 700])
def test_each_element_has_the_draw_that_the_definition_names(bits, column):
    generator, row = GENERATORS[bits], 5
    key = threefry(9, 8, 7, 6)
    i = 32 * (column // 512) + column % 16
    words = [int(w) for call in (i, i + 16) for w in threefry(*key, call, row)]
    states = [c.begin(np.uint32(w)) for c, w in zip(generator, words, strict=False)]
    expected = draws(generator, states, 33)[1 + column % 512 // 16]
    assert stream_words(generator, 9, 8, 7, 6, np.array([3, row]), column + 1)[1, column] == expected


@each_generator
def test_draws_are_uniform_and_uncorrelated(bits):
    """Between neighbouring columns, draws of one stream, streams of neighbouring blocks, rows and steps."""
    words = [stream_words(GENERATORS[bits], 5, step, 0, 0, np.arange(256), 1024) for step in (1, 2)]
    u = words[0] / 2**32 - 0.5
    n = u.size**0.5
    assert abs(u.mean()) < 5 / 12**0.5 / n and abs((u * u).mean() - 1 / 12) < 5 / 180**0.5 / n
    others = [np.roll(u, 1, 0), *(np.roll(u, lag, 1) for lag in (1, 16, 512)), words[1] / 2**32 - 0.5]
    for other in others:
        assert abs((u * other).mean() * 12) < 5 / n
    ones = np.array([(words[0] >> np.uint32(b) & 1).mean() for b in range(32)])
    assert abs(ones - 0.5).max() < 5 * 0.5 / n


@each_generator
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
def test_dropout_keeps_the_share_and_the_mean(bits, rate):
    mask = keep_stream(GENERATORS[bits], (2, 100, 700), rate, stream=1, seed=1, step=1, sample=0)
    deviation = (rate * (1 - rate) / mask.size) ** 0.5
    assert abs((mask == 0).mean() - rate) < 5 * deviation
    assert abs(mask.mean() - 1) < 5 * deviation / (1 - rate)
    assert set(np.unique(mask)) == {0.0, keep_scale(rate)}


def test_the_threshold_keeps_every_word_at_rate_0_where_fp32_would_not():
    """fp32 rounds words from 0xffffff80 on to 2^32, so that u 2^-32 < 1 drops them; integers are compared as they are."""
    last = np.array([0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF], np.uint32)
    assert (last.astype(np.float32) * np.float32(2.0**-32) < 1).tolist() == [True, False, False]
    assert (last >= np.uint32(threshold(0.0))).all() and threshold(0.0) == 0
    assert threshold(0.5) == 1 << 31 and threshold(1 - 2.0**-33) == 0xFFFFFFFF  # which still keeps one word


@each_generator
def test_streams_do_not_depend_on_the_split_into_micro_batches_or_the_length(bits):
    def mask(batch, seq, sample):
        return keep_stream(GENERATORS[bits], (batch, seq, 530), 0.3, stream=2, seed=4, step=9, sample=sample)

    whole = mask(4, 5, 100)
    np.testing.assert_array_equal(whole, np.concatenate([mask(3, 5, 100), mask(1, 5, 103)]))
    np.testing.assert_array_equal(whole[:, :3], mask(4, 3, 100))
