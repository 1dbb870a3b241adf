"""Operands and error bounds of Muon's ops: what the tests of every backend share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from barellm.program import ops
from barellm.program.dtypes import PRECISIONS
from barellm.program.ops.base import Op
from barellm.program.ops.optim.optimizer import CHUNK
from tests.cases import chain_bound, normal
from tests.check import EPS, Given, persistent, stored

MATRICES = [(1, 1), (1, 70), (70, 1), (33, 131), (131, 33), (259, 257)]
# Deeper than a part of the depth in fp32, odd, one row, wider than a block of rows.
SQUARES = [(1, 1), (1, 37), (37, 1), (48, 48), (65, 130), (131, 65), (97, 1701), (1701, 50), (401, 33), (33, 401), (401, 401)]
APPLIED = [(1, 1), (1, 37), (37, 1), (64, 64), (65, 130), (131, 65), (50, 403), (403, 50)]
STEP = {"scalars": {"lr": 0.03, "momentum": 0.95}}


def gram_case(shape, dtype, seed=1) -> dict:
    x = stored(normal(*shape, seed=seed), dtype)
    wide = x.T if shape[0] > shape[1] else x
    return {"given": {"x": persistent(x, dtype, "state")}, "bounds": {"a": symmetric_bound(wide)}}


def symmetric_bound(x: np.ndarray) -> np.ndarray:
    """Of x x^T: the diagonal's sums only grow, and so do their errors."""
    return chain_bound(x, x.T) + 2 * EPS * np.sqrt(x.shape[1]) * np.abs(x @ x.T)


def symmetric(n: int, dtype: str, seed: int = 1) -> np.ndarray:
    x = normal(n, n, seed=seed)
    return stored((x + x.T) / np.sqrt(n), dtype)


def polynomial_case(n: int, dtype: str, seed: int = 1) -> dict:
    a = symmetric(n, dtype, seed)
    bound = 2.5 * symmetric_bound(a) + 4 * EPS * (3 * np.abs(a) + 2.5 * np.abs(a @ a))
    return {"given": {"a": persistent(a, dtype, "state")}, "bounds": {"b": bound}, "linear": -3.25, "square": 2.5}


def apply_case(shape, dtype, seed=1) -> dict:
    x, b = stored(normal(*shape, seed=seed + 1), dtype), symmetric(min(shape), dtype, seed)
    left, right = (x, b) if shape[0] > shape[1] else (b, x)
    bound = chain_bound(left, right) + 4 * EPS * (3 * np.abs(x) + np.abs(left @ right))
    given = {"x": persistent(x, dtype, "state"), "b": persistent(b, dtype, "state")}
    return {"given": given, "bounds": {"y": bound}, "scale": 3.4445}


def clip(scale: float):
    return persistent(np.array([2.0, scale]), role="state")


def momentum_case(shape, dtype, scale, nesterov, seed=1) -> dict:
    grad, m = normal(*shape, seed=seed), 0.1 * normal(*shape, seed=seed + 1)
    given = {"grad": persistent(grad, role="gradient"), "m": persistent(m, role="state"), "clip": clip(scale)}
    size = np.abs(grad) + np.abs(m)
    bounds = {"m": 4 * EPS * size, "u": 8 * EPS * size, "partials": 32 * EPS * (size**2).sum()}
    return {"given": given, "bounds": bounds, "dtype": dtype, "nesterov": nesterov, **STEP}


def normalize_case(shape, dtype, size=3.0, seed=1) -> dict:
    u = stored(seed * size * normal(*shape, seed=seed), dtype)
    squares = np.add.reduceat(u.reshape(-1) ** 2, np.arange(0, u.size, CHUNK))
    given = {"u": persistent(u, dtype, "state"), "partials": persistent(squares, role="state")}
    bound = 4 * EPS * np.abs(u) / max(1e-30, np.sqrt(squares.sum()))
    return {"given": given, "bounds": {"x": bound}, "margin": 1.02, "eps": 1e-6}


def scales_case(shape, dtype, scale, size=0.1, seed=1) -> dict:
    x = stored(seed * size * normal(*shape, seed=seed), dtype)
    n = max(shape)
    given = {"x": persistent(x, dtype, "state"), "second": persistent(0.01 * normal(n, seed=seed + 2) ** 2, role="state")}
    given["clip"] = clip(scale)
    op = ops.NorMuonScales(dict.fromkeys(["x"]), {"beta2": 0.9})
    with np.errstate(all="ignore"):
        want = op.reference(x, given["second"].values, given["clip"].values)
    small = 8 * EPS * np.sqrt(min(shape))
    bounds = {"second": small * np.abs(want["second"]), "scales": small * np.abs(want["scales"])}
    return {"given": given, "bounds": bounds, "beta2": 0.9}


def update_case(shape, dtype, weight_decay, cautious, scaled, scale=1.0, seed=1, storage="", squared=False) -> dict:
    storage = storage or PRECISIONS[dtype].weights
    p, x = stored(normal(*shape, seed=seed), storage), stored(0.1 * normal(*shape, seed=seed + 1), dtype)
    x.flat[::7] = 0.0  # a step of nothing, which does not oppose a decay
    given = {"param": persistent(p, storage), "x": persistent(x, dtype, "state"), "clip": clip(scale)}
    if scaled:
        given["scales"] = persistent(np.abs(normal(max(shape), seed=seed + 2)), role="state")
    bounds = {"param": 6 * EPS * (np.abs(p) + np.abs(x))}
    attrs = {"lr_scale": 2.0, "scale": 1.5, "weight_decay": weight_decay, "cautious": cautious, "squared": squared}
    return {"given": given, "bounds": bounds, **attrs, **STEP}


# --- banks ---

BANKS = [(1, 1), (5, 9), (40, 24), (33, 131), (131, 33)]


def bank(case: Callable[[int], dict], matrices: int = 3) -> dict:
    """A case of one matrix, made from a seed, as one of several matrices. Those have other numbers, and other sizes where the op
    is about a size."""
    cases = [case(1 + 4 * i) for i in range(matrices)]

    def rows(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.atleast_1d(a) for a in arrays])

    given = {}
    for name, one in cases[0]["given"].items():
        values = one.values if name == "clip" else rows([c["given"][name].values for c in cases])
        given[name] = Given(values, one.dtype, one.kind)
    bounds = {}
    for name, bound in cases[0]["bounds"].items():
        every = [c["bounds"][name] for c in cases]
        bounds[name] = rows(every) if np.ndim(bound) else max(every)
    return {**cases[0], "given": given, "bounds": bounds, "matrices": matrices}


def bank_cases(shape: tuple[int, int], dtype: str) -> list[tuple[type[Op], dict]]:
    """Every op of Muon over a bank of three."""
    n = min(shape)
    return [
        (ops.MuonMomentum, bank(lambda seed: momentum_case(shape, dtype, 0.5, True, seed))),
        (ops.MuonNormalize, bank(lambda seed: normalize_case(shape, dtype, seed=seed))),
        (ops.Gram, bank(lambda seed: gram_case(shape, dtype, seed))),
        (ops.GramPolynomial, bank(lambda seed: polynomial_case(n, dtype, seed))),
        (ops.GramApply, bank(lambda seed: apply_case(shape, dtype, seed))),
        (ops.NorMuonScales, bank(lambda seed: scales_case(shape, dtype, 0.5, seed=seed))),
        (ops.MuonUpdate, bank(lambda seed: update_case(shape, dtype, 0.3, True, True, seed=seed, squared=True))),
    ]
