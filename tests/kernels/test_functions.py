"""Each function on arrays beside its formula in float64, and its gradients beside finite differences of the formula."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from barellm import kernels
from tests.kernels.cases import BFLOAT16, CASES, FLOAT32, near

EVERY = pytest.mark.parametrize("name", CASES)
SHAPES = [(name, which) for name, case in CASES.items() for which in range(len(case.shapes))]


@pytest.mark.parametrize("name, which", SHAPES)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.extended
def test_a_function_is_its_formula(name, which, dtype):
    case = CASES[name]
    given = case.arguments(dtype, which)
    y = case.function(*given, **case.options)
    wanted = case.formula(*(a.astype(np.float64) for a in given), **case.options)
    assert (y.dtype, y.shape) == (dtype, wanted.shape)
    near(y, wanted, dtype)


@pytest.mark.parametrize("name, which", [pair for pair in SHAPES if pair[1] < 3])
@pytest.mark.extended
def test_gradients_are_finite_differences_of_the_formula(name, which):
    case, rng, eps = CASES[name], np.random.default_rng(1), 1e-6
    given = case.arguments(FLOAT32, which)
    exact = [a.astype(np.float64) for a in given]
    y, vjp_fn = kernels.vjp(case.function, *given, **case.options)
    dy = rng.normal(size=y.shape).astype(np.float32)
    gradients = vjp_fn(dy)
    assert [(g.shape, g.dtype) for g in gradients] == [(a.shape, a.dtype) for a in given]
    near(y, case.formula(*exact, **case.options), FLOAT32)
    for i, gradient in enumerate(gradients):
        for _ in range(3):
            way = rng.normal(size=given[i].shape)
            above, below = (
                case.formula(*(a + sign * eps * way if j == i else a for j, a in enumerate(exact)), **case.options)
                for sign in (1, -1)
            )
            rise = (dy * (above - below)).sum() / (2 * eps)
            scale = np.linalg.norm(gradient) * np.linalg.norm(way) + 1e-3
            assert abs((gradient * way).sum() - rise) <= 2e-5 * scale


@EVERY
@pytest.mark.extended
def test_gradients_of_bf16_arguments_are_those_of_the_formula_rounded(name):
    case = CASES[name]
    given = case.arguments(BFLOAT16)
    _, vjp_fn = kernels.vjp(case.function, *(a.astype(np.float32) for a in given), **case.options)
    y, rounded = kernels.vjp(case.function, *given, **case.options)
    for exact, found in zip(vjp_fn(y.astype(np.float32)), rounded(y), strict=True):
        assert found.dtype == BFLOAT16
        near(found, exact.astype(np.float64), BFLOAT16)


@pytest.mark.parametrize("name, which", SHAPES)
@pytest.mark.extended
def test_gradients_of_float32_arguments_keep_their_digits_beside_bf16_ones(name, which):
    """Beside those of the same numbers all in float32. A function that refuses mixed dtypes says so in one line."""
    case = CASES[name]
    given = case.arguments(BFLOAT16, which)
    y, vjp_fn = kernels.vjp(case.function, *(a.astype(FLOAT32) for a in given), **case.options)
    dy = np.random.default_rng(1).normal(size=y.shape).astype(FLOAT32)
    for mix in product((FLOAT32, BFLOAT16), repeat=len(given)):
        try:
            y, rounded = kernels.vjp(case.function, *(a.astype(t) for a, t in zip(given, mix, strict=True)), **case.options)
        except (TypeError, ValueError) as error:
            assert len(set(mix)) == 2 and ("of one dtype" in str(error) or "expects relative" in str(error))
            continue
        seed = dy.astype(y.dtype)
        for found, exact, kind in zip(rounded(seed), vjp_fn(seed.astype(FLOAT32)), mix, strict=True):
            assert found.dtype == kind
            near(found, exact.astype(np.float64), kind)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_top_k_and_its_gradient(dtype):
    x = np.random.default_rng(0).integers(-9, 9, (3, 5, 41)).astype(dtype)  # with ties
    (values, indices), vjp_fn = kernels.vjp(kernels.top_k, x, 7)
    order = np.argsort(-x.astype(np.float64), -1, kind="stable")[..., :7]
    assert indices.dtype == np.int32 and np.array_equal(indices, order)
    assert np.array_equal(values, np.take_along_axis(x, order, -1))
    (dx,) = vjp_fn(values)
    wanted = np.zeros(x.shape)
    np.put_along_axis(wanted, order, values.astype(np.float64), -1)
    assert dx.dtype == dtype and np.array_equal(dx.astype(np.float64), wanted)
