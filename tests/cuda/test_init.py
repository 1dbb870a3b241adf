from __future__ import annotations

import numpy as np
import pytest

from barellm.assembly.programs import build, initialise
from barellm.cuda import step
from barellm.models.gpt2 import Config as ModelConfig
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.runtime.reference import ReferenceSession
from tests.cases import check_bf16_init
from tests.cuda.check import EPS, PLAIN, InterpretedSession, check_op, persistent

SHAPES = [(1,), (7,), (65,), (1, 1), (3, 131), (5, 16), (37, 257)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])


@each_shape
@each_dtype
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.extended
def test_normal_init(shape, dtype, missing):
    given = {"param": persistent(np.zeros(shape), dtype)}
    attrs = {"std": 0.02, "stream": 5, "valid_rows": shape[0] - missing}
    check_op(ops.NormalInit, given, scalars={"seed": (1 << 40) + 1234}, bounds={"param": 0.02 * 8 * EPS * 6}, **attrs)


@pytest.mark.parametrize("shape, dtype", [((7,), "fp32"), ((5, 16), "fp16_fp32"), ((37, 257), "bf16_i16")], ids=str)
def test_uniform_init(shape, dtype):
    given = {"param": persistent(np.zeros(shape), dtype)}
    attrs = {"bound": 0.03, "stream": 5, "valid_rows": shape[0] - 1}
    check_op(ops.UniformInit, given, scalars={"seed": 77}, bounds={"param": 0.03 * 2 * EPS}, **attrs)


@each_shape
@each_dtype
@pytest.mark.parametrize("missing", [0, 1])
def test_constant_init(shape, dtype, missing):
    given = {"param": persistent(np.zeros(shape), dtype)}
    check_op(ops.ConstantInit, given, value=0.7, valid_rows=shape[0] - missing)


@pytest.mark.parametrize("dtype", ["fp32", "bf16_i16", "fp16_fp32", "bf16_u16"])
@pytest.mark.parametrize("op_type, size", [(ops.NormalInit, {"std": 0.02}), (ops.UniformInit, {"bound": 0.03})], ids=str)
@pytest.mark.extended
def test_a_parameter_that_begins_with_bf16(op_type, size, dtype):
    check_bf16_init(check_op, op_type, dtype, **size)


# --- all parameters in a few launches ---

# Of one width and of others; rows that are zero; a vector, a multiple of 16 bytes or nothing wide.
PARAMETERS = [(67, 48), (1,), (9, 48), (3, 131), (5, 131), (64,), (1, 48), (4097,), (2, 2), (131,)]


def initial(compute: str):
    p = Program(Store(), compute=compute)
    for i, shape in enumerate(PARAMETERS):
        values = {"value": 0.25 * i} if len(shape) == 1 else {"std": 0.1 * i + 0.1}
        p.parameter(f"p{i}", shape, valid_rows=max(1, shape[0] - i % 3), **values)
    initialise(p)
    return {"init": p}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_all_parameters_in_a_few_launches_have_the_bits_of_single_ones(compute, monkeypatch):
    together = InterpretedSession(initial(compute))
    monkeypatch.setattr(step, "GROUPS", {})
    apart, oracle = InterpretedSession(initial(compute)), ReferenceSession(initial(compute))
    for session in (together, apart, oracle):
        session.run("init", seed=11)
    assert together.digest() == apart.digest()
    for name in oracle.tensors:
        np.testing.assert_allclose(together.read(name), oracle.read(name), rtol=2e-5, atol=1e-6, err_msg=name)
    few, many = (len(session.lowered["init"].launches) for session in (together, apart))
    assert few < many == len(PARAMETERS)


def test_gpt2_124m_is_initialised_in_three_launches():
    _, programs = build(ModelConfig(layers=12), batch=1, seq=8, compute="bf16")
    launches = step.lower_and_plan({"init": programs["init"]}, PLAIN).calls["init"]
    found = sorted((launch.spec.name, launch.args[0].entries) for launch in launches)
    assert found == [("constant_init", 98), ("random_init", 12), ("random_init", 38)]  # fcproj has other columns
