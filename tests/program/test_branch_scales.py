"""Gradient scales of residual branches in fp16 (`Precision.branch_scales`): the gradients of one loss scale, and those of models
for which there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from barellm import models
from barellm.assembly.programs import build
from barellm.cli.main import main
from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models import user_model
from barellm.models.gpt2 import Config as Gpt2
from barellm.models.llama3 import Config as Llama
from barellm.optim.adamw import adamw
from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS
from barellm.program.loss_scale import FIRST_SCALE, LEAST_SCALE, MOST_SCALE
from barellm.runtime.reference import ReferenceSession

UNEVEN = Path(__file__).parents[2] / "docs" / "techniques" / "uneven.py"
BRANCHES = replace(PRECISIONS["fp16"], branch_scales=True)
SIZES = {"layers": 2, "d_model": 36, "vocab_size": 101, "padded_vocab": 103, "max_seq": 17}
MODELS = {
    "gpt2": Gpt2(heads=3, dropout=0.1, **SIZES),
    "llama": Llama(heads=3, kv_heads=1, d_ff=40, **SIZES),
    "gemma": Llama(
        heads=2, kv_heads=2, d_ff=40, norm_position="both", norm_unit_offset=True, qk_norm="head", residual_multiplier=0.5, **SIZES
    ),
    "neox": Llama(heads=2, kv_heads=2, d_ff=40, parallel_residual=True, mlp="plain", norm="layer", **SIZES),
}


def gradients(
    model, precision, *, open_session=CpuSession, recompute=False, states=None, powers=(), whole=0, **more
) -> dict[str, np.ndarray]:
    """The gradients of a step of two micro-batches as the update leaves them, divided by the loss scale 2^(16 + `whole`).
    `powers`: of the branches' scales. `states` gets what the update makes of the scales."""
    _, programs = build(
        model, batch=3, seq=17, compute=precision, optimizer=lambda p: adamw(p, OptimConfig(lr=1e-3)), recompute=recompute
    )
    states = {} if states is None else states
    session = open_session({name: programs[name] for name in ("init", "forward_backward", "optimizer_step")}, **more)
    session.run("init", seed=3)
    scales = sorted(name for name in session.tensors if name.endswith("gradient_scale"))
    for name, power in [*zip(scales, powers, strict=False), ("loss_scale", whole)]:
        if name in session.tensors:
            session.write(name, np.array([power, 0], np.int32))
    r = np.random.default_rng(0)
    for micro in range(2):
        for name in ("tokens", "targets"):
            session.write(name, r.integers(0, model.vocab_size, (3, 17)).astype(np.int32))
        scalars = {"batch": 3, "seq": 17, "inv_targets": 1 / 102, "accumulate": micro, "step": 1, "seed": 5, "sample": 3 * micro}
        session.run("forward_backward", **scalars, pos=0)
    session.run("optimizer_step", step=1, lr=1e-3)
    found = {n: session.read(n).astype(np.float64) for n, t in session.tensors.items() if t.role == "gradient"}
    if precision != "fp32":
        found = {n: g / 2.0 ** (FIRST_SCALE + whole) for n, g in found.items()}
        states.update({n: session.read(n).tolist() for n in (*scales, "loss_scale", "skipped")})
    assert len(scales) == (4 if precision is BRANCHES else 0)
    getattr(session, "close", lambda: None)()
    return found


def error(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest error of a gradient, of its norm or a thousandth of that of all."""
    assert all(np.isfinite(g).all() for g in got.values())
    floor = 1e-3 * np.sqrt(sum((g**2).sum() for g in want.values()))
    return max(np.linalg.norm(got[n] - w) / (np.linalg.norm(w) + floor) for n, w in want.items())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_loss_scale(name, recompute):
    """What passes over into the stream's gradient is rounded to fp32 once more, in every branch, before it is added. Scales that
    differ are powers of two: where nothing underflows they change nothing else."""
    model = MODELS[name]
    whole = gradients(model, "fp16", recompute=recompute)
    same = gradients(model, BRANCHES, recompute=recompute)
    assert error(same, whole) < 1e-5 and same.keys() == whole.keys()
    other = gradients(model, BRANCHES, recompute=recompute, powers=(-2, 0, 1, -4))
    exact = gradients(model, "fp32", open_session=ReferenceSession)
    assert error(other, exact) < 1.5 * error(whole, exact) < 0.01


def test_threads_change_no_bit():
    one, two = (gradients(MODELS["gpt2"], BRANCHES, threads=threads) for threads in (1, 2))
    assert all((one[name] == two[name]).all() for name in one)


@pytest.fixture(autouse=True)
def no_model_is_left():
    """Whose first preset other tests of this process would take for that of their own file."""
    yield
    if models.ADDED.pop("uneven", None):
        del sys.modules["uneven"]


def test_an_overflow_stays_in_its_branch():
    """The scale of this branch alone falls, though its gradient goes on into all branches before it, and the step is skipped."""
    states: dict = {}
    found = gradients(MODELS["gemma"], BRANCHES, powers=(-2, 3, 1, -4), states=states)
    bad = {name.rpartition(".mlp")[0] for name, grad in found.items() if not np.isfinite(grad).all()}
    assert bad == {"h.0"} and states["skipped"] == [1]
    assert [states[f"h.{i}.{b}.gradient_scale"] for i in (0, 1) for b in ("attn", "mlp")] == [[-2, 1], [2, 0], [1, 1], [-4, 1]]
    assert states["loss_scale"] == [0, 1]


def test_an_overflow_of_the_head_stays_outside_of_all_branches():
    states: dict = {}
    gradients(MODELS["gpt2"], BRANCHES, whole=14, powers=(-2, 3, 1, -4), states=states)
    assert states["loss_scale"] == [13, 0] and states["skipped"] == [1]
    assert [states[f"h.{i}.{b}.gradient_scale"][0] for i in (0, 1) for b in ("attn", "mlp")] == [-2, 3, 1, -4]


def test_branches_whose_gradients_have_no_scale_in_common():
    """Of all 31 loss scales the best loses attention's gradients or those of the MLP; scales of the branches keep both."""
    user_model.add(UNEVEN)
    model = models.preset("uneven").model
    exact = gradients(model, "fp32", open_session=ReferenceSession)

    def relative(name: str, found: dict[str, np.ndarray]) -> float:
        difference = np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])
        return difference if np.isfinite(difference) else np.inf

    watched = [f"h.{i}.{name}.grad" for i in (0, 1) for name in ("qkv", "proj", "up", "down")]
    for power in range(LEAST_SCALE, MOST_SCALE + 1, 3):
        found = gradients(model, "fp16", whole=power - FIRST_SCALE)
        assert max(relative(name, found) for name in watched) > 0.9, power
    found = gradients(model, BRANCHES, powers=(14, -10, 14, -10))
    assert max(relative(name, found) for name in watched) < 0.01


@pytest.mark.parametrize("elsewhere", ["another branch", "the stream"])
def test_a_weight_of_two_scales_is_refused(elsewhere):
    p = Program(Store(), compute=BRANCHES)
    x, targets = p.input("x", (2, 3, 8), "fp32"), p.input("targets", (2, 3))
    weight, gain = p.parameter("shared", (8, 8), std=0.1), p.parameter("gain", (8,), value=1.0)
    with p.branch("a"):
        y = p.linear(p.rmsnorm(x, gain), weight)
    x = p.add(x, y)
    if elsewhere == "another branch":
        with p.branch("b"):
            y = p.linear(p.rmsnorm(x, p.parameter("other", (8,), value=1.0)), weight)
        x = p.add(x, y)
    else:
        x = p.linear(x, weight)
    loss = p.classifier(p.rmsnorm(x), p.parameter("head", (8, 8), std=0.1), targets, valid_vocab=8)
    with pytest.raises(UserError, match=r"^train.branch_scales is true, and shared is read in a residual branch and elsewhere$"):
        p.backward(loss)


@pytest.mark.extended
def test_a_killed_run_goes_on_with_its_scales(tmp_path):
    """kill -9 behind the first checkpoint, while scales fall: weights, optimizer and scales end with the bits of a run that was not
    killed."""
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i * i % 26) for i in range(9000)))
    given = ["train", "--model", str(UNEVEN), "--train.branch_scales", "true", "--steps", "1000", "--train.exponent_stats", "0"]
    given += ["--train.checkpoint_every", "100", "--eval-every", "0"]
    command = [sys.executable, "-m", "barellm", *given, "--out"]
    subprocess.run([*command, "whole"], cwd=tmp_path, check=True, capture_output=True)
    run = subprocess.Popen([*command, "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not list((tmp_path / "killed" / "checkpoints").glob("step-*")):
        assert run.poll() is None
        time.sleep(0.001)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    subprocess.run([*command, "killed", "--resume"], cwd=tmp_path, check=True, capture_output=True)
    ends = [tmp_path / name / "checkpoints" / "step-001000" for name in ("whole", "killed")]
    for file in ("weights.safetensors", "optimizer.safetensors"):
        first, second = ((end / file).read_bytes() for end in ends)
        assert first == second
    assert b"h.1.attn.gradient_scale" in first


@pytest.mark.parametrize(
    "options, message",
    [
        (["default"], "train.branch_scales is true, and the run has train.dtype bf16, expected fp16 and no adapter"),
        (
            ["speedrun-small", "--dtype", "fp16"],
            "train.branch_scales is true, and the model has no residual branches (Program.branch)",
        ),
        (
            ["llama-15m", "--dtype", "fp16", "--model.norm_position", "post"],
            "train.branch_scales is true, and the residual branch h.7.mlp begins with cast, expected a norm with a trained weight",
        ),
    ],
    ids=["bf16", "speedrun", "norm behind"],
)
def test_what_cannot_have_them_is_refused(options, message, capsys):
    options = [*options, "--dtype", "bf16"] if len(options) == 1 else options
    assert main(["plan", *options, "--train.branch_scales", "true"]) == 2
    assert message in capsys.readouterr().err
