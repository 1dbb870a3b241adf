"""Checkpoints that ranks write together while the training goes on."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barellm.assembly.build import open_model
from barellm.checkpoint import checkpoint, storage, tensorfile
from barellm.checkpoint.snapshot import Snapshot
from barellm.training.saving import Point, SharedSaving
from tests.distributed.test_pairs import BEFORE, Rank, config_of
from tests.distributed.threads import ThreadRanks, each_rank

POINT = Point(BEFORE, {"config": {}}, 9, False)


def contents(folder: Path) -> list[bytes]:
    path = checkpoint.step_folder(folder, BEFORE)
    return [(path / name).read_bytes() for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)]


class Disk:
    """A disk whose writes for a save on the way wait for `goes`; `error` is what making a folder gives."""

    def __init__(self, *, error: int = 0) -> None:
        self.goes, self.error = threading.Event(), error

    def __getattr__(self, name: str):
        return getattr(os, name)

    def write(self, file, data):
        if threading.current_thread().name == "checkpoint":
            assert self.goes.wait(60)
        return os.write(file, data)

    def mkdir(self, path):
        if self.error and threading.current_thread().name == "checkpoint":
            raise OSError(self.error, os.strerror(self.error), str(path))
        os.mkdir(path)


def saved(folder: Path, ranks: ThreadRanks, disk: Disk, *, optim=()) -> tuple[bool, int, list[str]]:
    """Saves at step BEFORE, all at once into "still", and into "moving" while two more steps are done. Gives whether that save was
    still under way when the steps were done, the bytes that were copied for it, and what was said."""
    config, lines = config_of(**dict(optim)), list[str]()
    with open_model(config, device="cpu", ranks=ranks) as compiled:
        rank = Rank(config, compiled, ranks)
        compiled.initialize(7)
        for step in range(BEFORE):
            rank.step(step)
        rank.save(folder / "still")
        how: dict[str, Any] = {"written": compiled.written, "shared": True, "threads": 1, "tokenizer": {}, "stop": None}
        how["console"] = SimpleNamespace(line=lines.append)
        saving = SharedSaving(folder / "moving", rank.shares, ranks=ranks, **how)
        saving.begin(POINT)
        writer = saving.writer
        for step in (BEFORE, BEFORE + 1):
            rank.step(step, saving.before)
        under_way = writer is not None and writer.is_alive()
        disk.goes.set()
        saving.close()
        assert saving.writer is None
        return under_way, writer.snapshot.copied if writer else 0, lines


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "1")
    monkeypatch.setattr(tensorfile, "PIECE", 1 << 15)


@pytest.mark.parametrize("optim", [{}, {"powersgd": 2}, {"name": "muon"}], ids=["adamw", "powersgd", "muon"])
@pytest.mark.extended
def test_a_checkpoint_holds_its_own_step_while_all_ranks_go_on(tmp_path, monkeypatch, optim):
    disk = Disk()
    monkeypatch.setattr(storage, "system", disk)
    found = each_rank(3, lambda ranks: saved(tmp_path, ranks, disk, optim=optim))
    assert contents(tmp_path / "moving") == contents(tmp_path / "still")
    assert checkpoint.problem(checkpoint.step_folder(tmp_path / "moving", BEFORE)) is None
    assert [under_way for under_way, _, _ in found] == [True] * 3
    sizes = [copied for _, copied, _ in found]
    whole = sum(map(len, contents(tmp_path / "still")))
    assert min(sizes) > 0 and sum(sizes) < 1.05 * whole, "of each tensor a rank copies what it gives"
    assert found[0][2][0].startswith(f"saved {tmp_path}/moving/step-000002 in ")


@pytest.mark.parametrize("poor", [0, 2])
@pytest.mark.extended
def test_where_one_rank_has_no_memory_for_copies_all_wait(tmp_path, monkeypatch, poor):
    here, disk = threading.local(), Disk()
    monkeypatch.setattr(Snapshot, "fits", lambda snapshot: here.rank != poor)

    def work(ranks):
        here.rank = ranks.rank
        return saved(tmp_path, ranks, disk)

    found = each_rank(3, work)
    assert [copied for _, copied, _ in found] == [0] * 3
    assert contents(tmp_path / "moving") == contents(tmp_path / "still")


@pytest.mark.extended
def test_a_save_that_fails_is_one_line_and_all_ranks_go_on(tmp_path, monkeypatch):
    disk = Disk(error=errno.EIO)
    monkeypatch.setattr(storage, "system", disk)
    found = each_rank(2, lambda ranks: saved(tmp_path, ranks, disk))
    assert found[0][2] == [f"warning: no checkpoint of step 2: Input/output error: {tmp_path / 'moving'}"]
    assert not checkpoint.steps(tmp_path / "moving")
