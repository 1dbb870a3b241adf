"""The ladder as a book: short files in their order, each says what is new; nothing in barellm knows of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anatomy import cpu, gpu
from anatomy.gpu_rung import GPU_RUNGS
from anatomy.rung import RUNGS

ROOT = Path(__file__).parents[2]
assert cpu and gpu


@pytest.mark.parametrize("rungs", [RUNGS, GPU_RUNGS], ids=["cpu", "gpu"])
def test_a_rung_is_a_short_file_that_says_what_is_new(rungs):
    folder = (ROOT / rungs[0].file).parent
    assert [ROOT / r.file for r in rungs] == sorted(folder.glob("r*.py"))
    for number, r in enumerate(rungs, 1):
        text = (ROOT / r.file).read_text()
        assert r.number == number and text.startswith(f'"""Rung {number}, ') and f"_r{number:02}_" in f"_{Path(r.file).name}_"
        assert len(text.splitlines()) <= 80 and 20 <= len(r.changes) <= 160, r.file


def test_barellm_does_not_import_the_anatomy():
    for path in (ROOT / "barellm").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) anatomy\b", path.read_text(), re.M), path
