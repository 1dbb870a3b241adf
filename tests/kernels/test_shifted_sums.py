"""Why LayerNorm takes the row's first element off before it sums."""

from __future__ import annotations

from benchmarks.shifted_sums import errors


def test_plain_sums_lose_the_variance_and_shifted_ones_do_not():
    for ratio, lost in ((100, 1e-4), (1000, 1e-2), (3000, 0.1)):
        found = errors(ratio, rows=40)
        assert found["plain"] > lost and found["subtracted in double"] > lost / 10
        assert found["shifted"] < 4e-6 and found["layernorm"] < 4e-6
