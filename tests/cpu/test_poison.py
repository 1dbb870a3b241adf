"""The debug mode must catch what it is for: a lifetime that ends too early, a byte written past a tensor's end."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cpu import step
from barellm.cpu.step import CpuSession
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import planner
from tests.cpu.test_models import OPTIM, adamw, batch_of, partial

MODEL = ModelConfig(layers=1, heads=2, d_model=16, vocab_size=31, max_seq=8)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("BARELLM_POISON", "1")


def loss_and_gradients() -> list[np.ndarray]:
    _, programs = build(MODEL, batch=2, seq=8, optimizer=partial(adamw, config=OPTIM))
    session = CpuSession(programs, threads=2)
    try:
        session.run("init", seed=1)
        tokens, targets = batch_of(MODEL, 2, 8, seed=1)
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", batch=2, seq=8, accumulate=0, inv_targets=0.1, step=1, pos=0)
        return [session.read(n) for n in ("loss", *(n for n, t in session.tensors.items() if t.role == "gradient"))]
    finally:
        session.close()


@pytest.mark.slow
def test_every_lifetime_that_ends_one_op_early_changes_the_result(monkeypatch):
    truth = loss_and_gradients()
    assert all(np.isfinite(x).all() for x in truth)
    spans = planner.lifetimes
    _, programs = build(MODEL, batch=2, seq=8, optimizer=partial(adamw, config=OPTIM))
    lives = step.lower_and_plan(programs, threads=2).plan.lifetimes["forward_backward"]
    long_lived = [t.name for t, (first, last) in lives.items() if last > first and t.role == "activation"]
    caught = 0
    for name in long_lived:

        def shortened(ops, scratch=None, name=name):
            found = spans(ops, scratch)
            return {t: (a, b - 1) if t.name == name and b > a else (a, b) for t, (a, b) in found.items()}

        monkeypatch.setattr(planner, "lifetimes", shortened)
        found = loss_and_gradients()
        caught += not all(np.array_equal(a, b) for a, b in zip(found, truth, strict=True))
    assert caught == len(long_lived) > 10


def test_a_write_past_the_end_is_named():
    _, programs = build(MODEL, batch=2, seq=8, optimizer=partial(adamw, config=OPTIM))
    session = CpuSession(programs, threads=1)
    try:
        session.run("init", seed=1)
        wte = session.tensors["wte"]
        session.arena[session.plan.offsets[wte] + wte.nbytes] = 0
        with pytest.raises(RuntimeError, match="init wrote past the end of wte"):
            session.run("init", seed=1)
    finally:
        session.close()
