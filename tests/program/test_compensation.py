"""Error compensation beside the method's definition, one column at a time in float64."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.errors import UserError
from barellm.program.compensation import DAMPING, compensated_codes
from barellm.program.quantization import Scheme, dequantize, nearest_codes, quantize, scales_of, scheme
from tests.cases import normal


def one_column_at_a_time(w_NK: np.ndarray, moments_KK: np.ndarray, how: Scheme) -> np.ndarray:
    """What the codes stand for. The best correction of the columns that are left, for the error of the one that is fixed, follows
    from the inverse of the moments; then that column is eliminated from the inverse (Hassibi and Stork 1993)."""
    w, K = w_NK.astype(np.float64), w_NK.shape[1]
    inverse = np.linalg.inv(moments_KK + DAMPING * np.trace(moments_KK) / K * np.eye(K))
    made, group = np.empty_like(w), how.group or K
    table = np.array(how.table or np.arange(-127.0, 128))
    for k in range(K):
        if k % group == 0:
            part = w[:, k : k + group].astype(np.float32)
            scale = scales_of(part.max(1), part.min(1), how).astype(np.float16)
        codes = nearest_codes(w[:, k].astype(np.float32), scale, how).astype(int)
        made[:, k] = (table[codes] if how.table else codes) * scale.astype(np.float64)
        w -= np.outer((w[:, k] - made[:, k]) / inverse[k, k], inverse[k])
        inverse = inverse - np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return made


def correlated(K: int, rows: int = 500) -> np.ndarray:
    """Inputs (rows, K) that vary in few directions, as activations do."""
    return normal(rows, 24, seed=3) @ normal(24, K, seed=4) + 0.1 * normal(rows, K, seed=5)


@pytest.mark.parametrize("name, N, K", [("int4", 5, 1), ("int4", 7, 131), ("nf4", 3, 300), ("int4/128", 4, 257), ("int8", 6, 150)])
def test_codes_are_those_of_the_definition(name, N, K):
    how, w, x = scheme(name), normal(N, K, seed=2).astype(np.float32), correlated(K)
    codes, scales = compensated_codes(w, x.T @ x, how)
    assert codes.shape == (N, K) and scales.shape == (N, how.groups(K)) and scales.dtype == np.float16
    want = one_column_at_a_time(w, x.T @ x, how)
    assert np.allclose(dequantize(codes, scales.astype(np.float64), how), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["int4", "nf4", "int8"])
def test_a_product_s_error_is_less_than_half_of_rounding_s(name):
    how, w, x = scheme(name), normal(40, 192, seed=2).astype(np.float32), correlated(192)

    def error(codes, scales):
        return np.linalg.norm(x @ (dequantize(codes, scales, how) - w).T)

    assert error(*compensated_codes(w, x.T @ x, how)) < 0.5 * error(*quantize(w, how))


@pytest.mark.parametrize("name", ["int4", "nf4", "int8"])
def test_a_row_s_magnitude_changes_no_code(name):
    how, w, x = scheme(name), normal(4, 150, seed=2).astype(np.float32), correlated(150)
    powers = np.array([[0], [-100], [90], [-25]])
    codes, scales = compensated_codes(w, x.T @ x, how)
    other, others = compensated_codes(np.ldexp(w, powers), x.T @ x, how)
    assert np.array_equal(other, codes) and np.array_equal(others, np.ldexp(scales.astype(np.float32), powers))


def test_inputs_without_correlation_leave_the_nearest_codes():
    w = normal(9, 70, seed=2).astype(np.float32)
    for moments in (np.zeros((70, 70)), 3.0 * np.eye(70)):
        for found, want in zip(compensated_codes(w, moments, scheme("nf4")), quantize(w, scheme("nf4")), strict=True):
            assert np.array_equal(found, want)


def test_an_input_that_is_always_zero_is_no_division_by_zero():
    x = correlated(64)
    x[:, 5] = x[:, 6]  # and two that are always equal
    x[:, 9] = 0
    codes, scales = compensated_codes(normal(3, 64).astype(np.float32), x.T @ x, scheme("int4"))
    assert codes.max() < 16 and np.isfinite(scales).all()


def test_activations_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match=r"row 1 of h\.0\.w has inf, expected finite numbers to quantize"):
        compensated_codes(np.array([[1.0], [np.inf]]), np.ones((1, 1)), scheme("int4"), name="h.0.w")
    with pytest.raises(UserError, match="the activations on the text to calibrate with are not finite"):
        compensated_codes(np.ones((2, 2), np.float32), np.array([[1.0, np.nan], [np.nan, 1.0]]), scheme("int4"))
