"""The speedrun's model against its mathematics in PyTorch, from the same weights and batches: loss and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import Config as Run
from barellm.config import TrainConfig
from barellm.cpu.step import CpuSession
from barellm.models.speedrun import Config, speedrun, training_schedule
from barellm.models.stages import Stage as Row
from barellm.models.stages import table
from barellm.optim.recipes import updates
from barellm.runtime.reference import ReferenceSession

torch = pytest.importorskip("torch")

from tests.oracle import torch_speedrun as theirs  # noqa: E402

pytestmark = pytest.mark.oracle
T, BOS, TOTAL, THIRD = 48, 3, 30, Fraction(1, 3)
STAGES = (
    Row(32, (1, 2), THIRD, mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)),
    Row(40, (2, 4), THIRD, lr=1.52, mtp=(1.0, 0.5), mtp_end=(1.0, 0.0)),
    Row(48, (3, 6), THIRD, lr=1.73),
    Row(48, (3, 8)),
)
MODEL = Config(
    heads=4,
    d_model=64,
    d_ff=128,
    vocab_size=61,
    max_seq=T,
    block=4,
    stages=table(STAGES),
    separator=BOS,
    extension=3,
    bigram_first="reserved",
)
RATES = {"momentum_start": 0.85, "momentum": 0.95, "momentum_warmup": 12, "momentum_cooldown": 5}
OPTIM = replace(speedrun().optim, **RATES)
RUN = Run(
    preset="", model=MODEL, optim=OPTIM, train=TrainConfig(micro_batch_size=1, seq=T, steps=TOTAL, gradient_accumulation_steps=2)
)
SIZES = theirs.Sizes(vocab=MODEL.padded_vocab, d_model=64, heads=4, d_ff=128)
BACKENDS = {"float64": partial(ReferenceSession, dtype="float64"), "cpu": CpuSession}


def text(seq: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of drawn lengths, some of one token, the last one cut: (tokens, targets), each (1, seq)."""
    rng = np.random.default_rng(seed)
    row = rng.integers(4, MODEL.vocab_size, seq + 1)
    begins = np.cumsum(rng.integers(1, 14, seq))
    row[begins[begins < seq]] = BOS
    row[0] = BOS if seed % 2 else row[0]  # a row may begin within a document
    return row[None, :-1].astype(np.int32), row[None, 1:].astype(np.int32)


@contextmanager
def opened(backend: str, compute: str = "fp32", model: Config = MODEL) -> Iterator[Any]:
    _, programs = build(model, batch=1, seq=T, compute=compute, optimizer=updates(OPTIM, ""))
    session = BACKENDS[backend](programs)
    try:
        session.run("init", seed=5)
        yield session
    finally:
        if backend == "cpu":
            session.close()


def disturb(session: Any) -> None:
    """Weights in which nothing is zero, so that each part has a say."""
    rng = np.random.default_rng(1)
    for name, t in session.tensors.items():
        if t.role == "parameter":
            values = session.read(name)
            session.write(name, (values + 0.2 * rng.normal(size=values.shape)).astype(values.dtype))


def weights(session: Any, dtype: Any) -> dict[str, Any]:
    """Our parameters as leaves."""
    names = [name for name, t in session.tensors.items() if t.role == "parameter"]
    return {name: torch.tensor(session.read(name), dtype=dtype, requires_grad=True) for name in names}


def packed(w: dict[str, Any]) -> dict[str, Any]:
    """Theirs from ours."""
    attended = [i for i in range(theirs.LAYERS) if i != 6]
    pad = torch.ones(7, dtype=w["lanes.attn0"].dtype)  # the first seven layers have no second lane
    post = [
        [torch.cat([pad, w["lanes.attn0"][7:]]), torch.cat([pad, w["lanes.attn1"][7:]])],
        [w["post.mlp"], torch.cat([pad, w["lanes.mlp1"][7:]])],
    ]
    scalars = torch.stack([w["qkv.scale"], w["proj.scale"]], 1).flatten()
    return {
        "attn_bank": torch.stack([torch.cat([w[f"h.{i}.attn.qkv"], w[f"h.{i}.attn.proj"]]) for i in attended]),
        "mlp_bank": torch.stack([torch.stack([w[f"h.{i}.mlp.up"], w[f"h.{i}.mlp.down"]]) for i in range(theirs.LAYERS)]),
        "attn_gate_bank": torch.stack([w[f"h.{i}.attn.gate"] for i in attended]),
        "ve_gate_bank": torch.stack([w[f"h.{i}.value.gate"] for i in theirs.VALUED]),
        "value_embeds": torch.cat([w[f"values.{k}"] for k in range(5)]),
        "scalars": torch.cat([scalars, w["smear.scale"], -w["backout.scale"], w["skip.scale"]]),
        "resid_lambdas": torch.stack([w["resid.attn"], w["resid.mlp"]], 1),
        "post_lambdas": torch.stack([torch.stack(lane) for lane in post]).permute(2, 0, 1),
        "x0_lambdas": w["x0.scale"],
        "bigram_lambdas": w["bigrams.scale"],
        "embed": w["embed"],
        "lm_head": w["head"],
        "bigram_embed": w["bigrams"],
        "smear_gate": w["smear.gate"],
        "skip_gate": w["skip.gate"],
    }


def stage_of(step: int) -> theirs.Stage:
    """Theirs in a step, from the table alone."""
    schedule = training_schedule(RUN).schedule(TOTAL)
    index = schedule.index(step)
    frequencies, scale = theirs.first_frequencies(SIZES.head), 0.1
    for before, after in pairwise(STAGES[: index + 1]):
        if before.windows[1] != after.windows[1]:
            frequencies, scale = theirs.yarn(frequencies, scale, before.windows[1] * 4, after.windows[1] * 4)
    short, long = (blocks * MODEL.block for blocks in STAGES[index].windows)
    long = MODEL.final_window * MODEL.block if step >= TOTAL else long
    return theirs.Stage(short, long, frequencies, scale, schedule.weights(step))


def their_loss(
    w: dict[str, Any], tokens: np.ndarray, targets: np.ndarray, step: int, *, training: bool = True, fp8: bool = False
) -> Any:
    row, after = torch.tensor(tokens[0], dtype=torch.int64), torch.tensor(targets[0], dtype=torch.int64)
    how = {"training": training, "fp8": fp8}
    return theirs.loss(packed(w), row, after, (row == BOS).cumsum(0), SIZES, stage_of(step), **how)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


@pytest.mark.parametrize("step", [0, 10, 19, 28])
@pytest.mark.parametrize("backend, limit", [("float64", 2e-5), ("cpu", 1e-4)])
def test_loss_and_every_gradient(backend, limit, step):
    """The limit of float64 is that of their angles, which are fp32."""
    with opened(backend) as session:
        disturb(session)
        w = weights(session, torch.float64)
        training_schedule(RUN).on_step(session, step, TOTAL)
        seq = training_schedule(RUN).step(step, TOTAL).seq
        tokens, targets = text(seq, step)
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", batch=1, seq=seq, inv_targets=1.0, accumulate=0)
        wanted = their_loss(w, tokens, targets, step)
        wanted.backward()
        assert abs(session.read("loss")[0] / wanted.item() - 1) < limit
        found = {
            name: relative(session.read(f"{name}.grad"), leaf.grad.numpy()) for name, leaf in w.items() if leaf.grad is not None
        }
        assert max(found.values()) < limit, sorted(found.items(), key=lambda pair: -pair[1])[:5]
        assert len(found) == len(w)


@pytest.mark.parametrize("backend, limit", [("float64", 2e-5), ("cpu", 1e-4)])
def test_a_step_with_the_classifier_in_8_bits(backend, limit):
    """As far as no number is so near the middle of two codes that one side rounds it up and the other down: none is here."""
    with opened(backend, model=replace(MODEL, fp8="static")) as session:
        disturb(session)
        w = weights(session, torch.float64)
        training_schedule(RUN).on_step(session, 0, TOTAL)
        tokens, targets = text(STAGES[0].seq, 4)
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", batch=1, seq=STAGES[0].seq, inv_targets=1.0, accumulate=0)
        exact, wanted = their_loss(w, tokens, targets, 0), their_loss(w, tokens, targets, 0, fp8=True)
        wanted.backward()
        assert abs(session.read("loss")[0] / wanted.item() - 1) < limit < abs(exact.item() / wanted.item() - 1)
        found = {name: relative(session.read(f"{name}.grad"), leaf.grad.numpy()) for name, leaf in w.items()}
        assert max(found.values()) < limit, sorted(found.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_validation_loss(backend):
    with opened(backend) as session:
        disturb(session)
        training_schedule(RUN).on_step(session, TOTAL, TOTAL)
        tokens, targets = text(T, 7)
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("eval", batch=1, seq=T, inv_targets=1 / T)
        wanted = their_loss(weights(session, torch.float64), tokens, targets, TOTAL, training=False).item()
        assert abs(session.read("loss")[0] / wanted - 1) < 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    """Of PyTorch's: sizes are so small that several wait for each other, and on a busy machine for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_thirty_steps_through_all_stages():
    """Losses, then weights: with stages, windows and their angles, losses of several tokens that fade, the embedding tied and on
    its own, Adam in every second step, momentum up and down."""
    with opened("cpu") as session:
        w = {name: t.detach().clone().requires_grad_() for name, t in packed(weights(session, torch.float64)).items()}
        optimizer, ours = theirs.Optimizer(w), training_schedule(RUN)
        schedule = ours.schedule(TOTAL)
        split = schedule.first(2) | 1
        for index in range(TOTAL):
            step = ours.step(index, TOTAL)
            ours.on_step(session, index, TOTAL)
            found = wanted = 0.0
            for micro in range(2):
                tokens, targets = text(step.seq, 100 + 2 * index + micro)
                session.write("tokens", tokens)
                session.write("targets", targets)
                adds = int(micro > 0 or step.adds)
                session.run("forward_backward", batch=1, seq=step.seq, inv_targets=step.inv_targets, accumulate=adds)
                found += step.shown * session.read("loss")[0]
                row, after = (torch.tensor(ids[0], dtype=torch.int64) for ids in (tokens, targets))
                loss = theirs.loss(w, row, after, (row == BOS).cumsum(0), SIZES, stage_of(index), training=True) / 2
                loss.backward()
                wanted += loss.item() / step.seq
            assert abs(found / wanted - 1) < 1e-5, index
            for program, scalars in step.updates:
                session.run(program, **scalars)
            momentum = 0.95 - 0.1 * max(0, index - 25) / 5 if index >= 12 else 0.85 + 0.1 * index / 12
            optimizer.step(schedule.lr(index), momentum, adam=index % 2 == 1, untie=index == split)
        assert optimizer.split and not torch.equal(w["embed"], w["lm_head"].T)
        for name, t in packed(weights(session, torch.float64)).items():
            kept = slice(None) if "lambdas" not in name else slice(7, None)  # unused ones stay in both
            assert relative(t.detach().numpy()[kept], w[name].detach().numpy()[kept]) < 5e-3, name


def test_bf16_is_about_as_near_as_autocast():
    """The error of all gradients together against float64: ours at most 1.5 times that of PyTorch under autocast."""
    step = 10
    tokens, targets = text(training_schedule(RUN).step(step, TOTAL).seq, step)
    with opened("cpu", "bf16") as session:
        disturb(session)
        exact, rounded = weights(session, torch.float64), weights(session, torch.float32)
        training_schedule(RUN).on_step(session, step, TOTAL)
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", batch=1, seq=tokens.shape[1], inv_targets=1.0, accumulate=0)
        their_loss(exact, tokens, targets, step).backward()
        with torch.autocast("cpu", torch.bfloat16):
            loss = their_loss(rounded, tokens, targets, step)
        loss.backward()
        ours = theirs_ = 0.0
        for name, leaf in exact.items():
            wanted = leaf.grad.numpy()
            size = np.linalg.norm(wanted)
            ours += np.linalg.norm(session.read(f"{name}.grad") - wanted) / size
            theirs_ += np.linalg.norm(rounded[name].grad.numpy() - wanted) / size
        assert ours < 1.5 * theirs_
