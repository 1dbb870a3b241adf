"""RMSNorm of each head by itself, forward and backward: what a backend's `check_op` wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from barellm.program import ops
from barellm.program.ops.base import Op
from tests.cases import normal
from tests.check import EPS, persistent, tokens

each_heads = pytest.mark.parametrize("heads, D", [(1, 7), (3, 24), (2, 128)])


def gradient_size(dy: np.ndarray, x: np.ndarray, rstd: np.ndarray, weight: Any) -> np.ndarray:
    """The terms of dx without their signs: what the error of any order of sums is measured by."""
    n, scaled = np.abs(x) * rstd[..., None], np.abs(dy * weight)
    return rstd[..., None] * (scaled + n * (scaled * n).mean(-1, keepdims=True))


def head_norms(dtype: str, heads: int, D: int) -> Iterator[tuple[type[Op], dict[str, Any], dict[str, Any]]]:
    """(op, its operands, the rest of a check), whatever the rows' dtype, in which the result is too."""
    shape = (2, 5, heads * D)
    x, weight = tokens(normal(*shape) + 0.5, dtype), persistent(normal(D, seed=4))
    parts = x.values.reshape(2, 5, heads, D)
    rstd = 1 / np.sqrt((parts**2).mean(-1) + 1e-5)
    n, c = np.abs(parts) * rstd[..., None], EPS * (8 + np.sqrt(D))
    bounds = {"y": (c * n * np.abs(weight.values)).reshape(shape), "rstd": c * rstd}
    yield ops.HeadRMSNorm, {"x": x, "weight": weight}, {"eps": 1e-5, "bounds": bounds, "plan": (3, 7)}
    dy = tokens(normal(*shape, seed=2), dtype)
    given = {"dy": dy, "x": x, "rstd": tokens(rstd)}
    size = gradient_size(dy.values.reshape(parts.shape), parts, rstd, weight.values).reshape(shape)
    yield ops.HeadRMSNormDx, given | {"weight": weight}, {"bounds": {"dx": 8 * EPS * size + 4 * EPS}, "plan": (3, 7)}
    bounds = {"dweight": 16 * EPS * (4 + 10 * heads)}
    for mode in ("store", "start"):
        more = {"modes": {"dweight": mode}, "scalars": {"accumulate": int(mode == "start")}}
        yield ops.HeadRMSNormDweight, given, {**more, "bounds": bounds, "plan": (3, 7)}
