"""The whole GPT-2 against PyTorch from the same weights: logits, loss and every gradient; AdamW steps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import ModelConfig as AnyModel
from barellm.config import OptimConfig
from barellm.models import preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession

torch = pytest.importorskip("torch")

from tests.oracle.torch_gpt2 import TorchGPT2, relative  # noqa: E402

pytestmark = pytest.mark.oracle
LIMIT = 1e-4  # relative, per tensor, fp32

SHAPES = {
    "biased": (ModelConfig(layers=2, heads=2, d_model=16, vocab_size=61, max_seq=16), 2, 11),
    "no bias": (ModelConfig(layers=3, heads=3, d_model=24, vocab_size=64, max_seq=8, bias=False), 1, 8),
    "one of each": (ModelConfig(layers=1, heads=1, d_model=3, vocab_size=5, padded_vocab=7, max_seq=2), 1, 1),
    "odd": (ModelConfig(layers=2, heads=5, d_model=35, vocab_size=97, padded_vocab=97, max_seq=31), 3, 29),
}


def session_of(model: ModelConfig, batch: int, seq: int, *, optim=None, compute="fp32", **options):
    optimizer = partial(adamw, config=optim or OptimConfig())
    _, programs = build(model, batch=batch, seq=seq, compute=compute, optimizer=optimizer)
    # The last logits of the training program, readable beside the loss.
    micro = programs["forward_backward"]
    micro.output("logits", next(op.logits for op in micro.ops if op.name == "cross_entropy"))
    return ReferenceSession(programs, **options)


def tokens_and_targets(model: AnyModel, batch: int, seq: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.vocab_size, (batch, seq), dtype=np.int32)
    targets = rng.integers(0, model.vocab_size, (batch, seq), dtype=np.int32)
    if seq > 2:
        targets[0, 1] = -1
    return tokens, targets


def spread(session, seed: int = 1) -> dict[str, np.ndarray]:
    """Replace the initial weights by larger ones with biases and norms away from 0 and 1: every gradient is exercised."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, t in session.tensors.items():
        if t.role == "parameter":
            shape = tuple(int(n) for n in t.shape)
            w = rng.normal(size=shape) * (0.1 if len(shape) == 2 else 0.3) + (1 if "ln_" in name and "weight" in name else 0)
            w[t.valid_rows :] = 0
            weights[name] = w.astype(np.float32)
            session.write(name, weights[name])
    return weights


def check_gradients(session, model: ModelConfig, weights, batch: int, seq: int) -> None:
    tokens, targets = tokens_and_targets(model, batch, seq)
    inv_targets = 1 / max(1, (targets >= 0).sum())
    session.write("tokens", tokens)
    session.write("targets", targets)
    session.run("forward_backward", batch=batch, seq=seq, inv_targets=inv_targets, step=1)
    oracle = TorchGPT2(model, weights)
    loss, gradients = oracle.gradients(tokens, targets, inv_targets)
    V = model.vocab_size
    errors = {"loss": abs(session.read("loss")[0] - loss) / loss}
    errors["logits"] = relative(session.read("logits")[..., :V], oracle.logits(tokens).detach().numpy()[..., :V])
    errors |= {name: relative(session.read(f"{name}.grad"), expected) for name, expected in gradients.items()}
    assert len(errors) == 2 + len(weights)
    for name, error in errors.items():
        print(f"{name:32} error {error:.1e} limit {LIMIT:.0e}")
    over = {name: error for name, error in errors.items() if not error <= LIMIT}
    assert not over, f"beyond {LIMIT}: {over}"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_small_gpt2_equals_pytorch(name, dtype):
    model, batch, seq = SHAPES[name]
    session = session_of(model, batch, seq, dtype=dtype)
    check_gradients(session, model, spread(session), batch, seq)


BF16_SHAPES = {
    "biased": (ModelConfig(layers=4, heads=4, d_model=128, vocab_size=500, max_seq=64), 4, 64),
    "no bias": (ModelConfig(layers=4, heads=2, d_model=64, vocab_size=65, max_seq=64, bias=False), 4, 61),
}


@pytest.mark.parametrize("name", BF16_SHAPES)
def test_bf16_rounds_in_no_worse_places_than_autocast(name):
    """References with every tensor rounded to its storage dtype: each gradient at most 1.5 times as far from the float64
    truth as PyTorch's bf16 autocast."""
    model, batch, seq = BF16_SHAPES[name]
    session = session_of(model, batch, seq, compute="bf16", dtype="float32", storage=True)
    session.run("init", seed=1)
    weights = {name: session.read(name) for name, t in session.tensors.items() if t.role == "parameter"}
    tokens, targets = tokens_and_targets(model, batch, seq)
    inv_targets = 1 / (targets >= 0).sum()
    session.write("tokens", tokens)
    session.write("targets", targets)
    session.run("forward_backward", inv_targets=inv_targets)
    true_loss, truth = TorchGPT2(model, weights, dtype=torch.float64).gradients(tokens, targets, inv_targets)
    _, rough = TorchGPT2(model, weights, autocast=True).gradients(tokens, targets, inv_targets)
    assert session.read("loss")[0] == pytest.approx(true_loss, abs=2e-3)
    for name, true in truth.items():
        ours, theirs = relative(session.read(f"{name}.grad"), true), relative(rough[name], true)
        print(f"{name:32} ours {ours:.1e} autocast {theirs:.1e}")
        assert ours <= 1.5 * theirs, name


@pytest.mark.slow
def test_gpt2_124m_equals_pytorch():
    """The real model, all 148 tensors, fp32 references, weights from our own initialisation."""
    model = preset("gpt2-124m").model
    session = session_of(model, 1, 16, dtype="float32")
    session.run("init", seed=1)
    weights = {name: session.read(name) for name, t in session.tensors.items() if t.role == "parameter"}
    assert len(weights) == 148
    check_gradients(session, model, weights, 1, 16)


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_ten_adamw_steps_equal_pytorch(clip):
    model, batch, seq = SHAPES["biased"]
    optim = OptimConfig(clip=clip, lr=1e-2)
    session = session_of(model, batch, seq, optim=optim)
    oracle = TorchGPT2(model, spread(session), dtype=torch.float64)
    optimizer = oracle.adamw(optim)
    for step in range(1, 11):
        tokens, targets = tokens_and_targets(model, batch, seq, seed=step)
        inv_targets, lr = 1 / (targets >= 0).sum(), 1e-2 / step
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", inv_targets=inv_targets, step=step, batch=batch, seq=seq)
        session.run("optimizer_step", step=step, lr=lr)
        expected = oracle.step(optimizer, tokens, targets, inv_targets, lr=lr, clip=clip)
        # torch divides by norm + 1e-6 where we divide by the norm.
        assert session.read("loss")[0] == pytest.approx(expected, rel=1e-5)
    for name, w in oracle.weights.items():
        assert relative(session.read(name), w.detach().numpy()) < 1e-5, name
