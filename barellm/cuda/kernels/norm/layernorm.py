"""LayerNorm and the gradient of both norms. RMSNorm is LayerNorm without the mean (`mean` None), and maybe without a weight.

Shapes: x, y, b, total, dy, dx (rows, C); weight, bias (C); mean, rstd (rows) fp32. A residual addition may come before the norm:
its sum `total` = x + b, or x + dropout(b), is normalised and stored. Short rows: a program has BR complete rows of BC >= C columns
in registers. Long rows: a program has one row, in blocks of BC columns. `row` (BR,) i64, `column` (BC,), `i` their offsets (BR,
BC); masks `live` of rows, `inside` of columns, `mask` of both. n: the normalised row (x - mean) rstd; dn = dy weight."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import MIN_SUM_COLUMNS, pow2, store_or_add
from barellm.cuda.kernels.pointwise.dropout import constants_of as dropout_constants
from barellm.cuda.kernels.pointwise.dropout import keep_mask
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.program.ops.norm.rmsnorm import heads_of
from barellm.program.tensor import Tensor

# Columns of a row that is held in registers after an addition. Alone, a forward pass holds one tensor, of which 1024 threads have
# four times as many elements in fp32, but twice as many in 16 bits, where the weights change their layout beside it. A backward
# pass holds two tensors. Longer rows are walked in blocks and read again, from the caches.
IN_REGISTERS = 8192
FORWARD, FORWARD_16, BACKWARD = 4, 2, 2  # times IN_REGISTERS
LONG_BLOCK = 4096  # columns of a long row that are read at a time
MOST_WARPS, MOST_REGISTERS = 32, 64  # of a program: 1024 threads, which have 64 registers each
THREAD = 16  # elements of a row that a thread holds


@device
def load_residual_sum(x, b, total, i, mask, row, scalars, seq, stream, THRESHOLD, SCALE, BR, BC):
    """The rows to be normalised, fp32 (BR, BC): x; or, with b, the residual sum x + b or x + dropout(b), which is also stored to
    `total`. THRESHOLD, SCALE: dropout's, None without dropout; then seq and stream are not used."""
    v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    if b is not None:
        u = tl.load(b + i, mask=mask, other=0.0).to(tl.float32)
        if THRESHOLD is not None:
            u = tl.where(keep_mask(row, 0, scalars, seq, stream, THRESHOLD, BR, BC), u * SCALE, 0.0)
        v += u
        tl.store(total + i, v, mask=mask)
    return v


@device
def normalised(v, centre, inverse, weight, bias, column, inside):
    """(v - centre) * inverse * weight + bias: v (BR, BC), centre (a mean) and inverse (rstd) (BR,), weight, bias (C) or None."""
    n = v * inverse[:, None] if centre is None else (v - centre[:, None]) * inverse[:, None]
    if weight is not None:
        n *= tl.load(weight + column, mask=inside, other=0.0)[None, :]
    if bias is not None:
        n += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    return n


@device
def layernorm(y, mean, rstd, x, b, total, weight, bias, scalars, rows, seq, stream, C, EPS, BR, BC, THRESHOLD, SCALE):
    """y = (x - mean) rstd weight + bias of BR complete rows, each read once, in registers; of x (rows, C) or of the residual sum x
    + b or x + dropout(b), which is written to `total`. Writes y (rows, C), mean and rstd (rows) fp32, for the backward pass.
    RMSNorm (`mean` None): y = x rstd weight. Grid: blocks of BR rows; BC >= C; both are powers of two.

    The variance is that of shifted data: a rough mean is subtracted before anything is squared, and its error afterwards: E[x^2] -
    E[x]^2 loses all digits when |mean| is 3000 times the deviation, this form never does. THRESHOLD, SCALE, `stream`: dropout's, or
    None. EPS: added to the variance."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    live, inside = row < rows, column < C
    mask = live[:, None] & inside[None, :]
    i = row[:, None] * C + column[None, :]
    v = load_residual_sum(x, b, total, i, mask, row, scalars, seq, stream, THRESHOLD, SCALE, BR, BC)
    if mean is None:
        d, offset, inverse = v, None, 1.0 / tl.sqrt(tl.sum(v * v, 1) / C + EPS)
    else:
        rough = tl.sum(v, 1) / C
        d = tl.where(mask, v - rough[:, None], 0.0)
        offset, square = tl.sum(d, 1) / C, tl.sum(d * d, 1) / C  # error of the rough mean; E[d^2]
        inverse = 1.0 / tl.sqrt(tl.maximum(square - offset * offset, 0.0) + EPS)
        tl.store(mean + row, rough + offset, mask=live)
    tl.store(rstd + row, inverse, mask=live)
    tl.store(y + i, normalised(d, offset, inverse, weight, bias, column, inside), mask=mask)


@device
def layernorm_long(y, mean, rstd, x, b, total, weight, bias, scalars, rows, seq, stream, C, EPS, BC):
    """`layernorm` of one row that registers do not hold, a program each, in blocks of BC columns (a power of two), without dropout.
    The row is read three times: for the rough mean, for the shifted variance, for y; by RMSNorm (`mean` None) twice."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * C  # of the row
    sums = tl.zeros((1, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        i, mask = base + column[None, :], (column < C)[None, :]
        v = load_residual_sum(x, b, total, i, mask, row, scalars, seq, stream, None, None, 1, BC)
        sums += v * v if mean is None else v
    if b is not None:
        tl.debug_barrier()  # other threads may read what this one stored
        x = total
    offset = None
    if mean is None:
        inverse = 1.0 / tl.sqrt(tl.sum(sums, 1) / C + EPS)
    else:
        rough = tl.sum(sums, 1) / C
        sums, squares = tl.zeros((1, BC), tl.float32), tl.zeros((1, BC), tl.float32)
        for first in range(0, C, BC):
            column = first + tl.arange(0, BC)
            mask = (column < C)[None, :]
            v = tl.load(x + base + column[None, :], mask=mask, other=0.0).to(tl.float32)
            d = tl.where(mask, v - rough[:, None], 0.0)
            sums += d
            squares += d * d
        offset = tl.sum(sums, 1) / C
        inverse = 1.0 / tl.sqrt(tl.maximum(tl.sum(squares, 1) / C - offset * offset, 0.0) + EPS)
        centre = rough + offset
        tl.store(mean + row, centre)
    tl.store(rstd + row, inverse)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        inside = column < C
        i = base + column[None, :]
        v = tl.load(x + i, mask=inside[None, :], other=0.0).to(tl.float32)
        if mean is not None:
            v -= rough[:, None]
        tl.store(y + i, normalised(v, offset, inverse, weight, bias, column, inside), mask=inside[None, :])


@device
def statistics(mean, rstd, row, live):
    """(mean, rstd) of some rows, (BR,) each; zeros for the mean where it is None."""
    centre = tl.zeros(row.shape, tl.float32)
    if mean is not None:
        centre = tl.load(mean + row, mask=live, other=0.0)
    return centre, tl.load(rstd + row, mask=live, other=0.0)


@device
def load_factors(dy, x, weight, i, column, mask, inside, centre, inverse):
    """Load (dy, dn = dy * weight, n), (BR, BC) fp32 each, zero in masked elements. `centre`, `inverse`: mean and rstd (BR,)."""
    g = tl.load(dy + i, mask=mask, other=0.0).to(tl.float32)
    dn = g
    if weight is not None:
        dn = g * tl.load(weight + column, mask=inside, other=0.0)[None, :]
    v = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    return g, dn, tl.where(mask, (v - centre[:, None]) * inverse[:, None], 0.0)


@device
def offset_of(mean, dn, C):
    """mean(dn) of each row (BR,); zeros where no mean was subtracted (RMSNorm, `mean` None)."""
    offset = tl.zeros((dn.shape[0],), tl.float32)
    if mean is not None:
        offset = tl.sum(dn, 1) / C
    return offset


@device
def layernorm_dx(dx, dy, x, weight, mean, rstd, scalars, rows, C, BR, BC, MODE):
    """dx = rstd (dn - mean(dn) - n mean(dn n)) of BR short rows, with n = (x - mean) rstd and dn = dy weight; an RMSNorm (`mean`
    None) has no mean(dn)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    live, inside = row < rows, column < C
    mask = live[:, None] & inside[None, :]
    i = row[:, None] * C + column[None, :]
    centre, inverse = statistics(mean, rstd, row, live)
    _, dn, n = load_factors(dy, x, weight, i, column, mask, inside, centre, inverse)
    a, p = offset_of(mean, dn, C), tl.sum(dn * n, 1) / C  # mean(dn), mean(dn n)
    store_or_add(dx + i, mask, inverse[:, None] * (dn - a[:, None] - n * p[:, None]), scalars, MODE)


@device
def layernorm_dx_long(dx, dy, x, weight, mean, rstd, scalars, rows, C, BC, MODE):
    """`layernorm_dx` of one row (rows, C) that registers do not hold, a program each, in blocks of BC columns (a power of two): dx
    = rstd (dn - mean(dn) - n mean(dn n)), stored or added (MODE). dy is the gradient of y, x, mean, rstd: of the forward pass."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    base = row[:, None] * C
    centre, inverse = statistics(mean, rstd, row, row < rows)
    sums, dot_products = tl.zeros((1, BC), tl.float32), tl.zeros((1, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        inside = column < C
        _, dn, n = load_factors(dy, x, weight, base + column[None, :], column, inside[None, :], inside, centre, inverse)
        sums += dn
        dot_products += dn * n
    a, p = offset_of(mean, sums, C), tl.sum(dot_products, 1) / C  # mean(dn), mean(dn n)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        inside = column < C
        i = base + column[None, :]
        _, dn, n = load_factors(dy, x, weight, i, column, inside[None, :], inside, centre, inverse)
        store_or_add(dx + i, inside[None, :], inverse[:, None] * (dn - a[:, None] - n * p[:, None]), scalars, MODE)


def launch_rows(
    c: Lowering, like: Tensor, short: Any, long: Any, operands: dict[str, Any],
    *, writes: str = "", thread: int = THREAD, times: int = 1, **constants: Any,
) -> None:  # fmt: skip
    """Plan one launch: of the kernel `short` over blocks of complete rows (..., C) of `like`, or of `long`, a program a row, where
    C is more than `times` * IN_REGISTERS columns. `thread`: elements of a row that a thread holds, more if 32 warps are too few."""
    C, rows = int(like.shape[-1]), c.rows(like)
    if times * IN_REGISTERS < C:
        if "THRESHOLD" in constants:
            assert constants.pop("THRESHOLD") is None and constants.pop("SCALE") is None, "no dropout in blocks"
        shape = {"C": C, "BC": LONG_BLOCK, **constants}
        c.launch(long, {**operands, "rows": rows}, shape, grid=lambda s: (rows(s),), writes=writes, warps=8)
        return
    BC = max(MIN_SUM_COLUMNS, pow2(C))
    BR = max(1, 128 * thread // BC)
    warps = min(MOST_WARPS, max(4, BC // (32 * thread)))
    shape = {"C": C, "BR": BR, "BC": BC, **constants}
    registers = MOST_REGISTERS if warps == MOST_WARPS else 0  # of 32 warps: else ptxas takes 32 of them and spills
    c.launch(
        short, {**operands, "rows": rows}, shape, grid=lambda s: (ceil_div(rows(s), BR),), writes=writes,
        warps=warps, registers=registers,
    )  # fmt: skip


def forward_times(op: Any) -> int:
    """`times` of `launch_rows` for a norm's forward pass: 1 after an addition, else by the dtype of x (see IN_REGISTERS)."""
    if "x" not in op.inputs:
        return 1
    return FORWARD if op.x.dtype == "fp32" else FORWARD_16


@lowering("layernorm", "add_layernorm", "dropout_add_layernorm")
def lower_layernorm(op: Any, c: Lowering) -> None:
    """LayerNorm of x; of a residual sum, which it also writes; or of x + dropout(b)."""
    dropped = op.name == "dropout_add_layernorm"
    operands = {
        "x": op.inputs.get("x") or op.a,
        "seq": (lambda s: s.seq) if dropped else None, "stream": int(op.stream) if dropped else None,
    }  # fmt: skip
    dropout = dropout_constants(op) if dropped else {"THRESHOLD": None, "SCALE": None}
    launch_rows(c, op.y, layernorm, layernorm_long, operands, times=forward_times(op), EPS=float(op.eps), **dropout)


@lowering("layernorm_dx", "rmsnorm_dx", "head_rmsnorm_dx", starts="dx")
def lower_layernorm_dx(op: Any, c: Lowering) -> None:
    like = heads_of(op) if op.name == "head_rmsnorm_dx" else op.dx
    launch_rows(c, like, layernorm_dx, layernorm_dx_long, {}, times=BACKWARD)
