"""Operands of products in 8 bits, for the tests of every backend."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from barellm.config.number_formats import number_format
from barellm.program import ops
from barellm.program.dtypes import LARGEST, numpy_dtype
from barellm.program.ops.gemm.fp8 import Static
from barellm.program.ops.optim.scales import BLOCKSPARSE, Delayed, Floating
from tests.cases import chain_bound, normal
from tests.check import EPS, persistent, tokens

# Names of formats -> ml_dtypes' of the same numbers. It rounds to nearest even, and to infinity or NaN beyond the largest number.
OTHERS = {
    "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e3m4": "float8_e3m4", "e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn", "e5m10": "float16", "e8m7": "bfloat16",
}  # fmt: skip
# (name, power of two that the numbers are multiplied by, dtype): those of which the dtype's normal numbers hold all
FORMS = [*((n, 0, "fp32") for n in OTHERS), *((n, -20, "fp32") for n in OTHERS if n != "e8m7")]
FORMS += [(n, 0, "bf16") for n in OTHERS if n not in ("e5m10", "e8m7")]
each_form = pytest.mark.parametrize("name, shift, dtype", FORMS)
RANDOM = {"seed": 5, "step": 2, "sample": 9}

STATIC = Static("head", x=5 / 448, weight=1.6 / 448, dy=0.75 / 448)
WAYS = {"static": STATIC, "delayed": Delayed("head", (5 / 448, 1.6 / 448, 0.75 / 448)), "floating": Floating("head")}
# What a backend does of a network with a classifier in each way.
USED = {
    "static": {"quantise", "softcap_codes", "scaled_matmul", "scaled_matmul_dx", "scaled_matmul_dw"},
    "delayed": {"quantise", "softcap_cross_entropy_backward", "delayed_scale", "measure", "remember", "scaled_matmul"},
    "floating": {"round_floating", "softcap_cross_entropy_backward", "float_bias", "measure", "scaled_matmul"},
}
each_way = pytest.mark.parametrize("way", WAYS)
each_format = pytest.mark.parametrize("dtype", LARGEST)
# (batch, length, K, N)
PRODUCTS = [(1, 1, 1, 1), (2, 5, 19, 33), (1, 37, 64, 131)]
each_product = pytest.mark.parametrize("shape", PRODUCTS, ids=str)


def codes_of(dtype: str) -> np.ndarray:
    """What each of the 256 codes stands for."""
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float64)


def every_number() -> np.ndarray:
    """All bf16; all codes of both formats; what lies in the middle between two of them, and the fp32 next to that on both sides."""
    with np.errstate(invalid="ignore"):  # NaN that signal
        words = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    found = [words]
    for dtype in LARGEST:
        codes = np.unique(codes_of(dtype)[np.isfinite(codes_of(dtype))])
        middle = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
        found += [codes, middle, *(np.nextafter(middle, np.float32(to)) for to in (-np.inf, np.inf))]
    values = np.concatenate(found)
    return np.resize(values, values.size + -values.size % 3).reshape(1, 3, -1)


def quantise_case(values: np.ndarray, dtype: str, scale: float, per_target: bool) -> tuple[dict, np.ndarray]:
    """What `check_op` wants, and the numbers that must come out, bit for bit."""
    given = {"x": tokens(values), "scale": persistent(np.array([scale]), "fp32", "state")}
    attrs = {"dtype": dtype, "per_target": per_target}
    scalars = {"inv_targets": 0.3} if per_target else {}
    wanted = ops.Quantise({}, attrs).reference(given["x"].values, given["scale"].values, **scalars)["y"]
    return {"given": given, **attrs, "scalars": scalars, "bounds": {"y": None}}, wanted


# Of the sum of magnitudes: what Hopper's tensor cores lose of a product of 8 bits, whose sums have some 14 bits there.
HOPPER_SUMS = 2.0**-10


def product_case(op_type, shape, mode: str = "store", dtype: str = "fp32", sums_to: float = 0.0) -> dict:
    """What `check_op` wants for one of the three products. `sums_to`: of the sum of magnitudes, what may be lost besides."""
    B, T, K, N = shape
    scales = {"x": 0.3, "weight": 0.01, "dy": 7.0}
    values = {"x": normal(B, T, K), "weight": normal(K, N, seed=2), "dy": normal(B, T, N, seed=3)}
    values["x"].flat[0] = 300.0  # far from the others, as some numbers of a transformer are
    given = {"x": tokens(values["x"], "e4m3"), "dy": tokens(values["dy"], "e5m2")}
    given["weight"] = persistent(values["weight"], "e4m3", "state")
    two, output = {
        ops.ScaledMatmul: (("x", "weight"), "y"),
        ops.ScaledMatmulDx: (("dy", "weight"), "dx"),
        ops.ScaledMatmulDw: (("x", "dy"), "dweight"),
    }[op_type]
    flat = {name: g.values.reshape(-1, g.values.shape[-1]) for name, g in given.items()}
    x, w, dy = flat["x"], flat["weight"], flat["dy"]
    by = scales[two[0]] * scales[two[1]] * (0.25 if "dy" in two else 1.0)
    factors = {"y": (x, w), "dx": (dy, w.T), "dweight": (x.T, dy)}[output]
    sums = np.abs(factors[0] @ factors[1])
    bound = by * (chain_bound(*factors) + 4 * EPS * sums) + (2 * EPS * (1 + by * sums) if mode != "store" else 0)
    bound += sums_to * by * (np.abs(factors[0]) @ np.abs(factors[1]))
    bound = bound if output == "dweight" else bound.reshape(B, T, -1)
    given = {name: given[name] for name in two}
    given |= {f"{name}_scale": persistent(np.array([scales[name]]), "fp32", "state") for name in two}
    case = {"given": given, "bounds": {output: bound}, "scalars": {"inv_targets": 0.25}, "plan": (B + 1, T + 2)}
    case |= {"modes": {output: mode}} if mode != "store" else {}
    more = {"dtype": dtype} if output != "dweight" else {}
    more |= {"source": (), "scaling": None} if output == "y" else {}
    return case | more


def floating_case(values: np.ndarray, emax: int, denormals: bool) -> tuple[dict, np.ndarray]:
    """What `check_op` wants, and the numbers that must come out, bit for bit."""
    given = {"x": tokens(values), "bias": persistent(np.array([emax, 3.0]), "fp32", "state")}
    form = replace(BLOCKSPARSE, denormals=denormals)
    attrs = {"dtype": "fp32", "format": form, "ties": "away", "per_target": True}
    op = ops.RoundFloating({}, attrs)
    wanted = op.reference(given["x"].values, given["bias"].values, inv_targets=0.25)["y"]
    return {"given": given, **attrs, "scalars": {"inv_targets": 0.25}, "bounds": {"y": None}}, wanted


def format_case(values: np.ndarray, name: str, shift: int, dtype: str = "fp32") -> tuple[dict, np.ndarray]:
    """What `check_op` wants of a format whose numbers are times 2^shift, and what ml_dtypes makes of x, bit for bit."""
    form = number_format(name)
    assert form is not None
    bias = 0.6 * 2.0 ** (form.top + shift) if shift else form.top  # a scale, whose logarithm is rounded up
    given = {"x": tokens(values, dtype), "bias": persistent(np.array([bias]), "fp32", "state")}
    attrs = {"dtype": dtype, "format": form, "ties": "even", "per_target": False, "of_scale": shift != 0}
    with np.errstate(over="ignore"):
        x = given["x"].values * 2.0**-shift
        most = form.largest * 2.0**form.top
        wanted = np.clip(x, -most, most).astype(getattr(ml_dtypes, OTHERS[name], OTHERS[name])).astype(np.float64)
    wanted = np.where(np.isnan(x), np.nan, wanted)  # the shortest have none
    return {"given": given, **attrs, "scalars": {}, "bounds": {"y": None}}, wanted * 2.0**shift


def stochastic_case(values: np.ndarray, name: str) -> tuple[dict, np.ndarray]:
    """The same of stochastic rounding, by the op's reference."""
    case, _ = format_case(values, name, 0)
    case |= {"ties": "stochastic", "stream": 3, "scalars": RANDOM}
    op = ops.RoundFloating({}, {k: case[k] for k in ("dtype", "format", "ties", "per_target", "of_scale", "stream")})
    return case, op.reference(case["given"]["x"].values, case["given"]["bias"].values, **RANDOM)["y"]


def scale_cases() -> list[tuple[type, dict]]:
    """What `check_op` wants for the ops that scales come from."""
    sums = persistent(np.array([10.0, 20.0, 70.0, 7.0]), "fp32", "state")
    narrow = persistent(np.array([100.0, 100.0, 420.0, 7.0]), "fp32", "state")  # the mean is large beside the deviation
    found: list[tuple[type, dict]] = []
    for count, deviations in [(0, False), (4, True), (5, False), (12, True), (512, True), (1536, False), (2048, False)]:
        given = {
            "bias": persistent(np.array([3.0, count]), "fp32", "state"),
            "sums": narrow if count == 512 else sums,
            "x": tokens(np.ones((2, 3, 4))),
        }
        found.append((ops.FloatBias, {"given": given, "deviations": deviations, "per_target": count > 4}))
    for entries in (1, 16):
        history = persistent(np.arange(entries) + 0.5, "fp32", "state")
        found.append((ops.Remember, {"given": {"history": history, "sums": sums}, "per_target": entries == 1}))
        for values in (history.values, np.zeros(entries)):
            given = {"history": persistent(values, "fp32", "state")}
            found.append((ops.DelayedScale, {"given": given, "first": 0.3, "largest": 448.0}))
    return [(op, case | {"scalars": {"inv_targets": 0.25}}) for op, case in found]
