from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.program import ops
from tests.cases import adamw_case, check_bf16_update, each_moments, normal
from tests.cpu.check import EPS, ISAS, check_op, isa_named, persistent

SHAPES = [(1,), (7,), (65,), (3, 131), (259, 257)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@each_isa
@each_shape
def test_sum_squares(isa, shape):
    x = normal(*shape)
    check_op(ops.SumSquares, isa, {"x": persistent(x, role="gradient")}, bounds={"partials": 16 * EPS * (x**2).sum()})


def clip(isa, partials, limit, skipped=4):
    given = {"skipped": persistent(np.array([skipped]), "i32", "state")}
    given |= {f"p{i}": persistent(p, role="gradient") for i, p in enumerate(partials)}
    return check_op(ops.ClipScale, isa, given, clip=limit, bounds={"clip": 0.0})


@each_isa
@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("counts", [(1,), (3, 1, 70), (1,) * 40], ids=str)
def test_clip_scale(isa, limit, counts):
    clip(isa, [normal(n, seed=i) ** 2 for i, n in enumerate(counts)], limit)


@each_isa
def test_clip_scale_of_zero_gradients(isa):
    clip(isa, [np.zeros(3)], 1.0)


@each_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_norm_that_is_not_finite_is_counted(isa, bad):
    got = clip(isa, [np.ones(2), np.array([1.0, bad])], 1.0)
    assert np.isnan(got["clip"][1])


def adamw(isa, shape, dtype, *, step=1, **more):
    given, bounds, attrs = adamw_case(shape, dtype, step=step, **more)
    return given, check_op(ops.AdamW, isa, given, scalars={"step": step, "lr": 3e-3, "seed": 9}, bounds=bounds, **attrs)


@each_isa
@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@each_moments
@pytest.mark.extended
def test_adamw(isa, shape, dtype, weight_decay, moments):
    adamw(isa, shape, dtype, moments=moments, weight_decay=weight_decay)


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "bf16_u16"])
@pytest.mark.parametrize("shape", [(7,), (3, 131), (259, 257)], ids=str)
@pytest.mark.parametrize("step, eps", [(1, 0.1), (9, 1e-10)])
def test_cautious_adam(isa, shape, dtype, step, eps):
    """At a rate of 6e-3 the decay takes some percent; where eps is large, it shows that it comes before the bias."""
    more = {"weight_decay": 1e3, "lr_scale": 2.0, "eps": eps, "op_type": ops.CautiousAdam}
    given, bounds, attrs = adamw_case(shape, dtype, step=step, **more)
    check_op(ops.CautiousAdam, isa, given, scalars={"step": step, "lr": 3e-3}, bounds=bounds, **attrs)


@each_isa
@pytest.mark.parametrize("op_type", [ops.AdamW, ops.CautiousAdam])
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])
def test_a_weight_that_holds_bf16(isa, op_type, dtype):
    check_bf16_update(partial(check_op, isa=isa), op_type, dtype)


@each_isa
def test_cautious_adam_changes_nothing_where_the_norm_is_not_finite(isa):
    given, bounds, attrs = adamw_case((3, 131), "bf16_u16", scale=np.nan, op_type=ops.CautiousAdam)
    got = check_op(ops.CautiousAdam, isa, given, scalars={"lr": 3e-3}, bounds=bounds, **attrs)
    for name in ("param", "m", "v"):
        assert np.array_equal(got[name], given[name].values)


@each_isa
@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adamw_at_any_step(isa, step, beta2):
    adamw(isa, (65,), "fp32", step=step, beta2=beta2)


@each_isa
@pytest.mark.parametrize("lr_scale", [0.5, 20.0])
def test_adamw_at_a_rate_of_its_own(isa, lr_scale):
    adamw(isa, (3, 131), "fp32", step=3, lr_scale=lr_scale)


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16"])
@each_moments
def test_adamw_changes_nothing_where_the_norm_is_not_finite(isa, dtype, moments):
    given, got = adamw(isa, (3, 131), dtype, scale=np.nan, moments=moments)
    for name in ("param", "m", "v"):
        assert np.array_equal(got[name], given[name].values)
