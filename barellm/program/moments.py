"""16-bit floats for AdamW's moments, as in OpenAI's blocksparse (Gray et al. 2017): exact encodings, in NumPy.

"e6m9" (first moment): bit 15 the sign, 14..9 the exponent e, 8..0 the mantissa m: +-(1 + m / 512) 2^(e - 60).
"ue6m10" (second moment): 15..10 the exponent, 9..0 the mantissa: (1 + m / 1024) 2^(e - 60), no sign.

Code 0 is zero, so 2^-60 itself is none of the values; there are no denormals, infinities or NaNs. 8.7e-19 to 15.98 covers
what gradients and their squares do in training, which fp16 and bf16 do not: one has too few exponents, the other too few
digits for a mean that moves by a thousandth of itself."""

from dataclasses import dataclass

import numpy as np

REBIAS = (127 - 60) << 23  # what the exponent field of an fp32 has on top


@dataclass(frozen=True)
class Format:
    """Six bits of exponent, `mantissa` bits, and a sign where `signed`."""

    signed: bool
    mantissa: int

    @property
    def shift(self) -> int:
        """How many bits more an fp32 mantissa has than this one. A stochastic rounding takes as many random bits."""
        return 23 - self.mantissa

    @property
    def least(self) -> int:
        return (1 << self.shift) + REBIAS

    @property
    def most(self) -> int:
        return (((1 << (6 + self.mantissa)) - 1) << self.shift) + REBIAS

    @property
    def per_least(self) -> float:
        """The factor that takes [0, least] to [0, 2^shift]. By it, dithering decides between zero and the smallest value."""
        return 2.0 ** (self.shift + 60) / (1 + 2.0**-self.mantissa)


FORMATS = {"e6m9": Format(signed=True, mantissa=9), "ue6m10": Format(signed=False, mantissa=10)}


def encode(x, dtype: str, dither=None) -> np.ndarray:
    """The uint16 codes of fp32 values. Values beyond the largest, infinity and NaN become the largest; the sign is dropped in
    unsigned formats.
    Without `dither`: round to nearest, ties away from zero, underflow to zero. With it (uniform integers below 2^shift): stochastic
    rounding to one of the two neighbours, one of which may be zero, so that the mean is unchanged."""
    f = FORMATS[dtype]
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.int32)
    magnitude = np.minimum(bits & 0x7FFFFFFF, f.most)  # the bits of fp32 magnitudes are ordered as the values are
    tiny = magnitude < f.least
    chance = 0
    if dither is None:
        dither = 1 << (f.shift - 1)  # half a unit: to nearest
    else:  # of tiny values the place between 0 and the least, in units of 2^-shift: the chance to become the least
        chance = (np.where(tiny, np.abs(x), np.float32(0)) * np.float32(f.per_least)).astype(np.int32)
    codes = (np.where(tiny, chance, magnitude - REBIAS) + np.asarray(dither, dtype=np.int32)) >> f.shift
    if f.signed:
        codes |= np.where(codes != 0, (bits >> 16) & 0x8000, 0)
    return codes.astype(np.uint16)


def decode(codes, dtype: str) -> np.ndarray:
    """The fp32 values of uint16 codes, exactly: `encode` gives the codes back."""
    f = FORMATS[dtype]
    codes = np.asarray(codes, dtype=np.int32)
    magnitude = codes & 0x7FFF if f.signed else codes
    bits = np.where(magnitude != 0, (magnitude << f.shift) + REBIAS, 0)
    if f.signed:
        bits |= (codes & 0x8000) << 16
    return bits.astype(np.int32).view(np.float32)
