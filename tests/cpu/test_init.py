from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from barellm.program import ops
from tests.cases import check_bf16_init
from tests.cpu.check import EPS, ISAS, check_op, isa_named, persistent

SHAPES = [(1,), (7,), (65,), (1, 1), (3, 131), (5, 16), (259, 257)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "bf16_u16"])


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("missing", [0, 1])
def test_normal_init(isa, shape, dtype, missing):
    given = {"param": persistent(np.zeros(shape), dtype)}
    attrs = {"std": 0.02, "stream": 5, "valid_rows": shape[0] - missing}
    check_op(ops.NormalInit, isa, given, scalars={"seed": (1 << 40) + 1234}, bounds={"param": 0.02 * 8 * EPS * 6}, **attrs)


@each_isa
@each_dtype
@pytest.mark.parametrize("shape", [(7,), (5, 16), (259, 257)], ids=str)
def test_uniform_init(isa, shape, dtype):
    given = {"param": persistent(np.zeros(shape), dtype)}
    attrs = {"bound": 0.03, "stream": 5, "valid_rows": shape[0] - 1}
    found = check_op(ops.UniformInit, isa, given, scalars={"seed": 77}, bounds={"param": 0.03 * 2 * EPS}, **attrs)["param"]
    assert np.abs(found).max() < 0.03
    if np.size(found) > 10_000:
        assert np.abs(found).max() > 0.0299 and abs(found.std() - 0.03 / np.sqrt(3)) < 3e-4


@each_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])
@pytest.mark.parametrize("op_type, size", [(ops.NormalInit, {"std": 0.02}), (ops.UniformInit, {"bound": 0.03})], ids=str)
def test_a_parameter_that_begins_with_bf16(isa, op_type, size, dtype):
    check_bf16_init(partial(check_op, isa=isa), op_type, dtype, **size)


@each_isa
def test_normals_are_normal(isa):
    """Moments of 300000 of them, and the bits equal on every ISA's own lanes within rounding."""
    given = {"param": persistent(np.zeros((300, 1000)))}
    z = check_op(ops.NormalInit, isa, given, std=1.0, stream=1, valid_rows=300, bounds={"param": 50 * EPS})["param"].astype(
        np.float64
    )
    n = z.size
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((z**power).mean() - moment) < 5 * np.sqrt((z ** (2 * power)).mean() / n)
    # Neighbours in either direction are not correlated.
    for a, b in ((z[:, 1:], z[:, :-1]), (z[1:], z[:-1]), (z[:, 16:], z[:, :-16])):
        assert abs((a * b).mean()) < 5 / np.sqrt(n)


@each_isa
@each_shape
@each_dtype
@pytest.mark.parametrize("missing", [0, 1])
def test_constant_init(isa, shape, dtype, missing):
    given = {"param": persistent(np.zeros(shape), dtype)}
    check_op(ops.ConstantInit, isa, given, value=0.7, valid_rows=shape[0] - missing)
