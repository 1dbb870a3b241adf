"""Unit scaling: gradients are the true ones times the constants that the factors say, and all there is has unit size at first."""

from __future__ import annotations

from functools import partial
from math import sqrt

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import Config as Run
from barellm.config import OptimConfig, TrainConfig
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models import gpt2, unit
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.dynamic_range import tensor_stats
from barellm.program.exponent_stats import COUNTS, TOTALS, tensors_with_stats
from barellm.program.ops.optim.exponent_stats import BINS, SUMS
from barellm.runtime.reference import ReferenceSession
from barellm.training.training_schedule import training_schedule


def model(layers: int, heads: int, channels: int, length: int, *, scaled: bool = True) -> gpt2.Config:
    sizes = {"layers": layers, "heads": heads, "d_model": channels, "vocab_size": 61, "max_seq": length}
    return gpt2.Config(**sizes, bias=False, unit_scaling=scaled)


def built(cfg: gpt2.Config, batch: int, compute: str = "fp32", **more):
    optimizer = partial(adamw, config=OptimConfig())
    return build(cfg, batch=batch, seq=cfg.max_seq, compute=compute, optimizer=optimizer, **more)[1]


def test_gradients_are_the_true_ones_times_a_constant():
    """Along three random ways each, by finite differences in float64. Constants that are not one in the same place would show here
    wherever a branch meets the stream."""
    cfg = model(2, 3, 12, 7)
    programs = built(cfg, 2)
    session = ReferenceSession(programs)
    r = np.random.default_rng(0)
    session.run("init", seed=3)
    weights = {n: session.read(n) for n, t in session.tensors.items() if t.role == "parameter"}
    for name in ("tokens", "targets"):
        session.write(name, r.integers(0, 61, (2, 7)))

    def loss(**changed) -> float:
        for name, values in (weights | changed).items():
            session.write(name, values)
        session.run("forward_backward", batch=2, seq=7, accumulate=0, inv_targets=1 / 14, step=1)
        return float(session.read("loss")[0])

    loss()
    gradients = {name: session.read(f"{name}.grad") for name in weights}
    for name, values in weights.items():
        layer = 2 * int(name.split(".")[1]) if name.startswith("h.") else 0
        branch = unit.Branch(layer) if ".attn." in name else unit.Branch(layer + 1, inside=unit.GELU_RMS)
        width = 36 if ".attn." in name else 48  # of what is between a branch's products
        ahead, back = branch.share / (branch.inside * sqrt(12 if ".attn." in name else width)), 1 / sqrt(12)
        expected = 1.0
        if "c_proj" in name:
            expected = 1 / ahead
        elif name.startswith("h."):
            expected = back / (ahead / sqrt(12))
        for _ in range(3):
            way = r.standard_normal(values.shape)
            way[61:] = 0.0
            slope = (loss(**{name: values + 1e-6 * way}) - loss(**{name: values - 1e-6 * way})) / 2e-6
            assert (gradients[name] * way).sum() == pytest.approx(expected * slope, rel=1e-5), name


def sizes(cfg: gpt2.Config, batch: int) -> dict[str, dict[str, float]]:
    """kind -> name -> rms of what is in memory in the first step of a run."""
    programs = built(cfg, batch, ranges=True)
    session = CpuSession(programs)
    session.run("init", seed=1)
    run = Run("", cfg, train=TrainConfig(micro_batch_size=batch, seq=cfg.max_seq))
    r = np.random.default_rng(0)
    for name in ("tokens", "targets"):
        session.write(name, r.integers(0, 61, (batch, cfg.max_seq)))
    step = training_schedule(run).step(0, 1000)
    session.run("forward_backward_stats", batch=batch, seq=cfg.max_seq, accumulate=0, inv_targets=step.inv_targets, step=1)
    shown = float(session.read("loss")[0]) * step.shown
    counts, sums = session.read(COUNTS).reshape(-1, BINS), session.read(TOTALS).reshape(-1, len(SUMS))
    session.close()
    found: dict[str, dict[str, float]] = {"loss": {"": shown}}
    for t in tensors_with_stats(programs["forward_backward_stats"]):
        m = tensor_stats(counts[t.number], sums[t.number])
        if m.size:
            found.setdefault(t.kind, {})[t.name] = m.rms
    return found


@pytest.mark.extended
def test_everything_has_unit_size_at_first():
    """The last norm takes the root of the width out of the logits, and its gradient has it; a weight's gradient is a sum over
    tokens, whose gradients are not wholly independent."""
    length, batch = 64, 6
    found = sizes(model(3, 4, 96, length), batch)
    assert [name for name in found["activation"] if name.startswith("h.0")] == [
        f"h.0.{name}"
        for name in ("layernorm", "attn.c_attn", "attention", "rescale.2", "attn.c_proj", "mix", "layernorm.2", "mlp.c_fc",
                     "gelu", "mlp.c_proj", "mix.2")
    ]  # fmt: skip
    last = {kind: found[kind].pop("layernorm") for kind in ("activation", "gradient")}
    assert last["activation"] == pytest.approx(1 / sqrt(96), rel=1e-3) and 0.7 < last["gradient"] / sqrt(96) < 1.4
    for kind, (least, most) in {"activation": (0.25, 3.0), "gradient": (0.25, 4.0), "weight": (0.95, 1.05)}.items():
        outside = {name: rms for name, rms in found[kind].items() if not least <= rms <= most}
        assert len(found[kind]) >= 11 and not outside, kind
    tokens = sqrt(batch * length)
    assert all(0.5 * tokens < rms < 12 * tokens for n, rms in found["weight gradient"].items() if n[0] == "h")
    assert found["loss"][""] == pytest.approx(np.log(61) + 0.5, abs=0.3)  # logits of unit normals
    plain = sizes(model(3, 4, 96, length, scaled=False), batch)
    assert max(plain["gradient"].values()) < 0.01 and min(plain["activation"].values()) < 0.05


def test_the_constants_are_those_of_unit_normals():
    x = np.linspace(-9, 9, 200_001)
    density = np.exp(-x * x / 2) / sqrt(2 * np.pi) * (x[1] - x[0])
    gelu = ops.ACTIVATIONS["gelu"].value(x)
    assert sqrt((gelu**2 * density).sum()) == pytest.approx(unit.GELU_RMS, rel=1e-5)
    r = np.random.default_rng(0)
    for length in (1, 16, 128):
        weights = np.exp(r.standard_normal((200, length, length))) * np.tri(length)
        weights /= weights.sum(-1, keepdims=True)
        assert unit.attention_rms(length) == pytest.approx(np.sqrt((weights**2).sum(-1).mean()), rel=0.08)


def test_decoding_computes_what_training_does():
    cfg = model(2, 3, 24, 9)
    programs = built(cfg, 1, decode_batch=1)
    session = CpuSession(programs)
    session.run("init", seed=1)
    ids = np.random.default_rng(0).integers(0, 61, (1, 10))
    losses = []
    for n in range(1, 10):
        session.write("tokens", ids[:, :n])
        session.write("targets", ids[:, 1 : n + 1])
        session.run("eval", batch=1, seq=n, inv_targets=1.0)
        losses.append(float(session.read("loss")[0]))
    session.write("tokens", ids[:, :9])
    session.run("decode", batch=1, seq=9, pos=0)
    logits = session.read("logits").reshape(-1)[:61].astype(np.float64)
    assert np.log(np.exp(logits).sum()) - logits[ids[0, 9]] == pytest.approx(losses[-1] - losses[-2], abs=1e-4)
    session.close()


def test_biases_and_other_activations_are_refused():
    with pytest.raises(UserError, match=r"^model.unit_scaling is true and model.activation 'relu2', expected gelu$"):
        gpt2.Config(unit_scaling=True, bias=False, activation="relu2")
    with pytest.raises(UserError, match=r"^model.unit_scaling is true and model.bias too, expected model.bias false$"):
        gpt2.Config(layers=1, unit_scaling=True)
