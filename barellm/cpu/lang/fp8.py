"""Conversion of FP8 (Micikevicius et al. 2022), E4M3 and E5M2, in integer arithmetic, for few CPUs have instructions. E4M3 has 4
bits of exponent and 3 of fraction, E5M2 5 and 2. E4M3 has no infinity, and of its codes only 0x7f and 0xff are NaN. A code is the 8
bits of a number. `k` is a Builder."""

from dataclasses import dataclass
from typing import Any

from barellm.program.dtypes import LARGEST

NAN = 0x7F


@dataclass(frozen=True)
class Fp8Format:
    """`fraction`: its bits; `bias` of the exponent; `largest`: the code of the largest number, before infinity and NaN."""

    fraction: int
    bias: int
    largest: int

    @property
    def shift(self) -> int:
        """By how many bits the fraction is shorter than fp32's."""
        return 23 - self.fraction

    @property
    def rebias(self) -> int:
        """By how much the biased exponent of a number is larger in fp32."""
        return 127 - self.bias


FP8_FORMATS = {"e4m3": Fp8Format(3, 7, 0x7E), "e5m2": Fp8Format(2, 15, 0x7B)}
assert FP8_FORMATS.keys() == LARGEST.keys()


def round_fp8(k: Any, v: Any, dtype: str) -> Any:
    """fp32 lanes to codes (i8 lanes), rounded to nearest even; beyond the largest number to that; NaN without its sign."""
    f, u = FP8_FORMATS[dtype], k.bitcast(v, k.ivec)
    magnitude, sign = u & 0x7FFFFFFF, (u >> 24) & 0x80
    # Round the fraction's last bits, which may carry into the exponent, as it should; then change the exponent's bias.
    to_even = (magnitude >> f.shift) & 1
    normal = (magnitude + ((1 << (f.shift - 1)) - 1) + to_even >> f.shift) - (f.rebias << f.fraction)
    # The fp32 number whose unit in the last place is that of FP8's denormals: adding it rounds to that unit.
    unit = f.rebias + 1 + f.shift << 23
    denormal = k.bitcast(k.bitcast(magnitude, k.vec) + k.bitcast(k.const(unit, k.ivec), k.vec), k.ivec) - unit
    code = k.select(magnitude < (f.rebias + 1 << 23), denormal, k.min(normal, f.largest))
    code = k.select(magnitude > 0x7F800000, NAN, code | sign)
    return k.to(code, f"<{k.lanes} x i8>")


def widen_fp8(k: Any, bits: Any, dtype: str) -> Any:
    """Codes (i8 lanes) to the fp32 lanes that they are. Exact."""
    f = FP8_FORMATS[dtype]
    wide = k.op(k.ivec, f"zext {bits.typed} to {k.ivec}")
    magnitude = (wide & 0x7F) << f.shift  # in fp32's fields, with FP8's bias
    out = k.bitcast(k.bitcast(magnitude, k.vec) * 2.0**f.rebias, k.ivec)  # a multiplication makes denormals normal
    infinite = 0x7F800000 if f.largest < NAN - 1 else 0x7FC00000  # fp32's exponent of infinity, or its NaN
    out = k.select((wide & 0x7F) > f.largest, magnitude | infinite, out) | ((wide & 0x80) << 24)
    return k.bitcast(out, k.vec)
