"""fp16 as a compute dtype: kernels, a loss scale that follows the gradients, and a model that trains."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from barellm.cuda import gemm_config
from barellm.cuda.gemm_config import GemmConfig
from barellm.cuda.kernel import Target
from barellm.cuda.kernels.loss import classifier, cross_entropy
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.program import ops
from barellm.program.loss_scale import FIRST_SCALE
from barellm.runtime.reference import ReferenceSession
from tests.cases import (
    adamw_case,
    backward_case,
    cached_case,
    check_classifier_of_inner_axes,
    check_network,
    forward_case,
    loss_gradient_case,
)
from tests.cpu.test_models import open_session, train
from tests.cuda.check import EPS, PLAIN, InterpretedSession, check_op, persistent
from tests.cuda.test_models import MODEL, SHAPE, evaluate_and_decode_beside_the_references, same_weights
from tests.half_cases import PRODUCTS, check_branch_scales, check_loss_scale, check_products, check_rows, scaled_update
from tests.muon_cases import apply_case, gram_case, momentum_case, normalize_case, polynomial_case, update_case
from tests.simulators.mock import Gpu


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    made.install(monkeypatch)
    return made


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products(shape):
    check_products(check_op, shape)


@pytest.mark.parametrize("shape", PRODUCTS[1:], ids=str)
def test_products_in_many_tiles(shape):
    check_products(partial(check_op, target=replace(PLAIN, config=GemmConfig(32, 32, 16, 4, 2))), shape)


def test_rows():
    check_rows(check_op)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention(rate):
    check_op(ops.Attention, **forward_case((2, 37, 2, 24), "fp16", rate=rate))
    check_op(ops.AttentionBackward, **backward_case((2, 37, 2, 24), "fp16", rate=rate))


def test_decoding():
    check_op(ops.AttentionCached, **cached_case("fp16", pos=3, T=4, heads=2, D=24, length=19))


@pytest.mark.parametrize("mode", ["store", "add"])
@pytest.mark.parametrize("power", [-FIRST_SCALE, -3, 0])
def test_gradients_of_the_loss_are_multiplied_by_its_scale(small_blocks, mode, power):
    case = loss_gradient_case((2, 3, 131, 120), "fp16", "store", roundings=3) | {"modes": {"dlogits": mode}}
    case["given"]["loss_scale"] = persistent(np.array([power, 5]), "i32", "state")
    added = 8 * EPS if mode == "add" else 0.0
    case["bounds"]["dlogits"] = case["bounds"]["dlogits"] * 2.0 ** (FIRST_SCALE + power) + added
    got = check_op(ops.CrossEntropyBackward, **case)["dlogits"].astype(float)
    assert mode == "add" or np.abs(got).max() > 0.1 * 2.0 ** (FIRST_SCALE + power) / 7


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
@pytest.mark.extended
def test_fused_ops_mean_their_sequence(activation, monkeypatch):
    monkeypatch.setattr(gemm_config, "num_splits", lambda tiles, rows: 2)
    monkeypatch.setattr(classifier, "chunk_tokens", lambda V, itemsize: 13)
    found = check_network(InterpretedSession, compute="fp16", limit=4e-3, bias=True, sizes=(24, 40, 53), activation=activation)
    assert found >= {"classifier", "classifier_loss"}


def test_a_classifier_of_inner_axes(monkeypatch):
    monkeypatch.setattr(classifier, "chunk_tokens", lambda V, itemsize: 16)
    check_classifier_of_inner_axes(InterpretedSession, compute="fp16", limit=4e-3)


def test_the_loss_scale_follows_the_gradients():
    check_loss_scale(InterpretedSession)
    check_branch_scales(InterpretedSession)


@pytest.mark.parametrize("shape", [(33, 131), (131, 33)], ids=str)
def test_muon(shape):
    check_op(ops.MuonMomentum, **momentum_case(shape, "fp16", 0.5, True))
    check_op(ops.MuonNormalize, **normalize_case(shape, "fp16"))
    check_op(ops.Gram, **gram_case(shape, "fp16"))
    check_op(ops.GramPolynomial, **polynomial_case(33, "fp16"))
    check_op(ops.GramApply, **apply_case(shape, "fp16"))
    check_op(ops.MuonUpdate, **update_case(shape, "fp16", 0.3, True, True))


def test_an_update_that_is_left_out_changes_no_weight():
    given, _, attrs = adamw_case((7, 5), "fp16_fp32", scale=np.nan)
    got = check_op(ops.AdamW, given, scalars={"step": 1, "lr": 3e-3}, bounds={}, **attrs)
    np.testing.assert_array_equal(got["param"], given["param"].values)


def first_planes_are_the_nearest(session) -> int:
    """How many weights of format "fp16_fp32" have in their first plane the fp16 nearest to the second."""
    found = 0
    for name, t in session.tensors.items():
        if t.dtype == "fp16_fp32":
            first = session._rows(t, 0, t.shape[0]).reshape(t.shape)
            np.testing.assert_array_equal(first, session.read(name).astype(np.float16), err_msg=name)
            found += 1
    return found


def test_products_read_the_nearest_of_an_updated_weight():
    p, store = scaled_update()
    session = InterpretedSession({"optimizer_step": p})
    session.write("w", np.linspace(-3, 3, 35).reshape(7, 5))
    session.write("w.grad", np.ones((7, 5), np.float32))
    before = session.read("w")
    session.run("optimizer_step", lr=0.1, step=1, seed=0)
    assert np.all(session.read("w") < before) and first_planes_are_the_nearest(session) == 1
    assert store.tensors["w"].dtype == "fp16_fp32"


@pytest.mark.extended
def test_a_model_trains_like_the_references(gpu, monkeypatch):
    """With dropout, accumulation, clipping and poison."""
    monkeypatch.setenv("BARELLM_POISON", "1")
    oracle = open_session(ReferenceSession, MODEL, SHAPE, "fp16")
    session = open_session(CudaSession, MODEL, SHAPE, "fp16")
    session.run("init", seed=3)
    assert first_planes_are_the_nearest(session) > 4
    same_weights(session, oracle)
    found, want = (train(s, MODEL, SHAPE, steps=2) for s in (session, oracle))
    assert found == pytest.approx(want, rel=2e-3)
    np.testing.assert_array_equal(session.read("loss_scale"), oracle.read("loss_scale"))
    assert session.read("loss_scale").tolist() == [0, 2] and first_planes_are_the_nearest(session) > 4
    for name, t in oracle.tensors.items():
        if t.role == "gradient":
            got, exact = session.read(name).astype(np.float64), oracle.read(name)
            # What nearly cancels (the bias of keys has no gradient at all) is noise, of the size of the scaled loss.
            scale = np.linalg.norm(exact) + 2.0**FIRST_SCALE * 1e-3 * np.sqrt(exact.size)
            assert np.linalg.norm(got - exact) <= 0.02 * scale, name


def test_evaluation_and_decoding_equal_the_references(gpu):
    evaluate_and_decode_beside_the_references(MODEL, "fp16", 0.02)


@pytest.mark.parametrize("arch", [80, 90])
def test_fp16_is_cut_as_bf16_is(arch):
    def launches(compute: str) -> list[tuple[str, tuple]]:
        p = open_session(lambda programs: programs, MODEL, SHAPE, compute)
        found = lower_and_plan({"forward_backward": p["forward_backward"]}, Target(arch)).lowered["forward_backward"].launches
        cuts = ("BM", "BN", "BK", "DP", "DC", "BLOCK", "GROUP")
        return [(c.spec.name, tuple(kv for kv in c.spec.constants if kv[0] in cuts), c.spec.options) for c in found]

    assert launches("fp16") == launches("bf16")
