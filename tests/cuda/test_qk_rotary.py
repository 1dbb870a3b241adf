from __future__ import annotations

import pytest

from tests.cuda.check import check_op
from tests.rotary_cases import CASES, case

each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_case = pytest.mark.parametrize("shape, form", CASES, ids=str)


@each_case
@each_dtype
def test_heads_are_normalised_and_turned(shape, form, dtype):
    check_op(**case(shape, form, dtype))


@each_case
@each_dtype
def test_gradient_turns_back(shape, form, dtype):
    check_op(**case(shape, form, dtype, backward=True, mode="add" if shape[1] == 7 else "store"))


@each_dtype
def test_columns_of_a_wider_tensor(dtype):
    shape = (3, 2, 2, 4, 20)
    check_op(**case(shape, "shifted", dtype, view=True))
    check_op(**case(shape, "shifted", dtype, backward=True, mode="add", view=True))
