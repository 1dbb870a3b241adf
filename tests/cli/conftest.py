"""A cache of its own for every test, a small text, and a tiny model on the reference backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from barellm.cli.main import main

TINY = (
    *("--model.layers", "1", "--model.heads", "2", "--model.d_model", "8", "--model.max_seq", "16", "--seq", "8"),
    *("--batch", "2", "--steps", "4", "--train.eval_every", "2", "--train.eval_tokens", "64", "--device", "reference"),
)


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    return path


@pytest.fixture
def tiny(text, tmp_path):
    """Arguments that train a tiny model into `out`; more arguments go before, so that a test's own win."""

    def arguments(*more: str, out: Path = tmp_path / "run") -> list[str]:
        return ["train", "shakespeare-char", "--data", str(text), "--out", str(out), *TINY, *more]

    return arguments


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A finished run of the tiny model."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARELLM_CACHE", str(folder / "cache"))
        path = folder / "text.txt"
        path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
        assert main(["train", "shakespeare-char", "--data", str(path), "--out", str(folder / "run"), *TINY]) == 0
    return folder / "run"
