"""Cases of the ops on images, for the kernel tests of both backends."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from barellm.program import ops
from tests.cases import normal
from tests.check import EPS, Given, persistent, stored

USUAL = {
    "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "reflect": False, "flip_kernel": False,
    "algorithm": "direct",
}  # fmt: skip
# name -> (N, C, H, W), (K, R, S), attributes
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one pixel": ((1, 1, 1, 1), (1, 1, 1), {}),
    "padded": ((3, 5, 7, 7), (13, 3, 3), {"padding": (1, 1)}),
    "strided": ((2, 3, 11, 8), (7, 5, 3), {"stride": (2, 3), "padding": (2, 0)}),
    "strided past the filter": ((2, 3, 9, 7), (4, 1, 2), {"stride": (2, 4)}),
    "strided past some columns": ((1, 3, 5, 23), (3, 2, 3), {"stride": (1, 4), "padding": (1, 2)}),
    "dilated": ((2, 4, 10, 13), (3, 3, 2), {"dilation": (2, 5), "padding": (1, 4)}),
    "reflected": ((2, 3, 5, 9), (6, 3, 5), {"padding": (2, 3), "reflect": True, "stride": (1, 2)}),
    "flip_kernel": ((1, 2, 6, 19), (5, 2, 4), {"flip_kernel": True, "padding": (1, 1), "stride": (1, 2), "dilation": (2, 1)}),
    "grouped": ((2, 6, 5, 7), (15, 3, 3), {"groups": 3, "padding": (1, 1)}),
    "depthwise": ((2, 5, 9, 6), (10, 3, 3), {"groups": 5, "padding": (1, 1), "stride": (2, 1)}),
    "of many channels to few": ((2, 70, 5, 4), (9, 3, 3), {"padding": (1, 1)}),
    "of many channels": ((2, 70, 5, 4), (19, 3, 3), {"padding": (1, 1)}),
    "of a long line": ((1, 2, 2, 611), (3, 2, 3), {"padding": (0, 1)}),
}
# Groups of one channel: tiles of some lines and of one, vectors and parts of them, filters too large to be unrolled, long lines.
DEPTHWISE: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "padded": ((3, 4, 13, 35), (4, 3, 3), {"groups": 4, "padding": (1, 1)}),
    "of three filters each": ((2, 3, 9, 17), (9, 3, 3), {"groups": 3, "padding": (1, 1), "flip_kernel": True}),
    "strided": ((2, 3, 19, 38), (6, 3, 3), {"groups": 3, "padding": (1, 1), "stride": (2, 2)}),
    "strided past the filter": ((2, 2, 11, 23), (2, 2, 1), {"groups": 2, "stride": (3, 4)}),
    "dilated": ((1, 3, 21, 20), (3, 3, 2), {"groups": 3, "padding": (4, 3), "dilation": (5, 3)}),
    "reflected": ((2, 3, 10, 18), (3, 5, 3), {"groups": 3, "padding": (4, 2), "reflect": True, "stride": (2, 1)}),
    "of large filters": ((1, 2, 22, 27), (2, 13, 21), {"groups": 2, "padding": (6, 10)}),
    "of very wide filters": ((1, 2, 5, 90), (2, 3, 64), {"groups": 2, "padding": (1, 9)}),
    "of long lines": ((1, 2, 3, 1700), (2, 3, 3), {"groups": 2, "padding": (1, 1)}),
    "strided of long lines": ((1, 2, 2, 2101), (2, 1, 3), {"groups": 2, "padding": (0, 1), "stride": (1, 2)}),
    "in several turns": ((1, 2, 70, 150), (2, 3, 3), {"groups": 2, "padding": (1, 1)}),
}


def images(values: np.ndarray, dtype: str = "fp32") -> Given:
    """Images (N, C, H, W), of which there are as many as a run says."""
    return Given(values, dtype, "sequences")


def case(name: str, form: tuple[Any, ...], dtype: str = "fp32", mode: str = "store", **more: Any) -> dict[str, Any]:
    """What `check_op` wants for "conv2d", "conv2d_dx" or "conv2d_dw" of a form."""
    (N, C, H, W), (K, R, S), attrs = form
    attrs = USUAL | attrs | more
    x, w = normal(N, C, H, W), normal(K, C // attrs["groups"], R, S, seed=2) / sqrt(C * R * S)
    P, Q = ops.Conv2d({}, attrs).output_size(H, W, R, S)
    dy = normal(N, K, P, Q, seed=3)
    x, w, dy = (stored(values, dtype) for values in (x, w, dy))
    op, given, out, deep = {
        "conv2d": (ops.Conv2d, {"x": images(x, dtype), "w": persistent(w)}, "y", C * R * S),
        "conv2d_dx": (ops.Conv2dDx, {"dy": images(dy, dtype), "w": persistent(w)}, "dx", K * R * S),
        "conv2d_dw": (ops.Conv2dDw, {"dy": images(dy, dtype), "x": images(x, dtype)}, "dw", N * P * Q),
    }[name]
    if name != "conv2d":
        attrs = attrs | {"size": (H, W) if name == "conv2d_dx" else (R, S)}
    # Sums of `deep` terms in fp32, in any order, of operands' magnitudes.
    sizes = op({}, attrs).reference(**{n: np.abs(g.values) for n, g in given.items()})[out]
    bounds = {out: (4 + 2 * sqrt(deep)) * EPS * sizes + 4 * EPS * (mode != "store") * 8}
    modes = {} if mode == "store" and name != "conv2d_dw" else {out: mode}
    return {"op_type": op, "given": given, "bounds": bounds, "modes": modes, "plan": (N + 1, 1), **attrs}


NORMS = {"one group": ((2, 6, 3, 5), 1), "a group for each channel": ((3, 5, 7, 7), 5), "long rows": ((1, 4, 13, 41), 2)}


def norm_case(name: str, form: tuple[Any, ...], dtype: str = "fp32", mode: str = "store") -> dict[str, Any]:
    """What `check_op` wants for "group_norm", "group_norm_dx" or "group_norm_dparams"."""
    (N, C, H, W), groups = form
    x, dy = (stored(values, dtype) for values in (normal(N, C, H, W) + 3.0, normal(N, C, H, W, seed=2)))
    weight, bias = (stored(normal(C, seed=seed), "fp32") for seed in (3, 4))
    forward = ops.GroupNorm({}, {"groups": groups, "eps": 1e-3})
    exact = forward.reference(x, weight, bias)
    saved = {n: stored(exact[n], "fp32") for n in ("mean", "rstd")}
    size, rstd = 8 * EPS * sqrt(C * H * W / groups), saved["rstd"].max()
    M = C * H * W // groups
    given = {"x": images(x, dtype)}
    if name == "group_norm":
        given |= {"weight": persistent(weight), "bias": persistent(bias)}
        bounds: dict[str, Any] = {"mean": size * 5, "rstd": size * 5 * rstd**2, "y": size * 12 * rstd}
        return {"op_type": ops.GroupNorm, "given": given, "bounds": bounds, "groups": groups, "eps": 1e-3, "plan": (N + 2, 1)}
    given |= {"dy": images(dy, dtype), **{n: images(v) for n, v in saved.items()}}
    if name == "group_norm_dx":
        given["weight"] = persistent(weight)
        more = {"op_type": ops.GroupNormDx, "bounds": {"dx": size * 30 * rstd}, "modes": {"dx": mode}}
        return {"given": given, "plan": (N + 2, 1), **(more | ({"modes": {}} if mode == "store" else {}))}
    bounds = {n: 8 * EPS * sqrt(N * M) * np.abs(dy).sum() / C * 4 * rstd for n in ("dweight", "dbias")}
    return {
        "op_type": ops.GroupNormDparams, "given": given, "bounds": bounds, "modes": dict.fromkeys(bounds, mode), "plan": (N + 2, 1),
    }  # fmt: skip


def mean_case(shape: tuple[int, ...], dtype: str = "fp32", mode: str = "store", *, backward: bool) -> dict[str, Any]:
    """What `check_op` wants for the mean over pixels, or its gradient."""
    modes = {} if mode == "store" else {"dx" if backward else "y": mode}
    added = 0.0 if mode == "store" else 8 * EPS
    if backward:
        dy = images(normal(*shape[:2]), dtype)
        more: dict[str, Any] = {
            "op_type": ops.MeanPixelsBackward,
            "size": shape[2:],
            "given": {"dy": dy},
            "bounds": {"dx": 8 * EPS},
        }
    else:
        more = {"op_type": ops.MeanPixels, "given": {"x": images(normal(*shape), dtype)}, "bounds": {"y": 8 * EPS + added}}
    return {**more, "modes": modes, "plan": (shape[0] + 1, 1)}


WINOGRAD = {
    "one tile": ((1, 1, 2, 1), (1, 3, 3), {"padding": (1, 1)}),
    "some tiles of several images": ((3, 13, 7, 9), (7, 3, 3), {"padding": (1, 2)}),
    "long lines": ((1, 2, 5, 77), (17, 3, 3), {"flip_kernel": True}),
    "groups": ((2, 10, 6, 5), (14, 3, 3), {"groups": 2, "padding": (1, 1), "reflect": True}),
    "a deep product": ((1, 260, 3, 3), (2, 3, 3), {"padding": (3, 0)}),
}
LARGE = {
    "seven by five": ((2, 5, 13, 19), (7, 7, 5), {"padding": (3, 1), "groups": 1, "flip_kernel": True}),
    "eleven rows": ((1, 4, 23, 5), (2, 11, 2), {"padding": (0, 1), "groups": 2}),
}
GROWN = {"fft": 3.0, "winograd2": 3.0, "winograd4": 8.0}  # the errors of these algorithms, beside those of direct sums


def winograd_case(name: str, form: tuple[Any, ...], algorithm: str, dtype: str = "fp32", mode: str = "store") -> dict[str, Any]:
    """As `case`. Errors are as large as the largest sum of a result's neighbours makes them."""
    found = case(name, form, dtype, mode, algorithm=algorithm)
    for out, bound in found["bounds"].items():
        found["bounds"][out] = GROWN[algorithm] * np.max(bound)
    return found
