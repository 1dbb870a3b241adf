"""RMSNorm forward; its gradient is LayerNorm's without the mean (layernorm.py, layernorm_backward.py).

Shapes: x, y, b, total (rows, C); weight (C) or None; rstd (rows) fp32. Names as in layernorm.py."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.norm.layernorm import forward_times, launch_rows, layernorm, layernorm_long
from barellm.cuda.lang import device
from barellm.program.ops.norm.rmsnorm import heads_of

# Elements of a row in a thread: with 16, ptxas would rather spill two of them than take more than 40 registers.
THREAD = 8


@device
def rmsnorm(y, rstd, x, b, total, weight, scalars, rows, C, EPS, BR, BC):
    """y = x rstd weight and rstd of BR short rows, of x or of the residual sum `total` = x + b, each read once."""
    layernorm(y, None, rstd, x, b, total, weight, None, scalars, rows, None, None, C, EPS, BR, BC, None, None)


@device
def rmsnorm_long(y, rstd, x, b, total, weight, scalars, rows, C, EPS, BC):
    """`rmsnorm` of one row that registers do not hold, read twice: for the mean of its squares, for y."""
    layernorm_long(y, None, rstd, x, b, total, weight, None, scalars, rows, None, None, C, EPS, BC)


@lowering("rmsnorm", "add_rmsnorm", "head_rmsnorm")
def lower_rmsnorm(op: Any, c: Lowering) -> None:
    """RMSNorm of x, of each head of x, or of a residual sum, which it also writes."""
    operands = {"x": op.inputs.get("x") or op.a}
    options = {"thread": THREAD, "times": forward_times(op)}
    like = heads_of(op) if op.name == "head_rmsnorm" else op.y
    launch_rows(c, like, rmsnorm, rmsnorm_long, operands, **options, EPS=float(op.eps))
