from __future__ import annotations

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS
from tests.cases import MODES, STREAM_CASES, each_activation, elementwise_cases, stream_case
from tests.cuda.check import EPS, check_op, persistent, tokens

SHAPES = [(1, 1, 1), (2, 3, 7), (3, 5, 65), (1, 13, 97), (2, 2, 768)]
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@each_shape
@pytest.mark.parametrize("a, b", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_add(shape, a, b):
    check_op(ops.Add, {"a": tokens(normal(*shape), a), "b": tokens(normal(*shape, seed=2), b)})


@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rescale(shape, dtype):
    given = {"x": tokens(normal(*shape), dtype)}
    check_op(ops.Rescale, given, forward=1 / 3, backward=5.0, bounds={"y": EPS * abs(given["x"].values)})


@each_shape
@pytest.mark.parametrize("source, target", [("fp32", "bf16"), ("bf16", "fp32")])
def test_cast(shape, source, target):
    check_op(ops.Cast, {"x": tokens(normal(*shape), source)}, dtype=target)


def test_cast_keeps_infinities_and_rounds_to_even():
    x = np.array([np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.3e38, 0.0, -0.0]).reshape(1, 1, -1)
    check_op(ops.Cast, {"x": tokens(x)}, dtype="bf16")


@each_shape
@each_dtype
@each_activation
def test_activation(shape, dtype, activation):
    x = 4 * normal(*shape)
    check_op(ACTIVATIONS[activation].forward, {"x": tokens(x, dtype)}, bounds={"y": 8 * EPS * np.abs(x)})


@each_shape
@each_dtype
@each_activation
@pytest.mark.parametrize("mode", ["store", "add"])
def test_activation_backward(shape, dtype, activation, mode):
    x, dy = 4 * normal(*shape), normal(*shape, seed=2)
    bounds = {"dx": 24 * EPS * (1 + np.abs(dy)) * (1 + np.abs(x))}
    given = {"dy": tokens(dy, dtype), "x": tokens(x, dtype)}
    check_op(ACTIVATIONS[activation].backward, given, modes={"dx": mode}, bounds=bounds)


@each_dtype
@pytest.mark.parametrize("activation", ["gelu_erf", "silu"])
def test_activations_whose_errors_are_absolute(dtype, activation):
    x, dy = 4 * normal(3, 5, 65), normal(3, 5, 65, seed=2)
    given, of = {"dy": tokens(dy, dtype), "x": tokens(x, dtype)}, ACTIVATIONS[activation]
    check_op(of.forward, {"x": given["x"]}, bounds={"y": 8 * EPS * (1 + np.abs(x))})
    check_op(of.backward, given, bounds={"dx": 24 * EPS * (1 + np.abs(dy)) * (1 + np.abs(x))})


@each_dtype
def test_squared_relu_of_what_is_not_finite(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e30, 3.0]).reshape(1, 1, -1)
    with np.errstate(invalid="ignore"):
        check_op(ACTIVATIONS["relu2"].forward, {"x": tokens(x, dtype)})
        check_op(ACTIVATIONS["relu2"].backward, {"dy": tokens(np.ones_like(x), dtype), "x": tokens(x, dtype)})


def test_gelu_far_from_zero():
    x = np.array([-1e6, -100.0, -20.0, 20.0, 100.0, 1e6]).reshape(1, 1, -1)
    check_op(ACTIVATIONS["gelu"].forward, {"x": tokens(x)}, bounds={"y": 1e-30})
    check_op(ACTIVATIONS["gelu"].backward, {"dy": tokens(np.ones_like(x)), "x": tokens(x)}, bounds={"dx": 1e-30})


@each_shape
@each_dtype
def test_bias(shape, dtype):
    check_op(ops.Bias, {"x": tokens(normal(*shape), dtype), "bias": persistent(normal(shape[-1], seed=2))})


@each_dtype
@pytest.mark.parametrize("C", [65, 384])
def test_last_row(dtype, C):
    check_op(ops.LastRow, {"x": tokens(normal(3, 5, C), dtype)}, plan=(4, 9))


@each_shape
@each_dtype
def test_dropout(shape, dtype):
    scalars = {"seed": (1 << 40) + 11, "step": 3, "sample": (1 << 33) + 5}
    check_op(ops.Dropout, {"x": tokens(normal(*shape), dtype)}, rate=0.2, stream=3, scalars=scalars, bounds={"y": EPS})


@each_dtype
@pytest.mark.parametrize("case", STREAM_CASES, ids=str)
def test_dropout_by_streams(dtype, case):
    op_type, given, more = stream_case(case, dtype)
    check_op(op_type, given, **more)


@each_dtype
@pytest.mark.parametrize("name", elementwise_cases("fp32"))
def test_results_are_added_to_what_is_there(dtype, name):
    op_type, given, attrs, bounds = elementwise_cases(dtype)[name]
    for mode, accumulate in MODES:
        modes, scalars = dict.fromkeys(bounds, mode), {"accumulate": accumulate}
        check_op(op_type, given, modes=modes, bounds=bounds, scalars=scalars, plan=(4, 6), **attrs)


@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_dropout_backward(dtype, mode):
    given = {"dy": tokens(normal(3, 5, 65), dtype)}
    attrs = {"rate": 0.7, "stream": 2, "dtype": dtype}
    check_op(ops.DropoutBackward, given, modes={"dx": mode}, bounds={"dx": 8 * EPS}, plan=(4, 6), **attrs)


def test_smaller_sizes_than_planned():
    given = {"a": tokens(normal(2, 3, 7)), "b": tokens(normal(2, 3, 7, seed=2), "bf16")}
    check_op(ops.Add, given, plan=(4, 64))
    check_op(ACTIVATIONS["gelu"].forward, {"x": tokens(normal(2, 3, 7))}, plan=(4, 64), bounds={"y": 1e-6})
