"""Number formats of matmul operands by their names: eXmY, with X bits of exponent and Y of mantissa beside the sign."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

OPERANDS = ("activations", "weights", "gradients")  # kinds of matmul operands, in the order of `train.matmul_formats`
EXPONENT_BITS, MANTISSA_BITS, BIASES = (2, 8), (0, 10), (-32, 127)  # that a name may have, both ends included
LARGEST_EXPONENT = 127  # fp32's
EXPECTED = (
    "eXmY with X from {} to {} and Y from {} to {}, or eXmYbZ with the exponent bias Z from {} to {} and numbers below 2^{}: "
    "one for all operands, or three for activations,weights,gradients"
).format(*EXPONENT_BITS, *MANTISSA_BITS, *BIASES, LARGEST_EXPONENT + 1)


@dataclass(frozen=True)
class NumberFormat:
    """The numbers of a format: `exponents` of normal numbers, each with 2^`mantissa_bits` of them; below these the denormals, or
    zero; and none beyond `largest` * 2^top. `top` is the largest exponent where the bias is static."""

    mantissa_bits: int
    exponents: int
    largest: float  # significand of the largest number, 1 <= largest < 2
    top: int = 0
    denormals: bool = True


def number_format(name: str) -> NumberFormat | None:
    """The format of a name, as eXmY or eXmYbZ; None if it names none. Those of 8 bits and more are as in IEEE 754, with a last
    exponent for infinity and NaN; but of that of e4m3, as in OCP, the last number alone is NaN. Shorter ones have only numbers."""
    found = re.fullmatch(r"e(\d+)m(\d+)(?:b(-?\d+))?", name.strip())
    if not found:
        return None
    exponent_bits, mantissa_bits = int(found[1]), int(found[2])
    bias = 2 ** (exponent_bits - 1) - 1 if found[3] is None else int(found[3])
    for number, (least, most) in ((exponent_bits, EXPONENT_BITS), (mantissa_bits, MANTISSA_BITS), (bias, BIASES)):
        if not least <= number <= most:
            return None
    is_e4m3 = (exponent_bits, mantissa_bits) == (4, 3)
    numbers_only = is_e4m3 or 1 + exponent_bits + mantissa_bits < 8
    exponents = 2**exponent_bits - (1 if numbers_only else 2)  # of normal numbers; the first code is that of the denormals
    top = exponents - bias
    if top > LARGEST_EXPONENT:
        return None
    return NumberFormat(mantissa_bits, exponents, 1.75 if is_e4m3 else 2 - 2.0**-mantissa_bits, top)


def number_formats(text: str) -> Mapping[str, NumberFormat]:
    """The format of each kind of operand, from one name or three with commas between them. ValueError for others."""
    found = [number_format(name) for name in text.split(",")]
    if len(found) not in (1, len(OPERANDS)) or None in found:
        raise ValueError(EXPECTED)
    each = found * len(OPERANDS) if len(found) == 1 else found
    return MappingProxyType({kind: f for kind, f in zip(OPERANDS, each, strict=True) if f})
