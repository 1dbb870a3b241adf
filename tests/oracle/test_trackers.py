"""What TensorBoard, Weights & Biases and trackio say of a run that was killed and resumed, read back from what they wrote."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from barellm.training import trackers
from barellm.training.trackers import Subject, Tracking

pytestmark = pytest.mark.oracle

ROWS = [
    {"kind": "train", "step": step, "loss": 4.0 / step, "grad_norm": None if step == 2 else 0.5, "skipped": step == 3}
    for step in range(1, 7)
]
EVAL = {"kind": "eval", "step": 4, "val_nats": 1.25}
SAMPLE = {"kind": "sample", "step": 4, "text": "ROMEO:\nwho\u2019s there?"}


def track(name: str, folder: Path) -> None:
    """A session that was killed behind step 4, whose checkpoint is of step 3, and one that goes on from there."""
    pytest.importorskip(name)
    said: list[str] = []
    for step, rows in ((0, [*ROWS[:3], EVAL, SAMPLE, {**ROWS[3], "loss": 9.0}]), (3, [ROWS[3], EVAL, *ROWS[4:]])):
        config = {"model.layers": 3, "data.source": "a.txt"}
        subject = trackers.subject(folder, project="some", step=step, config=config)
        tracking = Tracking([name], subject, say=said.append)
        for row in rows:
            tracking.add(row)
        tracking.close()
        if name == "wandb":  # a resumed run is another process with a service of its own; in one service, a run whose id still
            import_module(name).teardown()  # ends elsewhere can lose all its records (wandb's issue 10833)
    assert said == []


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(trackers, "END_S", 500.0)  # a busy machine imports slowly
    path = tmp_path / "the-run"
    path.mkdir()
    return path


def test_tensorboard_shows_one_curve(folder):
    track("tensorboard", folder)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()

    def values(tag):
        return [(event.step, event.value) for event in found.Scalars(tag)]

    assert values("train/loss") == [(row["step"], pytest.approx(row["loss"])) for row in ROWS]
    assert [step for step, _ in values("train/grad_norm")] == [1, 3, 4, 5, 6]
    assert values("train/skipped") == [(step, float(step == 3)) for step in range(1, 7)]
    assert values("eval/val_nats") == [(4, 1.25)]
    assert found.SummaryMetadata("config").plugin_data.plugin_name == "text"
    text = found.Tensors("config")[-1].tensor_proto.string_val[0]
    assert '"model.layers": 3' in text.decode()


def records(file: Path) -> Iterator[bytes]:
    """Records of wandb's log: a header of 7 bytes, then blocks of 32 KiB of pieces (checksum, length, kind). Kinds 1 to 4 are a
    whole record, its first, a middle and its last piece."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb_joins_both_sessions(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", folder)
    from wandb.proto.wandb_internal_pb2 import Record

    sessions, history = [], []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in records(file):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                sessions.append((record.run.run_id, record.run.project, record.run.display_name))
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                history.append({key: value for key, value in items.items() if not key.startswith("_")})
    assert set(sessions) == {(json.loads((folder / "tracking.json").read_text())["id"], "some", "the-run")}
    assert config["model.layers"] == 3 and config["data.source"] == "a.txt"
    losses = [(row["step"], row["train/loss"]) for row in history if "train/loss" in row]
    assert losses == [(1, 4.0), (2, 2.0), (3, 4 / 3), (4, 9.0), (4, 1.0), (5, 0.8), (6, 4 / 6)]
    assert [row["sample/text"] for row in history if "sample/text" in row] == [SAMPLE["text"]]
    assert [row["eval/val_nats"] for row in history if "eval/val_nats" in row] == [1.25, 1.25]


def test_trackio_has_one_run(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    track("trackio", folder)
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("some")
    assert name == "the-run-" + json.loads((folder / "tracking.json").read_text())["id"]
    rows = SQLiteStorage.get_logs("some", name)
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert sorted(losses) == sorted([(1, 4.0), (2, 2.0), (3, 4 / 3), (4, 9.0), (4, 1.0), (5, 0.8), (6, 4 / 6)])
    assert [row["sample/text"] for row in rows if "sample/text" in row] == [SAMPLE["text"]]


def test_a_subject_has_an_id_of_its_own(tmp_path):
    ids = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        ids.add(trackers.subject(tmp_path / name, project="x", step=0, config={}).id)
    assert len(ids) == 2 and isinstance(trackers.subject(tmp_path / "a", project="x", step=0, config={}), Subject)
