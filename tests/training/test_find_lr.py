"""The range test of the learning rate, on a loss that falls, is least at a known rate, and diverges."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from math import log10

import numpy as np
import pytest

from barellm.cli.main import main, parsed
from barellm.cli.parsing.options import configuration
from barellm.training import find_lr
from barellm.training.console import Console


@pytest.fixture
def valley(fake):
    """The loss is 4, falls in a line over the decades from 1e-4 to 1e-2, and rises 4 a decade behind it."""
    real = fake.read

    def read(name):
        if name != "loss":
            return real(name)
        updates = [scalars["lr"] for entry, scalars in fake.runs if entry == "optimizer_step"]
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
    assert [scalars["lr"] for entry, scalars in valley.runs if entry == "optimizer_step"] == rates
    assert {path.name for path in (tmp_path / "rates").iterdir()} == {"lr.json", "lr.png"}
    said = capsys.readouterr().out
    assert "rates, where lr.json has the losses, lr.png their curve\n" in said and "config.json" not in said
    assert f"try {found['suggestion']:.4g}: {found['rule']}\n" in said
    assert "the test has no use for optim.warmup, train.eval_every," in said.replace("\n", " ")


def test_every_step_is_a_step_of_the_run(valley, command):
    assert main(run(command)) == 0
    micros = [s for entry, s in valley.runs if entry == "forward_backward"]
    assert [s["sample"] for s in micros] == [2 * i for i in range(len(micros))]
    assert [s["accumulate"] for s in micros[:4]] == [0, 1, 0, 1]
    assert {s["inv_targets"] for s in micros} == {1 / (2 * 2 * 8)}


def test_the_smoothed_loss_counts_later_losses_more():
    assert find_lr._smoothed([3.0]) == 3.0
    assert find_lr._smoothed([1.0, 2.0]) == pytest.approx((0.9 * 1 + 2) / 1.9)


def test_a_loss_that_is_not_finite_ends_it(valley, command, tmp_path):
    read = valley.read
    valley.read = lambda name: np.array([np.nan], np.float32) if name == "loss" and len(valley.runs) > 250 else read(name)
    assert main(run(command)) == 0
    assert len(json.loads((tmp_path / "rates/lr.json").read_text())["steps"]) == 83


def test_nothing_that_is_there_is_touched(valley, command, refused, tmp_path):
    assert main(command("rates")) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rates").rglob("*")}
    assert "rates is not empty" in refused(*run(command))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rates").rglob("*")} == before
    assert "--find-lr is a test from the start" in refused(*run(command), "--resume")


def test_what_has_no_answer_is_refused_and_leaves_no_file(fake, command, refused, tmp_path):
    fake.read = lambda name: np.array([2.0 + 1e-3 * len(fake.runs), 1.0], np.float32)
    assert refused(*run(command)).startswith("the loss never fell below its first value in ")
    assert not (tmp_path / "rates").exists()
    fake.runs.clear()
    assert "--steps is 5, expected at least 20 for --find-lr" in refused(*command("few"), "--find-lr", "--steps", "5")
    assert "train.minutes is set, and --find-lr takes" in refused(*command("few"), "--find-lr", "--minutes", "5")
    assert "the runs of this model have stages" in refused("train", "speedrun-small", "--data", "none", "--find-lr")
    without = ("--optim.name", "muon", "--lr", "0", "--optim.min_lr", "0", "--optim.muon_lr", "0.1")
    assert "optim.lr was 0, of which optim.muon_lr 0.1 is no multiple" in refused(*run(command, *without))
    assert not fake.runs


def recommended(folder) -> str:
    return json.loads((folder / "lr.json").read_text())["command"]


MUON = ("--optim.name", "muon")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--lr=0.0123", "--optim.min_lr", "0.0001"),
        MUON,
        (*MUON, "--lr", "0.004", "--optim.muon_lr=0.03"),
        (*MUON, "--optim.muon_lr_ratio", "3.7"),
        ("--lr", "9", "--optim.min_lr", "8"),
        ("--lr", "9", "--optim.min_lr", "8", "--schedule", "constant"),
    ],
    ids=" ".join,
)
@pytest.mark.extended
def test_the_command_that_it_recommends_is_the_configuration_that_it_tested(valley, command, tmp_path, text, words):
    quoted = tmp_path / "a text; of 'two' words.txt"
    quoted.write_text(text.read_text())
    options = [*run(command), "--data", str(quoted), "--model.layers=2", "--json", *words]
    assert main(options) == 0
    found = json.loads((tmp_path / "rates/lr.json").read_text())
    name, train, *kept = shlex.split(found["command"])
    assert (name, train) == ("barellm", "train")
    assert {"--find-lr", "--out", "--steps"}.isdisjoint(kept)
    assert kept[kept.index("--batch") + 1] == "2" and "--json" in kept and kept.count("--lr") == 1
    said = configuration(parsed(["train", *kept]))
    (best,) = [step for step in found["steps"] if step["lr"] == found["suggestion"]]
    tested = [s for entry, s in valley.runs if entry == "optimizer_step"][found["steps"].index(best)]
    assert said.optim.rates(lambda high, low: high) == {key: tested[key] for key in ("lr", "muon_lr") if key in tested}
    before = configuration(parsed([word for word in options if word != "--find-lr"]))
    rates = {"lr": said.optim.lr, "muon_lr": said.optim.muon_lr, "min_lr": said.optim.min_lr}
    assert said.optim == replace(before.optim, **rates) and said.model == before.model and said.data == before.data
    assert said.optim.min_lr == before.optim.min_lr or before.optim.min_lr > said.optim.lr > said.optim.min_lr > 0
    assert said.train == replace(before.train, steps=2000), "those of the preset: --steps was of the test"
    assert main([train, *kept, "--out", str(tmp_path / "trained"), "--steps", "2"]) == 0


def test_with_muon_both_rates_grow_in_their_ratio(valley, command, tmp_path, capsys):
    assert main(run(command, *MUON, "--optim.muon_lr", "0.003")) == 0
    found = json.loads((tmp_path / "rates/lr.json").read_text())
    assert all(step["muon_lr"] == pytest.approx(3 * step["lr"], rel=1e-11) for step in found["steps"])
    given = [(s["lr"], s["muon_lr"]) for entry, s in valley.runs if entry == "optimizer_step"]
    assert given == [(step["lr"], step["muon_lr"]) for step in found["steps"]]
    said = capsys.readouterr().out
    assert f"try {found['suggestion']:.4g} (AdamW), {found['muon_lr']:.4g} (Muon): {found['rule']}\n" in said
    assert said.endswith(f"next     {found['command']}\n")


def test_the_steps_and_minutes_of_a_file_are_those_of_a_run(valley, command, tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[train]\nsteps = 7\nminutes = 3\n")
    words = [word for word in command("rates", "--config", str(tmp_path / "run.toml")) if word not in ("--steps", "12")]
    assert main([*words, "--find-lr"]) == 0
    rates = [step["lr"] for step in json.loads((tmp_path / "rates/lr.json").read_text())["steps"]]
    assert rates == find_lr.rates(200)[: len(rates)] and len(rates) > 20
    train = configuration(parsed(shlex.split(recommended(tmp_path / "rates"))[1:])).train
    assert (train.steps, train.minutes) == (7, 3)


def test_it_says_how_long_it_takes_at_most(valley, command, capsys, monkeypatch):
    monkeypatch.setattr(Console, "PLAIN_S", 0.0)
    now = iter(range(10**6))
    monkeypatch.setattr(find_lr.time, "monotonic", lambda: 2.0 * next(now))
    assert main(run(command)) == 0
    said = capsys.readouterr().out
    first, second = (next(line for line in said.splitlines() if line.startswith(f"step {n:>5}/150")) for n in (1, 5))
    assert " left" not in first
    left = re.fullmatch(r"step     5/150  at most (\d+):(\d\d) left  loss \d\.\d{4}  lr 1\.5e-06", second)
    assert left, second


def test_steps_have_rates_that_a_user_types():
    rates = find_lr.rates(20)
    assert rates[0] == 1e-6 and rates[-1] == 10 and all(float(f"{rate:.3e}") == rate for rate in rates)
    assert all(1.9 < b / a < 2.7 for a, b in pairwise(rates))
