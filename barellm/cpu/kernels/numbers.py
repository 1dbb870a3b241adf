"""Constants of an op that a call carries beside its addresses, as ops with the same code differ in them; and fp32's bits."""

import struct

from barellm.cpu.kernel import Value

FP32_FRACTION, FP32_BIAS = 23, 127  # bits of the fraction; what is added to the exponent, whose bits lie above
FP32_MAGNITUDE, FP32_INFINITY = 0x7FFFFFFF, 0x7F800000  # all bits but the sign; the bits of infinity


def bits(value: float) -> int:
    """An fp64 as the integer operand of a call."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def number(k, value) -> Value:
    """The fp64 that `bits` made an operand of."""
    return k.bitcast(value, "double")
