from __future__ import annotations

import numpy as np
import pytest

from barellm.cpu.kernels import loops
from barellm.program import ops
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS
from tests.cases import MODES, STREAM_CASES, each_activation, elementwise_cases, stream_case
from tests.cpu.check import EPS, ISAS, changed, check_op, isa_named, persistent, tokens

SHAPES = [(1, 1, 1), (2, 3, 7), (3, 5, 65), (1, 131, 97), (2, 64, 768)]
DTYPES = ["fp32", "bf16"]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@each_isa
@each_shape
@pytest.mark.parametrize("a, b", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_add(isa, shape, a, b):
    check_op(ops.Add, isa, {"a": tokens(normal(*shape), a), "b": tokens(normal(*shape, seed=2), b)})


@each_isa
@each_shape
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rescale(isa, shape, dtype):
    given = {"x": tokens(normal(*shape), dtype)}
    check_op(ops.Rescale, isa, given, forward=1 / 3, backward=5.0, bounds={"y": EPS * abs(given["x"].values)})


@each_isa
@each_shape
@pytest.mark.parametrize("source, target", [("fp32", "bf16"), ("bf16", "fp32")])
def test_cast(isa, shape, source, target):
    check_op(ops.Cast, isa, {"x": tokens(normal(*shape), source)}, dtype=target)


@each_isa
def test_cast_keeps_infinities_and_rounds_to_even(isa):
    x = np.array([np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.3e38, 0.0, -0.0]).reshape(1, 1, -1)
    check_op(ops.Cast, isa, {"x": tokens(x)}, dtype="bf16")


@each_isa
@each_shape
@each_dtype
@each_activation
def test_activation(isa, shape, dtype, activation):
    x = 4 * normal(*shape)
    check_op(ACTIVATIONS[activation].forward, isa, {"x": tokens(x, dtype)}, bounds={"y": 8 * EPS * np.abs(x)})


@each_isa
@each_shape
@each_dtype
@each_activation
@pytest.mark.parametrize("mode", ["store", "add"])
def test_activation_backward(isa, shape, dtype, activation, mode):
    x, dy = 4 * normal(*shape), normal(*shape, seed=2)
    bounds = {"dx": 24 * EPS * (1 + np.abs(dy)) * (1 + np.abs(x))}
    given = {"dy": tokens(dy, dtype), "x": tokens(x, dtype)}
    check_op(ACTIVATIONS[activation].backward, isa, given, modes={"dx": mode}, bounds=bounds)


@each_isa
@each_dtype
@pytest.mark.parametrize("activation", ["gelu_erf", "silu"])
def test_activations_whose_errors_are_absolute(isa, dtype, activation):
    x, dy = 4 * normal(3, 5, 65), normal(3, 5, 65, seed=2)
    given, of = {"dy": tokens(dy, dtype), "x": tokens(x, dtype)}, ACTIVATIONS[activation]
    check_op(of.forward, isa, {"x": given["x"]}, bounds={"y": 8 * EPS * (1 + np.abs(x))})
    check_op(of.backward, isa, given, bounds={"dx": 24 * EPS * (1 + np.abs(dy)) * (1 + np.abs(x))})


ENDS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e30, 3.0]).reshape(1, 1, -1)


@each_isa
@each_dtype
def test_squared_relu_of_what_is_not_finite(isa, dtype):
    with np.errstate(invalid="ignore"):
        check_op(ACTIVATIONS["relu2"].forward, isa, {"x": tokens(ENDS, dtype)})
        check_op(ACTIVATIONS["relu2"].backward, isa, {"dy": tokens(np.ones_like(ENDS), dtype), "x": tokens(ENDS, dtype)})


@each_isa
@each_shape
@each_dtype
def test_bias(isa, shape, dtype):
    check_op(ops.Bias, isa, {"x": tokens(normal(*shape), dtype), "bias": persistent(normal(shape[-1], seed=2))})


@each_isa
@each_dtype
def test_last_row(isa, dtype):
    check_op(ops.LastRow, isa, {"x": tokens(normal(3, 5, 65), dtype)}, plan=(4, 9))


@each_isa
@each_shape
@each_dtype
def test_dropout(isa, shape, dtype):
    scalars = {"seed": 11, "step": 3, "sample": (1 << 33) + 5}
    check_op(ops.Dropout, isa, {"x": tokens(normal(*shape), dtype)}, rate=0.2, stream=3, scalars=scalars, bounds={"y": EPS})


@each_isa
@each_dtype
@pytest.mark.parametrize("case", STREAM_CASES, ids=str)
def test_dropout_by_streams(isa, dtype, case):
    op_type, given, more = stream_case(case, dtype)
    check_op(op_type, isa, given, **more)


@each_dtype
@pytest.mark.parametrize("name", elementwise_cases("fp32"))
@pytest.mark.extended
def test_results_are_added_to_what_is_there(dtype, name):
    """Also where only the run says whether to. The last axis goes over in vectors of every instruction set."""
    op_type, given, attrs, bounds = elementwise_cases(dtype)[name]
    for isa in (isa_named(ISAS[0]), isa_named(ISAS[-1])):
        for mode, accumulate in MODES:
            modes, scalars = dict.fromkeys(bounds, mode), {"accumulate": accumulate}
            check_op(op_type, isa, given, modes=modes, bounds=bounds, scalars=scalars, plan=(4, 6), threads=(2,), **attrs)


@each_isa
@each_dtype
@pytest.mark.parametrize("mode", ["store", "add"])
def test_dropout_backward(isa, dtype, mode):
    given = {"dy": tokens(normal(3, 5, 65), dtype)}
    check_op(
        ops.DropoutBackward, isa, given, rate=0.7, stream=2, dtype=dtype, modes={"dx": mode}, bounds={"dx": 8 * EPS}, plan=(4, 6)
    )


@each_isa
def test_smaller_sizes_than_planned(isa):
    given = {"a": tokens(normal(2, 3, 7)), "b": tokens(normal(2, 3, 7, seed=2), "bf16")}
    check_op(ops.Add, isa, given, plan=(4, 64))
    check_op(ACTIVATIONS["gelu"].forward, isa, {"x": tokens(normal(2, 3, 7))}, plan=(4, 64), bounds={"y": 1e-6})


@each_isa
@each_dtype
def test_results_written_past_the_caches(isa, dtype, monkeypatch):
    """With the limit at zero every result takes the way of those larger than the caches."""
    changed(monkeypatch, loops, STREAM_BYTES=0)
    x, y = tokens(normal(3, 131, 97), dtype), tokens(normal(3, 131, 97, seed=2), dtype)
    check_op(ops.Add, isa, {"a": x, "b": y})
    check_op(ops.Cast, isa, {"x": x}, dtype="bf16" if dtype == "fp32" else "fp32")
    check_op(ACTIVATIONS["gelu"].forward, isa, {"x": x}, bounds={"y": 1e-6})
    check_op(ACTIVATIONS["gelu"].backward, isa, {"dy": y, "x": x}, bounds={"dx": 4e-6})
    for C in (64, 97, 384):  # aligned rows in registers, rows that are not aligned, aligned ones in a loop
        rows, weight = tokens(normal(2, 3, C)), persistent(normal(C, seed=2))
        bounds = {"y": 1e-5, "mean": 16 * EPS, "rstd": 1e-5}
        check_op(ops.LayerNorm, isa, {"x": rows, "weight": weight}, eps=1e-5, dtype=dtype, bounds=bounds)
        ids = tokens(np.array([[5, 0, 3], [3, 3, 1]], np.int32), "i32")
        tables = {"wte": persistent(normal(7, C)), "wpe": persistent(normal(4, C, seed=2))}
        check_op(ops.Embedding, isa, {"tokens": ids, **tables})
