"""Whole models on a driver in Python that says it is Hopper's: tensor maps, workspaces of sums in parts and the parameters of
every Gluon product are read from the bytes that a launch hands over, and the kernels' own functions do it on the model of the
machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from barellm.cuda import gemm_config, launch
from barellm.cuda.kernel import Launch
from barellm.cuda.kernels.gemm import hopper, split_k
from barellm.cuda.step import CudaSession
from barellm.models.gpt2 import Config as ModelConfig
from tests.cpu.test_models import open_session
from tests.cuda.test_models import evaluate_and_decode_beside_the_references, train_beside_the_references
from tests.simulators.mock import Gpu

pytestmark = pytest.mark.extended

MODEL = ModelConfig(layers=1, heads=2, d_model=64, vocab_size=130, padded_vocab=192, max_seq=70, dropout=0.1)
SHAPE = (2, 70)  # neither tokens nor lengths are multiples of anything
LIMIT = 0.15


@pytest.fixture
def gpu(monkeypatch):
    """A card so small that small products are worth Hopper's kernel. Sums over tokens are in three parts where the result has two
    tiles or more, in one where it has one."""
    monkeypatch.setattr(gemm_config, "WAVE", 1)
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: min(3, max(rows // 32, 1)) if tiles > 1 else 1)
    made = Gpu(arch=90, sms=3)
    made.install(monkeypatch)
    return made


def products(session: CudaSession, program: str) -> list[Launch]:
    return [c for c in session.calls[program] if isinstance(c, Launch) and c.spec.name == "hopper_gemm"]


@pytest.mark.slow
@pytest.mark.extended
def test_a_model_trains_like_the_references_on_hopper(gpu, monkeypatch):
    """With dropout, accumulation, clipping and poison."""
    monkeypatch.setenv("BARELLM_POISON", "1")
    session = train_beside_the_references(MODEL, "bf16", LIMIT, shape=SHAPE)
    found = [dict(p.spec.constants) for p in products(session, "forward_backward")]
    roles = {(c["A_TRANSPOSED"], c["B_TRANSPOSED"]) for c in found}
    assert roles == {(False, True), (False, False), (True, False)}  # forward, input gradients, weight gradients
    assert {c["EPILOGUE"] for c in found} == {"", "gelu", "gelu_backward", "start"}
    names = Counter(name for name, _ in gpu.launched)
    assert names["split_k_reduce"] and not names["gemm"]
    assert names["hopper_gemm"] == 4 * len(found)  # two steps of two micro-batches


@pytest.mark.slow
def test_evaluation_and_decoding_equal_the_references_on_hopper(gpu):
    evaluate_and_decode_beside_the_references(MODEL, "bf16", 0.1, SHAPE)


def wrong_count(monkeypatch) -> None:
    """All but the first part of a sum are forgotten."""
    monkeypatch.setattr(split_k.SplitK, "count", lambda self, sizes: 1)


def wrong_workspace(monkeypatch) -> None:
    """The partial results of the last part have no room in the tensor map."""
    monkeypatch.setattr(hopper._Times, "__call__", lambda self, sizes: (self.size(sizes) - 1) * self.factor)


def wrong_rows(monkeypatch) -> None:
    """A tensor map is of fewer rows than the matrix: what lies beyond counts as zeros, or is dropped."""
    encode = launch.encode_tensor_map
    monkeypatch.setattr(launch, "encode_tensor_map", lambda at, a, rows, *rest: encode(at, a, max(rows - 8, 1), *rest))


def wrong_stride(monkeypatch) -> None:
    encode = launch.encode_tensor_map

    def skewed(at, argument, *rest) -> None:
        encode(at, replace(argument, stride=argument.stride + 8), *rest)

    monkeypatch.setattr(launch, "encode_tensor_map", skewed)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [wrong_count, wrong_workspace, wrong_rows, wrong_stride])
@pytest.mark.extended
def test_a_mutant_of_the_launches_is_noticed(gpu, monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        train_beside_the_references(MODEL, "bf16", LIMIT, shape=SHAPE, steps=1)


def test_small_products_keep_to_triton(gpu, monkeypatch):
    """On a whole card the same model's products are too small for Hopper's kernel."""
    monkeypatch.setattr(gemm_config, "WAVE", 132)
    assert not products(open_session(CudaSession, MODEL, SHAPE, "bf16"), "forward_backward")
