"""Whole models on the CPU backend: drawn at random against the references, equal bits for any thread count, golden losses."""

from __future__ import annotations

import json
import os
import platform
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barellm.assembly.programs import build
from barellm.config import ACTIVATIONS, OptimConfig
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Specialisation
from barellm.cpu.step import CpuSession
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession
from tests.cpu.check import ISAS, isa_named
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED

GOLDEN = Path(__file__).with_name("golden_losses.json")
OPTIM = OptimConfig(lr=3e-3, clip=0.7)
MODEL = ModelConfig(layers=2, heads=3, d_model=39, vocab_size=101, padded_vocab=103, max_seq=17, dropout=0.1)
THREADS = (1, 2, 5)


def batch_of(model: ModelConfig, batch: int, seq: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(seed)
    tokens, targets = r.integers(0, model.vocab_size, (2, batch, seq)).astype(np.int32)
    targets[r.random((batch, seq)) < 0.1] = -1
    return tokens, targets


def train(session, model: ModelConfig, shape: tuple[int, int], *, steps: int, micros: int = 2) -> list[float]:
    """Losses of a few steps of two micro-batches each; the second step has a smaller batch and length."""
    losses = []
    for step in range(1, steps + 1):
        batch, seq = shape if step != 2 else (max(1, shape[0] - 1), max(1, shape[1] // 2))
        data = [batch_of(model, batch, seq, seed=10 * step + i) for i in range(micros)]
        inv_targets = 1 / max(1, sum((targets >= 0).sum() for _, targets in data))
        total = 0.0
        for i, (tokens, targets) in enumerate(data):
            session.write("tokens", tokens)
            session.write("targets", targets)
            sample = (step * micros + i) * batch
            scalars = {"batch": batch, "seq": seq, "accumulate": int(i > 0), "inv_targets": inv_targets, "pos": 0}
            session.run("forward_backward", **scalars, step=step, seed=5, sample=sample)
            total += float(session.read("loss")[0])
        session.run("optimizer_step", step=step, lr=OPTIM.lr / step)
        losses.append(total)
    return losses


def open_session(kind, model: ModelConfig, shape: tuple[int, int], compute: str, *, recompute: bool = False, **options):
    optimizer = partial(adamw, config=OPTIM)
    _, programs = build(
        model, batch=shape[0], seq=shape[1], compute=compute, optimizer=optimizer, recompute=recompute, decode_batch=1
    )
    return kind(programs, **options)


@st.composite
def models(draw):
    """Any widths: prime vocabularies and lengths, one of everything."""
    heads = draw(st.integers(1, 4))
    head_size = draw(st.sampled_from([1, 3, 5, 8, 16, 17]))
    vocab = draw(st.sampled_from([2, 7, 61, 131]))
    model = ModelConfig(
        layers=draw(st.integers(1, 2)),
        heads=heads,
        d_model=heads * head_size,
        vocab_size=vocab,
        padded_vocab=vocab + draw(st.sampled_from([0, 1, 5])),
        max_seq=draw(st.sampled_from([1, 2, 13, 37])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        dropout=draw(st.sampled_from([0.0, 0.3])),
    )
    return model, (draw(st.integers(1, 3)), draw(st.integers(1, model.max_seq)))


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("compute, limit", [("fp32", 5e-5), ("bf16", 0.15)])
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=models(), isa=st.sampled_from(ISAS), recompute=st.booleans())
def test_any_model_trains_like_the_references(compute, limit, drawn, isa, recompute):
    """With poison on: a wrong lifetime or an unwritten byte would be NaN."""
    model, shape = drawn
    oracle = open_session(ReferenceSession, model, shape, compute)
    with pytest.MonkeyPatch.context() as m:
        m.setenv("BARELLM_POISON", "1")
        session = open_session(CpuSession, model, shape, compute, recompute=recompute, isa=isa_named(isa), threads=2)
    try:
        session.run("init", seed=3)
        for name, t in oracle.tensors.items():
            if t.role == "parameter":
                oracle.write(name, session.read(name))
        for found, want in zip(train(session, model, shape, steps=1), train(oracle, model, shape, steps=1), strict=True):
            assert found == pytest.approx(want, rel=limit / 10, abs=limit / 10)
        for name, t in oracle.tensors.items():
            if t.role == "gradient":
                got, want = session.read(name).astype(np.float64), oracle.read(name)
                # In bf16 a gradient that nearly cancels has only noise to compare.
                scale = np.linalg.norm(want) + (1e-7 if compute == "fp32" else 1e-3 * np.sqrt(want.size))
                assert np.linalg.norm(got - want) <= limit * scale, name
    finally:
        session.close()


def outcome(isa: ISA, compute: str, *, threads: int, recompute: bool = False) -> tuple[str, tuple[float, ...]]:
    """The digest after three steps with dropout, accumulation and clipping, and their losses."""
    session = open_session(CpuSession, MODEL, (3, 17), compute, recompute=recompute, isa=isa, threads=threads)
    session.run("init", seed=3)
    losses = train(session, MODEL, (3, 17), steps=3)
    digest = session.digest()
    session.close()
    return digest, tuple(losses)


@cache
def plain_losses(compute: str) -> tuple[float, ...]:
    """Losses of the simplest instruction set, which every machine of the family runs."""
    return outcome(isa_named(ISAS[-1]), compute, threads=1)[1]


# How far losses of two instruction sets may lie apart, relatively: they add in other orders. A loss is a mean over 45 tokens,
# which evens out the roundings of bf16 operands, 2^-8 each; sums and losses are fp32.
APART = {"fp32": 2.0**-20, "bf16": 2.0**-12}
GOLDEN_CASES = [(isa_named(name), compute) for name in ISAS for compute in APART]
GOLDEN_CASES += [(isa, "bf16") for isa in EMULATED]  # its fp32 is that of AVX512-BF16


@pytest.mark.parametrize("isa, compute", GOLDEN_CASES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.extended
def test_bits_do_not_depend_on_threads_and_losses_are_golden(isa: ISA, compute, monkeypatch):
    """The same digest at 1, 2 and 5 threads, with and without recompute. The losses are near those of the simplest instruction
    set, and those of the file to the last digit where it has some for this one. BARELLM_GOLDEN=write adds or replaces them."""
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)
    outcomes = {outcome(isa, compute, threads=n) for n in THREADS} | {outcome(isa, compute, threads=2, recompute=True)}
    assert len(outcomes) == 1
    losses = list(outcomes.pop()[1])
    assert losses == pytest.approx(plain_losses(compute), rel=APART[compute])
    golden = json.loads(GOLDEN.read_text())
    key = f"{isa.name} {compute}"
    if os.environ.get("BARELLM_GOLDEN") == "write" and isa not in EMULATED:
        GOLDEN.write_text(json.dumps(golden | {key: losses}, indent=1, sort_keys=True) + "\n")
    elif platform.machine() == "x86_64":  # "generic" names another instruction set elsewhere
        assert losses == golden.get(key, losses)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-4), ("bf16", 0.1)])
@pytest.mark.extended
def test_decoding_with_a_cache_equals_the_references(isa, compute, limit):
    oracle = open_session(ReferenceSession, MODEL, (1, 17), compute)
    session = open_session(CpuSession, MODEL, (1, 17), compute, isa=isa_named(isa), threads=2)
    session.run("init", seed=3)
    for name, t in oracle.tensors.items():
        if t.role == "parameter":
            oracle.write(name, session.read(name))
    tokens, _ = batch_of(MODEL, 1, 17, seed=1)
    pos = 0
    for count in (5, 1, 1, 3, 1):
        for s in (session, oracle):
            s.write("tokens", tokens[:, pos : pos + count])
            s.run("decode", batch=1, seq=count, pos=pos)
        got, want = session.read("logits").reshape(-1), oracle.read("logits").reshape(-1)
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)
        pos += count
    session.close()
