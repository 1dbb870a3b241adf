"""Numbers that a call carries beside its addresses: a constant of an op that many ops with the same code do not share."""

import struct

from barellm.cpu.kernel import Value


def bits(value: float) -> int:
    """An fp64 as the integer operand of a call."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def number(k, value) -> Value:
    """The fp64 that `bits` made an operand of."""
    return k.bitcast(value, "double")
