"""A network like Llama's on the mock driver: every program of a run, against the references."""

from __future__ import annotations

import pytest

from barellm.cuda.fuse import FUSIONS
from barellm.cuda.step import CudaSession
from barellm.program.fusion import fuse
from tests.cpu.test_models import train
from tests.cuda.llama import Llama, open_llama, programs
from tests.cuda.test_models import SHAPE, evaluate_and_decode_beside_the_references, gpu, train_beside_the_references

__all__ = ["gpu"]  # a fixture

LLAMA = Llama(layers=2, heads=4, kv_heads=2, head_size=6, hidden=37, vocab_size=41, max_seq=9)


@pytest.mark.slow
@pytest.mark.parametrize("compute, limit", [("fp32", 5e-5), ("bf16", 0.15)])
def test_a_llama_trains_like_the_references(gpu, monkeypatch, compute, limit):
    """With accumulation, clipping and poison."""
    monkeypatch.setenv("BARELLM_POISON", "1")
    train_beside_the_references(LLAMA, compute, limit, opened=open_llama)


@pytest.mark.parametrize("compute, limit", [("fp32", 1e-4), ("bf16", 0.1)])
def test_evaluation_and_decoding_equal_the_references(gpu, compute, limit):
    evaluate_and_decode_beside_the_references(LLAMA, compute, limit, opened=open_llama)


def test_recompute_changes_no_bit(gpu):
    digests = set()
    for recompute in (False, True):
        session = open_llama(CudaSession, LLAMA, SHAPE, "bf16", recompute=recompute)
        session.run("init", seed=1)
        train(session, LLAMA, SHAPE, steps=1, micros=1)
        digests.add(session.digest())
        session.close()
    assert len(digests) == 1


def test_every_sum_and_norm_of_a_llama_is_fused():
    """Nothing else walks the residual stream of a bf16 Llama, but its first norm."""
    before = programs(LLAMA, SHAPE, "bf16")["micro"].ops
    after = fuse(before, FUSIONS)
    names = [op.name for op in after]
    assert names.count("rmsnorm_backward") == 5 and names.count("add_rmsnorm") == 4
    assert not {"add", "cast", "rmsnorm_dx", "rmsnorm_dweight"} & set(names)
    assert sum(op.bytes() for op in after) < sum(op.bytes() for op in before)
