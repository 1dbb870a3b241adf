"""The two floats of 8 bits, in integer arithmetic, for few CPUs convert them. The exponent of e4m3 has 4 bits and its fraction 3,
of e5m2 5 and 2. e4m3 has no infinity, and of its codes 0x7f and 0xff only are no numbers. `k` is a Builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from barellm.program.dtypes import LARGEST

NAN = 0x7F


@dataclass(frozen=True)
class Form:
    """`fraction` bits; the exponent's `bias`; the code of the largest number, beyond which are infinity, if any, and NaN."""

    fraction: int
    bias: int
    largest: int

    @property
    def shift(self) -> int:
        """Bits of an fp32 fraction that are not there."""
        return 23 - self.fraction

    @property
    def rebias(self) -> int:
        """Difference of the exponents of a number in fp32 and here."""
        return 127 - self.bias


FORMS = {"e4m3": Form(3, 7, 0x7E), "e5m2": Form(2, 15, 0x7B)}
assert FORMS.keys() == LARGEST.keys()


def round_eight(k: Any, v: Any, dtype: str) -> Any:
    """fp32 lanes to codes (i8 lanes), to nearest even; beyond the largest number to that, NaN kept without its sign."""
    f, u = FORMS[dtype], k.bitcast(v, k.ivec)
    size, sign = u & 0x7FFFFFFF, (u >> 24) & 0x80
    normal = (size + ((1 << (f.shift - 1)) - 1) + ((size >> f.shift) & 1) >> f.shift) - (f.rebias << f.fraction)
    # A number whose unit in the last place is that of our denormals: adding it rounds.
    unit = f.rebias + 1 + f.shift << 23
    small = k.bitcast(k.bitcast(size, k.vec) + k.bitcast(k.const(unit, k.ivec), k.vec), k.ivec) - unit
    code = k.select(size < (f.rebias + 1 << 23), small, k.min(normal, f.largest))
    code = k.select(size > 0x7F800000, NAN, code | sign)
    return k.to(code, f"<{k.lanes} x i8>")


def widen_eight(k: Any, bits: Any, dtype: str) -> Any:
    """Codes (i8 lanes) to the fp32 lanes that they are."""
    f = FORMS[dtype]
    wide = k.op(k.ivec, f"zext {bits.typed} to {k.ivec}")
    size = (wide & 0x7F) << f.shift
    out = k.bitcast(k.bitcast(size, k.vec) * 2.0**f.rebias, k.ivec)  # denormals become normal
    infinite = 0x7F800000 if f.largest < NAN - 1 else 0x7FC00000
    out = k.select((wide & 0x7F) > f.largest, size | infinite, out) | ((wide & 0x80) << 24)
    return k.bitcast(out, k.vec)
