"""Which kernels are compiled again by the golden tests."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.cuda import proven_kernels, sass
from tests.cuda.specs import SCALED

ROW = {"spills": 0}


def good(found) -> None:
    assert found == {"scaled": ROW}


def strict(found) -> None:
    raise AssertionError("it spills")


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list[int]:
    """For each call of the compiler, the card. One case is proven: SCALED for sm_90."""
    cards = []

    def rows(specs, arch):
        cards.append(arch)
        return {"scaled": ROW}

    monkeypatch.setattr(proven_kernels, "rows", rows)
    monkeypatch.setattr(proven_kernels, "PROVEN", tmp_path / "proven.json")
    monkeypatch.setenv("BARELLM_GOLDEN", "write")
    proven_kernels.prove("case", {SCALED: ""}, 90, good)
    monkeypatch.delenv("BARELLM_GOLDEN")
    cards.clear()
    return cards


def test_what_passed_is_not_compiled_again(compiled, monkeypatch):
    proven_kernels.prove("case", {SCALED: ""}, 90, good)
    assert compiled == []
    monkeypatch.setenv("BARELLM_GOLDEN", "anew")
    proven_kernels.prove("case", {SCALED: ""}, 90, good)
    assert compiled == [90]


def test_whatever_may_change_the_outcome_compiles_again(compiled, monkeypatch, tmp_path):
    other = replace(SCALED, constants=(("BLOCK", 128), ("FACTOR", 2)))
    for case, specs, arch, expected in (
        ("another", {SCALED: ""}, 90, None),
        ("case", {other: ""}, 90, None),
        ("case", {SCALED: "", other: ""}, 90, None),
        ("case", {SCALED: ""}, 80, None),
        ("case", {SCALED: ""}, 90, {"scaled": {"spills": 1}}),
    ):
        compiled.clear()
        proven_kernels.prove(case, specs, arch, good, expected=lambda expected=expected: expected)
        assert compiled == [arch], (case, arch, expected)
    with pytest.raises(AssertionError, match="it spills"):
        proven_kernels.prove("case", {SCALED: ""}, 90, strict)
    judge = tmp_path / "judge.py"
    judge.write_text("another rule")
    monkeypatch.setattr(proven_kernels, "JUDGES", [*proven_kernels.JUDGES, str(judge)])
    compiled.clear()
    proven_kernels.prove("case", {SCALED: ""}, 90, good)
    assert compiled == [90]


def test_what_fails_is_not_recorded(compiled, monkeypatch):
    monkeypatch.setenv("BARELLM_GOLDEN", "write")
    with pytest.raises(AssertionError, match="it spills"):
        proven_kernels.prove("strict", {SCALED: ""}, 90, strict)
    assert json.loads(proven_kernels.PROVEN.read_text()).keys() == {"case"}
    assert sass.__file__ in proven_kernels.JUDGES
