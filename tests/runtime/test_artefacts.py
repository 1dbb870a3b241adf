"""The cache's folder of compiled code: what is deleted and what stays. More of it in tests/cpu/test_jit.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
