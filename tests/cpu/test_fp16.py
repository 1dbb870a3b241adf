"""fp16 as a compute dtype: conversions, kernels, and a loss scale that follows the gradients."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.step import CpuSession
from barellm.optim.adamw import AdamW
from barellm.optim.rules import Rule, update
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.loss_scale import FIRST_SCALE, GROWTH_STEPS, LEAST_SCALE, MOST_SCALE
from barellm.program.ops.elementwise import ACTIVATIONS
from barellm.program.tensor import Dim
from barellm.runtime.reference import ReferenceSession
from tests.cases import backward_case, cached_case, forward_case, loss_case, normal
from tests.cpu.check import EPS, ISAS, check_op, isa_named, persistent, tokens
from tests.cpu.test_models import MODEL, open_session, train

each_isa = pytest.mark.parametrize("isa", ISAS)
HALF = 2.0**-11


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
    edges = np.array(
        [0.0, 65504, 65519.996, 65520, 1e30, np.inf, np.nan, 2.0**-25, 2.0**-25 * 1.0001, 1e-40], np.float32
    )
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


@each_isa
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 7, 37, 53), (1, 33, 70, 129)])
def test_products(isa, shape):
    B, T, N, K = shape
    x, w, dy = normal(B, T, K), normal(N, K, seed=2), normal(B, T, N, seed=3)
    host = isa_named(isa)
    weight = persistent(w, "half")
    bound = 8 * EPS * K**0.5 * (np.abs(x) @ np.abs(w).T + 1) * 1.01
    check_op(ops.Matmul, host, {"x": tokens(x, "fp16"), "weight": weight}, bounds={"y": bound})
    bound = 8 * EPS * N**0.5 * (np.abs(dy) @ np.abs(w) + 1) * 1.01
    check_op(ops.MatmulDx, host, {"dy": tokens(dy, "fp16"), "weight": weight}, bounds={"dx": bound})
    size = np.abs(dy).reshape(-1, N).T @ np.abs(x).reshape(-1, K)
    operands = {"dy": tokens(dy, "fp16"), "x": tokens(x, "fp16")}
    check_op(ops.MatmulDw, host, operands, bounds={"dweight": 8 * EPS * (B * T) ** 0.5 * (size + 1) * 1.01})


@each_isa
def test_rows(isa):
    host, x = isa_named(isa), normal(2, 5, 67)
    affine = {"weight": persistent(normal(67, seed=2)), "bias": persistent(normal(67, seed=3))}
    bounds = {"y": 64 * EPS * 67**0.5, "mean": 16 * EPS, "rstd": 64 * EPS}
    check_op(ops.LayerNorm, host, {"x": tokens(x), **affine}, bounds=bounds, eps=1e-5, dtype="fp16")
    check_op(ACTIVATIONS["gelu"].forward, host, {"x": tokens(x, "fp16")}, bounds={"y": 16 * EPS * 4})
    given = {"dy": tokens(normal(2, 5, 67, seed=4), "fp16"), "x": tokens(x, "fp16")}
    check_op(ACTIVATIONS["gelu"].backward, host, given, bounds={"dx": 32 * EPS * 8}, modes={"dx": "add"})
    check_op(ops.CrossEntropy, host, **loss_case((2, 5, 67, 61), "fp16"))


@each_isa
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention(isa, rate):
    check_op(ops.Attention, isa_named(isa), **forward_case((2, 37, 2, 24), "fp16", rate=rate))
    check_op(ops.AttentionBackward, isa_named(isa), **backward_case((2, 37, 2, 24), "fp16", rate=rate))


@each_isa
def test_decoding(isa):
    check_op(ops.AttentionCached, isa_named(isa), **cached_case("fp16", pos=3, T=4, heads=2, D=24, length=19))


def scaled_update(compute: str = "fp16") -> tuple[Program, Store]:
    store = Store()
    p = Program(store, compute=compute)
    p.parameter("w", (7, 5), std=1.0)
    p.gradient_of(store.tensors["w"])
    update(p, [Rule("*", optimizer=AdamW())], clip=1.0)
    return p, store


@pytest.mark.parametrize("open_session", [ReferenceSession, lambda programs: CpuSession(programs, threads=2)])
def test_the_loss_scale_follows_the_gradients(open_session):
    p, _ = scaled_update()
    session = open_session({"update": p})
    session.write("w", normal(7, 5))

    def step(gradient: float, state: tuple[int, int]) -> tuple[list[int], np.ndarray]:
        session.write("loss_scale", np.array(state, np.int32))
        session.write("w.grad", np.full((7, 5), gradient, np.float32))
        session.run("update", lr=0.1, step=1, seed=0)
        return session.read("loss_scale").tolist(), session.read("clip")

    state, clip = step(2.0**FIRST_SCALE * 0.01, (0, 0))
    assert state == [0, 1]
    assert clip == pytest.approx([0.01 * 35**0.5, 2.0**-FIRST_SCALE], rel=1e-6)
    assert step(1.0, (2, GROWTH_STEPS - 1))[0] == [3, 0]
    assert step(1.0, (2, GROWTH_STEPS - 2))[0] == [2, GROWTH_STEPS - 1]
    assert step(1.0, (MOST_SCALE - FIRST_SCALE, GROWTH_STEPS - 1))[0] == [MOST_SCALE - FIRST_SCALE, 0]
    before = session.read("w")
    for bad in (np.inf, np.nan):
        state, clip = step(bad, (2, 70))
        assert state == [1, 0] and np.isnan(clip[1])
    assert step(np.inf, (LEAST_SCALE - FIRST_SCALE, 5))[0] == [LEAST_SCALE - FIRST_SCALE, 0]
    np.testing.assert_array_equal(session.read("w"), before)
    assert session.read("skipped")[0] == 3


def test_other_precisions_have_no_loss_scale():
    assert "loss_scale" not in scaled_update("bf16")[1].tensors


@each_isa
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


def test_bits_do_not_depend_on_threads():
    digests = set()
    for threads in (1, 2, 5):
        session = open_session(CpuSession, MODEL, (3, 17), "fp16", threads=threads)
        session.run("init", seed=3)
        train(session, MODEL, (3, 17), steps=2)
        digests.add(session.digest())
        session.close()
    assert len(digests) == 1
