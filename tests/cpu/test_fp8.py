"""Numbers of 8 bits and their products on the CPU, against ml_dtypes and the float64 references."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from tests.cases import check_model
from tests.cpu.check import ISAS, check_op, isa_named
from tests.fp8_cases import (
    OTHERS,
    USED,
    WAYS,
    codes_of,
    each_form,
    each_format,
    each_product,
    each_way,
    every_number,
    floating_case,
    format_case,
    product_case,
    quantise_case,
    scale_cases,
    stochastic_case,
)
from tests.softcap_cases import WEIGHTS, transposed_network

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


@each_isa
@each_format
@pytest.mark.parametrize("scale, per_target", [(1.0, False), (0.3, True)])
def test_every_number_becomes_the_nearest_code(isa, dtype, scale, per_target):
    """As ml_dtypes has it, bit for bit: ties, denormals, infinities, NaN."""
    case, wanted = quantise_case(every_number(), dtype, scale, per_target)
    found = check_op(ops.Quantise, isa, **case)["y"].astype(np.float64)
    np.testing.assert_array_equal(found, wanted)
    assert np.isnan(wanted).any() and np.isfinite(wanted).any()


@each_isa
@each_format
def test_every_code_is_read_as_the_number_that_it_is(isa, dtype):
    """Codes of infinity and NaN too, which the kernels never write, through a product with one."""
    p = Program(Store())
    x, one, scale = (
        p.state(name, shape, form) for name, shape, form in (("x", (256, 1), dtype), ("w", (1, 1), "e4m3"), ("s", (1,), "fp32"))
    )
    operands: dict[str, Any] = {"x": x, "weight": one, "x_scale": scale, "weight_scale": scale}
    p.output("y", p.apply(ops.ScaledMatmul, **operands, dtype="fp32", source=(), scaling=None).y)
    session = CpuSession({"op": p}, isa=isa, threads=1)
    session.stored(x, (256, 1)).view(np.uint8)[:, 0] = np.arange(256)
    session.write("w", np.ones((1, 1)))
    session.write("s", np.ones(1))
    session.run("op")
    np.testing.assert_array_equal(session.read("y")[:, 0], codes_of(dtype))
    session.close()


@each_isa
@each_product
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_product(isa, shape, dtype):
    check_op(ops.ScaledMatmul, isa, **product_case(ops.ScaledMatmul, shape, dtype=dtype))


@each_isa
@each_product
@pytest.mark.parametrize("mode", ["store", "add"])
def test_gradient_of_the_input(isa, shape, mode):
    check_op(ops.ScaledMatmulDx, isa, **product_case(ops.ScaledMatmulDx, shape, mode))


@each_isa
@each_product
@pytest.mark.parametrize("mode", ["store", "add"])
def test_gradient_of_the_weight(isa, shape, mode):
    check_op(ops.ScaledMatmulDw, isa, **product_case(ops.ScaledMatmulDw, shape, mode))


@each_isa
@pytest.mark.parametrize("emax, denormals", [(0, True), (-20, False)])
def test_every_number_becomes_the_nearest_with_a_floating_bias(isa, emax, denormals):
    case, wanted = floating_case(every_number(), emax, denormals)
    np.testing.assert_array_equal(check_op(ops.RoundFloating, isa, **case)["y"], wanted)


@each_isa
@each_form
def test_every_number_becomes_the_nearest_of_a_format(isa, name, shift, dtype):
    """As ml_dtypes has it, of every bf16 and what lies in the middle between two codes; e8m7 is bf16 itself."""
    case, wanted = format_case(every_number(), name, shift, dtype)
    np.testing.assert_array_equal(check_op(ops.RoundFloating, isa, **case)["y"].astype(np.float64), wanted)


@each_isa
@pytest.mark.parametrize("name", OTHERS)
def test_stochastic_rounding_takes_the_words_of_its_stream(isa, name):
    case, wanted = stochastic_case(every_number(), name)
    np.testing.assert_array_equal(check_op(ops.RoundFloating, isa, **case)["y"], wanted)


@each_isa
def test_where_scales_come_from(isa):
    for op_type, case in scale_cases():
        check_op(op_type, isa, **case)


@each_isa
@each_way
@pytest.mark.parametrize("compute, limit", [("fp32", 1e-5), ("bf16", 6e-2)])
@pytest.mark.extended
def test_a_network_with_a_classifier_in_8_bits(isa, way, compute, limit):
    declare = partial(transposed_network, C=24, F=41, V=53, activation="relu2", scaling=WAYS[way])
    session = partial(CpuSession, isa=isa, threads=2)
    found = check_model(session, declare, compute=compute, limit=limit, ids=51, scalars=WEIGHTS)
    assert found >= USED[way]
