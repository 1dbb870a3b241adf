"""RMSNorm forward; its gradient is LayerNorm's without the mean (layernorm.py, layernorm_backward.py).

Shapes: x, y, b, total (rows, C); weight (C) or None; rstd (rows) fp32. Names as in layernorm.py."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.norm.layernorm import forward_times, launch_rows, load_residual_sum
from barellm.cuda.lang import device, tl
from barellm.program.ops.norm.rmsnorm import heads_of

# Elements of a row in a thread: with 16, ptxas would rather spill two of them than take more than 40 registers.
THREAD = 8


@device
def scaled(v, inverse, weight, column, inside):
    """v * inverse * weight: v (BR, BC), inverse (rstd) (BR,)."""
    n = v * inverse[:, None]
    if weight is not None:
        n *= tl.load(weight + column, mask=inside, other=0.0)[None, :]
    return n


@device
def rmsnorm(y, rstd, x, b, total, weight, scalars, rows, C, EPS, BR, BC):
    """y and rstd of BR short rows, of x or of the residual sum `total` = x + b, each read once."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    live, inside = row < rows, column < C
    mask = live[:, None] & inside[None, :]
    i = row[:, None] * C + column[None, :]
    v = load_residual_sum(x, b, total, i, mask, row, scalars, seq=None, stream=None, THRESHOLD=None, SCALE=None, BR=BR, BC=BC)
    inverse = 1.0 / tl.sqrt(tl.sum(v * v, 1) / C + EPS)
    tl.store(rstd + row, inverse, mask=live)
    tl.store(y + i, scaled(v, inverse, weight, column, inside), mask=mask)


@device
def rmsnorm_long(y, rstd, x, b, total, weight, scalars, rows, C, EPS, BC):
    """y and rstd of one long row, read twice: for the mean of its squares, for y."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * C
    squares = tl.zeros((1, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        i = base + column[None, :]
        mask = (column < C)[None, :]
        v = load_residual_sum(x, b, total, i, mask, row, scalars, seq=None, stream=None, THRESHOLD=None, SCALE=None, BR=1, BC=BC)
        squares += v * v
    if b is not None:
        tl.debug_barrier()  # other threads may read what this one stored
        x = total
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 1) / C + EPS)
    tl.store(rstd + row, inverse)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        inside = column < C
        i = base + column[None, :]
        v = tl.load(x + i, mask=inside[None, :], other=0.0).to(tl.float32)
        tl.store(y + i, scaled(v, inverse, weight, column, inside), mask=inside[None, :])


@lowering("rmsnorm", "add_rmsnorm", "head_rmsnorm")
def lower_rmsnorm(op: Any, c: Lowering) -> None:
    """RMSNorm of x, of each head of x, or of a residual sum, which it also writes."""
    operands = {"x": op.inputs.get("x") or op.a}
    options = {"thread": THREAD, "times": forward_times(op)}
    like = heads_of(op) if op.name == "head_rmsnorm" else op.y
    launch_rows(c, like, rmsnorm, rmsnorm_long, operands, **options, EPS=float(op.eps))
