from pathlib import Path

import pytest
from hypothesis import settings

from barellm.data.bpe import BytePairs, trained_bpe

settings.register_profile("patient", deadline=None)  # on a busy machine an example takes longer than usual
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    return own_cache


@pytest.fixture(scope="session")
def small_bpe() -> BytePairs:
    """Trained on this test's own source and some words that are not ASCII."""
    text = Path(__file__).read_text() + "  naïve façade — 你好，世界 🙂🙃 \r\n\r\n\t tabs  and   spaces \n\n\n" * 3
    return trained_bpe(lambda: [text], vocab=400)
