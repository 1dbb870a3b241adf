import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.data.loader import Batches, Validation, permuted
from barellm.data.shards import TokenStream
from barellm.errors import UserError

WINDOWS = ("epoch", "random", "sequential")  # orders of windows
keys = st.integers(0, 2**64 - 1)


def stream(length: int, parts: int = 1) -> TokenStream:
    """Token i is i, so that a window shows where it came from."""
    return TokenStream(np.array_split(np.arange(length, dtype=np.uint16), parts), name="training part of x")


@given(size=st.integers(1, 2000), key=keys)
def test_the_permutation_is_a_bijection(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permutations_of_huge_ranges_stay_inside():
    size = 10**15 + 37
    assert len({permuted(i, size, 5) for i in range(1000)}) == 1000
    assert all(permuted(size - 1 - i, size, 5) < size for i in range(1000))


def test_permutations_look_random():
    """Over 2000 keys each of the 24 orders of 4 comes up; each place of 16 gets each index about as often."""
    assert len({tuple(permuted(i, 4, key * 7919) for i in range(4)) for key in range(2000)}) == 24
    counts = np.zeros((16, 16))
    for key in range(1600):
        for i in range(16):
            counts[i, permuted(i, 16, key)] += 1
    assert abs(counts - 100).max() < 60  # six standard deviations


@given(length=st.integers(2, 400), seq=st.integers(1, 20), parts=st.integers(1, 4), seed=keys)
def test_an_epoch_has_every_window_once(length, seq, parts, seed):
    if length < seq + 1:
        return
    batches = Batches(stream(length, parts), seq=seq, seed=seed)
    for epoch in range(2):
        inputs, targets = batches.batch(epoch * batches.windows, batches.windows)
        order = np.argsort(inputs[:, 0])
        covered = batches.windows * seq
        assert inputs[order].ravel().tolist() == list(range(covered))
        assert targets[order].ravel().tolist() == list(range(1, covered + 1))
        assert length - 1 - covered < seq


def test_epochs_and_seeds_have_orders_of_their_own():
    tokens = stream(2000)
    orders = [Batches(tokens, seq=10, seed=s).batch(e * 199, 199)[0][:, 0].tolist() for s in range(3) for e in range(3)]
    assert len({tuple(order) for order in orders}) == 9


@given(order=st.sampled_from(WINDOWS), first=st.integers(0, 10**9), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_micro_batches_and_resumed_runs_see_the_same_samples(order, first, cuts):
    tokens = stream(300, 3)
    whole = Batches(tokens, seq=8, seed=3, order=order).batch(first, sum(cuts))
    pieces, at = [], first
    for count in cuts:  # a fresh object each time: nothing is remembered
        pieces.append(Batches(tokens, seq=8, seed=3, order=order).batch(at, count))
        at += count
    for whole_part, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert np.array_equal(whole_part, np.concatenate(parts))


def test_random_windows_start_everywhere_they_can():
    batches = Batches(stream(21), seq=8, seed=1, order="random")
    inputs, targets = batches.batch(0, 13_000)
    counts = np.bincount(inputs[:, 0], minlength=13)
    assert len(counts) == 13  # the last window is [12, 21): its last target is the last token
    assert abs(counts - 1000).max() < 6 * 31
    assert np.array_equal(inputs[:, 1:], targets[:, :-1]) and (targets[:, -1] == inputs[:, -1] + 1).all()


def test_a_stage_with_another_length_has_windows_of_its_own():
    batches, others = Batches(stream(300), seq=8, seed=3), Batches(stream(300), seq=11, seed=3)
    for seq, wanted in ((8, batches), (11, others), (8, batches)):
        found = batches.batch(5, 3, seq=seq)
        assert found[0].shape == (3, seq) and np.array_equal(found, wanted.batch(5, 3))


def test_the_order_never_changes_between_versions():
    """A checkpoint stores a sample index only: other numbers here would change what a resumed run sees."""
    epoch, random, line = (Batches(stream(1000), seq=8, seed=1337, order=order) for order in WINDOWS)
    assert [epoch.start(i) for i in (0, 1, 2, 123, 124, 125, 10**12)] == [896, 328, 928, 920, 256, 264, 744]
    assert [random.start(i) for i in (0, 1, 2, 10**12)] == [412, 604, 694, 288]
    assert [line.start(i) for i in (0, 1, 123, 124, 10**12)] == [0, 8, 984, 0, 32]


@pytest.mark.parametrize("order", WINDOWS)
def test_too_short_a_text_is_refused(order):
    Batches(stream(9), seq=8, seed=0, order=order).batch(0, 3)
    with pytest.raises(UserError, match="training part of x has 8 tokens, one sequence of 8 needs 9"):
        Batches(stream(8), seq=8, seed=0, order=order)
    with pytest.raises(UserError, match="has 1 tokens, expected at least 2"):
        Validation(stream(1), seq=8)


@given(length=st.integers(2, 300), seq=st.integers(1, 20), count=st.integers(1, 7))
def test_validation_has_every_target_once_in_order(length, seq, count):
    validation = Validation(stream(length, 2), seq=seq)
    batches = list(validation.batches(count))
    inputs, targets = (np.concatenate([batch[i] for batch in batches]).ravel() for i in range(2))
    valid = targets >= 0
    assert targets[valid].tolist() == list(range(1, length))
    assert inputs[valid].tolist() == list(range(length - 1))
    assert (targets[~valid] == -1).all() and (inputs[~valid] == 0).all() and (~valid).sum() < seq
    assert validation.targets == length - 1
    assert validation.text_bytes(np.arange(300)) == sum(range(1, length))


@given(length=st.integers(2, 300), seq=st.integers(1, 20), limit=st.integers(1, 400))
def test_a_limited_validation_is_spread_over_all(length, seq, limit):
    validation = Validation(stream(length), seq=seq, max_tokens=limit)
    targets = np.concatenate([batch[1] for batch in validation.batches(3)])
    valid = targets[targets >= 0]
    assert len(set(valid.tolist())) == len(valid) == validation.targets <= max(limit, seq)
    assert validation.windows == len(targets) == min(max(limit // seq, 1), -(-(length - 1) // seq))
    gaps = np.diff(targets[:, 0]) // seq
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
