"""Packed signs and their products on the CUDA backend: exact integers."""

from __future__ import annotations

import pytest

from barellm.cuda.compile import triton_compile
from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.binary_cases import NAMES, SIZES, cases
from tests.cuda.check import check_op


@pytest.mark.parametrize("name", NAMES)
def test_signs(name):
    """Each size with another dtype."""
    for (K, N), dtype in zip(SIZES, ("fp32", "bf16", "fp32", "fp16", "bf16"), strict=True):
        op_type, given, more = cases(K, N, dtype)[name]
        check_op(op_type, given, **more)


@pytest.mark.parametrize("mode", ["add", "start"])
def test_products_are_added_to_what_is_there(mode):
    op_type, given, more = cases(33, 100, "fp32")["product"]
    check_op(op_type, given, modes={"y": mode}, scalars={"accumulate": 1}, bounds={"y": 1e-4}, **more)


@pytest.mark.slow
def test_the_compiler_makes_one_instruction_of_the_count():
    p = Program(Store(), compute="fp32")
    x = p.input("x", (Dim("batch", 4), Dim("seq", 64), 96), "fp32")
    p.output("y", p.binary_linear(x, p.parameter("w", (64, 96))))
    (spec,) = [s for s in lower_and_plan({"op": p}, Target(90)).specs if s.name == "binary_matmul"]
    ptx = triton_compile(spec, 90).asm["ptx"]
    assert ptx.count("popc.b32") == 64 * 64 // 128  # a thread's share of the tile, once a word
