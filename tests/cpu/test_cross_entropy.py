from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cases import loss_operands
from tests.cpu.check import EPS, ISAS, check_op, isa_named, tokens

SHAPES = [(1, 1, 1, 1), (2, 3, 7, 7), (3, 5, 65, 65), (1, 37, 128, 97), (2, 3, 1031, 1000), (1, 2, 50304, 50257)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@each_isa
@each_shape
@each_dtype
def test_cross_entropy(isa, shape, dtype):
    B, T, _, valid = shape
    scalars = {"inv_targets": 1 / 7}
    bounds = {"lse": 16 * EPS * 20, "loss": 32 * EPS * 20 * B * T}
    check_op(
        ops.CrossEntropy,
        isa,
        loss_operands(shape, dtype),
        valid_vocab=valid,
        scalars=scalars,
        bounds=bounds,
        plan=(B + 1, T + 2),
    )


@each_isa
@each_dtype
@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e30])
def test_logits_of_any_size(isa, dtype, scale):
    shape = (1, 3, 65, 60)
    bounds = {"lse": 8 * EPS * 4 * (scale + 4), "loss": 16 * EPS * 12 * (scale + 4)}
    check_op(ops.CrossEntropy, isa, loss_operands(shape, dtype, scale), valid_vocab=60, bounds=bounds)


@each_isa
@each_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_what_is_not_finite_shows_in_the_loss(isa, dtype, bad):
    given = loss_operands((1, 5, 65, 60), dtype)
    given["logits"].values[0, 3, 33] = bad
    with np.errstate(invalid="ignore"):
        got = _loss_only(isa, given)
    assert not np.isfinite(got["loss"]).any()


def _loss_only(isa, given):
    return check_op(ops.CrossEntropy, isa, given, valid_vocab=60, bounds={"loss": None, "lse": None})


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_cross_entropy_backward(isa, shape, dtype, mode):
    B, T, _, valid = shape
    given = loss_operands(shape, dtype)
    lse = ops.CrossEntropy({}, {"valid_vocab": valid}).reference(given["logits"].values, given["targets"].values, 1.0)[
        "lse"
    ]
    given["lse"] = tokens(lse)
    scalars = {"inv_targets": 1 / 7}
    # The rounding of x - lse, of exp and of the product, in units of the probability; at the target that of p - 1.
    distance = np.where(np.arange(shape[2]) < valid, given["logits"].values - given["lse"].values[..., None], -np.inf)
    p = np.exp(distance)
    bound = EPS / 7 * (8 + np.where(p > 0, np.abs(distance), 0)) * p
    np.put_along_axis(bound, np.maximum(targets := given["targets"].values, 0)[..., None], 8 * EPS / 7, -1)
    bounds = {"dlogits": np.where(targets[..., None] >= 0, bound, 0) + (2 * EPS if mode == "add" else 0)}
    check_op(
        ops.CrossEntropyBackward,
        isa,
        given,
        valid_vocab=valid,
        scalars=scalars,
        modes={"dlogits": mode},
        bounds=bounds,
        plan=(B + 1, T + 2),
    )
