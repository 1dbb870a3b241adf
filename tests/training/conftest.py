"""Runs of the real command on a fake session: everything but the kernels, in milliseconds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from barellm.assembly.machine import Machine
from barellm.program.planner import Plan
from barellm.training import curve, run
from tests.training.fake import FakeSession

TEXT = "".join(f"line {i}: {'abcdefghij'[i % 10] * (i % 7)} {i * i}\n" for i in range(400))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def fake(monkeypatch, tmp_path) -> FakeSession:
    """The session that `barellm train` gets. Samples are short, and drawing the image is left out."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    session = FakeSession()

    @contextmanager
    def open_machine(config, *, device, training=True):
        config = replace(config, train=replace(config.train, dtype="fp32"))
        yield Machine(config, "reference", session, {}, Plan({}, {}, 0, 0, 0, {}))

    monkeypatch.setattr(run, "open_machine", open_machine)
    monkeypatch.setattr(run, "FINAL_SAMPLE_TOKENS", 8)
    monkeypatch.setattr(run, "SAMPLE_TOKENS", 8)
    monkeypatch.setattr(curve, "image", lambda path, *args, **more: path.write_bytes(b""))
    return session


@pytest.fixture
def command(text, tmp_path):
    """Arguments of a small run into tmp_path/NAME."""

    def arguments(name: str, *more: str) -> list[str]:
        sizes = [
            "--steps",
            "12",
            "--batch",
            "2",
            "--seq",
            "8",
            "--train.accumulate",
            "2",
            "--train.checkpoint_every",
            "4",
        ]
        looks = [
            "--train.eval_every",
            "3",
            "--train.eval_tokens",
            "64",
            "--train.sample_every",
            "5",
            "--optim.warmup",
            "2",
        ]
        return ["train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / name), *sizes, *looks, *more]

    return arguments
