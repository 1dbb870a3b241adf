from __future__ import annotations

import pytest

from barellm.cpu.kernels import loops
from barellm.cpu.kernels.attention import qk_rotary
from tests.cpu.check import ISAS, changed, check_op, isa_named
from tests.rotary_cases import CASES, case

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@each_isa
@each_dtype
@pytest.mark.parametrize("shape, form", CASES, ids=str)
def test_heads_are_normalised_and_turned(isa, dtype, shape, form):
    check_op(isa=isa, **case(shape, form, dtype))


@each_isa
@each_dtype
@pytest.mark.parametrize("shape, form", CASES, ids=str)
def test_gradient_turns_back(isa, dtype, shape, form):
    check_op(isa=isa, **case(shape, form, dtype, backward=True, mode="add" if shape[1] == 7 else "store"))


@each_isa
@each_dtype
def test_columns_of_a_wider_tensor(isa, dtype):
    shape = (3, 2, 2, 4, 20)
    check_op(isa=isa, **case(shape, "shifted", dtype, view=True))
    check_op(isa=isa, **case(shape, "shifted", dtype, backward=True, mode="add", view=True))


@each_isa
@each_dtype
@pytest.mark.parametrize("backward", [False, True])
def test_claims_of_a_row_and_results_past_the_caches(isa, dtype, backward, monkeypatch):
    """Every row is its claim's first one, so keys find no statistics of the row before that their own thread wrote."""
    changed(monkeypatch, qk_rotary, STREAM_BYTES=0)
    changed(monkeypatch, loops, GRAIN=1)
    check_op(isa=isa, **case((2, 3, 2, 2, 128), "shifted", dtype, backward=backward))
