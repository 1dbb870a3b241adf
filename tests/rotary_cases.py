"""Cases of the ops in program/ops/attention/qk_rotary.py, for the kernel tests of both backends."""

from __future__ import annotations

import numpy as np

from barellm.program import ops
from barellm.program.ops.attention.qk_rotary import Yarn
from tests.cases import normal
from tests.check import EPS, persistent, tokens

FORMS = {"": {}, "paired": {"paired": True}, "shifted": {"shift": True}, "both": {"paired": True, "shift": True}}
# (batch, length, heads, heads of keys, columns of a head), form: one vector for both halves, halves that meet within a vector, some
# vectors for each half, more than registers.
CASES = [
    ((1, 1, 1, 1, 4), "shifted"),
    ((2, 5, 2, 2, 12), "both"),
    ((3, 2, 2, 4, 20), "paired"),
    ((3, 7, 1, 2, 20), "shifted"),
    ((1, 7, 2, 3, 64), ""),
    ((2, 3, 4, 2, 128), "both"),
    ((1, 2, 1, 1, 264), "shifted"),
]


def case(shape, form, dtype, *, backward: bool = False, mode: str = "store", view: bool = False) -> dict:
    """What `check_op` wants. `view`: x, and where there is one dx, are columns of a wider tensor."""
    B, T, heads, kv_heads, D = shape
    W, first = (heads + kv_heads) * D, 3
    attrs = {"heads": heads, "kv_heads": kv_heads, "paired": False, "shift": False, "eps": 1e-3} | FORMS[form]
    cos, sin = Yarn.of_head(D).tables(2 * (T + 2) + 1)
    x, dy = normal(B, T, W + 5 if view else W), normal(B, T, W, seed=2)
    given = {"whole" if view else "x": tokens(x, dtype)}
    given |= {"cos": persistent(cos, role="constant"), "sin": persistent(sin, role="constant")}
    views = {"x": ("whole", first, W)} if view else {}
    exact = given["whole" if view else "x"].values[..., first : first + W] if view else given["x"].values
    rstd = ops.QKRotary({}, attrs).reference(exact, cos, sin)["rstd"]
    largest = np.abs(exact).max() * rstd.max()
    if not backward:
        bounds = {"y": 12 * EPS * largest, "rstd": 8 * EPS * rstd}
    else:
        given |= {"dy": tokens(dy, dtype), "rstd": tokens(rstd)}
        if view:
            views["dx"] = ("dwhole", 1, W)
        sizes = np.abs(given["dy"].values).max() * rstd.max() * (2 + largest)
        bounds = {"dx": 24 * EPS * sizes + (2 * EPS * 6 if mode != "store" else 0)}
        attrs.pop("eps")
    modes = {"dx": mode} if mode != "store" else {}
    more = {"views": views, "modes": modes, "bounds": bounds, "plan": (B + 1, T + 2)}
    return {"op_type": ops.QKRotaryBackward if backward else ops.QKRotary, "given": given, **more, **attrs}
