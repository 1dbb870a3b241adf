"""Whole programs of a model as Triton compiles them for sm_80, run by the PTX machine, and what they do, counted. Only with
`--device ptx`."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest

from barellm.cuda.step import CudaSession
from barellm.models.gpt2 import Config as ModelConfig
from tests.cpu.test_models import open_session, train
from tests.cuda.test_models import MODEL, evaluate_and_decode_beside_the_references, train_beside_the_references
from tests.simulators.mock import Gpu
from tests.simulators.ptx.counts import Counts
from tests.simulators.ptx.launch import RUNS, execute

pytestmark = pytest.mark.ptx
ALIGNED = ModelConfig(layers=1, heads=2, d_model=128, vocab_size=320, padded_vocab=320, max_seq=64)
# Sectors of global memory, against those that the bytes would fill, and passes over the banks of shared memory, against those that
# would do. Most kernels need no more; docs/cuda.md says what is behind the others.
SECTORS = defaultdict(lambda: 1.1, layernorm=1.65, layernorm_backward=1.55, sort_blocks=2.7, total_loss=3.0)
PASSES = defaultdict(lambda: 1.01, layernorm_backward=5.3, bias_grad_partials=8.4, combine=2.7)


@pytest.mark.parametrize("compute, limit", [("fp32", 5e-5), ("bf16", 0.15)])
@pytest.mark.parametrize("how", RUNS)
def test_a_model_trains_like_the_references(monkeypatch, compute, limit, how):
    """With dropout, accumulation and clipping."""
    Gpu(execute=partial(execute, arch=80, run=RUNS[how])).install(monkeypatch)
    train_beside_the_references(MODEL, compute, limit, steps=1)


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-4), ("bf16", 0.1)])
def test_evaluation_and_decoding_equal_the_references(monkeypatch, compute, limit):
    Gpu(execute=partial(execute, arch=80)).install(monkeypatch)
    evaluate_and_decode_beside_the_references(MODEL, compute, limit)


def test_memory_is_asked_for_little_more_than_is_needed(monkeypatch):
    """Of each kernel of a step, over all its launches."""
    counts: dict[str, Counts] = defaultdict(Counts)
    run = lambda spec, values, grid: execute(spec, values, grid, arch=80, counts=counts[spec.name])  # noqa: E731
    Gpu(execute=run).install(monkeypatch)
    session = open_session(CudaSession, ALIGNED, (2, 64), "bf16")
    session.run("init", seed=3)
    train(session, ALIGNED, (2, 64), steps=1, micros=1)
    session.close()
    assert {"gemm", "attention_dkv", "adamw", "layernorm_backward"} <= set(counts)
    for name, found in counts.items():
        sectors, asked = found.sectors.total(), found.asked.total()
        passes, needed = found.passes.total(), found.needed.total()
        print(f"{name:20s} sectors {sectors / max(asked, 1):.2f}, passes {passes / max(needed, 1):.2f} of what would do")
        assert sectors <= SECTORS[name] * asked, name
        assert passes <= PASSES[name] * needed, name
