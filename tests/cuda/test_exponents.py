from __future__ import annotations

import numpy as np
import pytest

from barellm.cuda.kernels.optim import exponents
from barellm.program import ops
from tests.cases import normal
from tests.cuda.check import check_op
from tests.exponents_cases import SHAPES, exponents_case, numbers, weight_case


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_exponents_of_every_size(dtype):
    for shape in SHAPES:
        with np.errstate(over="ignore"):
            check_op(ops.Exponents, **exponents_case(numbers(*shape), dtype), plan=(shape[0] + 1, shape[1] + 2))


@pytest.mark.parametrize("dtype", ["split", "half", "truncated"])
def test_of_a_weight_in_two_planes_what_products_read(dtype):
    check_op(ops.Exponents, **weight_case(normal(37, 13), dtype))


def test_several_programs_and_turns_count_what_one_does(monkeypatch):
    """More rows of partial results than are added at a time, and a last program with less to do."""
    monkeypatch.setattr(exponents, "PROGRAMS", 37)
    monkeypatch.setattr(exponents, "BLOCK", 64)
    check_op(ops.Exponents, **exponents_case(numbers(3, 37, 65), "fp32"))
