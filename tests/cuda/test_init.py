from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from tests.cuda.check import EPS, check_op, persistent

SHAPES = [(1,), (7,), (65,), (1, 1), (3, 131), (5, 16), (37, 257)]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "split"])


@each_shape
@each_dtype
@pytest.mark.parametrize("missing", [0, 1])
def test_normal_init(shape, dtype, missing):
    given = {"param": persistent(np.zeros(shape), dtype)}
    attrs = {"std": 0.02, "stream": 5, "valid_rows": shape[0] - missing}
    check_op(ops.NormalInit, given, scalars={"seed": (1 << 40) + 1234}, bounds={"param": 0.02 * 8 * EPS * 6}, **attrs)


@each_shape
@each_dtype
@pytest.mark.parametrize("missing", [0, 1])
def test_constant_init(shape, dtype, missing):
    given = {"param": persistent(np.zeros(shape), dtype)}
    check_op(ops.ConstantInit, given, value=0.7, valid_rows=shape[0] - missing)
