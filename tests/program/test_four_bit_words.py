"""Two ways to make fp16 of 4-bit codes without a table, in NumPy, on every word of 16 bits: codes as mantissas of denormal numbers,
and codes as the last places of 1024. Kernels use the second (docs/quantization.md); this holds why."""

from __future__ import annotations

import numpy as np
import pytest

WORDS = np.arange(1 << 16, dtype=np.uint16)
CODES = np.stack([WORDS >> (4 * i) & 15 for i in range(4)]).astype(np.float64)  # code i of each word
LEFT, RIGHT = np.left_shift, np.right_shift
DENORMAL = ((0x000F, LEFT, 6), (0x00F0, LEFT, 2), (0x0F00, RIGHT, 2), (0xF000, RIGHT, 6))  # mask, and the way to bits 9 to 6


def denormals() -> np.ndarray:
    """The four codes of each word, code n as the denormal n * 2**-18."""
    return np.stack([shift(WORDS & np.uint16(mask), np.uint16(by)).view(np.float16) for mask, shift, by in DENORMAL])


def last_places() -> np.ndarray:
    """The four codes of each word: n as 1024 + n, of its upper halves of bytes as 1024 + 16 n."""
    shifted = (WORDS, WORDS >> np.uint16(8))
    halves = [(w & np.uint16(mask)) | np.uint16(0x6400) for w in shifted for mask in (0x000F, 0x00F0)]
    return np.stack([x.view(np.float16) for x in halves])


def multiply_add(x: np.ndarray, scale: float, zero: float) -> np.ndarray:
    """x * scale + zero with one rounding, as the fp16 instruction has it: the products of fp16 are exact in float64."""
    with np.errstate(over="ignore"):
        return (x.astype(np.float64) * np.float16(scale).astype(np.float64) + np.float16(zero).astype(np.float64)).astype(
            np.float16
        )


def test_a_code_is_a_denormal_at_every_place_of_every_word():
    assert np.array_equal(denormals().astype(np.float64), CODES * 2.0**-18)


@pytest.mark.parametrize("scale", [2.0**-6, 0.0371, 0.2, -0.2499])
def test_one_multiply_add_scales_a_denormal(scale):
    """The scale times 2**18 is the factor: code 8 is zero, and every value is the nearest fp16."""
    factor = np.float16(np.float32(scale) * np.float32(2.0**18))
    zero = np.float16(-8.0 * np.float64(factor) * 2.0**-18)
    want = (CODES * 2.0**-18 * np.float64(factor) + np.float64(zero)).astype(np.float16)
    got = multiply_add(denormals(), float(factor), float(zero))
    assert np.isfinite(got).all() and np.array_equal(got, want)


def test_a_scale_of_a_quarter_is_too_large_for_denormals():
    """Up to 65504 / 2**18 = 0.24988 the factor is a number of fp16; from 0.25 on it is infinite."""
    with np.errstate(over="ignore"):
        factors = (np.array([0.24988, 0.25]) * 2.0**18).astype(np.float16)
    assert np.isfinite(factors[0]) and np.isinf(factors[1])


def test_places_of_1024_have_no_limit():
    """One fp16 operation leaves the code minus 8, exactly; any fp16 scale may follow."""
    x = last_places()
    lower = multiply_add(x[::2], 1.0, -1032.0).astype(np.float64)
    upper = multiply_add(x[1::2], 1 / 16, -72.0).astype(np.float64)
    assert np.array_equal(lower, CODES[::2] - 8) and np.array_equal(upper, CODES[1::2] - 8)


def operations(masks: int, shifts: int, adds: int) -> int:
    """Instructions for a word of 32 bits, which holds eight codes."""
    return masks + shifts + adds


def test_the_places_of_1024_take_fewer_instructions():
    """Both mask four pairs and end in four multiply-adds. The denormals are shifted four times, the others once."""
    shifts = len([by for _, _, by in DENORMAL if by])
    assert operations(4, shifts, 4) / 8 == 1.5 and operations(4, 1, 4) / 8 == 1.125
