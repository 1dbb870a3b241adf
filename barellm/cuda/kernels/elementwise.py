"""Element by element. Shapes: all operands dense, n elements at run time."""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import Lowering, cdiv, lowering, mode
from barellm.cuda.kernels.common import keep
from barellm.cuda.lang import device, tl

BLOCK = 1024


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
