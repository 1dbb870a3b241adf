from __future__ import annotations

import os
from pathlib import Path

import pytest

from barellm.cli.main import main


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BARELLM_CACHE", str(folder))
    monkeypatch.delenv("BARELLM_GPT2_VOCAB", raising=False)
    return folder


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; returns its one line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("barellm: error: ") and error.count("\n") == 1, error
        return error.removeprefix("barellm: error: ").strip()

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """GPT-2's vocabulary files, which are not part of the project."""
    folder = Path(os.environ.get("BARELLM_SHARED") or Path(__file__).parents[2] / ".." / "shared" / "data").resolve()
    if not (folder / "gpt2_vocab.bpe").is_file():
        pytest.skip(f"no shared data in {folder}: set BARELLM_SHARED")
    return folder
