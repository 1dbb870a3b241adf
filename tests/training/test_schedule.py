from __future__ import annotations

import pytest

from barellm.config import OptimConfig
from barellm.training.schedule import learning_rate, steps_in_time

OPTIM = OptimConfig(lr=1.0, min_lr=0.1, warmup=4)


def test_warmup_is_linear_and_reaches_lr_after_its_steps():
    assert [learning_rate(i, total=100, optim=OPTIM) for i in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_last_step_has_min_lr_and_the_middle_the_mean():
    assert learning_rate(103, total=104, optim=OPTIM) == pytest.approx(0.1)
    assert learning_rate(4 + 50, total=105, optim=OPTIM) == pytest.approx(0.55)
    assert learning_rate(500, total=104, optim=OPTIM) == pytest.approx(0.1)


def test_rates_fall_after_the_warmup():
    rates = [learning_rate(i, total=50, optim=OPTIM) for i in range(4, 50)]
    assert rates == sorted(rates, reverse=True)


def test_until_the_total_is_chosen_the_rate_does_not_depend_on_it():
    assert [learning_rate(i, total=None, optim=OPTIM) for i in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


@pytest.mark.parametrize("total", [1, 3, 4, 5])
def test_runs_shorter_than_the_warmup_have_a_rate(total):
    assert all(0 < learning_rate(i, total=total, optim=OPTIM) <= 1 for i in range(total))


def test_no_warmup_starts_at_lr():
    assert learning_rate(0, total=10, optim=OptimConfig(lr=3.0, min_lr=0, warmup=0)) == 3.0


@pytest.mark.parametrize(
    "left_s, limit, expected", [(10.0, 10**9, 10 + 80), (10.0, 50, 50), (-3.0, 10**9, 11), (0.0, 10**9, 11)]
)
def test_steps_fill_the_time_that_is_left(left_s, limit, expected):
    assert steps_in_time(done=10, step_s=0.1, pause_s=0.025, left_s=left_s, limit=limit) == expected
