"""Trackers get every row of metrics.jsonl, and none of what they do reaches the training. The real ones are in tests/oracle."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace

import pytest

from barellm.cli.main import main
from barellm.training import metrics, trackers


class Recorder:
    """A tracker that keeps what it is told. `broken` at the so-manieth row it raises, `slow` it comes back from none before
    the test's end."""

    def __init__(self, *, broken: int = -1, slow: bool = False) -> None:
        self.subjects, self.rows, self.closed, self.broken, self.slow = [], [], 0, broken, slow
        self.over = threading.Event()

    def __call__(self, subject):
        self.subjects.append(subject)
        return self

    def log(self, step, numbers, texts):
        if self.slow:
            self.over.wait()
        if len(self.rows) == self.broken:
            raise ConnectionError("no network\nat all")
        self.rows.append((step, numbers, texts))

    def close(self):
        self.closed += 1


@pytest.fixture
def recorded(fake, monkeypatch):
    made = []

    def install(name="wandb", **how) -> Recorder:
        made.append(recorder := Recorder(**how))
        monkeypatch.setattr(trackers, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, f"barellm.training.tracking.{name}", SimpleNamespace(Tracker=recorder))
        return recorder

    yield install
    for recorder in made:
        recorder.over.set()


def test_a_tracker_has_what_metrics_jsonl_has(recorded, command, tmp_path):
    one, other = recorded("wandb"), recorded("trackio")
    assert main(command("run", "--train.track", "wandb, trackio")) == 0
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    wanted = [(row["step"], *trackers.parts(row)) for row in rows]
    assert one.rows == other.rows == wanted and one.closed == 1
    step, numbers, texts = wanted[2]
    assert (step, texts) == (2, {}) and numbers["train/loss"] == rows[2]["loss"] and "train/tokens_per_s" in numbers
    assert {text for _, _, found in wanted for text in found} >= {"sample/text", "result/checkpoint"}
    (subject,) = one.subjects
    assert (subject.name, subject.project, subject.step) == ("run", "shakespeare-char", 0)
    assert subject.config["optim.warmup"] == 2


def test_a_row_becomes_numbers_and_texts():
    row = {"kind": "train", "step": 3, "loss": None, "lr": 0.5, "skipped": True, "seconds": 2, "who": "x"}
    assert trackers.parts(row) == ({"train/lr": 0.5, "train/skipped": 1.0, "train/seconds": 2.0}, {"train/who": "x"})


def test_a_resumed_run_is_the_same_run_to_a_tracker(recorded, command, tmp_path):
    recorder = recorded()
    assert main(command("run", "--train.track", "wandb")) == 0
    assert main(command("run", "--train.track", "wandb", "--resume", "--steps", "14")) == 0
    first, second = recorder.subjects
    assert first.id == second.id == json.loads((tmp_path / "run/tracking.json").read_text())["id"]
    assert (first.step, second.step) == (0, 12)
    steps = [step for step, numbers, _ in recorder.rows if "train/loss" in numbers]
    assert steps == list(range(1, 15))


def test_a_file_without_the_id_of_the_run_is_named(recorded, command, refused, tmp_path):
    recorded()
    assert main(command("run", "--train.track", "wandb")) == 0
    for content in ("{}", '{"id": 3}'):
        (tmp_path / "run/tracking.json").write_text(content)
        message = refused(*command("run", "--train.track", "wandb", "--resume", "--steps", "14"))
        assert message.startswith(f"{tmp_path / 'run/tracking.json'} has no id of the run, expected what barellm writes")


@pytest.mark.parametrize("broken", [0, 7])
def test_a_tracker_that_fails_is_one_line_and_the_training_goes_on(recorded, command, tmp_path, capsys, broken):
    recorded(broken=broken)
    assert main(command("run", "--train.track", "wandb")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "warning: wandb hears no more of this run: ConnectionError: no network at all" in said
    assert metrics.read(tmp_path / "run/metrics.jsonl")[-1]["kind"] == "result"


def test_a_tracker_that_hangs_does_not_hold_the_end_up(recorded, command, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "END_S", 0.05)
    monkeypatch.setattr(trackers, "MOST_WAITING", 4)
    recorded(slow=True)
    assert main(command("run", "--train.track", "wandb")) == 0
    assert "wandb hears no more of this run: 4 rows wait for it" in capsys.readouterr().out
    monkeypatch.setattr(trackers, "MOST_WAITING", 400)
    assert main(command("again", "--train.track", "wandb")) == 0
    assert "wandb hears no more of this run: it did not end within 0.05 s" in capsys.readouterr().out


def test_names_and_packages_that_are_not_there_are_one_line(fake, command, refused, monkeypatch):
    assert "train.track names 'tensorbord', expected any of tensorboard, wandb, trackio" in refused(
        *command("run", "--train.track", "tensorbord")
    )
    message = refused(*command("run", "--train.track", "wandb,trackio,wandb"))
    assert message == "train.track names 'wandb' twice, expected each once"
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    message = refused(*command("run", "--train.track", "tensorboard"))
    assert message == "train.track names tensorboard, which is not installed: pip install tensorboard"


def test_what_a_tracker_prints_is_not_among_the_json(fake, command, tmp_path, monkeypatch, capsys):
    class Chatty(Recorder):
        def log(self, step, numbers, texts):
            print(f"* step {step} of a run")

    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "barellm.training.tracking.trackio", SimpleNamespace(Tracker=Chatty()))
    assert main(command("run", "--train.track", "trackio", "--json")) == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == metrics.read(tmp_path / "run/metrics.jsonl")
    assert "* step 12 of a run\n" in said.err
    assert main(command("again", "--train.track", "trackio")) == 0
    assert "* step 12 of a run\n" in capsys.readouterr().out, "back where it was"
