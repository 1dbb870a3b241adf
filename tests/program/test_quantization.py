"""Weights of few bits: how far a matrix is from its codes, how codes lie in memory, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm.errors import UserError
from barellm.program import ops, quantization
from barellm.program.builder import Program, Store
from barellm.program.dtypes import FORMATS, decode, encode
from barellm.program.quantization import dequantize, pack, packed_matrix, quantize, scheme, unpack
from tests.cases import normal

NAMES = ("int8", "int4", "int4/128", "nf4", "nf4/32", "int8/32")
each_name = pytest.mark.parametrize("name", NAMES)


@each_name
def test_no_element_is_further_from_its_code_than_half_a_gap(name):
    how, w = scheme(name), normal(19, 133, seed=2).astype(np.float32)
    codes, scales = quantize(w, how)
    table = np.array(how.table or np.arange(-127.0, 128))
    each = np.abs(np.repeat(scales.astype(np.float64), how.group or 133, 1)[:, :133])
    # At an end the gap is that to the end; 2^-11 is the rounding of a scale.
    allowed = each * np.diff(table).max() / 2 * (1 + 1e-5) + np.abs(w) * 2.0**-11
    assert (np.abs(dequantize(codes, scales, how) - w) <= allowed + (each if name.startswith("int4") else 0) * 0.5).all()
    again, same = quantize(dequantize(codes, scales, how), how)
    assert np.array_equal(dequantize(again, same, how), dequantize(codes, scales, how)), "codes of codes are they themselves"


@each_name
def test_a_code_is_the_nearest_of_all(name):
    how, w = scheme(name), normal(3, 64, seed=4).astype(np.float32)
    codes, scales = quantize(w, how)
    values = np.array(how.table or np.arange(-127.0, 128)) * np.repeat(scales.astype(float), how.group or 64, 1)[:, :64, None]
    nearest = np.abs(values - w[..., None]).min(-1)
    assert np.allclose(np.abs(dequantize(codes, scales, how) - w), nearest, rtol=1e-5, atol=1e-7)


def test_the_largest_of_a_group_of_four_bit_integers_is_minus_eight():
    w = np.zeros((2, 32), np.float32)
    w[0, 3], w[0, 7], w[1, 5], w[1, 6] = 4.0, -2.0, -4.0, 3.5
    codes, scales = quantize(w, scheme("int4"))
    assert scales[:, 0].tolist() == [-0.5, 0.5] and codes[0, 3] == codes[1, 5] == 0
    assert dequantize(codes, scales, scheme("int4"))[1, 6] == 3.5


@each_name
def test_a_row_s_magnitude_changes_no_code_and_scales_follow_it_exactly(name):
    how, w = scheme(name), normal(7, 133, seed=2).astype(np.float32)
    powers = np.array([[0], [-100], [-40], [-12], [9], [20], [120]])
    codes, scales = quantize(w, how)
    other, others = quantize(np.ldexp(w, powers), how)
    assert scales.dtype == np.float16 and others.dtype == np.float32
    assert np.array_equal(other, codes) and np.array_equal(others, np.ldexp(scales.astype(np.float32), powers))
    for a, b in zip(unpack(*pack(other, others, how), how, 7, 133), (other, others), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", ("int8", "int4", "nf4"))
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e-6, 1e-5, 1.0, 1e5, 1e6, 1e30, 3e38, 3.4028235e38, -3.4028235e38])
def test_every_magnitude_of_fp32_is_held(name, size):
    """A row's elements of the largest magnitude have the code that has it, so they are off by the rounding of the scale alone: 11
    places, or of fp32's subnormal numbers as many as there are."""
    w = np.tile(np.linspace(0, size, 16, dtype=np.float32), 4)[None]
    codes, scales = quantize(np.concatenate([np.zeros_like(w), w]), scheme(name))
    made = dequantize(codes, scales, scheme(name))
    assert np.isfinite(made).all() and (made[0] == 0).all()
    assert abs(made[1, 15] - w[0, 15]) <= abs(size) * 2.0**-11 + 2.0**-142
    for a, b in zip(unpack(*pack(codes, scales, scheme(name)), scheme(name), 2, 64), (codes, scales), strict=True):
        assert np.array_equal(a, b)


def test_a_group_keeps_its_digits_beside_one_that_is_larger_by_2_to_the_27():
    w = np.ones((3, 96), np.float32) * 3e-20
    w[:, 32:64] *= np.float32([[2.0**24], [2.0**26], [2.0**60]])
    codes, scales = quantize(w, scheme("int4"))
    made = dequantize(codes, scales, scheme("int4"))
    assert np.allclose(made[:2], w[:2], rtol=2.0**-11, atol=0)
    assert (made[2, :32] == 0).all() and np.allclose(made[2, 32:64], w[2, 32:64], rtol=2.0**-11)


def test_scales_that_were_rounded_stay_as_they_are():
    """Also where rounding made the largest the next power of two, and the least has places that one exponent more would lose."""
    scales = np.array([[(2 - 2.0**-13) * 2.0**20, 5 * 2.0**-17], [2.0**20, 5 * 2.0**-17], [1.0, 2.0]], np.float32)
    numbers, exponents = quantization.halves(scales)
    assert exponents.tolist() == [[8], [7], [0]]
    again, same = quantization.halves(quantization.joined(numbers, exponents))
    assert np.array_equal(again, numbers) and np.array_equal(same, exponents)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(value):
    w = normal(5, 64).astype(np.float32)
    w[3, 40] = value
    with pytest.raises(UserError, match=f"row 19 of h.0.w has {value}, expected finite numbers to quantize"):
        quantize(w, scheme("int4"), name="h.0.w", first=16)


def test_scales_of_earlier_versions_lie_in_memory_as_they_were():
    """Numbers of fp16 below its normal ones, and infinity, which earlier versions wrote."""
    scales = np.array([[2.0**-24, 60000.0], [np.inf, -(2.0**-20)]], np.float16)
    _, packed = pack(np.full((2, 64), 8, np.uint8), scales, scheme("int4"))
    assert packed.dtype == np.float16 and np.array_equal(packed[0, :2, :2].T, scales) and not packed[0, 2].any()


@each_name
@pytest.mark.parametrize("shape", [(1, 1), (17, 9), (33, 200)], ids=str)
def test_unpacking_undoes_packing_and_memory_keeps_it(name, shape):
    how = scheme(name)
    codes, scales = quantize(normal(*shape), how)
    packed = pack(codes, scales, how)
    assert tuple(a.shape for a in packed) == how.shapes(*shape)
    for a, b in zip(unpack(*packed, how, *shape), (codes, scales), strict=True):
        assert np.array_equal(a, b)
    (stored,) = encode(packed[0], how.codes)
    assert stored.nbytes == FORMATS[how.codes].nbytes(packed[0].size) == packed[0].size * FORMATS[how.codes].bits // 8
    assert np.array_equal(decode([stored], how.codes).reshape(packed[0].shape), packed[0])
    assert np.array_equal(packed_matrix(*packed, how, *shape), dequantize(codes, scales, how))
    beyond = packed_matrix(*packed, how, packed[0].shape[0] * 16, packed[0].shape[1] * 8).copy()
    beyond[: shape[0], : shape[1]] = 0
    assert (beyond == 0).all(), "codes beyond the matrix stand for zero"


def test_a_byte_has_the_elements_k_and_k_plus_four_of_a_column():
    """The layout that byte look-ups want: of the tile's column 6, elements 2 and 6 share the byte 16 + 8 + 4."""
    codes = np.full((16, 8), 8, np.uint8)
    codes[6, 2], codes[6, 6] = 1, 15
    packed, _ = pack(codes, np.ones((16, 1), np.float16), scheme("int4"))
    (stored,) = encode(packed, "u4")
    assert {i: int(b) for i, b in enumerate(stored) if b != 0x88} == {28: 0xF1}


# QLoRA (Dettmers et al. 2023), appendix E.
PAPER = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def test_the_table_of_normal_quantiles_is_the_paper_s_rounded_to_bf16():
    nearest = np.array(PAPER, np.float32).astype(ml_dtypes.bfloat16)
    assert tuple(nearest.astype(float)) == quantization.NORMAL_QUANTILES
    assert scheme("nf4-v1/32").table == (*scheme("nf4").table[:6], -0.09130859375, *scheme("nf4").table[7:])


@pytest.mark.parametrize(
    "name, says",
    [
        ("int5", "unknown weights 'int5', did you mean 'int8'? (known: int8, int4, nf4)"),
        ("int4/100", "weights 'int4/100' have groups of '100', expected 32, 64, 128"),
    ],
)
def test_other_schemes_are_refused(name, says):
    with pytest.raises(UserError) as refused:
        scheme(name)
    assert str(refused.value) == says


def test_codes_of_another_shape_are_refused():
    p = Program(Store())
    x, codes = p.input("x", (3, 20), "fp32"), p.input("codes", (2, 2, 128), "u4")
    scales = p.input("scales", (2, 2, 16), "fp16")
    with pytest.raises(ValueError, match=r"expects codes \(2, 3, 128\) u4 and scales \(2, 2, 16\) for 17 columns"):
        p.apply(ops.QuantizedMatmul, x=x, codes=codes, scales=scales, weights="int4", columns=17)


def test_the_formats_are_those_of_the_page():
    found = [(s.name, s.codes, s.group, s.largest) for s in quantization.SCHEMES.values()]
    assert found == [("int8", "i8", 0, 127), ("int4", "u4", 32, 8), ("nf4", "u4", 64, 1)]
