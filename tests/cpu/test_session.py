"""What a session promises to those who run programs by name."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.config import ModelConfig
from barellm.cpu.step import CpuSession
from barellm.models.programs import build
from barellm.runtime.reference import ReferenceSession

MODEL = ModelConfig(layers=1, heads=2, channels=16, vocab_size=31, max_seq=8)


@pytest.mark.parametrize("open_session", [CpuSession, ReferenceSession])
def test_scalars_of_one_run_do_not_reach_into_the_next(open_session):
    """Sampling between two training steps moves `pos`; an evaluation at position 0 must not see it."""
    _, programs = build(MODEL, batch=2, seq=8, decode_batch=1)
    session = open_session(programs)
    session.run("init", seed=3)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 8)).astype(np.int32)

    def loss() -> float:
        session.write("tokens", tokens)
        session.write("targets", tokens)
        session.run("eval", batch=2, seq=8, inv_targets=1 / 16)
        return float(session.read("loss")[0])

    before = loss()
    session.write("tokens", tokens[:1, :1])
    session.run("decode", batch=1, seq=1, pos=5)
    assert loss() == before
