"""A run that was stopped or killed and resumed ends with the same bits as one that never was."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from barellm.checkpoint import checkpoint, storage
from barellm.cli.main import main
from barellm.training import metrics
from tests.checkpoint.test_checkpoint import System, in_child, kill

TENSORS = ("weights.safetensors", "optimizer.safetensors")


def final(out: Path) -> dict[str, bytes]:
    path, wrong = checkpoint.find(out)
    assert path.name == "step-000012" and not wrong
    return {name: (path / name).read_bytes() for name in TENSORS}


def steps_seen(out: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in metrics.read(out / "metrics.jsonl")]


def numbers(out: Path) -> list[dict]:
    timing = {"seconds", "seconds_all_sessions", "tokens_per_s", "checkpoint", "curve"}  # and places
    return [{k: v for k, v in row.items() if k not in timing} for row in metrics.read(out / "metrics.jsonl")]


@pytest.fixture
def whole(fake, command, tmp_path, capsys) -> Path:
    assert main(command("whole")) == 0
    return tmp_path / "whole"


def test_a_whole_run_evaluates_and_samples_at_its_steps(whole):
    rows = steps_seen(whole)
    assert [step for kind, step in rows if kind == "train"] == list(range(1, 13))
    assert [step for kind, step in rows if kind == "eval"] == [0, 3, 6, 9, 12]
    assert [step for kind, step in rows if kind == "sample"] == [5, 10, 12, 12]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", range(1, 30, 3))
@pytest.mark.extended
def test_a_run_stopped_by_a_signal_goes_on_to_the_same_bits(whole, fake, command, tmp_path, at, number):
    out = tmp_path / "stopped"

    def stop(entry, seen=[0]):  # noqa: B006
        seen[0] += 1
        if seen[0] == at:
            os.kill(os.getpid(), number)

    fake.before_run = stop
    assert main(command("stopped")) == 128 + number
    fake.before_run = lambda entry: None
    path, wrong = checkpoint.find(out)
    assert not wrong
    assert checkpoint.read_meta(path)["samples"] == checkpoint.step_of(path) * 4
    assert main(command("stopped", "--resume")) == 0
    assert final(out) == final(whole)
    assert numbers(out) == numbers(whole)


def test_a_partial_accumulation_is_discarded(fake, command, tmp_path):
    def stop(entry):
        if [e for e, _ in fake.runs].count("forward_backward") == 5 and entry == "forward_backward":  # before the second of step 3
            os.kill(os.getpid(), signal.SIGINT)

    fake.before_run = stop
    main(command("stopped"))
    # The signal came before the second micro-batch ran; it ran, and the update with it: the step was whole.
    assert checkpoint.find(tmp_path / "stopped")[0].name == "step-000003"

    fake.runs.clear()

    def stop_first(entry):
        if [e for e, _ in fake.runs].count("forward_backward") == 4 and entry == "forward_backward":  # in the first of step 3
            os.kill(os.getpid(), signal.SIGINT)

    fake.before_run = stop_first
    main(command("other"))
    assert checkpoint.find(tmp_path / "other")[0].name == "step-000002"


@pytest.mark.extended
def test_killed_at_any_call_of_a_save_the_run_goes_on_to_the_same_bits(whole, fake, command, tmp_path):
    """`kill -9` at each call of the second save (it removes no older one; the third does)."""
    calls = saves(command, tmp_path)
    assert len(calls) == 3 and calls[1] - calls[0] > 30
    for at in [*range(calls[0], calls[1]), *random.Random(7).sample(range(calls[1], calls[2]), 10)]:
        out = tmp_path / f"at-{at}"

        def crash(at=at, out=out):
            storage.system = System(at, kill)
            main(command(out.name))

        assert os.WTERMSIG(in_child(crash)) == signal.SIGKILL, at
        assert in_child(lambda out=out: os._exit(main(command(out.name, "--resume")))) == 0, at
        assert final(out) == final(whole), at
        assert numbers(out) == numbers(whole), at
        assert not list(out.rglob(f"{storage.TEMPORARY}*")), at


def saves(command, tmp_path) -> list[int]:
    """Calls of the system up to the end of each save of a run."""
    counter = System(-1, None)
    ends = []
    real = checkpoint.save

    def counted(*args, **more):
        path = real(*args, **more)
        ends.append(counter.count)
        return path

    storage.system, checkpoint.save = counter, counted
    try:
        assert main(command("count")) == 0
    finally:
        storage.system, checkpoint.save = os, real
    return ends


def test_a_finished_run_resumed_reports_again(whole, fake, command, capsys):
    before, rows = final(whole), numbers(whole)
    assert main(command("whole", "--resume")) == 0
    assert final(whole) == before
    assert numbers(whole) == rows


def test_a_damaged_newest_checkpoint_costs_its_steps_only(whole, fake, command, tmp_path, capsys):
    assert main(command("damaged")) == 0
    out = tmp_path / "damaged"
    weights = out / "checkpoints/step-000012/weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume"]) == 0
    said = capsys.readouterr().out
    assert "warning: skipped" in said and "the checksum of weights.safetensors" in said
    assert "resumed from" in said and "step-000008" in said
    assert final(out) == final(whole)


def test_steps_may_grow_on_resume_and_other_keys_may_not(whole, fake, command, tmp_path, capsys):
    assert main(["train", "--out", str(whole), "--resume", "--steps", "14"]) == 0
    assert checkpoint.find(whole)[0].name == "step-000014"
    capsys.readouterr()
    assert main(["train", "--out", str(whole), "--resume", "--lr", "1"]) == 2
    assert "optim.lr is 0.001 in" in capsys.readouterr().err
    assert main(["train", "gpt2-124m", "--out", str(whole), "--resume"]) == 2
    assert "holds a run of preset 'shakespeare-char'" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_as_it_was(whole, fake, tmp_path, capsys):
    out = tmp_path / "killed"
    out.mkdir()
    (out / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert main(["train", "--out", str(out), "--resume", "--lr", "1"]) == 2
    assert f"optim.lr is 0.001 in {out / 'config.json'}" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert "starting again from step 0" in capsys.readouterr().out
    assert final(out) == final(whole)


def test_another_text_is_refused_on_resume(whole, fake, command, text, capsys):
    text.write_text(text.read_text().replace("line 7", "LINE 7"))
    assert main(command("whole", "--resume")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("barellm: error:")


def test_minutes_choose_the_steps_once(fake, command, tmp_path, monkeypatch, capsys):
    """The number that the first session chose is kept by the second, whatever its speed."""
    from barellm.training import loop

    monkeypatch.setattr(loop, "CALIBRATION_S", 0.0)
    monkeypatch.setattr(loop, "steps_in_time", lambda **numbers: 19)
    args = command("timed", "--minutes", "5", "--steps", "1000")

    def stop(entry):
        if entry == "optimizer_step" and [e for e, _ in fake.runs].count("optimizer_step") == 14:
            os.kill(os.getpid(), signal.SIGINT)

    fake.before_run = stop
    assert main(args) == 130
    fake.before_run = lambda entry: None
    monkeypatch.setattr(loop, "steps_in_time", lambda **numbers: 999)
    assert main([*args, "--resume"]) == 0
    assert checkpoint.find(tmp_path / "timed")[0].name == "step-000019"
    monkeypatch.setattr(loop, "steps_in_time", lambda **numbers: 19)
    assert main(command("timed-whole", "--minutes", "5", "--steps", "1000")) == 0
    one, other = (checkpoint.find(tmp_path / name)[0] for name in ("timed", "timed-whole"))
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in TENSORS)


WSD = ("--schedule", "wsd", "--optim.decay_fraction", "0.25")


def rates(fake) -> list[float]:
    found = [scalars["lr"] for entry, scalars in fake.runs if entry == "optimizer_step"]
    fake.runs.clear()
    return found


def test_a_run_made_longer_in_its_constant_part_is_the_longer_run(fake, command, tmp_path):
    """wsd's point: stopped after 7 of 12 steps, 3 of them of cooldown, and sent on to 20, it has the bits of a run of 20."""

    def stop(entry):
        if entry == "optimizer_step" and [e for e, _ in fake.runs].count("optimizer_step") == 6:
            os.kill(os.getpid(), signal.SIGINT)

    assert main(command("long", *WSD, "--steps", "20")) == 0
    whole = rates(fake)
    assert whole[2:15] == [1e-3] * 13 and whole[15:] == pytest.approx([1e-3 - 1.8e-4 * i for i in range(1, 6)])
    fake.before_run = stop
    assert main(command("grown", *WSD)) == 130
    fake.before_run = lambda entry: None
    assert main(["train", "--out", str(tmp_path / "grown"), "--resume", "--steps", "20"]) == 0
    assert rates(fake) == whole
    long, grown = (checkpoint.find(tmp_path / name)[0] for name in ("long", "grown"))
    assert long.name == grown.name == "step-000020"
    assert all((long / name).read_bytes() == (grown / name).read_bytes() for name in TENSORS)
    assert numbers(tmp_path / "long") == numbers(tmp_path / "grown")


def test_after_its_cooldown_a_run_goes_on_at_the_full_rate(fake, command, tmp_path):
    assert main(command("run", *WSD)) == 0
    assert rates(fake)[9:] == pytest.approx([7e-4, 4e-4, 1e-4])
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "20"]) == 0
    assert rates(fake) == pytest.approx([1e-3] * 3 + [1e-3 - 1.8e-4 * i for i in range(1, 6)])


def test_fewer_steps_than_are_done_change_nothing_and_are_said(fake, command, tmp_path, capsys):
    assert main(command("run", *WSD)) == 0
    before = numbers(tmp_path / "run")
    rates(fake)
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "5"]) == 0
    assert "warning: the run is at step 12 already, past train.steps 5" in capsys.readouterr().out
    assert rates(fake) == [] and numbers(tmp_path / "run") == before


def test_a_cooldown_is_chosen_when_the_end_is(fake, command, tmp_path, capsys):
    """A trunk with no end in sight, stopped, and then cooled down over its last steps."""

    def stop(entry):
        if entry == "optimizer_step" and [e for e, _ in fake.runs].count("optimizer_step") == 14:
            os.kill(os.getpid(), signal.SIGINT)

    fake.before_run = stop
    assert main(command("run", *WSD, "--steps", "100000")) == 130
    fake.before_run = lambda entry: None
    assert rates(fake)[2:] == [1e-3] * 13
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "20", "--optim.decay_fraction", "0.1"]) == 0
    assert rates(fake) == pytest.approx([1e-3] * 3 + [5.5e-4, 1e-4])
    assert checkpoint.read_meta(checkpoint.find(tmp_path / "run")[0])["config"]["optim"]["decay_fraction"] == 0.1
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--schedule", "linear"]) == 2
    assert "optim.schedule is 'wsd' in" in capsys.readouterr().err


def test_the_cooldown_of_a_timed_run_ends_where_its_time_does(fake, command, tmp_path, monkeypatch):
    from barellm.training import loop

    monkeypatch.setattr(loop, "CALIBRATION_S", 0.0)
    monkeypatch.setattr(loop, "steps_in_time", lambda **numbers: 24)
    assert main(command("timed", *WSD, "--minutes", "5", "--steps", "1000")) == 0
    assert rates(fake)[2:] == pytest.approx([1e-3] * 16 + [1e-3 - 1.5e-4 * i for i in range(1, 7)])


def test_a_longer_run_that_is_stopped_before_its_first_step_says_how_to_go_on(whole, fake, capsys):
    """Its checkpoint is the old one, which knows nothing of --steps."""
    fake.before_run = lambda entry: os.kill(os.getpid(), signal.SIGINT)
    assert main(["train", "--out", str(whole), "--resume", "--steps", "14"]) == 130
    assert "stopped after step 12; resume with: the same command" in capsys.readouterr().out
