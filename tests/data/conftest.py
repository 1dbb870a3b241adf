import os
from pathlib import Path

import pytest
from hypothesis import settings

from barellm.data.bpe import BytePairs, trained_bpe

settings.register_profile("patient", deadline=None)  # on a busy machine an example takes longer than usual
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Every test has a cache of its own and no vocabulary from the user's environment."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BARELLM_CACHE", str(folder))
    monkeypatch.delenv("BARELLM_GPT2_VOCAB", raising=False)
    return folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """Tiny Shakespeare and GPT-2's vocabulary files, which are not part of the project."""
    folder = Path(os.environ.get("BARELLM_SHARED") or Path(__file__).parents[2] / ".." / "shared" / "data").resolve()
    if not (folder / "tinyshakespeare.txt").is_file():
        pytest.skip(f"no shared data in {folder}: set BARELLM_SHARED")
    return folder


@pytest.fixture(scope="session")
def small_bpe() -> BytePairs:
    """Trained on this test's own source and some words that are not ASCII."""
    text = Path(__file__).read_text() + "  naïve façade — 你好，世界 🙂🙃 \r\n\r\n\t tabs  and   spaces \n\n\n" * 3
    return trained_bpe(lambda: [text], vocab=400)
