"""The CPU backend's whole GPT-2 against PyTorch from the same weights: loss, logits and every gradient; ten AdamW steps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.cpu.isa import available
from barellm.cpu.step import CpuSession
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw

torch = pytest.importorskip("torch")

from tests.oracle.test_gpt2 import SHAPES, spread, tokens_and_targets  # noqa: E402
from tests.oracle.torch_gpt2 import TorchGPT2, relative  # noqa: E402

pytestmark = pytest.mark.oracle
FP32_LIMIT = 1e-4  # relative, per tensor
BF16_FACTOR = 1.5  # times the error of PyTorch's autocast, both against float64 (or fp32 for the large model)
BF16_FLOOR = 2e-3  # half a unit of bf16: where PyTorch happens to be exact


@pytest.fixture
def opened(monkeypatch):
    """Opens CPU sessions and closes them after the test."""
    sessions = []

    def open_session(model: ModelConfig, batch: int, seq: int, *, compute: str, optim: OptimConfig | None = None, logits=False):
        optimizer = partial(adamw, config=optim or OptimConfig())
        _, programs = build(model, batch=batch, seq=seq, compute=compute, optimizer=optimizer)
        if logits:  # a program whose logits are an output cannot fuse its classifier
            micro = programs["forward_backward"]
            micro.output("logits", next(op.logits for op in micro.ops if op.name == "cross_entropy"))
        sessions.append(CpuSession(programs))
        return sessions[-1]

    yield open_session
    for session in sessions:
        session.close()


def outcome(session, model, tokens, targets) -> dict[str, np.ndarray]:
    batch, seq = tokens.shape
    session.write("tokens", tokens)
    session.write("targets", targets)
    inv_targets = 1 / max(1, (targets >= 0).sum())
    session.run("forward_backward", batch=batch, seq=seq, accumulate=0, inv_targets=inv_targets, step=1)
    found = {"loss": session.read("loss")}
    if "logits" in session.programs["forward_backward"].named:
        found["logits"] = session.read("logits").astype(np.float32)[..., : model.vocab_size]
    gradients = [name for name, t in session.tensors.items() if t.role == "gradient"]
    return found | {name: session.read(name) for name in gradients}


def expected(model, weights, tokens, targets, **options) -> dict[str, np.ndarray]:
    oracle = TorchGPT2(model, weights, **options)
    loss, gradients = oracle.gradients(tokens, targets, 1 / max(1, (targets >= 0).sum()))
    with torch.no_grad():
        logits = oracle.logits(tokens).numpy()[..., : model.vocab_size]
    return {"loss": np.array([loss]), "logits": logits} | {f"{name}.grad": g for name, g in gradients.items()}


def check(found, truth, limits) -> None:
    """Every tensor's relative error beside its limit."""
    errors = {name: relative(x, truth[name]) for name, x in found.items()}
    for name, error in errors.items():
        print(f"{name:34} error {error:.1e} limit {limits[name]:.1e}")
    over = {name: f"{error:.2e} > {limits[name]:.2e}" for name, error in errors.items() if not error <= limits[name]}
    assert not over, over


@pytest.mark.parametrize("logits", [False, True], ids=["fused", "with logits"])
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("name", SHAPES)
def test_small_fp32_equals_pytorch(opened, monkeypatch, name, isa, logits):
    monkeypatch.setenv("BARELLM_ISA", isa)
    model, batch, seq = SHAPES[name]
    session = opened(model, batch, seq, compute="fp32", logits=logits)
    weights = spread(session)
    tokens, targets = tokens_and_targets(model, batch, seq)
    truth = expected(model, weights, tokens, targets, dtype=torch.float64)
    check(outcome(session, model, tokens, targets), truth, dict.fromkeys(truth, FP32_LIMIT))


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("name", SHAPES)
def test_small_bf16_is_no_further_from_the_truth_than_autocast(opened, monkeypatch, name, isa):
    monkeypatch.setenv("BARELLM_ISA", isa)
    model, batch, seq = SHAPES[name]
    session = opened(model, batch, seq, compute="bf16")
    weights = spread(session)
    tokens, targets = tokens_and_targets(model, batch, seq)
    truth = expected(model, weights, tokens, targets, dtype=torch.float64)
    autocast = expected(model, weights, tokens, targets, autocast=True)
    # Few numbers a tensor make single errors a matter of luck: the factor holds for the worst tensor here, and for each at 124M.
    worst = max(relative(autocast[name], truth[name]) for name in truth)
    check(outcome(session, model, tokens, targets), truth, dict.fromkeys(truth, BF16_FACTOR * worst + BF16_FLOOR))


@pytest.fixture(scope="module")
def gpt2_124m():
    """The model, weights from our initialisation, one micro-batch and PyTorch's fp32 results."""
    model = preset("gpt2-124m").model
    _, programs = build(model)
    session = CpuSession({"init": programs["init"]})
    session.run("init", seed=1)
    weights = {name: session.read(name) for name, t in session.tensors.items() if t.role == "parameter"}
    session.close()
    assert len(weights) == 148
    tokens, targets = tokens_and_targets(model, 2, 64)
    return model, weights, tokens, targets, expected(model, weights, tokens, targets)


def load(session, weights) -> None:
    for name, w in weights.items():
        session.write(name, w)


@pytest.mark.slow
def test_124m_fp32_equals_pytorch(opened, gpt2_124m):
    model, weights, tokens, targets, truth = gpt2_124m
    session = opened(model, 2, 64, compute="fp32")
    load(session, weights)
    check(outcome(session, model, tokens, targets), truth, dict.fromkeys(truth, FP32_LIMIT))


@pytest.mark.slow
def test_124m_bf16_is_no_further_from_the_truth_than_autocast(opened, gpt2_124m):
    model, weights, tokens, targets, truth = gpt2_124m
    session = opened(model, 2, 64, compute="bf16")
    load(session, weights)
    autocast = expected(model, weights, tokens, targets, autocast=True)
    limits = {name: BF16_FACTOR * relative(autocast[name], truth[name]) for name in truth}
    limits["loss"] = max(limits["loss"], 1e-4)
    check(outcome(session, model, tokens, targets), truth, limits)


TEN_STEPS = OptimConfig(lr=1e-4, weight_decay=0.1, clip=1.0)


@pytest.fixture(scope="module")
def ten_losses(gpt2_124m) -> list[float]:
    """PyTorch's in fp32: llm.c's own test, one batch of 4 x 64, ten steps at a rate of 1e-4. (At 3e-4 on 64 tokens rounding grows
    to 0.02.)"""
    model, weights, *_ = gpt2_124m
    oracle = TorchGPT2(model, weights)
    optimizer = oracle.adamw(TEN_STEPS)
    tokens, targets = tokens_and_targets(model, 4, 64)
    inv_targets = 1 / (targets >= 0).sum()
    return [oracle.step(optimizer, tokens, targets, inv_targets, lr=TEN_STEPS.lr, clip=TEN_STEPS.clip) for _ in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-4), ("bf16", 0.02)])
def test_ten_steps_of_124m_follow_pytorch(opened, gpt2_124m, ten_losses, compute, limit):
    model, weights, *_ = gpt2_124m
    session = opened(model, 4, 64, compute=compute, optim=TEN_STEPS)
    load(session, weights)
    tokens, targets = tokens_and_targets(model, 4, 64)
    inv_targets = 1 / (targets >= 0).sum()
    for step, want in enumerate(ten_losses, 1):
        loss = outcome_loss(session, tokens, targets, inv_targets, step)
        print(f"step {step}: {loss:.5f} PyTorch {want:.5f}")
        assert abs(loss - want) <= limit * (want if compute == "fp32" else 1)


def outcome_loss(session, tokens, targets, inv_targets, step) -> float:
    session.write("tokens", tokens)
    session.write("targets", targets)
    session.run("forward_backward", batch=4, seq=64, accumulate=0, inv_targets=inv_targets, step=step)
    loss = float(session.read("loss")[0])
    session.run("optimizer_step", step=step, lr=TEN_STEPS.lr)
    return loss
