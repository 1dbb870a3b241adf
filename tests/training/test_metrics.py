from __future__ import annotations

import errno
import json

import pytest

from barellm.training import metrics


def train(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": step / 7}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_rows_are_in_the_file_as_soon_as_they_are_added(path):
    log = metrics.Metrics(path)
    log.add(train(1))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [train(1)]
    log.add(train(2))
    assert metrics.read(path) == [train(1), train(2)]


def test_a_line_cut_short_by_a_kill_is_dropped_with_what_follows(path):
    path.write_bytes(b'{"kind":"train","step":1}\n{"kind":"tr\n{"kind":"train","step":3}\n{"kind":"train","st')
    assert [row["step"] for row in metrics.read(path)] == [1]
    path.write_bytes(b'{"kind":"train","step":1}\n{"kind":"train","step":2}')
    assert [row["step"] for row in metrics.read(path)] == [1]


def test_truncation_keeps_what_the_checkpoint_knew(path):
    log = metrics.Metrics(path)
    for step in range(1, 7):
        log.add(train(step))
        if step % 2 == 0:
            log.add({"kind": "eval", "step": step, "val_nats": 1.0})
    kept = metrics.truncate(path, step=4)
    assert [(r["kind"], r["step"]) for r in kept] == [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4)]
    assert metrics.read(path) == kept
    again = metrics.Metrics(path, rows=kept)
    again.add(train(5))
    assert metrics.read(path) == again.rows == [*kept, train(5)]


def test_rows_wait_while_the_disk_is_full_and_are_written_whole_later(path, monkeypatch):
    log = metrics.Metrics(path)
    log.add(train(1))
    room = [10]  # bytes until the disk is full
    real = metrics.os.pwrite

    def pwrite(fd, data, at):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = data[: room[0]]
        room[0] -= len(data)
        return real(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "pwrite", pwrite)
        log.add(train(2))
        assert log.problem is not None and log.problem.filename == str(path)
        log.add(train(3))
    log.add(train(4))
    assert log.problem is None
    assert metrics.read(path) == [train(i) for i in range(1, 5)]
