"""AdamW with 16-bit moments: the compiled kernel against the formats, code by code, and whole programs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import MOMENTS, OptimConfig
from barellm.cpu.step import CpuSession
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.moments import FORMATS, decode, encode
from barellm.runtime.reference import ReferenceSession
from tests.cpu.check import ISAS, isa_named
from tests.cpu.test_models import MODEL, THREADS, batch_of, train
from tests.moment_cases import STREAM, Update, check_rounding

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_rounding = pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "stochastic"])


def on(isa):
    return lambda programs: CpuSession(programs, threads=2, isa=isa)


@each_isa
def test_every_code_goes_through_the_kernel_unchanged(isa):
    """Betas of 1 and no gradient: decoded, multiplied by one, encoded."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    update = Update(on(isa), codes.size, beta1=1.0, beta2=1.0, stream=None)
    with np.errstate(all="ignore"):
        m, v = update.run(m=codes, v=codes, grad=np.zeros(codes.size))
    update.close()
    assert np.array_equal(v, codes)
    assert np.array_equal(m, np.where(codes == 0x8000, 0, codes))  # minus zero is read as zero, and never written


@each_isa
@each_rounding
def test_the_kernel_rounds_every_value_as_the_reference_does(isa, stream):
    check_rounding(on(isa), stream=stream)


@each_isa
def test_random_bits_of_a_step_keep_the_mean_and_the_next_step_has_others(isa):
    n = 1 << 18
    update = Update(on(isa), n, beta1=0.0, beta2=0.0, stream=STREAM)
    g = np.full(n, np.float32(1.1e-3))
    found = [update.run(m=0, v=0, grad=g, step=step, seed=seed) for step, seed in ((1, 1), (2, 1), (1, 2), (1, 1))]
    update.close()
    for i, (dtype, x) in enumerate((("e6m9", g[0]), ("ue6m10", g[0] * g[0]))):
        values = decode(found[0][i], dtype).astype(np.float64)
        assert len(np.unique(values)) == 2
        assert abs(values.mean() - x) < 5 * values.std() / np.sqrt(n)
        assert np.array_equal(found[0][i], found[3][i])
        assert all(0.2 < (found[0][i] != other[i]).mean() < 0.6 for other in found[1:3])


def test_a_second_moment_sticks_to_nearest_and_decays_stochastically():
    """beta2 = 0.9999 without gradients, 2000 steps of the kernel."""
    mean = {}
    for stream in (None, STREAM):
        update = Update(on(isa_named(ISAS[0])), 4096, beta1=0.9, beta2=0.9999, stream=stream)
        update.run(m=0, v=encode(np.full(4096, 1e-6, np.float32), "ue6m10"), grad=np.zeros(4096), step=1)
        first = update.session.read("v").mean() if stream is None else 1e-6
        for step in range(2, 2001):
            update.session.run("op", lr=0.0, step=step, seed=1)
        mean[stream] = update.session.read("v").mean(dtype=np.float64)
        update.close()
        if stream is None:
            assert mean[stream] == pytest.approx(first, rel=1e-6)  # not one code has moved
    assert mean[STREAM] == pytest.approx(1e-6 * 0.9999**2000, rel=2e-3)


@each_isa
@each_rounding
@pytest.mark.extended
def test_a_norm_that_is_not_finite_leaves_every_code(isa, stream):
    codes = np.arange(1 << 16, dtype=np.uint16)
    update = Update(on(isa), codes.size, beta1=0.9, beta2=0.95, stream=stream)
    update.session.write("clip", np.array([np.inf, np.nan]))
    m, v = update.run(m=codes, v=codes, grad=np.full(codes.size, np.nan))
    update.close()
    assert np.array_equal(m, codes) and np.array_equal(v, codes)


# --- whole programs ---


def opened(kind, moments: str, compute: str = "bf16", model=MODEL, **options):
    optimizer = partial(adamw, config=OptimConfig(lr=3e-3, clip=0.7, moments=moments))
    _, programs = build(model, batch=3, seq=17, compute=compute, optimizer=optimizer)
    return kind(programs, **options)


@pytest.mark.parametrize("moments", MOMENTS)
def test_moments_of_matrices_alone_have_16_bits(moments):
    session = opened(ReferenceSession, moments)
    for t in session.store.of_role("parameter"):
        packed = moments != "fp32" and len(t.shape) == 2
        found = tuple(session.tensors[f"{t.name}.{k}"].dtype for k in "mv")
        assert found == (("e6m9", "ue6m10") if packed else ("fp32", "fp32"))
    streams = [op.stream for op in session.programs["optimizer_step"].ops if op.name == "adamw" and op.stream is not None]
    assert len(set(streams)) == len(streams) and bool(streams) == (moments == "16bit-stochastic")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS[1:])
@pytest.mark.extended
def test_bits_do_not_depend_on_threads(isa, moments):
    outcomes = set()
    for threads in THREADS:
        session = opened(CpuSession, moments, isa=isa_named(isa), threads=threads)
        session.run("init", seed=3)
        losses = train(session, MODEL, (3, 17), steps=3)
        outcomes.add((session.digest(), tuple(losses)))
        session.close()
    assert len(outcomes) == 1


@pytest.mark.parametrize("moments", MOMENTS[1:])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_a_model_trains_like_the_references(moments, compute):
    """After one step from zero state: rounding may differ by a unit where fp32 and float64 fall on two sides of a boundary."""
    model = replace(MODEL, dropout=0.0)
    cpu, reference = (opened(CpuSession, moments, compute, model), opened(ReferenceSession, moments, compute, model, storage=True))
    cpu.run("init", seed=3)
    tokens, targets = batch_of(model, 3, 17, seed=1)
    for name, t in cpu.tensors.items():
        if t.role == "parameter":
            reference.write(name, cpu.read(name))
    for session in (cpu, reference):
        session.write("tokens", tokens)
        session.write("targets", targets)
        session.run("forward_backward", batch=3, seq=17, accumulate=0, inv_targets=1 / 51, step=1, seed=5)
        if session is reference:
            for name, t in cpu.tensors.items():
                if t.role == "gradient":  # the same ones: a product's rounding is not what is looked at here
                    session.write(name, cpu.read(name))
        session.run("optimizer_step", step=1, lr=1e-3, seed=5)
    for name, t in cpu.tensors.items():
        if t.dtype in FORMATS:
            got, want = cpu.read(name).astype(np.float64), reference.read(name).astype(np.float64)
            unit = 2.0 ** -FORMATS[t.dtype].mantissa
            assert (abs(got - want) <= unit * abs(want) + 1e-18).all() and (got != want).mean() < 0.01, name
        elif t.role == "parameter":
            np.testing.assert_allclose(cpu.read(name), reference.read(name), atol=2e-6, err_msg=name)
    cpu.close()


def test_values_written_are_rounded_and_read_as_fp32():
    for kind, options in ((CpuSession, {}), (ReferenceSession, {"storage": True})):
        session = opened(kind, "16bit", **options)
        values = np.random.default_rng(0).standard_normal(session.tensors["wte.m"].shape).astype(np.float32)
        session.write("wte.m", values)
        want = decode(encode(values, "e6m9"), "e6m9")
        assert session.read("wte.m").dtype == np.float32
        assert np.array_equal(session.read("wte.m"), want) and np.array_equal(session.read_rows("wte.m", 2, 5), want[2:5])
        session.write_rows("wte.m", 1, values[:1])
        assert np.array_equal(session.read("wte.m")[1], want[0])


def test_other_dtypes_of_moments_are_refused():
    store = Store()
    inputs = {name: store.get(name, (4,), "fp32", "state") for name in ("param", "grad", "v")}
    with pytest.raises(ValueError, match=r"expects fp32 moments, or e6m9 and ue6m10: m \(4,\) e6m9, v \(4,\) fp32"):
        Program(store).apply(
            ops.AdamW, **inputs, m=store.get("m", (4,), "e6m9", "state"), clip=store.get("c", (2,), "fp32", "state")
        )
