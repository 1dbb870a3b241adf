"""Whole models on the mock driver: every program of a run, against the references, and beside the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cpu.step import CpuSession
from barellm.cuda.fuse import FUSIONS
from barellm.cuda.step import CudaSession
from barellm.models.gpt2 import Config as ModelConfig
from barellm.models.llama3 import Config as Llama
from barellm.program.fusion import fuse
from barellm.runtime.reference import ReferenceSession
from tests.cpu.test_models import OPTIM, batch_of, open_session, train
from tests.simulators.mock import Gpu

MODEL = ModelConfig(layers=1, heads=3, d_model=21, vocab_size=37, padded_vocab=41, max_seq=9, dropout=0.1)
LLAMA = Llama(layers=2, heads=4, kv_heads=2, d_model=24, d_ff=37, vocab_size=41, padded_vocab=43, max_seq=9, tied=False)
GEMMA = replace(
    LLAMA, norm_position="both", norm_unit_offset=True, sliding_window=4, window_layers="0", attention_softcap=0.5,
    logits_softcap=30.0, activation="gelu", embedding_multiplier=5.0,
)  # fmt: skip
SHAPE = (2, 9)
each_model = pytest.mark.parametrize("model", [MODEL, LLAMA, GEMMA], ids=["gpt2", "llama3", "gemma2"])


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


def same_weights(session, oracle) -> None:
    for name, t in oracle.tensors.items():
        if t.role == "parameter":
            oracle.write(name, session.read(name))


def train_beside_the_references(
    model: Any, compute: str, limit: float, *, shape: tuple[int, int] = SHAPE, steps: int = 2, **options
) -> CudaSession:
    """Steps of two micro-batches, the second of other sizes. The session, still open."""
    oracle = open_session(ReferenceSession, model, shape, compute)
    session = open_session(CudaSession, model, shape, compute, **options)
    session.run("init", seed=3)
    same_weights(session, oracle)
    found, want = (train(s, model, shape, steps=steps) for s in (session, oracle))
    assert found == pytest.approx(want, rel=limit / 10, abs=limit / 10)
    for name, t in oracle.tensors.items():
        got, right = session.read(name).astype(np.float64), oracle.read(name)
        if t.role == "gradient":
            scale = np.linalg.norm(right) + (1e-7 if compute == "fp32" else 1e-3 * np.sqrt(right.size))
            assert np.linalg.norm(got - right) <= 2 * limit * scale, name
        elif t.role == "parameter" and not name.endswith("attn.bias"):  # a key's has no gradient: AdamW steps by noise
            assert np.linalg.norm(got - right) <= 10 * limit * OPTIM.lr * np.sqrt(right.size), name
    return session


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("compute, limit", [("fp32", 5e-5), ("bf16", 0.15)])
@pytest.mark.extended
def test_a_model_trains_like_the_references(gpu, monkeypatch, model, compute, limit):
    """With dropout where it has that, accumulation, clipping and poison."""
    monkeypatch.setenv("BARELLM_POISON", "1")
    train_beside_the_references(model, compute, limit)


def evaluate_and_decode_beside_the_references(model: Any, compute: str, limit: float, shape: tuple[int, int] = SHAPE) -> None:
    oracle = open_session(ReferenceSession, model, shape, compute)
    session = open_session(CudaSession, model, shape, compute)
    session.run("init", seed=3)
    same_weights(session, oracle)
    tokens, targets = batch_of(model, 2, 7, seed=1)
    for s in (session, oracle):
        s.write("tokens", tokens)
        s.write("targets", targets)
        s.run("eval", batch=2, seq=7, inv_targets=1 / (targets >= 0).sum())
    assert float(session.read("loss")[0]) == pytest.approx(float(oracle.read("loss")[0]), rel=limit)
    pos = 0
    for count in (5, 1, 1):
        for s in (session, oracle):
            s.write("tokens", tokens[:1, pos : pos + count])
            s.run("decode", batch=1, seq=count, pos=pos)
        got, want = session.read("logits").reshape(-1), oracle.read("logits").reshape(-1)
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)
        pos += count


@each_model
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-4), ("bf16", 0.1)])
@pytest.mark.extended
def test_evaluation_and_decoding_equal_the_references(gpu, model, compute, limit):
    evaluate_and_decode_beside_the_references(model, compute, limit)


@pytest.mark.extended
def test_initial_weights_and_dropout_are_the_cpus(gpu):
    """Random bits are counter-based: the same weights from a seed, and nearly the same loss with dropout."""
    cpu, cuda = (open_session(kind, MODEL, SHAPE, "fp32") for kind in (CpuSession, CudaSession))
    for s in (cpu, cuda):
        s.run("init", seed=3)
    for name, t in cpu.tensors.items():
        if t.role == "parameter":
            np.testing.assert_allclose(cuda.read(name), cpu.read(name), rtol=1e-5, atol=1e-8)
    assert train(cuda, MODEL, SHAPE, steps=1) == pytest.approx(train(cpu, MODEL, SHAPE, steps=1), rel=1e-5)
    cpu.close()


@each_model
@pytest.mark.extended
def test_recompute_changes_no_bit(gpu, model):
    digests = set()
    for recompute in (False, True):
        session = open_session(CudaSession, model, SHAPE, "bf16", recompute=recompute)
        session.run("init", seed=1)
        train(session, model, SHAPE, steps=1, micros=1)
        digests.add(session.digest())
        session.close()
    assert len(digests) == 1


def test_every_sum_and_norm_of_a_llama_is_fused():
    """Nothing else walks the residual stream of a bf16 Llama, but its first norm."""
    _, programs = build(LLAMA, batch=SHAPE[0], seq=SHAPE[1], compute="bf16", optimizer=lambda p: None)
    before = programs["forward_backward"].ops
    after = fuse(before, FUSIONS)
    names = [op.name for op in after]
    assert names.count("rmsnorm_backward") == 5 and names.count("add_rmsnorm") == 4
    assert not {"add", "cast", "rmsnorm_dx", "rmsnorm_dweight"} & set(names)
    assert sum(op.bytes() for op in after) < sum(op.bytes() for op in before)
