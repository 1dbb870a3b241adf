from __future__ import annotations

from fractions import Fraction

import pytest

from barellm.config import SCHEDULES, OptimConfig
from barellm.training.schedule import learning_rate, steps_in_time

OPTIM = OptimConfig(lr=1.0, min_lr=0.1, warmup=4)


def test_warmup_is_linear_and_reaches_lr_after_its_steps():
    assert [learning_rate(i, total=100, optim=OPTIM) for i in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_last_step_has_min_lr_and_the_middle_the_mean():
    assert learning_rate(103, total=104, optim=OPTIM) == pytest.approx(0.1)
    assert learning_rate(4 + 50, total=105, optim=OPTIM) == pytest.approx(0.55)
    assert learning_rate(500, total=104, optim=OPTIM) == pytest.approx(0.1)


def optimizer(schedule: str, **more) -> OptimConfig:
    return OptimConfig(**({"lr": 1.0, "min_lr": 0.25, "warmup": 4, "schedule": schedule} | more))


def rates(total: int | None, steps: int, optim: OptimConfig) -> list[float]:
    return [learning_rate(i, total=total, optim=optim) for i in range(steps)]


def drawn(total: int, warmup: int, falling: int) -> list[Fraction]:
    """The rates of a run as its picture: up from 0 to 1, flat, and down to 1/4 over the last steps, in exact numbers."""
    up = [Fraction(i, warmup + 1) for i in range(1, warmup + 1)]
    down = [1 - Fraction(3, 4) * Fraction(i, falling) for i in range(1, falling + 1)]
    return (up + [Fraction(1)] * (total - len(up) - len(down)) + down)[:total]


@pytest.mark.parametrize("decay_fraction", [Fraction(0), Fraction(1, 10), Fraction(1, 5), Fraction(1, 2), Fraction(1)])
def test_straight_schedules_are_as_drawn_for_every_short_run(decay_fraction):
    """Every total up to 24 with every warmup, also one that is longer than the run."""
    for total in range(1, 25):
        for warmup in range(total + 3):
            most = max(0, total - 1 - warmup)
            lengths = {"constant": 0, "linear": most, "wsd": min(most, round(float(decay_fraction) * total))}
            for schedule, falling in lengths.items():
                optim = optimizer(schedule, warmup=warmup, decay_fraction=float(decay_fraction))
                want = [float(x) for x in drawn(total, warmup, falling)]
                assert rates(total, total, optim) == pytest.approx(want, abs=1e-15), (schedule, total, warmup)


def test_a_run_of_ten_steps_in_numbers():
    assert rates(10, 12, optimizer("wsd", warmup=1, decay_fraction=0.3)) == [0.5, *[1] * 6, 0.75, 0.5, 0.25, 0.25, 0.25]
    assert rates(5, 6, optimizer("linear", warmup=1)) == [0.5, 1, 0.75, 0.5, 0.25, 0.25]
    assert rates(3, 5, optimizer("constant", warmup=1)) == [0.5, 1, 1, 1, 1]


def test_a_decay_of_the_whole_run_is_the_line():
    for total in range(1, 40):
        assert rates(total, total, optimizer("wsd", decay_fraction=1.0)) == rates(total, total, optimizer("linear"))


def test_the_constant_part_does_not_know_how_long_the_run_is():
    """To the bit: this is what lets a run be made longer. 0.1 and 0.03 are no sums of powers of two."""
    optim = optimizer("wsd", lr=0.1, min_lr=0.03, warmup=7, decay_fraction=0.2)
    for total in range(10, 100):
        stable = total - round(0.2 * total)
        for longer in (total + 1, 2 * total, None):
            assert rates(total, stable, optim) == rates(longer, stable, optim)
        assert learning_rate(stable, total=total, optim=optim) < 0.1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_never_rise_after_the_warmup_and_end_at_min_lr(schedule):
    found = rates(50, 60, optimizer(schedule))[4:]
    assert found == sorted(found, reverse=True) and found[0] == 1.0
    assert found[45:] == [1.0 if schedule == "constant" else 0.25] * 11


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_until_the_total_is_chosen_the_rate_does_not_depend_on_it(schedule):
    assert rates(None, 6, optimizer(schedule)) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 3, 4, 5])
def test_runs_shorter_than_the_warmup_have_a_rate(schedule, total):
    assert all(0 < rate <= 1 for rate in rates(total, total, optimizer(schedule)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_warmup_starts_at_lr(schedule):
    assert learning_rate(0, total=10, optim=optimizer(schedule, lr=3.0, min_lr=0, warmup=0)) == 3.0


@pytest.mark.parametrize("left_s, limit, expected", [(10.0, 10**9, 10 + 80), (10.0, 50, 50), (-3.0, 10**9, 11), (0.0, 10**9, 11)])
def test_steps_fill_the_time_that_is_left(left_s, limit, expected):
    assert steps_in_time(done=10, step_s=0.1, pause_s=0.025, left_s=left_s, limit=limit) == expected
