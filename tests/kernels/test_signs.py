"""The product of signs on arrays. Its gradient is not its derivative, so it is not among the cases of test_functions."""

from __future__ import annotations

import numpy as np
import pytest

from barellm import kernels
from tests.binary_cases import signs
from tests.kernels.cases import BFLOAT16, FLOAT32, near


def sign(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1, -1)


@pytest.mark.parametrize("shape, N", [((3, 7, 33), 65), ((1, 1), 1), ((13,), 3), ((131, 257), 97)])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_product_is_exact(shape, N, dtype):
    a, b = signs(*shape).astype(dtype), signs(N, shape[-1], seed=2).astype(dtype)
    y = kernels.binary_matmul(a, b)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, sign(a.astype(np.float32)) @ sign(b.astype(np.float32)).T)


@pytest.mark.parametrize("kind_a", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("kind_b", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("rows, N, K", [(5, 7, 37), (67, 131, 257)])
def test_gradients_go_straight_through_where_the_argument_is_small(kind_a, kind_b, rows, N, K):
    """Those of float32 arguments with all digits, whatever the other argument is."""
    r = np.random.default_rng(0)
    a, b = r.normal(size=(rows, K)).astype(kind_a), r.normal(size=(N, K)).astype(kind_b)
    y, vjp_fn = kernels.vjp(kernels.binary_matmul, a, b)
    dy = r.normal(size=y.shape).astype(np.float32)
    exact_a, exact_b, exact_dy = (x.astype(np.float64) for x in (a, b, dy))
    wanted = (exact_dy @ sign(exact_b)) * (abs(exact_a) <= 1), (exact_dy.T @ sign(exact_a)) * (abs(exact_b) <= 1)
    for found, exact, kind in zip(vjp_fn(dy), wanted, (kind_a, kind_b), strict=True):
        assert found.dtype == kind
        near(found, exact, kind)
