from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.cuda import step
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import AdamW
from barellm.optim.adamw import adamw as adamw_of_all
from barellm.optim.rules import Rule, update
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.grouping import members
from barellm.runtime.reference import ReferenceSession
from tests.cases import adamw_case, check_bf16_update, each_moments, normal
from tests.cuda.check import EPS, PLAIN, InterpretedSession, check_op, persistent
from tests.moment_cases import STREAM, check_rounding

SHAPES = [(1,), (7,), (65,), (3, 131), (17, 257)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@each_shape
def test_sum_squares(shape):
    x = normal(*shape)
    check_op(ops.SumSquares, {"x": persistent(x, role="gradient")}, bounds={"partials": 16 * EPS * (x**2).sum()})


def test_sum_squares_of_more_than_one_chunk():
    x = normal(259, 257)
    check_op(ops.SumSquares, {"x": persistent(x, role="gradient")}, bounds={"partials": 16 * EPS * (x**2).sum()})


def clip(partials, limit, skipped=4):
    given = {"skipped": persistent(np.array([skipped]), "i32", "state")}
    given |= {f"p{i}": persistent(p, role="gradient") for i, p in enumerate(partials)}
    return check_op(ops.ClipScale, given, clip=limit, bounds={"clip": 0.0})


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("counts", [(1,), (3, 1, 70), (1,) * 40], ids=str)
def test_clip_scale(limit, counts):
    clip([normal(n, seed=i) ** 2 for i, n in enumerate(counts)], limit)


def test_clip_scale_of_zero_gradients():
    clip([np.zeros(3)], 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_norm_that_is_not_finite_is_counted(bad):
    got = clip([np.ones(2), np.array([1.0, bad])], 1.0)
    assert np.isnan(got["clip"][1])


def adamw(shape, dtype, *, step=1, **more):
    given, bounds, attrs = adamw_case(shape, dtype, step=step, **more)
    return given, check_op(ops.AdamW, given, scalars={"step": step, "lr": 3e-3, "seed": 9}, bounds=bounds, **attrs)


@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@each_moments
def test_adamw(shape, dtype, weight_decay, moments):
    adamw(shape, dtype, moments=moments, weight_decay=weight_decay)


@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "bf16_u16"])
@pytest.mark.parametrize("shape", [(7,), (3, 131), (259, 257)], ids=str)
@pytest.mark.parametrize("step, eps", [(1, 0.1), (9, 1e-10)])
@pytest.mark.extended
def test_cautious_adam(shape, dtype, step, eps):
    """At a rate of 6e-3 the decay takes some percent; where eps is large, it shows that it comes before the bias."""
    more = {"weight_decay": 1e3, "lr_scale": 2.0, "eps": eps, "op_type": ops.CautiousAdam}
    given, bounds, attrs = adamw_case(shape, dtype, step=step, **more)
    check_op(ops.CautiousAdam, given, scalars={"step": step, "lr": 3e-3}, bounds=bounds, **attrs)


@pytest.mark.parametrize("op_type", [ops.AdamW, ops.CautiousAdam])
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])
def test_a_weight_that_holds_bf16(op_type, dtype):
    check_bf16_update(check_op, op_type, dtype)


def test_cautious_adam_changes_nothing_where_the_norm_is_not_finite():
    given, bounds, attrs = adamw_case((3, 131), "bf16_u16", scale=np.nan, op_type=ops.CautiousAdam)
    got = check_op(ops.CautiousAdam, given, scalars={"lr": 3e-3}, bounds=bounds, **attrs)
    for name in ("param", "m", "v"):
        assert np.array_equal(got[name], given[name].values)


@pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "stochastic"])
def test_moments_are_rounded_as_the_reference_rounds(stream):
    check_rounding(InterpretedSession, stream=stream, every=61)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adamw_at_any_step(step, beta2):
    adamw((65,), "fp32", step=step, beta2=beta2)


@pytest.mark.parametrize("lr_scale", [0.5, 20.0])
def test_adamw_at_a_rate_of_its_own(lr_scale):
    adamw((3, 131), "fp32", step=3, lr_scale=lr_scale)


def test_parameters_of_two_rates_are_two_launches():
    p = Program(Store())
    for name in ("a", "b", "c"):
        p.parameter(name, (64,), std=1.0)
    update(p, [Rule("b", optimizer=AdamW(lr_scale=2.0)), Rule("*", optimizer=AdamW())], clip=1.0)
    session = InterpretedSession({"optimizer_step": p})
    found = [[u.param.name for u in members(op)] for op in session.lowered["optimizer_step"].ops if op.name == "adamw"]
    assert sorted(found) == [["a", "c"], ["b"]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16"])
@each_moments
def test_adamw_changes_nothing_where_the_norm_is_not_finite(dtype, moments):
    given, got = adamw((3, 131), dtype, scale=np.nan, moments=moments)
    for name in ("param", "m", "v"):
        assert np.array_equal(got[name], given[name].values)


# --- all parameters in a launch ---

# Counts of chunks, of programs, of neither; a vector, a multiple of 16 bytes or nothing wide.
PARAMETERS = [(67, 1024), (1,), (64,), (3, 131), (65539,), (16, 80), (4097,), (2, 2), (4096,)]


def update_of_many(compute: str, moments: str, *, groups: bool = True, bad: float = 0.5):
    """(session, launches) after two updates of all parameters; `bad`: one value of one gradient in the second."""
    p = Program(Store(), compute=compute)
    for i, shape in enumerate(PARAMETERS):
        p.parameter(f"p{i}", shape, std=1.0)
    adamw_of_all(p, OptimConfig(moments=moments, clip=3.0))
    with pytest.MonkeyPatch.context() as m:
        if not groups:
            m.setattr(step, "GROUPS", {})
        session = InterpretedSession({"optimizer_step": p})
    return session, run_updates(session, bad)


def run_updates(session, bad: float = 0.5):
    for name, t in session.tensors.items():
        if t.role == "parameter":
            session.write(name, normal(*t.shape, seed=len(name)))
    for i in range(2):
        for name, t in session.tensors.items():
            if t.role == "gradient":
                session.write(name, normal(*t.shape, seed=10 * i + t.size))
        if i:
            session.write("p3.grad", np.full((3, 131), bad))
        session.run("optimizer_step", step=i + 1, lr=1e-2, seed=4)
    return [launch.spec.name for low in getattr(session, "lowered", {}).values() for launch in low.launches]


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@each_moments
@pytest.mark.extended
def test_all_parameters_in_a_few_launches_have_the_bits_of_single_ones(compute, moments):
    together, launches = update_of_many(compute, moments)
    apart, many = update_of_many(compute, moments, groups=False)
    assert together.digest() == apart.digest()
    assert np.array_equal(together.read("clip"), apart.read("clip"))
    assert launches.count("sum_squares") < many.count("sum_squares") == len(PARAMETERS)
    assert launches.count("adamw") < many.count("adamw") == len(PARAMETERS)
    assert launches.count("clip_scale") == 1


@pytest.mark.slow
def test_all_parameters_in_a_few_launches_are_the_references():
    session, _ = update_of_many("fp32", "fp32")
    oracle = ReferenceSession(session.programs)
    run_updates(oracle)
    np.testing.assert_allclose(session.read("clip"), oracle.read("clip"), rtol=1e-6)
    for name in oracle.tensors:
        np.testing.assert_allclose(session.read(name), oracle.read(name), rtol=2e-5, atol=2e-7, err_msg=name)


@pytest.mark.extended
def test_no_parameter_changes_where_the_norm_is_not_finite():
    session, _ = update_of_many("bf16", "16bit", bad=np.inf)
    assert session.read("skipped")[0] == 1 and np.isnan(session.read("clip")[1])
    kept, _ = update_of_many("bf16", "16bit")
    names = [name for name, t in kept.tensors.items() if t.role == "parameter"]
    assert all(not np.array_equal(session.read(name), kept.read(name)) for name in names)
    assert all(np.isfinite(session.read(name)).all() for name in names)


def test_gpt2_124m_is_updated_in_six_launches():
    model = ModelConfig(layers=12)
    optimizer = partial(adamw_of_all, config=OptimConfig())
    _, programs = build(model, batch=1, seq=8, compute="bf16", optimizer=optimizer)
    built = step.lower_and_plan({"optimizer_step": programs["optimizer_step"]}, PLAIN)
    names = [launch.spec.name for launch in built.calls["optimizer_step"]]
    assert names == ["sum_squares", "clip_scale", *["step_factors", "adamw"] * 2]
    split, plain = (launch.args[0].entries for launch in built.calls["optimizer_step"][3::2])
    assert (split, plain) == (50, 98)  # 4 matrices a layer and both embeddings; the rest are vectors
