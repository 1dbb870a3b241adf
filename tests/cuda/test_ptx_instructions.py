"""Single instructions of the PTX machine against what NVIDIA's PTX ISA says of them."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.simulators.ptx.arithmetic import fused, fused_doubles
from tests.simulators.ptx.parse import Address, Number, Pair, Register, Vector, parse
from tests.simulators.ptx.snippet import MODULE, run


def one(instruction: str, given: np.ndarray, out: str) -> np.ndarray:
    """An instruction from %r1 or %rd5 or %rs1 to %r2 or %rd6 or %rs2, as its operands say."""
    size = 8 * given.dtype.itemsize
    source = {16: "%rs1", 32: "%r1", 64: "%rd5"}[size]
    width = 8 * np.dtype(out).itemsize
    to = {16: "%rs2", 32: "%r2", 64: "%rd6"}[width]
    body = f"ld.global.b{size} {source}, [%rd3];\n {instruction};\n st.global.b{width} [%rd4], {to};"
    return run(body, given, out)[: len(given)]


FLOATS = np.array([0.0, -0.0, 1.5, -2.5, 0.5, 1e10, -1e10, np.inf, -np.inf, np.nan, 2.5, 1e-40, -3e-39, 255.7], "f4")
PAIRS = np.array([0x3F80BF80, 0xC0003F01, 0x80000000, 0x00018001, 0xFF807F80], "u4")  # of bf16
MOST, LEAST = 2**31 - 1, -(2**31)
INTEGERS = np.array([0, 1, -1, 2, 31, 32, 2**31 - 1, -(2**31), 12345, -98765], "i4")


@pytest.mark.parametrize(
    "instruction, given, want",
    [
        ("add.s32 %r2, %r1, 1", INTEGERS, INTEGERS + np.int32(1)),
        ("sub.s32 %r2, 5, %r1", INTEGERS, np.int32(5) - INTEGERS),
        ("mul.lo.s32 %r2, %r1, %r1", INTEGERS, INTEGERS * INTEGERS),
        ("mul.hi.s32 %r2, %r1, 65537", INTEGERS, (INTEGERS.astype("i8") * 65537 >> 32).astype("i4")),
        ("mul.hi.u32 %r2, %r1, %r1", INTEGERS, (INTEGERS.view("u4").astype("u8") ** 2 >> 32).astype("u4")),
        ("mul.wide.s32 %rd6, %r1, -3", INTEGERS, INTEGERS.astype("i8") * -3),
        ("mul.wide.u32 %rd6, %r1, 3", INTEGERS, INTEGERS.view("u4").astype("u8") * np.uint64(3)),
        ("mad.lo.s32 %r2, %r1, 7, %r1", INTEGERS, INTEGERS * np.int32(8)),
        ("mad.wide.u32 %rd6, %r1, 2, 5", INTEGERS, INTEGERS.view("u4").astype("u8") * np.uint64(2) + np.uint64(5)),
        ("div.s32 %r2, %r1, 7", INTEGERS, np.trunc(INTEGERS.astype("f8") / 7).astype("i4")),
        ("rem.s32 %r2, %r1, 7", INTEGERS, np.fmod(INTEGERS.astype("i8"), 7).astype("i4")),
        ("shl.b32 %r2, %r1, 33", INTEGERS, np.zeros(10, "i4")),
        ("shl.b32 %r2, 1, %r1", np.array([0, 31, 32, 99], "i4"), np.array([1, 1 << 31, 0, 0], "u4")),
        ("shr.s32 %r2, %r1, 40", INTEGERS, np.where(INTEGERS < 0, -1, 0).astype("i4")),
        ("shr.u32 %r2, %r1, 4", INTEGERS, INTEGERS.view("u4") >> 4),
        ("shf.l.wrap.b32 %r2, %r1, %r1, 6", INTEGERS, INTEGERS.view("u4") << 6 | INTEGERS.view("u4") >> 26),
        ("shf.r.wrap.b32 %r2, %r1, 0, 8", INTEGERS, INTEGERS.view("u4") >> 8),
        ("bfe.u32 %r2, %r1, 4, 5", INTEGERS, INTEGERS.view("u4") >> 4 & 31),
        ("bfe.s32 %r2, %r1, 0, 4", np.arange(-8, 8, dtype="i4") & 15, np.r_[-8:8].astype("i4")),
        ("bfe.u32 %r2, %r1, 28, 14", INTEGERS, INTEGERS.view("u4") >> 28),
        ("prmt.b32 %r2, %r1, 0, 0x0123", INTEGERS, INTEGERS.byteswap()),
        ("lop3.b32 %r2, %r1, 0x0ff00ff0, 0x5a5a1234, 0xea", PAIRS, PAIRS & 0x0FF00FF0 | 0x5A5A1234),
        ("lop3.b32 %r2, %r1, 0x0ff00ff0, 0x5a5a1234, 0xb4", PAIRS, PAIRS ^ np.uint32(0x0FF00FF0 & ~0x5A5A1234)),
        ("fma.rn.f16x2 %r2, %r1, %r1, %r1", np.array([0x3C004000, 0x3E00C200], "u4"), np.array([0x40004600, 0x43804600], "u4")),
        ("abs.bf16x2 %r2, %r1", PAIRS, PAIRS & 0x7FFF7FFF),
        ("neg.bf16x2 %r2, %r1", PAIRS, PAIRS ^ 0x80008000),
        ("popc.b32 %r2, %r1", INTEGERS, np.array([bin(v).count("1") for v in INTEGERS.view("u4").tolist()], "u4")),
        ("clz.b32 %r2, %r1", INTEGERS, np.array([32 - v.bit_length() for v in INTEGERS.view("u4").tolist()], "u4")),
        ("cvt.s64.s32 %rd6, %r1", INTEGERS, INTEGERS.astype("i8")),
        ("cvt.u64.u32 %rd6, %r1", INTEGERS, INTEGERS.view("u4").astype("u8")),
        ("cvt.u16.u32 %rs2, %r1", INTEGERS, INTEGERS.astype("u2")),
        ("cvt.rn.f32.s32 %r2, %r1", INTEGERS, INTEGERS.astype("f4")),
        ("max.s32 %r2, %r1, 5", INTEGERS, np.maximum(INTEGERS, 5)),
        ("min.u32 %r2, %r1, 5", INTEGERS, np.minimum(INTEGERS.view("u4"), 5)),
        ("neg.f32 %r2, %r1", FLOATS, -FLOATS),
        ("mul.f32 %r2, %r1, 0f40400000", FLOATS, FLOATS * np.float32(3)),
        ("max.f32 %r2, %r1, 0f3F800000", FLOATS, np.array([1, 1, 1.5, 1, 1, 1e10, 1, np.inf, 1, 1, 2.5, 1, 1, 255.7], "f4")),
        ("max.NaN.f32 %r2, %r1, 0f3F800000", FLOATS[7:10], np.array([np.inf, 1, np.nan], "f4")),
        ("add.ftz.f32 %r2, %r1, 0f00000000", FLOATS[-3:], np.array([0, 0, 255.7], "f4")),
        ("add.f32 %r2, %r1, 0f00000000", FLOATS[-3:], FLOATS[-3:]),
        ("cvt.rzi.s32.f32 %r2, %r1", FLOATS, np.array([0, 0, 1, -2, 0, MOST, LEAST, MOST, LEAST, 0, 2, 0, 0, 255], "i4")),
        ("cvt.rni.s32.f32 %r2, %r1", FLOATS[2:5], np.array([2, -2, 0], "i4")),
        ("cvt.rzi.u32.f32 %r2, %r1", FLOATS[[3, 5, 13]], np.array([0, 2**32 - 1, 255], "u4")),
        ("cvt.rna.tf32.f32 %r2, %r1", np.array([0x3F801000, 0xBF803000], "u4"), np.array([0x3F802000, 0xBF804000], "u4")),
        ("rcp.approx.ftz.f32 %r2, %r1", np.array([2.0, -4.0], "f4"), np.array([0.5, -0.25], "f4")),
        ("ex2.approx.ftz.f32 %r2, %r1", np.array([3.0, -200.0, -np.inf], "f4"), np.array([8, 0, 0], "f4")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_instruction(instruction, given, want):
    got = one(instruction, given, want.dtype.str)
    assert np.array_equal(got, want, equal_nan=want.dtype.kind == "f"), (got, want)


def test_bf16_is_rounded_to_nearest_even_and_the_first_operand_is_the_upper_half():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3.3e38, np.inf], "f4")
    got = one("cvt.rn.bf16x2.f32 %r2, %r1, 0f40000000", values, "u4")
    want = values.astype(ml_dtypes.bfloat16).view("u2").astype("u4") << 16 | 0x4000
    assert np.array_equal(got, want)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "geu", "num", "nan"])
def test_comparison_with_nan(name):
    """Ordered ones are false, `ne` too; those that end in u are true."""
    body = f"ld.global.b32 %r1, [%rd3]; setp.{name}.f32 %p1, %r1, 0f3FC00000; selp.b32 %r2, 1, 0, %p1; st.global.b32 [%rd4], %r2;"
    got = run(body, FLOATS, "u4")[: len(FLOATS)]
    nan = np.isnan(FLOATS)
    simple = {
        "eq": FLOATS == 1.5,
        "ne": FLOATS != 1.5,
        "lt": FLOATS < 1.5,
        "le": FLOATS <= 1.5,
        "gt": FLOATS > 1.5,
        "ge": FLOATS >= 1.5,
    }
    want = {"num": ~nan, "nan": nan}.get(name)
    if want is None:
        want = simple[name[:2]] | nan if name.endswith("u") else simple[name] & ~nan
    assert np.array_equal(got, want)


def test_fma_of_bf16_rounds_once():
    """1 + 2^-8 lies halfway between two bf16; what is added decides, however small."""
    rows = [(1.0, 1.0, 2.0**-8), (1.0, 1.0, 2.0**-8 + 2.0**-14), (1.0078125, 1.0078125, 0.0), (257.0, 1.0, 2.0**-60)]
    a, b, c = (np.array(v, "f4").astype(ml_dtypes.bfloat16).astype("f8") for v in zip(*rows, strict=True))
    body = "ld.global.v4.b16 {%rs1, %rs2, %rs3, %rs4}, [%rd3]; fma.rn.bf16 %rs5, %rs1, %rs2, %rs3; st.global.b16 [%rd4], %rs5;"
    given = np.stack([a, b, c, a], -1).astype(ml_dtypes.bfloat16).view("u8")[:, 0]
    got = run(body, given, "u2")[: len(a)].view(ml_dtypes.bfloat16)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        whole = Fraction(x) * Fraction(y) + Fraction(z)
        around = [np.nextafter(found, ml_dtypes.bfloat16(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(found)) - whole) <= abs(Fraction(float(v)) - whole) for v in around), (x, y, z)


def test_fma_rounds_once():
    """Against rational arithmetic, where rounding to a double first would go wrong, and at random."""
    r = np.random.default_rng(0)
    a, b = (r.integers(1 << 23, 1 << 24, 400).astype("f4") for _ in range(2))
    exact = a.astype("f8") * b
    c = (r.choice([1, -1], 400) * exact * 2.0 ** r.integers(-30, 30, 400)).astype("f4")
    tie = np.float32(1 + 2**-12)  # its square's last bit is half of a float's last; what is added decides
    a, b, c = np.r_[a, tie, tie, tie, 1e-20], np.r_[b, tie, tie, tie, 1e-20], np.r_[c, 1e-30, -1e-30, 0, 1e-45]
    a, b, c = (v.astype("f4") for v in (a, b, c))
    got = fused(a, b, c).astype(np.float32)
    for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        whole = Fraction(x) * Fraction(y) + Fraction(z)
        distance = abs(Fraction(found) - whole)
        around = [float(np.nextafter(np.float32(found), np.float32(side))) for side in (-np.inf, np.inf)]
        assert all(distance <= abs(Fraction(v) - whole) for v in around), (x, y, z)
    assert got[400] > got[402] >= got[401]


def test_fma_of_doubles_keeps_what_the_product_loses():
    r = np.random.default_rng(0)
    a, b = r.standard_normal((2, 200))
    for c in (-a * b, r.standard_normal(200), np.zeros(200)):
        for x, y, z, found in zip(a, b, c, fused_doubles(a, b, c), strict=True):
            assert found == float(Fraction(x) * Fraction(y) + Fraction(z))


@pytest.mark.parametrize(
    "mode, b, c, want",
    [
        ("bfly", 5, 31, [k ^ 5 for k in range(32)]),
        ("idx", 3, 31, [3] * 32),
        ("idx", 3, 0x181F, [k // 8 * 8 + 3 for k in range(32)]),
        ("up", 2, 0, [max(k - 2, k if k < 2 else k - 2) for k in range(32)]),
        ("down", 4, 31, [k + 4 if k < 28 else k for k in range(32)]),
    ],
)
def test_shuffle(mode, b, c, want):
    body = f"ld.global.b32 %r1, [%rd3]; shfl.sync.{mode}.b32 %r2, %r1, {b}, {c}, -1; st.global.b32 [%rd4], %r2;"
    assert run(body, np.arange(32, dtype="u4"), "u4").tolist() == want


def test_operands_are_parsed():
    text = MODULE.replace("THREADS", "32").replace("SIZE", "8")
    body = """
    { .reg .pred p; elect.sync %r1|p, -1; }
    @!%p2 ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd1 + 0x10 ];
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {%r1, %r2}], [%r3+-4];
    mov.f32 %r1, 0fBF800000;
"""
    elect, load, bulk, move, _ = parse(text.replace("BODY", body)).instructions[6:]
    assert elect.operands == (Pair(Register("%r1"), Register("p.1")), Number((1 << 64) - 1))
    assert load.guard == (Register("%p2"), True) and load.modifiers == ("global", "L1::evict_last", "v2", "b32")
    assert load.operands == (Vector((Register("%r1"), Register("%r2"))), Address(Register("%rd1"), 16))
    assert bulk.operands[0] == Address(Register("%rd3"), 0, (Register("%r1"), Register("%r2")))
    assert bulk.operands[1] == Address(Register("%r3"), -4)
    assert move.operands[1] == Number(0xBF800000, True)
