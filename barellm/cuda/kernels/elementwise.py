"""Element by element. Shapes: all operands dense, n elements at run time."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, cdiv, lowering, mode
from barellm.cuda.kernels.common import keep
from barellm.cuda.lang import constant, device, tl
from barellm.program.ops.elementwise import GELU_CUBIC, GELU_SCALE

BLOCK = 1024
# tanh(u) = 2 sigmoid(2 u) - 1 turns the op's formula into x sigmoid(2 u), with one exp and no cancellation near zero.
TWO_SCALE, CUBIC = constant(2 * GELU_SCALE), constant(GELU_CUBIC)


@device
def gelu_value(x):
    """GELU of fp32 values."""
    return x / (1.0 + tl.exp(-TWO_SCALE * x * (1.0 + CUBIC * x * x)))


@device
def gelu_slope(x):
    """The derivative of GELU at fp32 values."""
    s = 1.0 / (1.0 + tl.exp(-TWO_SCALE * x * (1.0 + CUBIC * x * x)))
    return s + x * s * (1.0 - s) * TWO_SCALE * (1.0 + 3.0 * CUBIC * x * x)


@device
def cast(y, x, n, scalars, MODE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    keep(y + i, mask, tl.load(x + i, mask=mask).to(y.dtype.element_ty), scalars, MODE)


@lowering("cast")
def lower_cast(op: Any, c: Lowering) -> None:
    n = c.elements(op.x)
    c.launch(
        cast,
        {"y": op.y, "x": op.x, "n": n},
        {"MODE": mode(op, "y"), "BLOCK": BLOCK},
        grid=lambda s: (cdiv(n(s), BLOCK),),
        writes="y",
    )
