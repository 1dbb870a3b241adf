"""Samplers against counts: every distribution is small enough to be known exactly."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.errors import UserError
from barellm.generation import samplers
from barellm.generation.samplers import (
    Sampling,
    biased,
    draw,
    log_probabilities,
    most_likely,
    penalized,
    probabilities,
    sampling,
    uniform,
)

LOGITS = np.log(np.array([0.4, 0.1, 0.25, 0.05, 0.2], np.float32))


def test_an_unknown_option_is_one_line():
    with pytest.raises(UserError, match=r"unknown option 'temprature' of sampling, expected one of .*min_p, .*temperature"):
        sampling({}, temprature=0.5)


def test_temperature_one_gives_the_softmax():
    p = probabilities(LOGITS, Sampling(temperature=1.0))
    np.testing.assert_allclose(p, [0.4, 0.1, 0.25, 0.05, 0.2], rtol=1e-6)


def test_temperature_sharpens_as_the_power_says():
    p = probabilities(LOGITS, Sampling(temperature=0.5))
    expected = np.array([0.4, 0.1, 0.25, 0.05, 0.2]) ** 2
    np.testing.assert_allclose(p, expected / expected.sum(), rtol=1e-5)


def test_temperature_zero_takes_the_lowest_id_of_equals():
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert {draw(logits, Sampling(temperature=0, seed=seed), index=seed) for seed in range(20)} == {1}


@pytest.mark.parametrize("k, kept", [(1, [0]), (2, [0, 2]), (3, [0, 2, 4]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])])
def test_top_k_keeps_exactly_the_k_most_likely(k, kept):
    p = probabilities(LOGITS, Sampling(temperature=1.0, top_k=k))
    assert np.flatnonzero(p).tolist() == kept
    assert p.sum() == pytest.approx(1)


def test_top_k_of_equal_logits_keeps_the_lower_ids():
    p = probabilities(np.zeros(6, np.float32), Sampling(temperature=1.0, top_k=4))
    np.testing.assert_allclose(p, [0.25] * 4 + [0, 0])


@pytest.mark.parametrize(
    "top_p, kept", [(0.01, [0]), (0.39, [0]), (0.41, [0, 2]), (0.64, [0, 2]), (0.66, [0, 2, 4]), (0.96, [0, 1, 2, 3, 4])]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(top_p, kept):
    p = probabilities(LOGITS, Sampling(temperature=1.0, top_p=top_p))
    assert np.flatnonzero(p).tolist() == kept
    assert p.sum() == pytest.approx(1)


def test_top_p_is_minimal_on_random_logits():
    rng = np.random.default_rng(3)
    for _ in range(200):
        logits = rng.normal(size=rng.integers(1, 40)).astype(np.float32) * 3
        top_p = float(rng.uniform(0.01, 0.999))
        full = probabilities(logits, Sampling(temperature=1.0))
        kept = probabilities(logits, Sampling(temperature=1.0, top_p=top_p)) > 0
        assert full[kept].sum() >= top_p - 1e-12
        assert full[kept].sum() - full[kept].min() < top_p  # without the least likely it would not be enough
        assert full[kept].min() >= full[~kept].max(initial=0)


def test_top_p_applies_to_what_top_k_left():
    p = probabilities(LOGITS, Sampling(temperature=1.0, top_k=3, top_p=0.7))  # 0.4 0.25 0.2 of 0.85: 0.47, 0.76
    assert np.flatnonzero(p).tolist() == [0, 2]


@pytest.mark.parametrize("min_p, kept", [(0.0, [0, 1, 2, 3, 4]), (0.2, [0, 1, 2, 4]), (0.45, [0, 2, 4]), (1.0, [0])])
def test_min_p_keeps_what_is_likely_beside_the_most_likely(min_p, kept):
    p = probabilities(LOGITS, Sampling(temperature=1.0, min_p=min_p))
    assert np.flatnonzero(p).tolist() == kept and p.sum() == pytest.approx(1)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("how", [
    {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.97, "min_p": 0.01}, {"top_k": 700, "top_p": 0.9}, {"top_k": 9000}, {"top_p": 1e-9},
])  # fmt: skip
def test_cuts_of_a_large_vocabulary_are_those_of_a_sort_of_all(how, spread):
    logits = (spread * np.random.default_rng(0).normal(size=9000)).astype(np.float32)
    logits[:40] = logits[40:80]  # equal ones
    how = Sampling(temperature=0.9, **how)
    p = probabilities(logits, Sampling(temperature=0.9))
    keep = np.argsort(-logits, kind="stable")[: how.top_k or 9000]
    if how.top_p < 1:
        keep = keep[: int((np.cumsum(p[keep]) < how.top_p * p[keep].sum()).sum()) + 1]
    keep = keep[p[keep] >= how.min_p * p.max()]
    found = probabilities(logits, how)
    assert np.array_equal(np.flatnonzero(found), np.sort(keep))
    np.testing.assert_allclose(found[keep], p[keep] / p[keep].sum(), rtol=1e-12)


def test_a_penalty_makes_tokens_of_the_text_less_likely_once():
    logits = np.array([2.0, -1.0, 3.0, 0.5], np.float32)
    np.testing.assert_allclose(penalized(logits, [0, 1, 0], 2.0), [1.0, -2.0, 3.0, 0.5])
    assert penalized(logits, [0], 1.0) is logits and logits[0] == 2
    how = Sampling(temperature=0, repetition_penalty=2.0)
    assert [draw(logits, how, index=0, text=text) for text in ([], [2], [2, 0])] == [2, 0, 2]


def test_penalties_of_drawn_tokens_and_biases_of_ids():
    """mu[j] - c[j] frequency - (c[j] > 0) presence + bias[j], c the counts of drawn tokens; the prompt's do not count."""
    logits = np.array([2.0, -1.0, 3.0, 0.5], np.float32)
    how = Sampling(temperature=0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 4.0, 2: -1, 99: 100.0})
    np.testing.assert_array_equal(biased(logits, [0, 0, 1], how), [2 - 1.25, -1 - 0.75, 3 - 1, 0.5 + 4])
    assert biased(logits, [0], Sampling()) is logits and logits[0] == 2
    assert draw(logits, how, index=0, text=[3]) == 3
    assert draw(logits, Sampling(temperature=0, presence_penalty=2.0), index=0, text=[2]) == 2  # of the prompt
    assert draw(logits, Sampling(temperature=0, presence_penalty=2.0), index=1, text=[0, 2]) == 0
    assert how == Sampling(
        temperature=0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((2, -1.0), (3, 4.0), (99, 100.0))
    )


def test_log_probabilities_and_the_most_likely():
    logits = np.array([1.0, 3.0, 2.0, 3.0, -1e30], np.float32)
    found = log_probabilities(logits)
    np.testing.assert_allclose(np.exp(found[:4]), probabilities(logits, Sampling(temperature=1.0))[:4])
    assert found.dtype == np.float64 and np.isfinite(found).all()
    assert [most_likely(found, k).tolist() for k in (0, 1, 2, 3, 9)] == [[], [1], [1, 3], [1, 3, 2], [1, 3, 2, 0, 4]]


@pytest.mark.parametrize("how", [{}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}])
@pytest.mark.extended
def test_draws_follow_the_probabilities(how):
    sampling = Sampling(**({"temperature": 1.0} | how), seed=11)
    n = 8000
    counts = np.bincount([draw(LOGITS, sampling, index=i) for i in range(n)], minlength=5)
    p = probabilities(LOGITS, sampling)
    assert counts[p == 0].sum() == 0
    chi_square = ((counts - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum()
    assert chi_square < 18.5  # chance of more with 4 degrees of freedom: 0.001; the draws are fixed


def test_the_same_seed_and_index_give_the_same_bits():
    assert uniform(5, 9) == uniform(5, 9)
    values = np.array([uniform(seed, index) for seed in range(20) for index in range(20)])
    assert len(np.unique(values)) == 400
    assert values.min() >= 0 and values.max() < 1


def test_probabilities_of_huge_logits_do_not_overflow():
    p = probabilities(np.array([3e38, -3e38, 0], np.float32), Sampling(temperature=0.01))
    np.testing.assert_array_equal(p, [1, 0, 0])


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        draw(np.array([0, np.nan], np.float32), Sampling(), index=0)


@pytest.mark.parametrize(
    "wrong, found",
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"presence_penalty": "much"}, "presence_penalty is 'much'"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias has the id -3"),
        ({"logit_bias": {1: float("-inf")}}, r"logit_bias\[1\] is -inf"),
        ({"logit_bias": {"a": 1.0}}, "an id of logit_bias is 'a'"),
    ],
)
def test_impossible_values_are_refused(wrong, found):
    with pytest.raises(UserError, match=found):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.3}, {"top_k": 700}, {"top_p": 0.9}, {"top_k": 600, "top_p": 0.95, "min_p": 0.01}]
)
def test_a_draw_is_the_inverse_of_the_distribution_function(how):
    """Of a vocabulary that is no multiple of the blocks in which its probabilities are added, by sums of all of them in float64."""
    logits = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    sampling = samplers.Sampling(seed=5, **how)
    likely = samplers.probabilities(logits, sampling)
    ends = np.cumsum(likely)
    for index in range(400):
        token, u = samplers.draw(logits, sampling, index=index), samplers.uniform(5, index)
        assert likely[token] > 0 and ends[token] - likely[token] - 1e-6 <= u <= ends[token] + 1e-6
