"""Runs of the real command on a fake session: everything but the kernels, in milliseconds."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barellm.assembly.build import CompiledModel
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.program.planner import Plan
from barellm.runtime.ranks import ALONE
from barellm.training import curve, find_lr, inputs, run
from tests.training.fake import FakeSession

TEXT = "".join(f"line {i}: {'abcdefghij'[i % 10] * (i % 7)} {i * i}\n" for i in range(400))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def programs(session: FakeSession) -> dict[str, Any]:
    """What a machine knows of the fake's programs: the tensors that they change."""
    roles = {"forward_backward": ("gradient",), "grad_norm": (), "optimizer_step": ("parameter", "state")}
    return {
        name: SimpleNamespace(
            flops=0, ops=[SimpleNamespace(outputs={"out": t}) for t in session.tensors.values() if t.role in changed]
        )
        for name, changed in roles.items()
    }


@pytest.fixture
def fake(monkeypatch, tmp_path) -> FakeSession:
    """The session that `barellm train` gets. Samples are short, and drawing the image is left out."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    session = FakeSession()

    @contextmanager
    def open_model(config, *, device, training=True, positions=None, scoring=None, ranks=ALONE, documents=False):
        config = replace(config, train=replace(config.train, dtype="fp32"))
        yield CompiledModel(config, "reference", session, programs(session), Plan({}, {}, 0, 0, 0, {}))

    for module in (run, find_lr):
        monkeypatch.setattr(module, "open_model", open_model)
    monkeypatch.setattr(inputs, "FINAL_SAMPLE_TOKENS", 8)
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
            "--train.gradient_accumulation_steps",
            "2",
            "--train.checkpoint_every",
            "4",
        ]
        looks = ["--train.eval_every", "3", "--train.eval_tokens", "64", "--train.sample_every", "5", "--optim.warmup", "2"]
        return ["train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / name), *sizes, *looks, *more]

    return arguments


def whole_and_resumed(fake: FakeSession, command: Any, folder: Path, *options: str, entry: str, at: int) -> tuple[Path, Path]:
    """The checkpoints of a run and of one that was interrupted at the `at`-th time of a program, and resumed: they are equal."""
    assert main(command("whole", *options)) == 0
    fake.runs.clear()

    def stop(program: str) -> None:
        if program == entry and [name for name, _ in fake.runs].count(entry) == at:
            os.kill(os.getpid(), signal.SIGINT)

    fake.before_run = stop
    assert main(command("run", *options)) == 130
    fake.before_run = lambda program: None
    assert main(command("run", *options, "--resume")) == 0
    whole, resumed = (checkpoint.find(folder / name)[0] for name in ("whole", "run"))
    for name in (checkpoint.WEIGHTS, "optimizer.safetensors"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()
    return whole, resumed
