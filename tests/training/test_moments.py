"""Runs with 16-bit moments: checkpoints that resume to the bit, and a change of format on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.config import MOMENTS
from barellm.cpu.step import CpuSession
from barellm.program.moments import FORMATS, decode, encode
from tests.cpu.test_models import MODEL, train
from tests.cpu.test_moments import opened


def saved(session, folder, step: int):
    return checkpoint.save(folder, session, step=step, meta={"config": {}}, tokenizer={}, keep=9)


@pytest.mark.parametrize("moments", MOMENTS[1:])
def test_a_checkpoint_gives_back_every_code(tmp_path, moments):
    one, other = opened(CpuSession, moments), opened(CpuSession, moments)
    one.run("init", seed=3)
    train(one, MODEL, (3, 17), steps=2)
    path = saved(one, tmp_path / "checkpoints", 2)
    checkpoint.load(path, other)
    assert other.digest() == one.digest()
    assert train(one, MODEL, (3, 17), steps=2) == train(other, MODEL, (3, 17), steps=2)
    assert other.digest() == one.digest()
    for session in (one, other):
        session.close()


def test_moments_are_converted_between_formats(tmp_path):
    """The files hold fp32: from 16 bits exactly, to 16 bits rounded to nearest."""
    wide, packed, again = (opened(CpuSession, m) for m in ("fp32", "16bit-stochastic", "fp32"))
    wide.run("init", seed=3)
    train(wide, MODEL, (3, 17), steps=2)
    checkpoint.load(saved(wide, tmp_path / "wide", 2), packed)
    checkpoint.load(saved(packed, tmp_path / "packed", 2), again)
    for name, t in packed.tensors.items():
        if t.role == "state":
            values = wide.read(name)
            want = decode(encode(values, t.dtype), t.dtype) if t.dtype in FORMATS else values
            assert np.array_equal(packed.read(name), want), name
            assert np.array_equal(again.read(name), want), name
    for session in (wide, packed, again):
        session.close()


@pytest.mark.parametrize("moments", MOMENTS[1:])
@pytest.mark.extended
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path, text, command, monkeypatch, capsys, moments):
    """The real command on the CPU backend; and resumed with another format it goes on."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    small = ["--model.layers", "1", "--model.d_model", "32", "--optim.moments", moments, "--train.sample_every", "0"]
    assert main(command("whole", *small)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    last = Path("checkpoints/step-000012")
    shutil.rmtree(tmp_path / "parts" / last)
    again = ["train", "--out", str(tmp_path / "parts"), "--resume"]
    assert main(again) == 0
    assert "resumed from" in capsys.readouterr().out
    for name in ("weights.safetensors", "optimizer.safetensors"):
        whole, parts = (tmp_path / run / last / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes(), name
    assert main([*again, "--steps", "13", "--optim.moments", "fp32"]) == 0
    newest = checkpoint.steps(tmp_path / "parts/checkpoints")[0]
    assert newest.name == "step-000013" and checkpoint.read_meta(newest)["config"]["optim"]["moments"] == "fp32"
