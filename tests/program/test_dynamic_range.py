"""Shares that saturate or become zero, from histograms of exponents, beside what the formats themselves do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm.program.builder import Program, Store
from barellm.program.dynamic_range import FORMAT_RANGES, TensorStats, tensor_stats
from barellm.runtime.reference import ReferenceSession

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def of(values: np.ndarray) -> TensorStats:
    p = Program(Store())
    for name, t in zip(("counts", "sums"), p.exponent_stats(p.state("x", values.shape)), strict=True):
        p.output(name, t)
    session = ReferenceSession({"op": p})
    session.write("x", values)
    session.run("op")
    return tensor_stats(session.read("counts"), session.read("sums"))


@pytest.mark.parametrize("name", TYPES)
def test_ranges_are_those_of_the_formats(name):
    info = ml_dtypes.finfo(TYPES[name])
    assert FORMAT_RANGES[name].largest == float(info.max) and FORMAT_RANGES[name].least == float(info.smallest_subnormal)


@pytest.mark.parametrize("scale", [2.0**-7, 1.0, 2.0**30, 3e8])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "fp16"])
def test_shares_are_those_that_conversion_finds(name, scale):
    """Numbers of all sizes: what becomes zero exactly at powers of two, the octave of the largest number to a thousandth."""
    r = np.random.default_rng(3)
    x = r.uniform(1, 2, 200_000) * 2.0 ** r.integers(-60, 30, 200_000) * r.choice([-1, 1], 200_000)
    x = x.astype(np.float32)
    x[:1000], x[1000:1010] = 0.0, np.nan
    m = of(x)
    with np.errstate(over="ignore"):
        converted = np.float64((np.float64(x) * scale).astype(TYPES[name]))
    flushed = ((converted == 0) & (x != 0)).mean()
    assert m.flushed(name, scale) == pytest.approx(flushed, abs=1e-9 if np.log2(scale) % 1 == 0 else 1e-3)
    beyond = ~(np.abs(np.float64(x) * scale) <= FORMAT_RANGES[name].largest)
    assert m.saturated(name, scale) == pytest.approx(beyond.mean(), abs=1e-3) and beyond.mean() > 0
    assert (m.zeros, m.not_finite, m.size) == (1000, 10, 200_000)


def test_nothing_saturates_where_the_largest_fits():
    m = of(np.array([448.0, -300.0, 1.0]))
    assert m.saturated("e4m3") == 0.0 < of(np.array([449.0, -300.0, 1.0])).saturated("e4m3")


def test_means_are_of_finite_elements():
    m = of(np.array([1.0, -3.0, 0.0, np.inf]))
    assert m.mean == pytest.approx(-2 / 3) and m.mean_abs == pytest.approx(4 / 3) and m.largest == 3.0
    assert m.rms == pytest.approx(np.sqrt(10 / 3)) and m.std == pytest.approx(np.std([1.0, -3.0, 0.0]))
