"""What ranks do where MPI itself fails, and which files of it they take away. Runs of real processes are in `test_runs`."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from barellm.distributed import mpi


class Lost(RuntimeError):
    """What MPI raises where the process at the other end is gone."""


def test_where_mpi_misses_a_rank_the_others_have_time_to_say_which(monkeypatch):
    """The launcher's guard, or the watch, ends this process meanwhile. If neither does, the error comes out."""
    slept: list[float] = []
    monkeypatch.setattr(mpi.time, "sleep", slept.append)
    monkeypatch.setenv("BARELLM_RANK_LIMIT", "7")

    def testall(requests):
        if requests == ["lost"]:
            raise Lost
        return requests == ["done"]

    ranks = object.__new__(mpi.MpiRanks)
    ranks._mpi = SimpleNamespace(Request=SimpleNamespace(Testall=testall), Exception=Lost)
    assert ranks._done(["done"]) and not ranks._done(["going"]) and not slept
    with pytest.raises(Lost):
        ranks._done(["lost"])
    assert slept == [14.0]


def test_what_is_sent_beside_the_run_is_waited_for_without_its_watch(monkeypatch):
    """The answer comes at the third look; the watch, which would end a run that waits for long, is not asked."""
    slept: list[float] = []
    monkeypatch.setattr(mpi.time, "sleep", slept.append)
    answers = [None, None, SimpleNamespace(recv=lambda: "weights")]
    ranks = object.__new__(mpi.MpiRanks)
    ranks._world = SimpleNamespace(improbe=lambda rank, tag: answers.pop(0) if (rank, tag) == (1, mpi.BESIDE) else 0)
    assert ranks.receive(1, background=True) == "weights"
    assert not answers and slept == [mpi.BESIDE_NAP_S] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="finds files in /proc and /dev/shm")
@pytest.mark.parametrize("name, gone", [("sm_segment.x.{}", True), ("mpich_shm_{}", True), ("another_{}", False)])
def test_the_names_of_files_that_ranks_share_are_taken_away(monkeypatch, name, gone):
    monkeypatch.delenv("PMIX_SERVER_TMPDIR", raising=False)
    path = Path("/dev/shm") / name.format(os.getpid())
    path.write_bytes(bytes(4096))
    try:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096) as shared:
            mpi._forget_files()
            assert path.exists() != gone and shared[0] == 0
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name, gone", [("ompi.4711", True), ("ompi.x", False), ("work", False)])
def test_so_is_open_mpis_folder_and_no_other(monkeypatch, tmp_path, name, gone):
    (tmp_path / name / "1").mkdir(parents=True)
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path / name))
    mpi._forget_files()
    assert (tmp_path / name).exists() != gone and tmp_path.exists()
    monkeypatch.delenv("PMIX_SERVER_TMPDIR")
    mpi._forget_files()
