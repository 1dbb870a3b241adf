"""The update program: what decays, what is clipped, in which order."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.program.ops.pointwise.random import STATE_STREAMS
from barellm.runtime.reference import ReferenceSession

MODEL = ModelConfig(layers=1, heads=2, d_model=8, vocab_size=11, padded_vocab=13, max_seq=6)


def session_of(config: OptimConfig) -> ReferenceSession:
    _, programs = build(MODEL, batch=1, seq=6, optimizer=partial(adamw, config=config))
    session = ReferenceSession(programs)
    rng = np.random.default_rng(0)
    for name, t in session.tensors.items():
        if t.role in ("parameter", "gradient"):
            session.write(name, rng.normal(size=t.shape))
    return session


def test_weight_decay_acts_on_matrices_only():
    session = session_of(OptimConfig(weight_decay=0.5))
    before = {name: session.read(name) for name in session.tensors}
    for name, t in session.tensors.items():
        if t.role == "gradient":
            session.write(name, np.zeros(t.shape))
    session.run("optimizer_step", step=1, lr=0.1)
    for t in session.store.of_role("parameter"):
        factor = 0.95 if len(t.shape) == 2 else 1.0
        np.testing.assert_allclose(session.read(t.name), factor * before[t.name], rtol=1e-12, err_msg=t.name)


def test_the_first_step_moves_by_the_learning_rate():
    """At step 1 both moments are corrected to g and g^2, so every element moves by lr against its sign."""
    session = session_of(OptimConfig(weight_decay=0.0, clip=0.0, eps=0.0))
    before = {t.name: session.read(t.name) for t in session.store.of_role("parameter")}
    session.run("optimizer_step", step=1, lr=0.25)
    for name, w in before.items():
        np.testing.assert_allclose(session.read(name), w - 0.25 * np.sign(session.read(f"{name}.grad")), rtol=1e-9)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_the_norm_is_that_of_all_gradients_together(clip):
    session = session_of(OptimConfig(clip=clip))
    total = sum((session.read(t.name) ** 2).sum() for t in session.store.of_role("gradient"))
    session.run("optimizer_step", step=1, lr=0.1)
    norm, scale = session.read("clip")
    assert norm == pytest.approx(total**0.5, rel=1e-12)
    assert scale == pytest.approx(min(1.0, clip / total**0.5) if clip else 1.0, rel=1e-12)
    wte = session.read("wte.grad") * scale
    np.testing.assert_allclose(session.read("wte.m"), 0.1 * wte, rtol=1e-12)
    np.testing.assert_allclose(session.read("wte.v"), 0.05 * wte**2, rtol=1e-9)


def test_each_matrix_is_rounded_by_a_stream_of_its_own():
    """By its place among the parameters, counted up from STATE_STREAMS: dropout has the streams below, and a run that is resumed
    must draw the bits that it would have drawn."""
    _, programs = build(MODEL, batch=1, seq=6, optimizer=partial(adamw, config=OptimConfig(moments="16bit-stochastic")))
    program = programs["optimizer_step"]
    parameters = program.store.of_role("parameter")
    streams = {op.param: op.stream for op in program.ops if op.name == "adamw"}
    for i, param in enumerate(parameters):
        assert streams[param] == (STATE_STREAMS + i if len(param.shape) == 2 else None), param
