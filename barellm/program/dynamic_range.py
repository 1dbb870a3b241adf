"""Saturation and underflow of a tensor in a format, by the histogram of its exponents (`program.ops.exponent_stats`)."""

from dataclasses import dataclass
from math import log2, sqrt

import numpy as np

from barellm.program.ops.optim.exponent_stats import BINS, NOT_FINITE

BIAS = 127  # bin e has the numbers of 2^(e - BIAS) and more


@dataclass(frozen=True)
class FormatRange:
    """What a format can hold: its largest number, and the smallest above zero."""

    largest: float
    least: float

    @property
    def exponents(self) -> tuple[float, float]:
        """The logarithms between which numbers neither saturate nor, rounded to the nearest, become zero."""
        return log2(self.least) - 1, log2(self.largest)


# e4m3 has no infinities, and a NaN in the place of its largest number, as in OCP's specification.
FORMAT_RANGES = {
    "e4m3": FormatRange(448.0, 2.0**-9),
    "e5m2": FormatRange(57344.0, 2.0**-16),
    "fp16": FormatRange(65504.0, 2.0**-24),
    "bf16": FormatRange(2.0**128 - 2.0**120, 2.0**-133),
}


@dataclass(frozen=True)
class TensorStats:
    """The outputs of the op for one tensor: `counts` (256), and the sums of its finite elements."""

    counts: np.ndarray
    total: float
    total_abs: float
    total_squares: float
    largest: float

    @property
    def size(self) -> int:
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Zeros, and what is below 2^-126."""
        return int(self.counts[0])

    @property
    def not_finite(self) -> int:
        return int(self.counts[NOT_FINITE])

    @property
    def finite(self) -> int:
        return max(1, self.size - self.not_finite)

    @property
    def mean(self) -> float:
        return self.total / self.finite

    @property
    def mean_abs(self) -> float:
        return self.total_abs / self.finite

    @property
    def rms(self) -> float:
        return sqrt(self.total_squares / self.finite)

    @property
    def std(self) -> float:
        return sqrt(max(0.0, self.total_squares / self.finite - self.mean**2))

    def saturated(self, name: str, scale: float = 1.0) -> float:
        """The share of the elements that, times `scale`, are beyond the largest number of the format, infinities and NaN included.
        Within the octave of that number they are taken to be spread evenly."""
        limit = FORMAT_RANGES[name].largest / scale
        above = self._above(limit) if self.largest > limit else 0.0
        return (above + self.not_finite) / max(1, self.size)

    def flushed(self, name: str, scale: float = 1.0) -> float:
        """The share of nonzero elements that underflow: become zero when they are multiplied by `scale` and rounded to the
        nearest number of the format. It is exact where the scale is a power of two."""
        limit = FORMAT_RANGES[name].least / 2 / scale
        return (self.finite - self.zeros - self._above(limit)) / max(1, self.size)

    def _above(self, limit: float) -> float:
        low = np.exp2(np.arange(1, NOT_FINITE, dtype=np.float64) - BIAS)
        share = np.clip((2 * low - limit) / low, 0.0, 1.0)
        return float(self.counts[1:NOT_FINITE] @ share)


def tensor_stats(counts: np.ndarray, sums: np.ndarray) -> TensorStats:
    """Of the two outputs of the op."""
    assert counts.size == BINS, counts.shape
    return TensorStats(counts.reshape(-1).astype(np.int64), *(float(s) for s in sums.reshape(-1)))
