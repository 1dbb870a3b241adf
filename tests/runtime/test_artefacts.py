"""The cache's folder of compiled code: what is deleted and what stays. More of it in tests/cpu/test_jit.py."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from barellm.cpu import jit
from barellm.errors import UserError
from barellm.runtime import artefacts


def fill(folder: Path, ages: dict[str, float]) -> None:
    for name, age in ages.items():
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (time.time() - age, time.time() - age))


def test_a_torn_file_goes_where_there_is_room_and_a_whole_one_where_there_is_none(tmp_path):
    """Either reason is enough: a process that was killed while it wrote, or too many bytes."""
    fill(tmp_path, {"old.o": 9e6, "new.o": 10.0, ".killed.tmp": 2 * artefacts.PRUNE_EVERY_S, ".written.tmp": 5.0})
    artefacts.prune(tmp_path, limit=1000)
    assert {p.name for p in tmp_path.iterdir()} == {"old.o", "new.o", ".written.tmp", ".pruned"}
    (tmp_path / ".pruned").unlink()
    artefacts.prune(tmp_path, limit=280)
    assert {p.name for p in tmp_path.iterdir()} == {"new.o", ".written.tmp", ".pruned"}


def test_code_under_the_name_of_another_key_is_compiled_again(tmp_path):
    artefacts.keep(tmp_path / "objects" / "one.o", b"code of one")
    assert artefacts.load(tmp_path / "objects" / "one.o") == b"code of one"
    os.replace(tmp_path / "objects" / "one.o", tmp_path / "objects" / "two.o")
    assert artefacts.load(tmp_path / "objects" / "two.o") is None


@pytest.mark.parametrize("mode, refused", [(0o700, False), (0o755, False), (0o777, True), (0o1777, True), (0o702, True)])
def test_a_cache_that_everybody_can_write_is_refused_in_one_line(own_cache, mode, refused):
    folder = own_cache / "objects"
    folder.mkdir()
    folder.chmod(mode)
    if refused:
        with pytest.raises(UserError, match=rf"objects can be written by everybody \(mode {mode:o}\).*BARELLM_CACHE"):
            jit.cache_folder()
    else:
        assert jit.cache_folder() == folder


@pytest.mark.parametrize(
    "owner, group, mode, problem",
    [
        (1000, 1000, 0o775, None),  # a group of the user's own
        (1000, 100, 0o755, None),
        (1000, 100, 0o775, "can be written by group 100 (mode 775)"),
        (0, 0, 0o775, None),  # made by the system, for all to read
        (1001, 1000, 0o755, "belongs to user 1001, expected 1000 (this process) or 0"),
    ],
)
def test_who_may_write_a_folder_of_code(monkeypatch, owner, group, mode, problem):
    found = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(Path, "stat", lambda self: found)
    assert artefacts.untrusted(Path("objects")) == problem


def test_the_cache_is_not_made_writable_for_a_group(tmp_path):
    umask = os.umask(0)
    try:
        artefacts.keep(tmp_path / "objects" / "one.o", b"code")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "objects").stat().st_mode) == 0o755
