"""Storage formats of weights and moments, which kernels load and store as fp32.

A weight is one array, or two planes p and lo (`program.dtypes`): the bits (hi << 16) + lo of "bf16_i16" (hi is the nearest bf16)
and "bf16_u16", whose lo is unsigned (hi is truncated), or the nearest fp16 and the fp32 weight of "fp16_fp32". FORMAT: one of
these, None for one array. A moment is one array, or the 16-bit codes of `program.moments`: fp32 with fewer bits."""

from typing import Any

from barellm.cuda.kernels.optim.multi_tensor import aligned_pointer, column
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import format_of
from barellm.program.moments import FORMATS
from barellm.program.moments import REBIAS as REBIAS_BITS
from barellm.program.tensor import Tensor
from barellm.runtime.lowering import part, plane

REBIAS = constant(REBIAS_BITS)
WHOLE = constant(16)  # UNIT of a tensor that is no part of a bank: its first plane begins at a multiple of 16 elements


def weight_operands(name: str, t: Tensor) -> dict[str, Any]:
    """Operands `name` and `name_lo` of a launch: both planes, or the fp32 tensor and None."""
    if t.dtype in ("bf16_i16", "bf16_u16"):
        return {name: (plane(t, 0)[0], "i16"), f"{name}_lo": plane(t, 1)}
    if format_of(t.dtype).planes:
        return {name: plane(t, 0), f"{name}_lo": plane(t, 1)}
    return {name: t, f"{name}_lo": None}


def weight_columns(params: list[Tensor]) -> dict[str, Any]:
    """The columns `param` and `lo` of a table, for many weights of one dtype (`weight_operands` of each)."""
    planes = [weight_operands("param", p) for p in params]
    two = bool(format_of(params[0].dtype).planes)
    lo = column(p["param_lo"] for p in planes) if two else ("i64", [0] * len(params))
    return {"param": column(p["param"] for p in planes), "lo": lo}


def weight_constants(t: Tensor) -> dict[str, Any]:
    """The constant FORMAT of a kernel whose table has weights like `t`: None where they have one plane."""
    return {"FORMAT": t.dtype if format_of(t.dtype).planes else None}


@device
def weight_pointer(table, entry, PARAM, ENTRIES, UNIT, FORMAT):
    """Load from the table a pointer to a weight's first plane, or fp32 array; UNIT divides its number of elements."""
    ONE: tl.constexpr = tl.float32 if FORMAT is None else tl.float16 if FORMAT == "fp16_fp32" else tl.int16
    return aligned_pointer(table, entry, PARAM, ENTRIES, ONE, UNIT)


@device
def lo_pointer(table, entry, LO, ENTRIES, UNIT, FORMAT):
    """Load from the table a pointer to a weight's second plane. Of "fp16_fp32" it begins after as many fp16, of half the size."""
    TWO: tl.constexpr = tl.float32 if FORMAT == "fp16_fp32" else tl.uint16 if FORMAT == "bf16_u16" else tl.int16
    MULTIPLE: tl.constexpr = UNIT if FORMAT != "fp16_fp32" or UNIT == 1 else UNIT // 2
    return aligned_pointer(table, entry, LO, ENTRIES, TWO, MULTIPLE)


@device
def load_weight(p, lo, i, mask):
    """Load fp32 values of a weight's elements i; zero in masked elements."""
    if lo is None:
        return tl.load(p + i, mask=mask, other=0.0)
    elif lo.dtype.element_ty == tl.float32:
        return tl.load(lo + i, mask=mask, other=0.0)
    else:
        bits = tl.load(p + i, mask=mask, other=0).to(tl.int32) << 16  # adding fits both: lo widens by its own sign
        return (bits + tl.load(lo + i, mask=mask, other=0).to(tl.int32)).to(tl.float32, bitcast=True)


@device
def to_bf16(value):
    """The nearest bf16 of fp32 numbers, ties to even, as fp32."""
    return value.to(tl.bfloat16).to(tl.float32)


@device
def store_weight(p, lo, i, mask, value):
    """Store fp32 values as a weight's elements i (off the mask nothing), in all of its planes: p alone, an fp32 array (`lo` None);
    the nearest fp16 in p and fp32 in lo; or the upper 16 bits in p, rounded (lo i16) or cut off (lo uint16), the lower in lo."""
    if lo is None:
        tl.store(p + i, value, mask=mask)
    elif lo.dtype.element_ty == tl.float32:
        tl.store(p + i, value, mask=mask)
        tl.store(lo + i, value, mask=mask)
    else:
        bits = value.to(tl.int32, bitcast=True)  # of fp32
        half = 0 if lo.dtype.element_ty == tl.uint16 else 0x8000  # truncated, or rounded to the nearest
        tl.store(p + i, ((bits + half) >> 16).to(tl.int16), mask=mask)
        tl.store(lo + i, bits.to(lo.dtype.element_ty), mask=mask)


def moment_constants(name: str, t: Tensor) -> dict[str, Any]:
    """Constants of a moment's parameter `name` that the two functions below take: mantissa bits (None: fp32) and sign."""
    f = FORMATS.get(t.dtype)
    return {f"{name}_MANTISSA": f.mantissa if f else None, f"{name}_SIGNED": f.signed if f else None}


def moment_operand(t: Tensor) -> Any:
    """A moment as the operand of a launch."""
    return (part(t), "i16") if t.dtype in FORMATS else t


@device
def load_moment(p, i, mask, MANTISSA, SIGNED):
    """fp32 values of a moment's elements i; zero off the mask. Codes are the upper bits of fp32 with another exponent bias."""
    if MANTISSA is None:
        return tl.load(p + i, mask=mask, other=0.0)
    else:
        codes = tl.load(p + i, mask=mask, other=0).to(tl.int32)
        magnitude = codes & (0x7FFF if SIGNED else 0xFFFF)  # without the sign bit, if there is one
        bits = tl.where(magnitude != 0, (magnitude << (23 - MANTISSA)) + REBIAS, 0)
        if SIGNED:
            bits |= (codes & 0x8000) << 16
        return bits.to(tl.float32, bitcast=True)


@device
def store_moment(p, i, mask, value, dither, MANTISSA, SIGNED):
    """Store fp32 values as a moment's elements i: fp32, or 16-bit codes with MANTISSA bits and 6 exponent bits, below a sign if
    SIGNED, as `moments.encode` does: code = (fp32 bits - REBIAS) >> SHIFT, rounded. `dither`: int32 below 2^SHIFT for stochastic
    rounding, None for the nearest. LEAST, MOST: fp32 bits of the smallest and the largest number of the format."""
    if MANTISSA is None:
        tl.store(p + i, value, mask=mask)
    else:
        SHIFT: tl.constexpr = 23 - MANTISSA  # mantissa bits of fp32 that a code drops
        LEAST: tl.constexpr = (1 << SHIFT) + REBIAS
        MOST: tl.constexpr = (((1 << (6 + MANTISSA)) - 1) << SHIFT) + REBIAS
        bits = value.to(tl.int32, bitcast=True)  # of fp32
        magnitude = tl.minimum(bits & 0x7FFFFFFF, MOST)  # without the sign
        tiny = magnitude < LEAST  # below the smallest number
        if dither is None:
            code = (tl.where(tiny, 0, magnitude - REBIAS) + (1 << (SHIFT - 1))) >> SHIFT
        else:
            # A number below LEAST becomes LEAST or 0, in proportion to its size: `below` is its share of LEAST, times 2^SHIFT.
            PER_LEAST: tl.constexpr = 2.0 ** (SHIFT + 60) / (1 + 2.0**-MANTISSA)
            below = (tl.where(tiny, magnitude.to(tl.float32, bitcast=True), 0.0) * PER_LEAST).to(tl.int32)
            code = (tl.where(tiny, below, magnitude - REBIAS) + dither) >> SHIFT
        if SIGNED:
            code |= tl.where(code != 0, (bits >> 16) & 0x8000, 0)  # the sign bit; zero has none
        tl.store(p + i, code.to(tl.int16), mask=mask)
