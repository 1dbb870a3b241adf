"""Sigmoid gates: logits z = [x, extra] weight^T, gating y = base + factor sigmoid(z) x, and their gradients.

Shapes: of the logits x (rows, WX) and extra (rows, WE) or None, columns of wider rows, NAME_STRIDE elements apart; weight (N, WX +
WE); z, dz (rows, N) fp32. Of the gating base, x, y, dy, dx (rows, C): gate n of N is for the columns [n, n + 1) * C / N; factor
(1): a learned number, or its sigmoid (SQUASH), times SCALE. SHIFT: x of the position SHIFT before, zero at a start."""

from typing import Any

from barellm.cuda.kernel import COUNTER, Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, MIN_SUM_COLUMNS, axis_size, pow2, store_or_add
from barellm.cuda.kernels.norm.column_sums import Chunks, lower_combine
from barellm.cuda.kernels.pointwise.activations import sigmoid
from barellm.cuda.kernels.single_pass_reduction import is_last_program, store_total
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.runtime.lowering import part


@device
def load_columns(x, row, live, STRIDE, WIDTH, BC):
    """The first WIDTH columns of some rows, (rows, BC) fp32 padded with zeros. x: pointer to rows STRIDE elements apart; row
    (rows,): their indices; live (rows,): which exist; BC >= WIDTH."""
    column = tl.arange(0, BC)
    mask = live[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * STRIDE + column[None, :], mask=mask, other=0.0).to(tl.float32)


@device
def load_gate_weights(weight, n, FIRST, WIDTH, K, BC):
    """WIDTH weights of gate n from column FIRST on, (1, BC) fp32 padded with zeros. weight (N, K), K columns a row."""
    column = tl.arange(0, BC)
    return tl.load(weight + n * K + FIRST + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@device
def gate_logits(z, x, extra, weight, rows, N, WX, WE, X_STRIDE, EXTRA_STRIDE, BR, BC):
    """z (rows, N) fp32 = [x, extra] weight^T of BR rows of x (rows, WX) and extra (rows, WE) or None: their columns stay in
    registers, (BR, BC) fp32 each, and the weights (N, WX + WE) of each gate are loaded in turn. BC >= WX, WE. NAME_STRIDE: elements
    from a row of x, extra to the next. Grid: blocks of BR rows."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = row < rows
    v = load_columns(x, row, live, X_STRIDE, WX, BC)  # (BR, BC) fp32
    if extra is not None:
        e = load_columns(extra, row, live, EXTRA_STRIDE, WE, BC)
    for n in range(N):
        total = tl.sum(v * load_gate_weights(weight, n, 0, WX, WX + WE, BC), 1)
        if extra is not None:
            total += tl.sum(e * load_gate_weights(weight, n, WX, WE, WX + WE, BC), 1)
        tl.store(z + row * N + n, total, mask=live)


def logits_constants(op: Any) -> dict[str, Any]:
    """The constants of gate_logits and its gradient: widths, strides, and a block (BR, BC) that holds rows of x or of extra."""
    widths = [int(op.x.shape[-1]), 0 if op.extra is None else int(op.extra.shape[-1])]
    BC = max(MIN_SUM_COLUMNS, pow2(max(widths)))
    sizes = {"N": int(op.weight.shape[0]), "WX": widths[0], "WE": widths[1]}
    return {**sizes, "BR": max(1, 2 * BLOCK // BC), "BC": BC}


@lowering("gate_logits", also={"weight": "bf16_i16 fp16_fp32"}, views="x extra")
def lower_gate_logits(op: Any, c: Lowering) -> None:
    constants, rows = logits_constants(op), c.rows(op.x)
    c.launch(gate_logits, {"rows": rows}, constants, grid=lambda s: (ceil_div(rows(s), constants["BR"]),))


@device
def gate_input_backward(dx, partials, dz, x, weight, scalars, begin, end, N, FIRST, WIDTH, K, X_STRIDE, DX_STRIDE, BR, BC, MODE):
    """The gradients of gate_logits for one of its inputs (x or extra: WIDTH columns, weights from column FIRST of K on), of rows
    [begin, end), the program's chunk: dx = dz weight, stored or added (MODE), and in partials (chunks, N, K) fp32 dz^T x of these
    rows, the program's part of dweight. dz (rows, N) fp32: the gradient of z. BR rows at a time; BC >= WIDTH, a power of two.
    `scalars`: of the run, for MODE. Row strides: X_STRIDE, DX_STRIDE."""
    column = tl.arange(0, BC)
    inside = column < WIDTH
    for first in range(begin, end, BR):
        row = first + tl.arange(0, BR).to(tl.int64)
        live = row < end
        total = tl.zeros((BR, BC), tl.float32)
        for n in range(N):
            dz_column = tl.load(dz + row * N + n, mask=live, other=0.0)
            total += dz_column[:, None] * load_gate_weights(weight, n, FIRST, WIDTH, K, BC)
        store_or_add(dx + row[:, None] * DX_STRIDE + column[None, :], live[:, None] & inside[None, :], total, scalars, MODE)
    for n in range(N):
        sums = tl.zeros((BR, BC), tl.float32)
        for first in range(begin, end, BR):
            row = first + tl.arange(0, BR).to(tl.int64)
            live = row < end
            dz_column = tl.load(dz + row * N + n, mask=live, other=0.0)
            sums += dz_column[:, None] * load_columns(x, row, live, X_STRIDE, WIDTH, BC)
        partial_ptrs = partials + tl.program_id(0) * (N * K) + n * K + FIRST + column
        tl.store(partial_ptrs, tl.sum(sums, 0), mask=inside)


@device
def gate_logits_backward(
    dx, dextra, partials, dz, x, extra, weight, scalars, rows, per,
    N, WX, WE, X_STRIDE, EXTRA_STRIDE, DX_STRIDE, DEXTRA_STRIDE, BR, BC, DX_MODE, DEXTRA_MODE,
):  # fmt: skip
    """dx (rows, WX) and dextra (rows, WE) = dz weight, stored or added (DX_MODE, DEXTRA_MODE), and partials (chunks, N, WX + WE)
    fp32 of dweight = dz^T [x, extra], by `gate_input_backward` for each of the two inputs: x, and extra unless None. dz (rows, N)
    fp32: the gradient of the N gates' logits; x (rows, WX), extra (rows, WE), weight (N, WX + WE) as in gate_logits. A program has
    one chunk of `per` rows and alone writes its rows of dx and dextra and its part of partials, which another launch adds in order.
    `scalars`: the run's, which says whether a mode adds; NAME_STRIDE: elements from a row to the next; (BR, BC): a block in
    registers, BC >= WX, WE. Grid: chunks."""
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    gate_input_backward(dx, partials, dz, x, weight, scalars, begin, end, N, 0, WX, WX + WE, X_STRIDE, DX_STRIDE, BR, BC, DX_MODE)
    if extra is not None:
        gate_input_backward(
            dextra, partials, dz, extra, weight, scalars, begin, end,
            N, WX, WE, WX + WE, EXTRA_STRIDE, DEXTRA_STRIDE, BR, BC, DEXTRA_MODE,
        )  # fmt: skip


@lowering("gate_logits_backward", starts="dx dextra dweight", also={"weight": "bf16_i16 fp16_fp32"}, views="x extra dx dextra")
def lower_gate_logits_backward(op: Any, c: Lowering) -> None:
    """Plan two launches: dx and dextra with partial sums of dweight in scratch, then dweight from these (column_sums.py)."""
    rows, size = c.rows(op.x), op.weight.size
    chunks = Chunks(rows)
    partials = c.scratch("partials", (chunks.planned(op.x.size // int(op.x.shape[-1])), 1, size))
    operands = {"partials": partials, "rows": rows, "per": chunks.per}
    constants = logits_constants(op)
    constants |= {"BR": min(16, constants["BR"])}
    c.launch(gate_logits_backward, operands, constants, grid=lambda s: (chunks.count(s),), writes="dx dextra partials")
    lower_combine(c, partials, ["dweight"], chunks)


@device
def scale_and_slope(factor, SCALE, SQUASH):
    """(what multiplies a gate, its derivative by the factor): SCALE, times the factor or (SQUASH) its sigmoid; factor None: 1."""
    scale, scale_slope = tl.full((), SCALE, tl.float32), tl.full((), SCALE, tl.float32)
    if factor is not None:
        value = tl.load(factor)
        if SQUASH:
            value = sigmoid(value)
            scale_slope *= value * (1.0 - value)
        scale *= value
    return scale, scale_slope


@device
def gated(y, base, x, z, factor, scalars, rows, seq, C, N, X_STRIDE, BASE_STRIDE, SCALE, SQUASH, SHIFT, BR, BC, MODE):
    """y (rows, C) = base (None: 0) + gate x, gate = SCALE factor sigmoid(z), a block (BR, BC) for each program, all of whose
    columns belong to one of N gates of C / N columns. z (rows, N) fp32: of gate_logits. SHIFT: x of the position SHIFT before."""
    D: tl.constexpr = C // N  # columns of a gate
    blocks: tl.constexpr = (D + BC - 1) // BC
    n = tl.program_id(1) // blocks  # the gate
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) % blocks * BC + tl.arange(0, BC)
    live = row < rows
    mask = live[:, None] & (column < D)[None, :]
    column = n * D + column  # of x and y
    scale, _ = scale_and_slope(factor, SCALE, SQUASH)
    gate = scale * sigmoid(tl.load(z + row * N + n, mask=live, other=0.0))
    shifted_in = mask  # where x of the position SHIFT before is in the sequence
    if SHIFT > 0:
        shifted_in = mask & (row % seq >= SHIFT)[:, None]
    gate = gate[:, None]
    x_ptrs = x + (row - SHIFT)[:, None] * X_STRIDE + column[None, :]
    value = gate * tl.load(x_ptrs, mask=shifted_in, other=0.0).to(tl.float32)
    if base is not None:
        value += tl.load(base + row[:, None] * BASE_STRIDE + column[None, :], mask=mask, other=0.0).to(tl.float32)
    store_or_add(y + row[:, None] * C + column[None, :], mask, value, scalars, MODE)


def gated_constants(op: Any) -> dict[str, Any]:
    """The constants that gating and its gradient share."""
    return {"C": int(op.x.shape[2]), "N": int(op.z.shape[2]), "SCALE": op.scale, "SQUASH": op.squash, "SHIFT": op.shift}


@lowering("gated", starts="y", views="x base factor")
def lower_gated(op: Any, c: Lowering) -> None:
    """Launch gating, in blocks of BLOCK elements that end with a gate's columns."""
    constants, rows = gated_constants(op), c.rows(op.x)
    C, N = constants["C"], constants["N"]
    BC = min(256, pow2(C // N))
    BR = BLOCK // BC
    operands, blocks = {"rows": rows, "seq": axis_size(op.x, 1)}, N * ceil_div(C // N, BC)
    c.launch(gated, operands, constants | {"BR": BR, "BC": BC}, grid=lambda s: (ceil_div(rows(s), BR), blocks))


@device
def gated_backward(
    dx, dz, dfactor, partials, counter, dy, x, z, factor, scalars, rows, seq,
    C, N, X_STRIDE, DX_STRIDE, SCALE, SQUASH, SHIFT, BR, BC, DX_MODE, DZ_MODE, DFACTOR_MODE, SUM_BLOCK,
):  # fmt: skip
    """Gradients of `gated`: dx (rows, C) = dy gate, dz (rows, N) = gate (1 - sigmoid(z)) dot(dy, x) over a gate's columns, and
    dfactor (1), each stored or added: BR rows of one gate's columns a program, BC at a time. A program's part of dfactor goes to
    partials (programs), which the last program adds up (single_pass_reduction.py). Grid: blocks of rows, gates. NAME_STRIDE: of
    rows. SHIFT: x is of SHIFT positions before. SUM_BLOCK: partials that are added at a time."""
    D: tl.constexpr = C // N  # columns of a gate
    n = tl.program_id(1)  # the gate
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = row < rows
    scale, scale_slope = scale_and_slope(factor, SCALE, SQUASH)
    s = sigmoid(tl.load(z + row * N + n, mask=live, other=0.0))  # (BR,), of the rows' gates
    shifted_in = live  # rows whose x of SHIFT before exists
    if SHIFT > 0:
        shifted_in = live & (row % seq >= SHIFT)
        last = live & (row % seq >= seq - SHIFT)  # positions whose x no later one reads: dx is zero
    sums = tl.zeros((BR, BC), tl.float32)  # of dy x, added over columns at the end
    for first in tl.static_range(0, D, BC):
        inside = first + tl.arange(0, BC) < D
        column = n * D + first + tl.arange(0, BC)
        mask = shifted_in[:, None] & inside[None, :]
        dy_block = tl.load(dy + row[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
        x_block = tl.load(x + (row - SHIFT)[:, None] * X_STRIDE + column[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += dy_block * x_block
        dx_ptrs = dx + (row - SHIFT)[:, None] * DX_STRIDE + column[None, :]
        store_or_add(dx_ptrs, mask, dy_block * (scale * s)[:, None], scalars, DX_MODE)
        if SHIFT > 0:
            zeros = tl.zeros((BR, BC), tl.float32)
            tail_ptrs = dx + row[:, None] * DX_STRIDE + column[None, :]
            store_or_add(tail_ptrs, last[:, None] & inside[None, :], zeros, scalars, DX_MODE)
    dots = tl.sum(sums, 1)  # of dy and x in each row
    store_or_add(dz + row * N + n, live, scale * (s * (1.0 - s)) * dots, scalars, DZ_MODE)
    if partials is not None:
        tl.store(partials + tl.program_id(0) * N + n, scale_slope * tl.sum(s * dots, 0))
        if is_last_program(counter):
            store_total(dfactor, partials, tl.num_programs(0) * N, scalars, SUM_BLOCK, DFACTOR_MODE)


@lowering("gated_backward", starts="dx dz dfactor", views="x dx factor dfactor")
def lower_gated_backward(op: Any, c: Lowering) -> None:
    """Plan one launch, the gradient of gating; with a counter and partials only if there is a factor."""
    constants, rows = gated_constants(op), c.rows(op.x)
    C, N = constants["C"], constants["N"]
    BC = min(256, max(MIN_SUM_COLUMNS, pow2(C // N)))
    BR = BLOCK // BC
    constants |= {"BR": BR, "BC": BC, "SUM_BLOCK": None}
    operands: dict[str, Any] = {"dfactor": None, "partials": None, "counter": None, "rows": rows, "seq": axis_size(op.x, 1)}
    if op.factor is not None:
        operands |= {"dfactor": (part(op.dfactor), "fp32"), "counter": COUNTER}
        operands["partials"] = c.scratch("partials", (ceil_div(op.z.size // N, BR) * N,))
        constants |= {"SUM_BLOCK": BLOCK}
    grid, writes = lambda s: (ceil_div(rows(s), BR), N), "dx dz dfactor partials"
    c.launch(gated_backward, operands, constants, grid=grid, writes=writes)
