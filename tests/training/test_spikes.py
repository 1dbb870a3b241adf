"""Spikes of the loss and of the gradient's norm: the score, and the steps that are left out for it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.config import OptimConfig
from barellm.models.gpt2 import Config
from barellm.optim.recipes import updates
from barellm.runtime import reference
from barellm.training import metrics, spikes
from barellm.training.spikes import Detector, Spikes
from tests.training.conftest import whole_and_resumed


def numbers(count: int) -> list[float]:
    return list(np.random.default_rng(3).normal(4.0, 0.5, count))


def test_the_score_is_that_of_the_last_128_numbers_with_the_new_one_among_them():
    detector, values = Detector(), numbers(300)
    for i, value in enumerate(values):
        found, window = detector.score(value), values[max(0, i - 127) : i + 1]
        if i < 128:
            assert found is None
        else:
            assert found == pytest.approx((value - np.mean(window)) / np.std(window), rel=1e-9)


def test_a_huge_number_leaves_nothing_behind_when_it_is_gone():
    detector = Detector()
    for value in [*numbers(200), 1e12, *numbers(128)]:
        score = detector.score(value)
    window = numbers(128)
    assert score == pytest.approx((window[-1] - np.mean(window)) / np.std(window), rel=1e-9)


def test_what_is_not_a_number_leaves_no_trace():
    one, other = Detector(), Detector()
    for value in numbers(140):
        assert one.score(float("nan")) is None and one.score(float("inf")) is None
        assert one.score(value) == other.score(value)


def test_equal_numbers_have_no_spikes():
    detector = Detector()
    assert [detector.score(2.5) for _ in range(131)][128:] == [0.0] * 3


def test_a_detector_goes_on_from_json_with_the_same_bits():
    whole, values = Detector(), numbers(400)
    half = Detector()
    scores = [whole.score(value) for value in values]
    again = [half.score(value) for value in values[:211]]
    half = Detector(json.loads(json.dumps(half.state())))
    assert again + [half.score(value) for value in values[211:]] == scores


def test_the_loss_is_asked_first_and_only_what_is_far_above_counts():
    found = Spikes(loss_limit=3.0, norm_limit=3.0)
    for i in range(128):
        assert found.look(loss=4 + 0.1 * (i % 2), norm=1 + 0.1 * (i % 2)) == ""
    assert found.look(loss=0.0, norm=0.0) == ""  # far below
    for i in range(128):
        found.look(loss=4 + 0.1 * (i % 2), norm=1 + 0.1 * (i % 2))
    assert found.look(loss=6.0, norm=9.0).startswith("its loss 6 is 10.")
    assert found.look(loss=4.0, norm=90.0).startswith("its norm 90 is 11.")
    assert found.skipped == 2


OPTIM = {"lr": 0.01, "min_lr": 0.001, "clip": 0.5}


def test_the_norm_in_a_program_of_its_own_changes_no_bit():
    model = Config(layers=1, heads=1, d_model=8, vocab_size=11, max_seq=4)
    results = []
    for optim in (OptimConfig(**OPTIM), OptimConfig(**OPTIM, skip_norm_z=5.0)):
        append = updates(optim, "h.*")
        _, programs = build(model, batch=1, seq=3, optimizer=append)
        session = reference.open(programs, dtype="float32")
        session.run("init", seed=1)
        session.write("tokens", np.array([[1, 2, 3]], np.int32))
        session.write("targets", np.array([[2, 3, 4]], np.int32))
        for step in (1, 2):
            session.run("forward_backward", batch=1, seq=3, accumulate=0, inv_targets=1 / 3, seed=1, step=step, sample=0)
            for name in append:
                session.run(name, **({"lr": 0.01, "step": step, "seed": 1} if name == "optimizer_step" else {}))
                if name == next(iter(append)):
                    clip = session.read("clip").copy()
        results.append({"clip": clip} | {n: session.read(n) for n, t in session.tensors.items() if t.role != "cache"})
    one, other = results
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.fixture
def spiky(fake, monkeypatch):
    """A window of 4, and a loss that jumps in these steps; the fake's update is in two parts."""
    monkeypatch.setattr(spikes, "WINDOW", 4)
    real = fake.read

    def read(name):
        entry, scalars = fake.runs[-1]
        jump = 50 if (name, entry) == ("loss", "forward_backward") and scalars["step"] in (7, 8) else 0
        return real(name) + np.float32(jump)

    fake.read = read
    return fake


LIMIT = ("--optim.skip_loss_z", "1.7")


def updated(fake) -> list[int]:
    return [scalars["step"] for entry, scalars in fake.runs if entry == "optimizer_step"]


def test_a_skipped_step_changes_nothing_but_counts(spiky, command, tmp_path, capsys):
    assert main(command("run", *LIMIT)) == 0
    # The second of two equal jumps is no longer far above the mean.
    assert updated(spiky) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    rows = {row["step"]: row for row in metrics.read(tmp_path / "run/metrics.jsonl") if row["kind"] == "train"}
    assert [step for step, row in rows.items() if row["skipped"]] == [7]
    assert rows[7]["loss_z"] > 1.7 > rows[8]["loss_z"] and rows[4]["loss_z"] is None and "norm_z" in rows[7]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "skipped:" in line]
    assert line.startswith("step     7  skipped: its loss 100") and line.endswith("(1 skipped so far)")
    (result,) = [row for row in metrics.read(tmp_path / "run/metrics.jsonl") if row["kind"] == "result"]
    assert result["skipped_steps"] == 1


@pytest.mark.parametrize("at", [5, 7, 10])
def test_a_resumed_run_skips_the_same_steps(spiky, command, tmp_path, at):
    one, other = whole_and_resumed(spiky, command, tmp_path, *LIMIT, entry="grad_norm", at=at)
    assert checkpoint.read_meta(one)["spikes"] == checkpoint.read_meta(other)["spikes"]


def test_a_run_with_stages_cannot_skip(refused):
    message = refused("train", "speedrun-small", "--optim.skip_norm_z", "3")
    assert message == "optim.skip_norm_z is 3, and the runs of speedrun have stages, expected 0"
