"""fp16 as a compute dtype: conversions, kernels, and a loss scale that follows the gradients."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.loss_scale import FIRST_SCALE
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.cases import backward_case, cached_case, forward_case
from tests.cpu.check import ISAS, check_op, isa_named
from tests.cpu.test_models import MODEL, open_session, train
from tests.half_cases import PRODUCTS, check_branch_scales, check_loss_scale, check_products, check_rows, scaled_update

each_isa = pytest.mark.parametrize("isa", ISAS)


def cast(values: np.ndarray, source: str, target: str, isa: str) -> np.ndarray:
    p = Program(Store())
    x = p.input("x", (Dim("n", values.size),), source)
    p.output("y", p.apply(ops.Cast, x=x, dtype=target).y)
    session = CpuSession({"cast": p}, isa=isa_named(isa), threads=1)
    session.write("x", values)
    session.run("cast", n=values.size)
    found = session.stored(session.programs["cast"].named["y"], values.shape).copy()
    session.close()
    return found


@each_isa
def test_every_fp16_is_loaded_exactly(isa):
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(cast(codes, "fp16", "fp32", isa), codes.astype(np.float32))


@each_isa
def test_fp32_is_rounded_to_the_nearest_fp16(isa):
    """Ties, denormals, the largest number, what is beyond it, zeros, infinities, NaN, and a million others."""
    r = np.random.default_rng(0)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    edges = np.array([0.0, 65504, 65519.996, 65520, 1e30, np.inf, np.nan, 2.0**-25, 2.0**-25 * 1.0001, 1e-40], np.float32)
    random = r.integers(0, 1 << 31, 1 << 18, dtype=np.uint32).view(np.float32)
    near = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))])
    values = np.concatenate([halves, near, edges, random])
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    got = cast(values, "fp32", "fp16", isa)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint16)[numbers], want.view(np.uint16)[numbers])
    assert np.isnan(got[~numbers]).all()


def check_of(isa: str):
    return lambda op_type, given, **more: check_op(op_type, isa_named(isa), given, **more)


@each_isa
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products(isa, shape):
    check_products(check_of(isa), shape)


@each_isa
def test_rows(isa):
    check_rows(check_of(isa))


@each_isa
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention(isa, rate):
    check_op(ops.Attention, isa_named(isa), **forward_case((2, 37, 2, 24), "fp16", rate=rate))
    check_op(ops.AttentionBackward, isa_named(isa), **backward_case((2, 37, 2, 24), "fp16", rate=rate))


@each_isa
def test_decoding(isa):
    check_op(ops.AttentionCached, isa_named(isa), **cached_case("fp16", pos=3, T=4, heads=2, D=24, length=19))


@pytest.mark.parametrize("open_session", [ReferenceSession, lambda programs: CpuSession(programs, threads=2)])
def test_the_loss_scale_follows_the_gradients(open_session):
    check_loss_scale(open_session)
    check_branch_scales(open_session)


def test_other_precisions_have_no_loss_scale():
    assert "loss_scale" not in scaled_update("bf16")[1].tensors


@each_isa
@pytest.mark.extended
def test_a_model_trains_like_the_references(isa, monkeypatch):
    monkeypatch.setenv("BARELLM_POISON", "1")
    oracle = open_session(ReferenceSession, MODEL, (3, 17), "fp16")
    session = open_session(CpuSession, MODEL, (3, 17), "fp16", isa=isa_named(isa), threads=2)
    session.run("init", seed=3)
    for name, t in oracle.tensors.items():
        if t.role == "parameter":
            oracle.write(name, session.read(name))
    found, want = train(session, MODEL, (3, 17), steps=3), train(oracle, MODEL, (3, 17), steps=3)
    assert found == pytest.approx(want, rel=2e-3)
    np.testing.assert_array_equal(session.read("loss_scale"), oracle.read("loss_scale"))
    for name, t in oracle.tensors.items():
        if t.role == "gradient":
            got, exact = session.read(name).astype(np.float64), oracle.read(name)
            # What nearly cancels (the bias of keys has no gradient at all) is noise, of the size of the scaled loss.
            scale = np.linalg.norm(exact) + 2.0**FIRST_SCALE * 1e-3 * np.sqrt(exact.size)
            assert np.linalg.norm(got - exact) <= 0.02 * scale, name
    session.close()


@pytest.mark.extended
def test_bits_do_not_depend_on_threads():
    digests = set()
    for threads in (1, 2, 5):
        session = open_session(CpuSession, MODEL, (3, 17), "fp16", threads=threads)
        session.run("init", seed=3)
        train(session, MODEL, (3, 17), steps=2)
        digests.add(session.digest())
        session.close()
    assert len(digests) == 1
