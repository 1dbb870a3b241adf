"""Numbers of 8 bits and their products on the CUDA backend, against ml_dtypes and the float64 references; what becomes of them on
Hopper."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.cuda.kernel import Target
from barellm.cuda.step import lower_and_plan
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.cases import check_model
from tests.cuda import check
from tests.cuda.check import InterpretedSession, check_op
from tests.cuda.sass import rows, wrong
from tests.fp8_cases import (
    HOPPER_SUMS,
    OTHERS,
    STATIC,
    USED,
    WAYS,
    each_form,
    each_format,
    each_product,
    every_number,
    floating_case,
    format_case,
    product_case,
    quantise_case,
    scale_cases,
    stochastic_case,
)
from tests.softcap_cases import WEIGHTS, transposed_network

ADA = Target(arch=89)  # the first that multiplies 8 bits, without Hopper's own products


def sums_to() -> float:
    """What a GPU loses; the interpreter adds in fp32."""
    return HOPPER_SUMS if check.DEVICE == "cuda" else 0.0


@each_format
@pytest.mark.parametrize("scale, per_target", [(1.0, False), (0.3, True)])
def test_every_number_becomes_the_nearest_code(dtype, scale, per_target):
    """As ml_dtypes has it: ties, denormals, infinities, NaN."""
    case, wanted = quantise_case(every_number(), dtype, scale, per_target)
    found = check_op(ops.Quantise, **case, target=ADA)["y"].astype(np.float64)
    np.testing.assert_array_equal(found, wanted)


@each_product
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_product(shape, dtype):
    check_op(ops.ScaledMatmul, **product_case(ops.ScaledMatmul, shape, dtype=dtype, sums_to=sums_to()), target=ADA)


@each_product
@pytest.mark.parametrize("mode", ["store", "add"])
@pytest.mark.parametrize("op_type", [ops.ScaledMatmulDx, ops.ScaledMatmulDw])
def test_gradient(op_type, shape, mode):
    check_op(op_type, **product_case(op_type, shape, mode, sums_to=sums_to()), target=ADA)


@pytest.mark.parametrize("emax, denormals", [(0, True), (-20, False)])
def test_every_number_becomes_the_nearest_with_a_floating_bias(emax, denormals):
    case, wanted = floating_case(every_number()[..., ::5], emax, denormals)
    np.testing.assert_array_equal(check_op(ops.RoundFloating, **case)["y"], wanted)


@each_form
def test_every_number_becomes_the_nearest_of_a_format(name, shift, dtype):
    case, wanted = format_case(every_number()[..., ::5], name, shift, dtype)
    np.testing.assert_array_equal(check_op(ops.RoundFloating, **case)["y"].astype(np.float64), wanted)


@pytest.mark.parametrize("name", OTHERS)
def test_stochastic_rounding_takes_the_words_of_its_stream(name):
    case, wanted = stochastic_case(every_number()[..., ::5], name)
    np.testing.assert_array_equal(check_op(ops.RoundFloating, **case)["y"], wanted)


def test_where_scales_come_from():
    for op_type, case in scale_cases():
        check_op(op_type, **case)


@pytest.mark.parametrize("way, compute, limit", [("static", "bf16", 6e-2), ("delayed", "fp32", 1e-5), ("floating", "bf16", 6e-2)])
@pytest.mark.extended
def test_a_network_with_a_classifier_in_8_bits(way, compute, limit):
    declare = partial(transposed_network, C=24, F=41, V=53, activation="relu2", scaling=WAYS[way])
    session = partial(InterpretedSession, target=ADA)
    assert check_model(session, declare, compute=compute, limit=limit, ids=51, scalars=WEIGHTS) >= USED[way]


@pytest.mark.extended
def test_hopper_multiplies_8_bits_by_its_own_instructions():
    """Products of the record's classifier: QGMMA, wide loads of operands, no spill, nothing waited for one at a time."""
    p = Program(Store(), compute="bf16")
    shape = (Dim("batch", 1), Dim("seq", 16384))
    x = p.linear(p.input("x", (*shape, 768), "bf16"), p.parameter("w", (768, 768)))
    head = p.parameter("head", (768, 50304))
    loss = p.softcapped_classifier(x, head, p.input("targets", shape), valid_vocab=50304, scaling=STATIC)
    p.output("loss", loss)
    p.backward(loss)
    found = lower_and_plan({"train": p}, Target(90)).specs
    found = {spec: op for spec, op in found.items() if spec.name in ("fp8_gemm", "transpose_codes", "quantise")}
    table = rows(found, 90)
    assert not [text for name, row in table.items() for text in wrong(name, row)]
    products = {name: row for name, row in table.items() if name.startswith("fp8_gemm")}
    assert len(products) == 3 and all(row["QGMMA"] >= 4 and not row["spills"] for row in products.values()), products


def test_a_card_without_these_formats_is_refused_in_a_line():
    p = Program(Store())
    transposed_network(p, C=24, F=41, V=53, activation="relu2", scaling=STATIC)
    with pytest.raises(ValueError, match=r"^quantise needs a GPU of compute capability 8\.9 or later, found 8\.0$"):
        lower_and_plan({"train": p}, Target(arch=80))
