from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels.optim import exponents
from barellm.program import ops
from barellm.program.builder import Program, Store
from tests.cases import normal
from tests.cpu.check import ISAS, changed, check_op, isa_named
from tests.exponents_cases import SHAPES, exponents_case, numbers, weight_case

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_exponents_of_every_size(isa, dtype):
    for shape in SHAPES:
        with np.errstate(over="ignore"):
            check_op(ops.ExponentStats, isa, **exponents_case(numbers(*shape), dtype), plan=(shape[0] + 1, shape[1] + 2))


@each_isa
@pytest.mark.parametrize("dtype", ["bf16_i16", "fp16_fp32", "bf16_u16"])
def test_of_a_weight_in_two_planes_what_products_read(isa, dtype):
    check_op(ops.ExponentStats, isa, **weight_case(normal(37, 13), dtype))


@each_isa
def test_several_chunks_count_what_one_does(isa, monkeypatch):
    """Fewer chunks at run time than planned, the last one shorter; and as many as there may be."""
    changed(monkeypatch, exponents, CHUNK=64, CHUNKS=5)
    for shape in ((1, 7, 31), (3, 37, 65)):
        check_op(ops.ExponentStats, isa, **exponents_case(numbers(*shape), "fp32"), plan=(shape[0] + 2, shape[1]))


def test_more_elements_than_32_bits_count_are_refused():
    p = Program(Store())
    with pytest.raises(ValueError, match=r"^exponents counts in 32 bits, expected fewer than 2\^31 elements: x \(65536"):
        p.exponent_stats(p.state("x", (65536, 32768), "bf16"))
