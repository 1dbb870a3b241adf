"""The product of signs on arrays. Its gradient is not its derivative, so it is not among the cases of test_functions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm import kernels
from tests.binary_cases import signs


def sign(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1, -1)


@pytest.mark.parametrize("shape, N", [((3, 7, 33), 65), ((1, 1), 1), ((13,), 3), ((131, 257), 97)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_a_product_is_exact(shape, N, dtype):
    a, b = signs(*shape).astype(dtype), signs(N, shape[-1], seed=2).astype(dtype)
    y = kernels.binary_matmul(a, b)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, sign(a.astype(np.float32)) @ sign(b.astype(np.float32)).T)


def test_gradients_go_straight_through_where_the_argument_is_small():
    r = np.random.default_rng(0)
    a, b = r.normal(size=(5, 37)).astype(np.float32), r.normal(size=(7, 37)).astype(np.float32)
    y, pull = kernels.vjp(kernels.binary_matmul, a, b)
    dy = r.normal(size=y.shape).astype(np.float32)
    da, db = pull(dy)
    np.testing.assert_allclose(da, (dy @ sign(b)) * (abs(a) <= 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(db, (dy.T @ sign(a)) * (abs(b) <= 1), rtol=1e-5, atol=1e-5)
