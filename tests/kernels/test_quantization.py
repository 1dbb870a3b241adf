"""Matrices in few bits on arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm import kernels
from tests.cases import normal


@pytest.mark.parametrize("format, most", [("int8", 0.012), ("int4", 0.1), ("nf4/32", 0.09), ("int4/128", 0.12)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_matrix_of_normals_comes_back_nearly(format, most, dtype):
    w = normal(37, 300).astype(dtype)
    codes, scales = kernels.quantize(w, format)
    assert codes.shape == w.shape and scales.dtype == np.float16
    made = kernels.dequantize(codes, scales, format)
    assert most / 2 < np.linalg.norm(made - w.astype(np.float32)) / np.linalg.norm(made) < most


@pytest.mark.parametrize("format, most", [("int8", 0.012), ("int4", 0.1), ("nf4/32", 0.09)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_of_every_magnitude_come_back_nearly(format, most, dtype):
    sizes = np.array([1.0, 1e-6, 1e-30, 0.0, 1e30, 3e38])[:, None]
    w = normal(6, 300)
    w = (w / np.abs(w).max(1, keepdims=True) * sizes).astype(dtype)
    codes, scales = kernels.quantize(w, format)
    assert scales.dtype == np.float32 and kernels.quantize(w[:1], format)[1].dtype == np.float16
    made, exact = kernels.dequantize(codes, scales, format).astype(np.float64), w.astype(np.float64)
    assert (np.linalg.norm(made - exact, axis=1) <= most * np.linalg.norm(exact, axis=1)).all() and not made[3].any()


def test_codes_of_the_first_nf4_have_their_numbers():
    codes, scales = np.full((1, 64), 6, np.uint8), np.ones((1, 1), np.float16)
    assert (kernels.dequantize(codes, scales, "nf4") == -0.0908203125).all()
    assert (kernels.dequantize(codes, scales, "nf4-v1") == -0.09130859375).all()


def test_what_fits_no_format_is_refused():
    w = np.ones((3, 64), np.float32)
    codes, scales = kernels.quantize(w)
    for call, says in [
        (lambda: kernels.quantize(w[0]), r"quantize expects w \(N, K\) with at least one element, it has shape \(64,\)"),
        (lambda: kernels.quantize(w, "int3"), "unknown weights 'int3'"),
        (lambda: kernels.dequantize(codes, scales, "int8"), r"expects codes \(N, K\) int8 of int8, found \(3, 64\) uint8"),
        (lambda: kernels.dequantize(codes, scales[:, :1]), r"expects scales \(3, 2\) for codes \(3, 64\), found \(3, 1\)"),
        (lambda: kernels.dequantize(codes + 16, scales), "expects codes from 0 to 15, the largest is"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
    with pytest.raises(TypeError, match="quantize expects w as float32 or bfloat16, it is float64"):
        kernels.quantize(w.astype(float))
