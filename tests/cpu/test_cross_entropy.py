from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels.loss import classifier
from barellm.cpu.step import CpuSession
from barellm.program import ops
from tests.cases import check_scores, loss_case, loss_gradient_case, loss_of_scale_case, loss_operands, token_losses_case
from tests.cpu.check import ISAS, check_op, isa_named

SHAPES = [(1, 1, 1, 1), (2, 3, 7, 7), (3, 5, 65, 65), (1, 37, 128, 97), (2, 3, 1031, 1000), (1, 2, 50304, 50257)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@each_isa
@each_shape
@each_dtype
def test_cross_entropy(isa, shape, dtype):
    check_op(ops.CrossEntropy, isa, **loss_case(shape, dtype))


@each_isa
@each_shape
@each_dtype
def test_token_losses(isa, shape, dtype):
    got = check_op(ops.TokenLosses, isa, **token_losses_case(shape, dtype))
    assert got["margins"][0, 0] == 0


@pytest.mark.parametrize("compute, limit", [("fp32", 3e-6), ("bf16", 2e-2)])
def test_scores_in_chunks(compute, limit, monkeypatch):
    monkeypatch.setattr(classifier, "CHUNK", 8)
    check_scores(lambda programs: CpuSession(programs, threads=2), compute=compute, limit=limit)
    check_scores(lambda programs: CpuSession(programs, threads=2), compute=compute, limit=limit, quantized=True)


@each_isa
@each_dtype
@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e30])
def test_logits_of_any_size(isa, dtype, scale):
    check_op(ops.CrossEntropy, isa, **loss_of_scale_case(scale, dtype))


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
    check_op(ops.CrossEntropyBackward, isa, **loss_gradient_case(shape, dtype, mode))
