"""Numbers of every size for histograms of exponents: what the tests of every backend share."""

from __future__ import annotations

import numpy as np

from tests.cases import normal
from tests.check import EPS, persistent, tokens

SHAPES = [(1, 1, 1), (2, 5, 13), (3, 37, 65)]


def numbers(*shape: int) -> np.ndarray:
    """Of all exponents, with zeros of both signs, infinities and NaN among them where there is room."""
    r = np.random.default_rng(shape[-1])
    x = normal(*shape) * 2.0 ** r.integers(-40, 30, shape)
    flat = x.reshape(-1)
    if flat.size > 8:
        flat[::7], flat[1::11], flat[2::97], flat[5::89], flat[6::83] = 0.0, -0.0, np.inf, -np.inf, np.nan
        flat[3], flat[4] = 2.0**-130, -(2.0**-126)
    return x


def exponents_case(values: np.ndarray, dtype: str, **more) -> dict:
    """What `check_op` wants; more elements than planned are not there."""
    case = {"given": {"x": tokens(values, dtype)}, **more}
    x = case["given"]["x"].values
    return case | {"bounds": {"sums": sums_bound(x), "counts": 0}}


def weight_case(values: np.ndarray, dtype: str) -> dict:
    """The same of a parameter."""
    return {"given": {"x": persistent(values, dtype)}, "bounds": {"sums": sums_bound(values), "counts": 0}}


def sums_bound(x: np.ndarray) -> np.ndarray:
    """Sums in fp32 of a chain for each lane at least: errors walk at random. The largest is exact."""
    a = np.abs(np.where(np.isfinite(x), x, 0.0)).reshape(-1)
    walk = 4 * EPS * np.sqrt(a.size)
    return np.array([walk * a.sum(), walk * a.sum(), walk * (a**2).sum(), 0.0])
