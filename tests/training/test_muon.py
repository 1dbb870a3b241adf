"""Runs with Muon on the CPU backend: like the references, equal bits for any thread count, resumed to the bit."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cli.main import main
from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.models import HIDDEN
from barellm.models.training_schedule import momentum
from barellm.optim.recipes import optimize
from barellm.program.dtypes import Precision
from barellm.runtime.reference import ReferenceSession
from tests.cpu.test_models import MODEL, batch_of

OPTIM = OptimConfig(name="muon", lr=3e-3, muon_lr=0.02, clip=0.7, normuon=0.9, cautious=True)
SHAPE = (3, 17)
TRUNCATED = Precision("bf16", "bf16_u16")
STEPS = 3


def opened(kind, compute: str | Precision, optim: OptimConfig = OPTIM, **options):
    optimizer = partial(optimize, config=optim, hidden=HIDDEN)
    _, programs = build(MODEL, batch=SHAPE[0], seq=SHAPE[1], compute=compute, optimizer=optimizer)
    return kind(programs, **options)


def train(session, optim: OptimConfig = OPTIM) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens, targets = batch_of(MODEL, *SHAPE, seed=step)
        session.write("tokens", tokens)
        session.write("targets", targets)
        scalars = {"batch": SHAPE[0], "seq": SHAPE[1], "inv_targets": 1 / max(1, (targets >= 0).sum())}
        session.run("forward_backward", **scalars, step=step + 1, seed=5, accumulate=0, pos=0, sample=step)
        losses.append(float(session.read("loss")[0]))
        rates = {"lr": optim.lr, "muon_lr": optim.muon_lr}
        session.run("optimizer_step", step=step + 1, **rates, momentum=momentum(step, total=None, optim=optim))
    return losses


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-3), ("bf16", 0.15), (TRUNCATED, 0.15)], ids=str)
@pytest.mark.extended
def test_it_trains_like_the_references(compute, limit):
    session, oracle = opened(CpuSession, compute, threads=2), opened(ReferenceSession, "fp32")
    session.run("init", seed=3)
    before = {}
    for name, t in oracle.tensors.items():
        if t.role == "parameter":
            before[name] = session.read(name)
            oracle.write(name, before[name])
        elif t.role == "state":
            oracle.write(name, np.zeros(t.shape))
            session.write(name, np.zeros(t.shape))
    np.testing.assert_allclose(train(session), train(oracle), rtol=limit / 10)
    for name, weights in before.items():
        got, want = (s.read(name) - weights for s in (session, oracle))
        if compute != "fp32" and not (name.startswith("h.") and len(weights.shape) == 2):
            continue  # AdamW's: where a gradient is nothing but rounding, as that of the keys' biases, so is its sign
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want), name
    session.close()


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_bits_do_not_depend_on_threads(compute):
    digests = set()
    for threads in (1, 2, 5):
        session = opened(CpuSession, compute, threads=threads)
        session.run("init", seed=3)
        train(session)
        digests.add(session.digest())
        session.close()
    assert len(digests) == 1


def test_which_parameter_gets_which():
    _, programs = build(MODEL, batch=1, seq=3, optimizer=partial(optimize, config=OPTIM, hidden=HIDDEN))
    ops = programs["optimizer_step"].ops
    muon = {op.param.name for op in ops if op.name == "muon_update"}
    adamw = {op.param.name for op in ops if op.name == "adamw"}
    parameters = {t.name: t for t in programs["optimizer_step"].store.of_role("parameter")}
    assert muon == {name for name, t in parameters.items() if name.startswith("h.") and len(t.shape) == 2}
    assert len(muon) == 4 * MODEL.layers and adamw == set(parameters) - muon
    assert programs["optimizer_step"].flops == 0


def test_the_momentum_rises_to_its_value():
    optim = OptimConfig(momentum=0.9, momentum_start=0.5, momentum_warmup=4)
    assert [momentum(i, total=None, optim=optim) for i in range(6)] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 0.9])
    assert momentum(0, total=None, optim=OptimConfig(momentum=0.8)) == 0.8
    optim = OptimConfig(momentum_start=0.5, momentum=0.9, momentum_cooldown=4)
    assert [momentum(i, total=9, optim=optim) for i in range(4, 9)] == pytest.approx([0.9, 0.9, 0.8, 0.7, 0.6])


def test_the_loop_gives_the_momentum_of_each_step(fake, command):
    muon = ("--optim.name", "muon", "--optim.momentum_warmup", "10", "--optim.momentum_start", "0.45")
    assert main(command("whole", *muon)) == 0
    given = [scalars["momentum"] for entry, scalars in fake.runs if entry == "optimizer_step"]
    assert given == pytest.approx([0.45 + 0.05 * min(i, 10) for i in range(12)])


@pytest.mark.extended
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path, text, command, monkeypatch, capsys):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    small = ["--model.layers", "1", "--model.d_model", "32", "--train.sample_every", "0", "--optim.name", "muon"]
    small += ["--optim.normuon", "0.9", "--optim.momentum_warmup", "10"]
    assert main(command("whole", *small)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    last = Path("checkpoints/step-000012")
    shutil.rmtree(tmp_path / "parts" / last)
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume"]) == 0
    assert "resumed from" in capsys.readouterr().out
    for name in ("weights.safetensors", "optimizer.safetensors"):
        whole, parts = (tmp_path / run / last / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes(), name


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"name": "lion"}, "optim.name is 'lion', expected adamw, muon or speedrun"),
        ({"orthogonalization": "svd"}, "optim.orthogonalization is 'svd', expected polar-express or jordan"),
        ({"step_scale": "none"}, "optim.step_scale is 'none', expected jordan or moonshot"),
        ({"ns_steps": 6}, "optim.ns_steps is 6, expected at most 5"),
        ({"ns_steps": 0}, "optim.ns_steps is 0, expected at least 1"),
        ({"momentum": 1.0}, "optim.momentum is 1.0, expected 0 <= momentum < 1"),
        ({"normuon": -0.1}, "optim.normuon is -0.1, expected 0 <= normuon < 1"),
        ({"muon_lr": -1.0}, "optim.muon_lr is -1.0, expected at least 0"),
        ({"momentum_warmup": -1}, "optim.momentum_warmup is -1, expected at least 0"),
        ({"name": "muon", "lr": 0.0}, "optim.min_lr 6e-05 is above optim.lr 0.0: lower it too"),
    ],
)
def test_values_that_no_run_can_have_are_refused(wrong, message):
    from barellm.errors import UserError

    with pytest.raises(UserError) as error:
        OptimConfig(**wrong)
    assert str(error.value) == message
