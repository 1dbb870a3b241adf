"""A tiny run of the real loop on the reference backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "device": "reference",
    "steps": 4,
    "batch": 2,
    "seq": 8,
    "quiet": True,
    "model": {"layers": 1, "heads": 2, "d_model": 8, "max_seq": 16},
    "optim": {"warmup": 2, "name": "adamw"},
    "train": {"eval_every": 0, "eval_tokens": 64, "save_total_limit": 9},
}


@pytest.fixture
def text(tmp_path, own_cache) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(200)))
    return path


@pytest.fixture
def tiny(text, monkeypatch) -> dict[str, Any]:
    """Arguments of `barellm.train`; drawing the image is left out."""
    from barellm.training import curve

    monkeypatch.setattr(curve, "image", lambda path, *args, **more: path.write_bytes(b""))
    return {**TINY, "data": {"source": str(text), "tokenizer": "bytes"}}
