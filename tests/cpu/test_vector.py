"""Accuracy of the functions on vectors against float64, over every exponent of the argument, on each ISA."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest

from barellm.cpu import jit
from barellm.cpu.isa import ISA
from barellm.cpu.kernel import Specialisation
from barellm.cpu.kernels.loops import vectors
from barellm.cpu.lang import vector
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, GELU_CUBIC, GELU_SCALE, sigmoid
from tests.cpu.check import EPS, ISAS, isa_named

each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)


def silu_slope(k, x, dtype="fp32"):
    return vector.silu_and_slope(k, x, dtype)[1]


def gelu_erf_slope(k, x):
    return vector.gelu_erf_and_slope(k, x)[1]


def apply(k, y, x, n, *, function, more):
    of = {"silu_slope": silu_slope, "gelu_erf_slope": gelu_erf_slope}.get(function) or getattr(vector, function)
    for i, mask, _ in vectors(k, 0, n):
        y.store(of(k, x.load(i, mask), *more), i, mask)


def sincos(k, sine, cosine, turn, n):
    for i, mask, _ in vectors(k, 0, n):
        s, c = vector.sincos_turn(k, turn.load(i, mask))
        sine.store(s, i, mask)
        cosine.store(c, i, mask)


@cache
def compiled(isa: ISA, spec: Specialisation):
    library = jit.Library([jit.compile_object(spec.ir(isa), isa)], isa)
    return library, ctypes.CFUNCTYPE(None, *3 * [ctypes.c_void_p])(library.address(spec.symbol()))


def run(isa: ISA, spec: Specialisation, *arrays: np.ndarray) -> None:
    args = np.array([*(a.ctypes.data for a in arrays), arrays[-1].size], np.int64)
    compiled(isa, spec)[1](None, args.ctypes.data, None)


def evaluate(isa: ISA, function: str, x: np.ndarray, *more: str) -> np.ndarray:
    """function(x, *more) as float64, x fp32 of odd size, so that the tail is masked."""
    y = np.full_like(x, np.nan)
    run(isa, Specialisation(apply, ("fp32", "fp32", "int"), (("function", function), ("more", more))), y, x)
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return y.astype(np.float64)


@cache
def every_exponent() -> np.ndarray:
    """fp32 of each sign and exponent with 2047 mantissas each: zeros, denormals and infinities among them, no NaN."""
    top = np.arange(512, dtype=np.uint32) << 23
    mantissas = np.concatenate([[0], np.random.default_rng(3).integers(0, 1 << 23, 2046)]).astype(np.uint32)
    x = (top[:, None] | mantissas[None, :]).reshape(-1).view(np.float32)
    return x[~np.isnan(x)]


def relative_error(got: np.ndarray, want: np.ndarray, smallest: float = 2.0**-126) -> float:
    """The largest error in units of 2^-24 of the value, or of `smallest` where that is larger; infinities must agree."""
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want)) / np.maximum(np.abs(want), smallest)
    return float((error / EPS).max())  # NaN if there is one


def as_fp32(want: np.ndarray) -> np.ndarray:
    """The last 4e-5 of the exponent before fp32 overflows may be infinity already."""
    return np.where(want > 3.4026e38, np.inf, want)


@each_isa
def test_exp(isa):
    x = np.concatenate([every_exponent(), np.linspace(-104, 89, 400001)]).astype(np.float32)
    with np.errstate(over="ignore"):
        want = as_fp32(np.exp(x.astype(np.float64)))
    got = evaluate(isa, "exp", x)
    denormal = want < 2.0**-126
    assert np.abs(got[denormal] - want[denormal]).max() < 2.0**-126
    assert relative_error(got[~denormal], want[~denormal]) < 3.5


@each_isa
def test_exp2(isa):
    x = np.concatenate([every_exponent(), np.linspace(-150, 129, 400001)]).astype(np.float32)
    with np.errstate(over="ignore"):
        want = as_fp32(np.exp2(x.astype(np.float64)))
    got = evaluate(isa, "exp2", x)
    denormal = want < 2.0**-126
    assert np.abs(got[denormal] - want[denormal]).max() < 2.0**-126
    assert relative_error(got[~denormal], want[~denormal]) < 3.5


@each_isa
def test_ln(isa):
    x = np.concatenate([every_exponent(), np.linspace(0.5, 2, 400001)]).astype(np.float32)
    x = x[x >= 2.0**-126]
    assert relative_error(evaluate(isa, "ln", x), np.log(x.astype(np.float64))) < 6


@each_isa
def test_tanh(isa):
    """Of tiny numbers too, which it is nearly equal to."""
    x = np.concatenate([every_exponent(), np.linspace(-12, 12, 400001)]).astype(np.float32)
    assert relative_error(evaluate(isa, "tanh", x), np.tanh(x.astype(np.float64))) < 5


@each_isa
def test_gelu(isa):
    x = np.concatenate([every_exponent(), np.linspace(-12, 12, 400001)]).astype(np.float32)
    x = x[np.isfinite(x)]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        want = wide / (1 + np.exp(-2 * GELU_SCALE * (wide + GELU_CUBIC * wide**3)))
    # In the negative tail the exponent's own rounding shows; below 1e-5 the error is absolute.
    assert relative_error(evaluate(isa, "gelu", x), want, 1e-5) < 32


@each_isa
def test_gelu_by_the_error_function(isa):
    """Its error is absolute: that of the polynomial in the normal distribution, times x."""
    x = np.concatenate([every_exponent(), np.linspace(-12, 12, 40001)]).astype(np.float32)
    x = x[np.abs(x) < 1e9]
    wide, of = x.astype(np.float64), ACTIVATIONS["gelu_erf"]
    size = np.maximum(1, np.abs(wide))
    assert (np.abs(evaluate(isa, "gelu_erf", x) - of.value(wide)) / size).max() < 6 * EPS
    assert (np.abs(evaluate(isa, "gelu_erf_slope", x) - of.slope(wide)) / size).max() < 6 * EPS


@each_isa
def test_silu(isa):
    x = np.concatenate([every_exponent(), np.linspace(-20, 20, 400001)]).astype(np.float32)
    x = x[np.isfinite(x)]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        want = wide / (1 + np.exp(-wide))
    assert relative_error(evaluate(isa, "silu", x), want, 1e-5) < 8


@each_isa
def test_silu_slope(isa):
    x = np.concatenate([every_exponent(), np.linspace(-20, 20, 400001)]).astype(np.float32)
    x = x[np.abs(x) < 1e9]
    wide = x.astype(np.float64)
    s = sigmoid(wide)
    assert np.abs(evaluate(isa, "silu_slope", x) - s * (1 + wide * (1 - s))).max() < 6 * EPS  # absolute


@each_isa
@pytest.mark.parametrize("function, smallest", [("gelu", 1e-5), ("gelu_slope", 0.25), ("silu", 1e-5), ("silu_slope", 0.25)])
def test_values_for_bf16_err_by_far_less_than_rounding_does(isa, function, smallest):
    x = np.concatenate([every_exponent(), np.linspace(-12, 12, 400001)]).astype(np.float32)
    x = x[np.abs(x) < 1e9]
    rough, fine = (evaluate(isa, function, x, dtype) for dtype in ("bf16", "fp32"))
    assert relative_error(rough, fine, smallest) < 2.0**-12 / EPS


@each_isa
def test_gelu_slope(isa):
    x = np.concatenate([every_exponent(), np.linspace(-12, 12, 400001)]).astype(np.float32)
    x = x[np.abs(x) < 1e9]
    wide = x.astype(np.float64)
    t = np.tanh(GELU_SCALE * (wide + GELU_CUBIC * wide**3))
    want = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * wide * wide)
    assert np.abs(evaluate(isa, "gelu_slope", x) - want).max() < 6 * EPS  # absolute


@each_isa
@pytest.mark.parametrize("function", ["exp", "exp2", "ln", "tanh", "gelu", "gelu_slope", "silu"])
def test_nan_stays_nan(isa, function):
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC001FF, 0x7FD55555], np.uint32)
    assert np.isnan(evaluate(isa, function, patterns.view(np.float32))).all()


@each_isa
def test_sincos_turn(isa):
    turn = np.concatenate([np.arange(0, 1 << 24, 61), (np.arange(17) << 20)[:-1], [(1 << 24) - 1]]).astype(np.int32)
    sine, cosine = np.full(turn.size, np.nan, np.float32), np.full(turn.size, np.nan, np.float32)
    run(isa, Specialisation(sincos, ("fp32", "fp32", "i32", "int"), ()), sine, cosine, turn)
    angle = 2 * np.pi / 2**24 * turn
    assert np.abs(sine - np.sin(angle)).max() < 2 * EPS
    assert np.abs(cosine - np.cos(angle)).max() < 2 * EPS
