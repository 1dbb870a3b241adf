"""Checkpoints that are written while the training goes on: what they hold, what they cost, and the end that a scheduler sets."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from barellm.checkpoint import checkpoint, snapshot, storage, tensorfile
from barellm.cli.main import main
from barellm.training import metrics
from barellm.training.saving import Point, Saving
from barellm.training.signal_grace_period import SignalGracePeriod
from barellm.training.trackers import Tracking
from tests.checkpoint.test_checkpoint import in_child
from tests.training.fake import FakeSession

TENSORS = ("weights.safetensors", "optimizer.safetensors")


def tensors_of(folder, step: int) -> list[bytes]:
    return [(checkpoint.step_folder(folder / "checkpoints", step) / name).read_bytes() for name in TENSORS]


class Slow:
    """A disk that takes its first write of a save only when the training has gone on to a later step."""

    def __init__(self, fake: FakeSession, *, steps: int) -> None:
        self.fake, self.steps, self.behind = fake, steps, 0

    def __getattr__(self, name):
        return self.write if name == "write" else getattr(os, name)

    def updates(self) -> int:
        return [entry for entry, _ in self.fake.runs].count("optimizer_step")

    def write(self, fd, data):
        begin, deadline = self.updates(), time.monotonic() + 10
        if threading.current_thread() is not threading.main_thread() and not self.behind:
            while self.updates() < begin + self.steps and time.monotonic() < deadline:
                time.sleep(0.001)
            self.behind = self.updates() - begin
        return os.write(fd, data)


def test_a_checkpoint_holds_its_own_step_however_far_the_training_is(fake, command, tmp_path, monkeypatch):
    assert main(command("whole", "--train.save_total_limit", "9")) == 0
    fake.runs.clear()
    monkeypatch.setattr(snapshot, "available", lambda: 1 << 40)
    disk = Slow(fake, steps=2)
    monkeypatch.setattr(storage, "system", disk)
    assert main(command("slow", "--train.save_total_limit", "9")) == 0
    assert disk.behind >= 2
    for step in (4, 8, 12):
        assert tensors_of(tmp_path / "slow", step) == tensors_of(tmp_path / "whole", step)


@pytest.mark.parametrize("piece", [12, 1 << 20])
def test_only_rows_that_nobody_has_read_yet_are_copied(monkeypatch, piece):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    session = FakeSession()
    before = {name: array.copy() for name, array in session.arrays.items()}
    found = snapshot.Snapshot(session, snapshot.pieces_of(session.tensors, ["w", "b", "w.m"]), threads=2)

    def read(name):
        t = session.tensors[name]
        return np.concatenate([found.read_rows(name, lo, hi) for lo, hi in tensorfile.pieces(t.shape, 4)])

    np.testing.assert_array_equal(read("w"), before["w"])
    assert found.copied == 0
    for names, copied in ((["w", "b"], 28), (["b", "skipped"], 28), (["w.m"], 28 + 60)):
        found.keep(names)
        for name in names:
            session.arrays[name] += 1
        assert found.copied == copied
    np.testing.assert_array_equal(read("b"), before["b"])
    np.testing.assert_array_equal(read("w.m"), before["w.m"])


def test_without_memory_what_is_not_due_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(snapshot, "available", lambda: 0)
    session = FakeSession()
    snapshot.Snapshot(session, [("w", 0, 5)], threads=1).keep(["b", "w.m"])  # it would never return


def test_without_memory_for_copies_the_training_waits_for_the_writer(monkeypatch):
    monkeypatch.setattr(snapshot, "available", lambda: snapshot.SPARE + 59)
    session = FakeSession()
    found = snapshot.Snapshot(session, [("w", 0, 5)], threads=1)
    training = threading.Thread(target=found.keep, args=(["w"],))
    training.start()
    training.join(0.05)
    assert training.is_alive() and found.copied == 0
    np.testing.assert_array_equal(found.read_rows("w", 0, 5), session.arrays["w"])
    found.end()
    training.join(10)
    assert not training.is_alive()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC])
def test_a_save_that_fails_on_the_way_is_one_line_and_the_training_goes_on(fake, command, tmp_path, monkeypatch, capsys, code):
    class Broken:
        def __getattr__(self, name):
            return self.mkdir if name == "mkdir" else getattr(os, name)

        def mkdir(self, path):
            if path.name == ".tmp-step-000008":
                raise OSError(code, os.strerror(code), str(path))
            os.mkdir(path)

    monkeypatch.setattr(storage, "system", Broken())
    assert main(command("run")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: no checkpoint")]
    assert line.startswith(f"warning: no checkpoint of step 8: {os.strerror(code)}: ")
    assert [checkpoint.step_of(path) for path in checkpoint.steps(tmp_path / "run/checkpoints")] == [12, 4]


def test_a_mistake_in_the_writer_is_not_taken_for_a_failing_disk(fake, command, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", lambda *arguments, **more: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(command("run"))


def test_milestones_stay_and_the_others_rotate(fake, command, tmp_path):
    how = ("--train.keep_every", "5", "--train.checkpoint_every", "2", "--train.save_total_limit", "2", "--steps", "13")
    assert main(command("run", *how)) == 0
    held = [checkpoint.step_of(path) for path in checkpoint.steps(tmp_path / "run/checkpoints")]
    assert held == [13, 12, 10, 5]
    # What a checkpoint was when it was made decides, not what a later session asks for.
    how = ("--train.keep_every", "0", "--train.checkpoint_every", "0", "--train.save_total_limit", "1", "--steps", "15", "--resume")
    assert main(command("run", *how)) == 0
    held = [checkpoint.step_of(path) for path in checkpoint.steps(tmp_path / "run/checkpoints")]
    assert held == [15, 10, 5]


def test_a_run_that_stops_begins_no_save_beside_that_of_its_grace_period(fake, command, tmp_path, capsys):
    def stop(entry):
        if entry == "optimizer_step" and [e for e, _ in fake.runs].count("optimizer_step") == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    fake.before_run = stop
    assert main(command("run")) == 143  # step 8 would have its checkpoint on the way
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saved ")]
    assert said[-1] == f"saved {tmp_path / 'run/checkpoints/step-000008'}"  # by the run itself, before it ends


def test_a_program_runs_while_another_thread_ends_the_save(tmp_path):
    """The writer may be gone between two looks at it."""
    session = FakeSession()
    saving = Saving(tmp_path, session, written={}, shared=True, threads=1, tokenizer={}, console=None, stop=None)

    class Vanishing:
        stalled = 0.0
        point = Point(1, {}, 1, False)

        @property
        def snapshot(self):
            saving.writer = None
            return SimpleNamespace(keep=lambda names: None)

    saving.writer = Vanishing()
    saving.before("optimizer_step")
    assert saving.writer is None


# --- grace ---


def until_saved(folder, step: int) -> None:
    deadline = time.monotonic() + 10
    while not checkpoint.step_folder(folder / "checkpoints", step).exists() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_sigterm_inside_a_step_that_does_not_end_saves_the_last_whole_one(fake, command, tmp_path):
    assert main(command("whole")) == 0
    fake.runs.clear()

    def hang(entry):
        if entry == "forward_backward" and [e for e, _ in fake.runs].count("optimizer_step") == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    fake.before_run = hang
    begin = time.monotonic()
    status = in_child(lambda: main(command("run", "--train.signal_grace_period", "0.6")))
    assert os.WEXITSTATUS(status) == 143 and time.monotonic() - begin < 12
    assert checkpoint.find(tmp_path / "run")[0].name == "step-000005"
    fake.before_run = lambda entry: None
    assert main(command("run", "--resume")) == 0
    assert tensors_of(tmp_path / "run", 12) == tensors_of(tmp_path / "whole", 12)


class Stuck:
    """A disk whose fsync does not return."""

    def __getattr__(self, name):
        return (lambda *arguments: time.sleep(20)) if name == "fsync" else getattr(os, name)


@pytest.mark.parametrize("entry, disk", [("optimizer_step", os), ("forward_backward", Stuck())], ids=["an update", "a slow disk"])
def test_what_does_not_end_does_not_prolong_the_grace(fake, command, tmp_path, entry, disk):
    """Weights that are half of one step and half of the next are not saved, and a save that takes too long is given up."""

    def hang(program):
        if program == entry and [e for e, _ in fake.runs].count("optimizer_step") == 5:
            until_saved(tmp_path / "run", 4)
            storage.system = disk
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    fake.before_run = hang
    begin = time.monotonic()
    status = in_child(lambda: main(command("run", "--train.signal_grace_period", "0.4")))
    assert os.WEXITSTATUS(status) == 143 and time.monotonic() - begin < 12
    assert checkpoint.find(tmp_path / "run")[0].name == "step-000004"


def test_the_thread_saves_at_half_of_the_grace_and_leaves_at_its_end(monkeypatch):
    begin, happened = time.monotonic(), {}
    monkeypatch.setattr(SignalGracePeriod, "_save", lambda self: happened.update(save=time.monotonic() - begin))
    monkeypatch.setattr(SignalGracePeriod, "_end", lambda self, end: happened.update(end=end - begin))
    loop, stop = SimpleNamespace(saving=SimpleNamespace(last_began=False)), SimpleNamespace(terminated=begin)
    SignalGracePeriod(3.0, loop=loop, stop=stop, console=None)._watch()
    assert happened["end"] == pytest.approx(3.0) and 1.5 <= happened["save"] < 2.5


def test_a_tracker_that_hangs_at_the_end_does_not_prolong_the_grace(fake, command, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(Tracking, "close", lambda self: time.sleep(20))

    def stop(entry):
        if entry == "optimizer_step" and [e for e, _ in fake.runs].count("optimizer_step") == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    fake.before_run = stop
    begin = time.monotonic()
    status = in_child(lambda: main(command("run", "--train.signal_grace_period", "0.4")))
    assert os.WEXITSTATUS(status) == 143 and time.monotonic() - begin < 12
    held = f"{tmp_path / 'run/checkpoints/step-000006'} holds its last step"
    assert f"the grace period of 0.4 s is over, and the run is ended: {held}" in capfd.readouterr().out


def test_a_step_that_ends_in_time_is_saved_as_ever(fake, command, tmp_path, capsys):
    def stop(entry):
        if entry == "optimizer_step" and [e for e, _ in fake.runs].count("optimizer_step") == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    fake.before_run = stop
    assert main(command("run", "--train.signal_grace_period", "5")) == 143
    assert checkpoint.find(tmp_path / "run")[0].name == "step-000006"
    assert "stopped after step 6; resume with" in capsys.readouterr().out


def test_a_run_goes_on_where_an_old_checkpoint_cannot_be_removed(fake, command, tmp_path, monkeypatch, capsys):
    """Saves of the thread and the last one say so, each thing once."""

    class Busy:
        def __getattr__(self, name):
            return self.rmdir if name == "rmdir" else getattr(os, name)

        def rmdir(self, path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(storage, "system", Busy())
    assert main(command("run", "--train.save_total_limit", "1")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "is not removed" in line]
    assert len(said) == len(set(said)) and sum("/step-000004 is not removed" in line for line in said) == 1
    assert any("/step-000008 is not removed" in line for line in said)
    monkeypatch.setattr(storage, "system", os)
    assert main(command("run", "--resume", "--train.save_total_limit", "1", "--steps", "13")) == 0
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000013"]


@pytest.mark.parametrize("loss", [3.0, None])
def test_a_run_that_was_killed_behind_its_last_checkpoint_removes_the_ones_before(fake, command, tmp_path, loss):
    """Not where the last step was not finite: they may be the last good ones."""
    assert main(command("run", "--train.save_total_limit", "9")) == 0
    path, folder = tmp_path / "run/metrics.jsonl", tmp_path / "run/checkpoints"
    before, rows = sorted(folder.iterdir()), metrics.read(path)
    [row for row in rows if row["kind"] == "train"][-1]["loss"] = loss
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len(before) > 1 and main(command("run", "--resume", "--train.save_total_limit", "1")) == 0
    assert sorted(folder.iterdir()) == (before if loss is None else before[-1:])


def test_the_curve_takes_the_place_of_a_link(fake, command, tmp_path):
    assert main(command("run")) == 0
    (tmp_path / "own.png").write_text("own")
    for name in ("loss.png", "metrics.jsonl", "config.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "own.png")
    assert main(command("run", "--resume", "--steps", "13")) == 0
    assert (tmp_path / "own.png").read_text() == "own" and (tmp_path / "run" / "loss.png").read_bytes() == b""
