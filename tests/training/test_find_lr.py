"""The range test of the learning rate, on a loss that falls, is least at a known rate, and diverges."""

from __future__ import annotations

import json
from math import log10

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.training import find_lr


@pytest.fixture
def valley(fake):
    """The loss is 4, falls in a line over the decades from 1e-4 to 1e-2, and rises 4 a decade behind it."""
    real = fake.read

    def read(name):
        if name != "loss":
            return real(name)
        updates = [scalars["lr"] for entry, scalars in fake.runs if entry == "update"]
        decades = log10(updates[-1] if updates else find_lr.LOWEST)
        value = 4.0 - 0.75 * min(max(decades + 4, 0), 2) + 4 * max(decades + 2, 0)
        return np.array([value / 2], np.float32)  # each of two micro-batches has its half

    fake.read = read
    return fake


def run(command, *more: str) -> list[str]:
    return [*command("rates", *more), "--find-lr", "--steps", "150"]


def test_it_suggests_a_third_of_the_best_rate_and_stops_where_it_diverges(valley, command, tmp_path, capsys):
    assert main(run(command)) == 0
    found = json.loads((tmp_path / "rates/lr.json").read_text())
    # The mean of the last ten steps or so is least a little later than the loss.
    assert 1e-2 < found["least"] < 2.5e-2 and found["suggestion"] == pytest.approx(found["least"] / 3, rel=0.06)
    rates = [step["lr"] for step in found["steps"]]
    assert rates == find_lr.rates(150)[: len(rates)] and 0.05 < rates[-1] < 1
    assert found["steps"][-1]["smoothed"] > 4.4 > found["steps"][-2]["smoothed"]
    assert [scalars["lr"] for entry, scalars in valley.runs if entry == "update"] == rates
    assert {path.name for path in (tmp_path / "rates").iterdir()} == {"lr.json", "lr.png"}
    said = capsys.readouterr().out
    assert f"try {found['suggestion']:.4g}: {found['rule']}\n" in said
    assert "the test has no use for optim.warmup, train.eval_every," in said.replace("\n", " ")


def test_every_step_is_a_step_of_the_run(valley, command):
    assert main(run(command)) == 0
    micros = [s for entry, s in valley.runs if entry == "micro"]
    assert [s["sample"] for s in micros] == [2 * i for i in range(len(micros))]
    assert [s["accumulate"] for s in micros[:4]] == [0, 1, 0, 1]


def test_the_smoothed_loss_counts_later_losses_more():
    assert find_lr._smoothed([3.0]) == 3.0
    assert find_lr._smoothed([1.0, 2.0]) == pytest.approx((0.9 * 1 + 2) / 1.9)


def test_a_loss_that_is_not_finite_ends_it(valley, command, tmp_path):
    read = valley.read
    valley.read = lambda name: (
        np.array([np.nan], np.float32) if name == "loss" and len(valley.runs) > 250 else read(name)
    )
    assert main(run(command)) == 0
    assert len(json.loads((tmp_path / "rates/lr.json").read_text())["steps"]) == 83


def test_nothing_that_is_there_is_touched(valley, command, refused, tmp_path):
    assert main(command("rates")) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rates").rglob("*")}
    assert "rates is not empty" in refused(*run(command))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rates").rglob("*")} == before
    assert "--find-lr begins anew" in refused(*run(command), "--resume")


def test_what_has_no_answer_is_refused_and_leaves_no_file(fake, command, refused, tmp_path):
    fake.read = lambda name: np.array([2.0 + 1e-3 * len(fake.runs), 1.0], np.float32)
    assert refused(*run(command)).startswith("the loss never fell below its first value in ")
    assert not (tmp_path / "rates").exists()
    fake.runs.clear()
    assert "--steps is 5, expected at least 20 for --find-lr" in refused(*command("few"), "--find-lr", "--steps", "5")
    assert "train.minutes is set, and --find-lr takes" in refused(*command("few"), "--find-lr", "--minutes", "5")
    assert "the runs of this model have stages" in refused("train", "speedrun-small", "--data", "none", "--find-lr")
    assert not fake.runs
