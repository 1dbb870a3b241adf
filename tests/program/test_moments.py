"""The 16-bit formats of moments: every code, every boundary between codes, and what stochastic rounding keeps."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import moments
from barellm.program.moments import FORMATS, decode, encode
from barellm.program.ops.pointwise import random

CODES = np.arange(1 << 16)
each_dtype = pytest.mark.parametrize("dtype", FORMATS)


def value_of(code: int, dtype: str) -> float:
    """The definition, digit by digit."""
    bits = FORMATS[dtype].mantissa
    sign = -1.0 if FORMATS[dtype].signed and code & 0x8000 else 1.0
    magnitude = code & 0x7FFF if FORMATS[dtype].signed else code
    exponent, mantissa = magnitude >> bits, magnitude & ((1 << bits) - 1)
    return sign * (1 + mantissa / 2**bits) * 2.0 ** (exponent - 60) if magnitude else 0.0


def positive(dtype: str) -> np.ndarray:
    """Every value from zero up, float64."""
    return decode(CODES[: 1 << (6 + FORMATS[dtype].mantissa)], dtype).astype(np.float64)


@each_dtype
def test_every_code_decodes_to_its_definition_and_back(dtype):
    assert np.array_equal(decode(CODES, dtype), [value_of(c, dtype) for c in CODES.tolist()])
    back = encode(decode(CODES, dtype), dtype)
    never = 0x8000 if FORMATS[dtype].signed else None  # minus zero: read as zero, never written
    assert all(code == back[code] or code == never for code in CODES.tolist())
    assert back[0x8000] == (0 if never else 0x8000)


@pytest.mark.parametrize(
    "dtype, largest, smallest", [("e6m9", 15.984375, 2**-60 * (1 + 2**-9)), ("ue6m10", 15.9921875, 2**-60 * (1 + 2**-10))]
)
def test_the_range_is_the_published_one(dtype, largest, smallest):
    values = positive(dtype)
    assert values[-1] == largest and values[1] == smallest and (np.diff(values) > 0).all()


@each_dtype
def test_the_nearest_at_every_boundary_between_codes(dtype):
    """Midpoints go up in magnitude, the fp32 below each goes down, exactly; below the smallest value all is zero."""
    values = positive(dtype)[1:]
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    assert np.array_equal(middle, (values[:-1] + values[1:]) / 2)  # fp32 holds them
    codes = np.arange(2, len(values) + 1)
    assert np.array_equal(encode(middle, dtype), codes)
    assert np.array_equal(encode(np.nextafter(middle, np.float32(0)), dtype), codes - 1)
    assert encode(np.nextafter(np.float32(values[0]), np.float32(0)), dtype) == 0
    if FORMATS[dtype].signed:
        assert np.array_equal(encode(-middle, dtype), codes | 0x8000)


@pytest.mark.parametrize("dtype, bound", [("e6m9", 2.0**-10), ("ue6m10", 2.0**-11)])
def test_the_relative_error_is_half_a_unit(dtype, bound):
    x = np.exp(np.random.default_rng(1).uniform(np.log(1e-18), np.log(15.9), 10**6)).astype(np.float32)
    error = abs(decode(encode(x, dtype), dtype).astype(np.float64) / x - 1)
    assert 0.99 * bound < error.max() <= bound


@each_dtype
def test_what_is_too_large_or_small(dtype):
    most = decode(CODES[(1 << (6 + FORMATS[dtype].mantissa)) - 1], dtype)
    large = np.array([16, 1e30, np.inf, np.nan], np.float32)
    small = np.array([0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-60, -(2.0**-60)], np.float32)
    for dither in (None, 0, (1 << FORMATS[dtype].shift) - 1):
        assert (decode(encode(large, dtype, dither), dtype) == most).all()
        assert (encode(small[:2], dtype, dither) == 0).all()
    assert (encode(small, dtype) == 0).all() and (encode(small, dtype, 0) == 0).all()
    if FORMATS[dtype].signed:
        assert (decode(encode(-large[:3], dtype), dtype) == -most).all()


@each_dtype
def test_stochastic_rounding_keeps_the_mean_exactly(dtype):
    """Over all values that the random bits can have: not a sample, all of them."""
    shift = FORMATS[dtype].shift
    dithers = np.arange(1 << shift)
    rng = np.random.default_rng(2)
    x = np.exp(rng.uniform(np.log(1e-18), np.log(15.9), 50)).astype(np.float32)
    x[:3] = [15.984375, 1.0, np.float32(2) - np.float32(2**-23)]
    for value in [*x, *(-x if FORMATS[dtype].signed else [])]:
        found = decode(encode(np.full(1 << shift, value), dtype, dithers), dtype).astype(np.float64)
        assert found.mean() == value and len(np.unique(found)) <= 2
    least = float(positive(dtype)[1])
    for share in (0.0, 1e-3, 0.3, 0.9999):
        mean = decode(encode(np.full(1 << shift, share * least, np.float32), dtype, dithers), dtype).mean(dtype=np.float64)
        assert abs(mean - share * least) <= least / (1 << shift)


@pytest.mark.parametrize("columns", [1, 17, 32, 63, 64, 129, 300])
def test_each_element_has_the_word_that_the_definition_names(columns):
    found = random.shared_words(9, 8, 7, 6, columns)
    key = random.threefry(9, 8, 7, 6)
    assert found.shape == (columns,)
    for c in range(columns):
        word = int(random.threefry(*key, 16 * (c // 128) + c % 16, 0)[(c // 64) % 2])
        turn = 8 * ((c // 16) % 4)
        assert found[c] == (word >> turn | word << (32 - turn)) & 0xFFFFFFFF


def test_errors_of_both_moments_hardly_go_together():
    bits = random.shared_words(3, 1, 0, random.STATE_STREAMS, 1 << 18)
    x = np.full(bits.size, 1.0 + 2.0**-12, np.float32)
    m = decode(encode(x, "e6m9", bits & 0x3FFF), "e6m9") - x
    v = decode(encode(x, "ue6m10", bits >> 19), "ue6m10") - x
    for error in (m, v):
        assert abs(error.mean()) < 5 * error.std() / np.sqrt(error.size)
    assert abs(np.corrcoef(m, v)[0, 1]) < 0.01


@pytest.mark.parametrize("beta2, ratio", [(0.9999, 0.0), (0.999, 1.3)])
@pytest.mark.extended
def test_a_second_moment_sticks_when_rounded_to_nearest_and_moves_when_stochastically(beta2, ratio):
    """v = beta2 v + (1 - beta2) g^2 with g^2 = `ratio` v at the start: a step below half a unit is lost, on average it is not."""
    steps, count = 4000, 4096
    v = {"nearest": np.ones(count, np.float32), "stochastic": np.ones(count, np.float32)}
    for step in range(1, steps + 1):
        for how in v:
            dither = random.shared_words(1, step, 0, 0, count) >> np.uint32(19) if how == "stochastic" else None
            new = np.float32(beta2) * v[how] + np.float32((1 - beta2) * ratio)
            v[how] = decode(encode(new, "ue6m10", dither), "ue6m10")
    assert (v["nearest"] == 1).all()
    exact = ratio + (1 - ratio) * beta2**steps
    assert abs(v["stochastic"].mean() - exact) < 5 * v["stochastic"].std() / np.sqrt(count) + 1e-4 * exact


def test_a_second_moment_follows_the_mean_of_its_squares():
    """Gradients of a unit normal and beta2 = 0.999: to nearest too, since single squares leave the dead zone."""
    rng = np.random.default_rng(4)
    v = {"fp32": np.ones(2000, np.float32), "nearest": np.ones(2000, np.float32), "stochastic": np.ones(2000, np.float32)}
    for step in range(1, 3001):
        square = (0.001 * rng.standard_normal(2000) ** 2).astype(np.float32)
        bits = random.shared_words(1, step, 0, 0, 2000) >> np.uint32(19)
        for how, dither in (("fp32", None), ("nearest", None), ("stochastic", bits)):
            new = np.float32(0.999) * v[how] + square
            v[how] = new if how == "fp32" else moments.decode(moments.encode(new, "ue6m10", dither), "ue6m10")
    assert abs(v["stochastic"].mean() / v["fp32"].mean() - 1) < 1e-3
    assert abs(v["nearest"].mean() / v["fp32"].mean() - 1) < 0.05
