"""What the loop tells the session, and when it gives up."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from barellm.checkpoint import checkpoint, storage
from barellm.cli.main import main
from barellm.models import preset
from barellm.training import metrics, saving
from barellm.training.schedule import learning_rate


def test_each_step_gets_its_scalars(fake, command):
    assert main(command("run")) == 0
    micros = [s for entry, s in fake.runs if entry == "forward_backward"]
    assert [s["sample"] for s in micros] == [2 * i for i in range(24)]
    assert [s["accumulate"] for s in micros] == [0, 1] * 12
    assert [s["step"] for s in micros] == [1 + i // 2 for i in range(24)]
    assert {s["inv_targets"] for s in micros} == {1 / (2 * 2 * 8)}
    updates = [s for entry, s in fake.runs if entry == "optimizer_step"]
    assert [s["step"] for s in updates] == list(range(1, 13))
    from dataclasses import replace

    optim = replace(preset("shakespeare-char").optim, warmup=2)
    assert [s["lr"] for s in updates] == [learning_rate(i, total=12, optim=optim) for i in range(12)]


def test_the_loss_of_a_step_is_the_sum_over_its_micro_batches(fake, command, tmp_path):
    losses = []
    real = fake.read

    def read(name):
        value = real(name)
        if name == "loss" and fake.runs[-1][0] == "forward_backward":
            losses.append(float(value[0]))
        return value

    fake.read = read
    assert main(command("run")) == 0
    rows = [row["loss"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert rows == pytest.approx([a + b for a, b in zip(losses[::2], losses[1::2], strict=True)])


def not_finite(fake, steps):
    """Makes the loss NaN in these steps."""
    real = fake.read

    def read(name):
        entry, scalars = fake.runs[-1]
        if name == "loss" and entry == "forward_backward" and scalars["step"] in steps:
            return np.array([np.nan], np.float32)
        return real(name)

    fake.read = read


def test_a_loss_that_stays_not_finite_ends_the_run_with_one_line(fake, command, tmp_path, capsys):
    not_finite(fake, range(5, 100))
    assert main(command("run", "--steps", "40")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "not finite for 10 steps up to step 14" in error and "--lr 0.0005" in error
    assert [
        row["loss"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["step"] == 6 and row["kind"] == "train"
    ] == [None]


@pytest.fixture
def diverging(fake):
    """The gradient's norm is not finite from a step on, and such an update changes nothing, as the real one's."""

    def install(first: int, *, broken: bool = False) -> None:
        real_read, real_run = fake.read, fake.run

        def read(name):
            bad = name == "clip" and fake.runs[-1][1]["step"] >= first
            return np.array([np.inf, np.nan], np.float32) if bad else real_read(name)

        def run(entry, **scalars):
            held = {name: array.copy() for name, array in fake.arrays.items()}
            real_run(entry, **scalars)
            if entry == "optimizer_step" and scalars["step"] >= first:
                fake.arrays.update(held)
            elif entry == "optimizer_step" and scalars["step"] == first - 1 and broken:
                fake.arrays["w"][1, 2] = np.nan

        fake.read, fake.run = read, run

    return install


def test_a_run_that_diverges_leaves_its_last_finite_weights(diverging, fake, command, tmp_path, capsys):
    diverging(11)
    assert main(command("run", "--steps", "40", "--train.checkpoint_every", "0")) == 2
    target = tmp_path / "run/checkpoints/step-000010"
    assert f"{target} holds the last weights that were finite" in capsys.readouterr().err
    assert last_step(tmp_path) == checkpoint.read_meta(target)["step"] == 10
    saved = load_file(target / checkpoint.WEIGHTS)
    assert all((saved[name] == fake.arrays[name]).all() for name in ("w", "b"))
    meta = checkpoint.read_meta(target)
    assert (meta["tokens"], meta["samples"]) == (10 * 32, 10 * 4)  # of this step, as all of it
    # It is a checkpoint like any: the run goes on from it, to the same end.
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 2
    steps = [r["step"] for r in metrics.read(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == list(range(1, 21))


@pytest.mark.parametrize("broken", [False, True], ids=["finite", "broken weights"])
def test_a_run_that_diverges_keeps_its_checkpoints_from_before(diverging, fake, command, tmp_path, capsys, broken):
    """The last finite weights may be bad already, so they push out no checkpoint, and nothing is saved on the way to the end."""
    diverging(12, broken=broken)
    assert main(command("run", "--steps", "40", "--train.checkpoint_every", "4", "--train.save_total_limit", "1")) == 2
    folder = tmp_path / "run/checkpoints"
    held = [checkpoint.step_of(path) for path in checkpoint.steps(folder)]
    end = capsys.readouterr().err.rstrip("\n").split("; ")[1:]
    if broken:
        assert held == [8] and end == [f"{folder}/step-000008 is the last checkpoint"]
    else:
        before = f"the checkpoint before that is {folder}/step-000008"
        assert held == [11, 8] and end == [f"{folder}/step-000011 holds the last weights that were finite", before]


def test_a_checkpoint_that_is_due_in_a_bad_moment_comes_after_it(fake, command, tmp_path):
    """fp16 skips an update now and then, and goes on."""
    not_finite(fake, {4, 5})
    assert main(command("run", "--train.checkpoint_every", "4", "--train.save_total_limit", "9")) == 0
    steps = [checkpoint.step_of(path) for path in checkpoint.steps(tmp_path / "run/checkpoints")]
    assert steps == [12, 8, 6]


@pytest.mark.parametrize("first, broken", [(1, False), (7, True)], ids=["at once", "broken weights"])
def test_weights_that_are_worth_nothing_are_not_saved(diverging, command, tmp_path, capsys, first, broken):
    diverging(first, broken=broken)
    assert main(command("run", "--steps", "40", "--train.checkpoint_every", "0")) == 2
    assert "holds the last" not in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_few_such_steps_are_survived(fake, command):
    not_finite(fake, {3, 4, 9})
    assert main(command("run")) == 0


class FullDisk:
    """Refuses to reserve the space of a checkpoint's files so many times, from the given step on."""

    def __init__(self, *, step: int, times: float, code: int = errno.ENOSPC) -> None:
        self.step, self.times, self.code, self.refused = step, times, code, 0

    def __getattr__(self, name):
        return self.refuse if name == "posix_fallocate" else getattr(os, name)

    def refuse(self, fd, *arguments):
        step = int(Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name.removeprefix(".tmp-step-"))
        if step >= self.step and self.refused < self.times:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        return os.posix_fallocate(fd, *arguments)


@pytest.fixture
def full_disk(fake, monkeypatch):
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("space is not reserved here")
    monkeypatch.setattr(saving, "FULL_DISK_PAUSE_S", 0.01)

    def install(**how) -> FullDisk:
        disk = FullDisk(**how)
        monkeypatch.setattr(storage, "system", disk)
        return disk

    return install


def last_step(tmp_path) -> int:
    path, wrong = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert path is not None and not wrong
    return checkpoint.step_of(path)


def test_the_last_save_waits_until_the_disk_has_room(full_disk, command, tmp_path, capsys):
    disk = full_disk(step=12, times=3)
    assert main(command("run")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "No space left on device" in line]
    assert disk.refused == len(said) == 3
    assert all("tried again" in line and "weights.safetensors" in line for line in said)
    assert last_step(tmp_path) == 12


def test_ctrl_c_ends_the_wait_for_room_and_the_older_checkpoints_stay(full_disk, command, tmp_path, monkeypatch, capsys):
    disk = full_disk(step=12, times=float("inf"))
    real = disk.refuse

    def refuse(*arguments):
        if disk.refused == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(disk, "refuse", refuse)
    assert main(command("run")) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert last_step(tmp_path) == 8


def test_the_wait_for_room_has_an_end_and_other_errors_are_not_waited_for(full_disk, command, tmp_path, monkeypatch):
    disk = full_disk(step=12, times=float("inf"), code=errno.EIO)
    assert main(command("run")) != 0 and disk.refused == 1
    assert last_step(tmp_path) == 8
    monkeypatch.setattr(saving, "FULL_DISK_S", 0.05)
    disk = full_disk(step=12, times=float("inf"))
    assert main(command("second")) != 0 and disk.refused > 1


def evaluations(fake, losses):
    """Gives the evaluations of a run these losses, one after the other; 9 behind their end."""
    real, given = fake.read, dict(enumerate(losses))
    seen: list[int] = []

    def read(name):
        entry = fake.runs[-1][0]
        if name != "loss" or entry != "eval":
            return real(name)
        step = sum(entry == "optimizer_step" for entry, _ in fake.runs)
        if step not in seen:
            seen.append(step)
        return np.array([given.get(len(seen) - 1, 9.0)], np.float32)

    fake.read = read


def test_a_run_ends_where_validation_is_not_better_for_long_and_its_best_checkpoint_stays(fake, command, tmp_path, capsys):
    evaluations(fake, [5.0, 4.0, 3.0, 3.5, 3.5])
    words = ("--train.eval_every", "2", "--train.early_stopping", "2", "--train.keep_best")
    assert main(command("run", *words)) == 0
    out = capsys.readouterr().out
    assert "step     8  early stopping: 2 evaluations without a lower validation loss" in out
    assert [path.name for path in checkpoint.steps(tmp_path / "run" / "best")] == ["step-000004"]
    assert checkpoint.find(tmp_path / "run" / "best")[0].name == "step-000004"
    assert checkpoint.find(tmp_path / "run")[0].name == "step-000008" and "done     8 steps" in out
    # A longer run may go on from there.
    more = ["--resume", "--steps", "20", "--train.early_stopping", "0"]
    assert main(["train", "--out", str(tmp_path / "run"), *more]) == 0
    assert checkpoint.find(tmp_path / "run")[0].name == "step-000020"
