"""Sigmoid gates. Shapes: x (rows, k) and extra (rows, K - k), columns of wider rows, which lie as many elements apart as their
constants say; weight (N, K); z, dz (rows, N) fp32; base, y, dy, dx (rows, C), of which N divides C.
"""

from __future__ import annotations

from typing import Any

from barellm.cuda.kernel import COUNTER, Lowering, lowering, mode
from barellm.cuda.kernels.common import BLOCK, MIN_SUM_COLUMNS, pow2, row_strides, store_or_add
from barellm.cuda.kernels.norm.column_sums import Chunks, lower_combine
from barellm.cuda.kernels.pointwise.swiglu import sigmoid
from barellm.cuda.kernels.single_pass_reduction import is_last_program, store_total
from barellm.cuda.lang import device, tl
from barellm.program.integers import ceil_div
from barellm.runtime.lowering import part, weight_operand

# --- logits ---


@device
def read(x, row, live, ROW: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr):
    """WIDTH columns of some rows."""
    column = tl.arange(0, BC)
    mask = live[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * ROW + column[None, :], mask=mask, other=0.0).to(tl.float32)


@device
def weights(weight, n, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, BC: tl.constexpr):
    """WIDTH weights of gate n, from column FIRST on."""
    column = tl.arange(0, BC)
    return tl.load(weight + n * K + FIRST + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@device
def gate_logits(
    z, x, extra, weight, rows,
    N: tl.constexpr, WX: tl.constexpr, WE: tl.constexpr, X_ROW: tl.constexpr, EXTRA_ROW: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = row < rows
    v = read(x, row, live, X_ROW, WX, BC)
    if extra is not None:
        e = read(extra, row, live, EXTRA_ROW, WE, BC)
    for n in range(N):
        total = tl.sum(v * weights(weight, n, 0, WX, WX + WE, BC), 1)
        if extra is not None:
            total += tl.sum(e * weights(weight, n, WX, WE, WX + WE, BC), 1)
        tl.store(z + row * N + n, total, mask=live)


def logits_constants(op: Any) -> dict[str, Any]:
    """Columns that are read of x and extra, how far their rows lie apart, and a block that holds either."""
    widths = [int(op.x.shape[-1]), 0 if op.extra is None else int(op.extra.shape[-1])]
    strides = row_strides(x=op.x) | ({"EXTRA_ROW": None} if op.extra is None else row_strides(extra=op.extra))
    BC = max(MIN_SUM_COLUMNS, pow2(max(widths)))
    sizes = {"N": int(op.weight.shape[0]), "WX": widths[0], "WE": widths[1]}
    return {**sizes, **strides, "BR": max(1, 2 * BLOCK // BC), "BC": BC}


@lowering("gate_logits", also={"weight": "split half"}, views="x extra")
def lower_gate_logits(op: Any, c: Lowering) -> None:
    constants, rows = logits_constants(op), c.rows(op.x)
    operands = {"z": op.z, "x": op.x, "extra": op.extra, "weight": weight_operand(op.weight), "rows": rows}
    c.launch(gate_logits, operands, constants, grid=lambda s: (ceil_div(rows(s), constants["BR"]),), writes="z")


@device
def columns_backward(
    dx, partials, dz, x, weight, scalars, begin, end,
    N: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr, DX_ROW: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of WIDTH columns in rows [begin, end), and these rows' part of the gradient of their weights."""
    column = tl.arange(0, BC)
    inside = column < WIDTH
    for first in range(begin, end, BR):
        row = first + tl.arange(0, BR).to(tl.int64)
        live = row < end
        total = tl.zeros((BR, BC), tl.float32)
        for n in range(N):
            by = tl.load(dz + row * N + n, mask=live, other=0.0)
            total += by[:, None] * weights(weight, n, FIRST, WIDTH, K, BC)
        store_or_add(
            dx + row[:, None] * DX_ROW + column[None, :], live[:, None] & inside[None, :], total, scalars, MODE
        )
    for n in range(N):
        sums = tl.zeros((BR, BC), tl.float32)
        for first in range(begin, end, BR):
            row = first + tl.arange(0, BR).to(tl.int64)
            live = row < end
            by = tl.load(dz + row * N + n, mask=live, other=0.0)
            sums += by[:, None] * read(x, row, live, X_ROW, WIDTH, BC)
        to = partials + tl.program_id(0) * (N * K) + n * K + FIRST + column
        tl.store(to, tl.sum(sums, 0), mask=inside)


@device
def gate_logits_backward(
    dx, dextra, partials, dz, x, extra, weight, scalars, rows, per,
    N: tl.constexpr, WX: tl.constexpr, WE: tl.constexpr, X_ROW: tl.constexpr, EXTRA_ROW: tl.constexpr,
    DX_ROW: tl.constexpr, DEXTRA_ROW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DX_MODE: tl.constexpr, DEXTRA_MODE: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * per
    end = tl.minimum(begin + per, rows)
    columns_backward(
        dx, partials, dz, x, weight, scalars, begin, end, N, 0, WX, WX + WE, X_ROW, DX_ROW, BR, BC, DX_MODE
    )
    if extra is not None:
        columns_backward(
            dextra, partials, dz, extra, weight, scalars, begin, end,
            N, WX, WE, WX + WE, EXTRA_ROW, DEXTRA_ROW, BR, BC, DEXTRA_MODE,
        )  # fmt: skip


@lowering("gate_logits_backward", starts="dx dextra dweight", also={"weight": "split half"}, views="x extra dx dextra")
def lower_gate_logits_backward(op: Any, c: Lowering) -> None:
    rows, size = c.rows(op.x), op.weight.size
    chunks = Chunks(rows)
    partials = c.scratch("partials", (chunks.planned(op.x.size // int(op.x.shape[-1])), 1, size))
    operands = {name: (op.inputs | op.outputs).get(name) for name in ("dx", "dextra", "dz", "x", "extra")}
    operands |= {"partials": partials, "weight": weight_operand(op.weight), "rows": rows, "per": chunks.per}
    two = op.extra is not None
    constants = logits_constants(op) | row_strides(dx=op.dx) | {"DEXTRA_ROW": op.dextra.row_stride if two else None}
    constants |= {"BR": min(16, constants["BR"])}
    constants |= {"DX_MODE": mode(op, "dx"), "DEXTRA_MODE": mode(op, "dextra") if two else None}
    c.launch(
        gate_logits_backward,
        operands,
        constants,
        grid=lambda s: (chunks.count(s),),
        writes="dx dextra partials",
    )
    lower_combine(c, partials, ["dweight"], chunks)


# --- what they let through ---


@device
def factor_of(factor, SCALE: tl.constexpr, SQUASH: tl.constexpr):
    """The number that a gate is multiplied with, and its derivative by the factor."""
    times, rise = tl.full((), SCALE, tl.float32), tl.full((), SCALE, tl.float32)
    if factor is not None:
        by = tl.load(factor)
        if SQUASH:
            by = sigmoid(by)
            rise *= by * (1.0 - by)
        times *= by
    return times, rise


@device
def gated(
    y, base, x, z, factor, scalars, rows, seq,
    C: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, BASE_ROW: tl.constexpr,
    SCALE: tl.constexpr, SQUASH: tl.constexpr, SHIFT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """A program's columns are those of one gate."""
    D: tl.constexpr = C // N
    blocks: tl.constexpr = (D + BC - 1) // BC
    n = tl.program_id(1) // blocks
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) % blocks * BC + tl.arange(0, BC)
    live = row < rows
    mask = live[:, None] & (column < D)[None, :]
    column = n * D + column
    times, _ = factor_of(factor, SCALE, SQUASH)
    gate = times * sigmoid(tl.load(z + row * N + n, mask=live, other=0.0))
    opens = mask
    if SHIFT > 0:
        opens = mask & (row % seq >= SHIFT)[:, None]
    value = gate[:, None] * tl.load(x + (row - SHIFT)[:, None] * X_ROW + column[None, :], mask=opens, other=0.0).to(
        tl.float32
    )
    if base is not None:
        value += tl.load(base + row[:, None] * BASE_ROW + column[None, :], mask=mask, other=0.0).to(tl.float32)
    store_or_add(y + row[:, None] * C + column[None, :], mask, value, scalars, MODE)


def gated_constants(op: Any) -> dict[str, Any]:
    sizes = {"C": int(op.x.shape[2]), "N": int(op.z.shape[2]), **row_strides(x=op.x)}
    return {**sizes, "SCALE": op.scale, "SQUASH": op.squash, "SHIFT": op.shift}


@lowering("gated", starts="y", views="x base factor")
def lower_gated(op: Any, c: Lowering) -> None:
    constants, rows = gated_constants(op), c.rows(op.x)
    C, N = constants["C"], constants["N"]
    BC = min(256, pow2(C // N))
    BR = BLOCK // BC
    constants |= {"BASE_ROW": None if op.base is None else op.base.row_stride, "BR": BR, "BC": BC}
    operands = {"y": op.y, "base": op.base, "x": op.x, "z": op.z, "factor": op.factor, "rows": rows, "seq": length(op)}
    blocks = N * ceil_div(C // N, BC)
    constants |= {"MODE": mode(op, "y")}
    c.launch(gated, operands, constants, grid=lambda s: (ceil_div(rows(s), BR), blocks), writes="y")


def length(op: Any) -> Any:
    """The length of a sequence: a number, or by the sizes of a run."""
    name = getattr(op.x.shape[1], "name", None)
    return int(op.x.shape[1]) if name is None else lambda s: s[name]


@device
def gated_backward(
    dx, dz, dfactor, partials, counter, dy, x, z, factor, scalars, rows, seq,
    C: tl.constexpr, N: tl.constexpr, X_ROW: tl.constexpr, DX_ROW: tl.constexpr,
    SCALE: tl.constexpr, SQUASH: tl.constexpr, SHIFT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DX_MODE: tl.constexpr, DZ_MODE: tl.constexpr, DFACTOR_MODE: tl.constexpr, SUM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Do some rows of one gate's columns, BC at a time: the gradient that they pass on, and their dot products, which the gate's
    gradient needs. A program's part of the factor's gradient goes into partials, which the last one adds up."""
    D: tl.constexpr = C // N
    n = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = row < rows
    times, rise = factor_of(factor, SCALE, SQUASH)
    s = sigmoid(tl.load(z + row * N + n, mask=live, other=0.0))
    opens = live
    if SHIFT > 0:
        opens = live & (row % seq >= SHIFT)
        last = live & (row % seq >= seq - SHIFT)
    sums = tl.zeros((BR, BC), tl.float32)
    for first in tl.static_range(0, D, BC):
        inside = first + tl.arange(0, BC) < D
        column = n * D + first + tl.arange(0, BC)
        mask = opens[:, None] & inside[None, :]
        by = tl.load(dy + row[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + (row - SHIFT)[:, None] * X_ROW + column[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += by * v
        store_or_add(
            dx + (row - SHIFT)[:, None] * DX_ROW + column[None, :], mask, by * (times * s)[:, None], scalars, DX_MODE
        )
        if SHIFT > 0:
            zeros = tl.zeros((BR, BC), tl.float32)
            to = dx + row[:, None] * DX_ROW + column[None, :]
            store_or_add(to, last[:, None] & inside[None, :], zeros, scalars, DX_MODE)
    dots = tl.sum(sums, 1)
    store_or_add(dz + row * N + n, live, times * (s * (1.0 - s)) * dots, scalars, DZ_MODE)
    if partials is not None:
        tl.store(partials + tl.program_id(0) * N + n, rise * tl.sum(s * dots, 0))
        if is_last_program(counter):
            store_total(dfactor, partials, tl.num_programs(0) * N, scalars, SUM_BLOCK, DFACTOR_MODE)


@lowering("gated_backward", starts="dx dz dfactor", views="x dx factor dfactor")
def lower_gated_backward(op: Any, c: Lowering) -> None:
    constants, rows = gated_constants(op), c.rows(op.x)
    C, N = constants["C"], constants["N"]
    BC = min(256, max(MIN_SUM_COLUMNS, pow2(C // N)))
    BR = BLOCK // BC
    constants |= {"BR": BR, "BC": BC, "DX_MODE": mode(op, "dx"), "DZ_MODE": mode(op, "dz"), **row_strides(dx=op.dx)}
    operands: dict[str, Any] = {
        name: (op.inputs | op.outputs).get(name) for name in ("dx", "dz", "dy", "x", "z", "factor")
    }
    operands |= {"dfactor": None, "partials": None, "counter": None, "rows": rows, "seq": length(op)}
    constants |= {"DFACTOR_MODE": None, "SUM_BLOCK": None}
    if op.factor is not None:
        operands |= {"dfactor": (part(op.dfactor), "fp32"), "counter": COUNTER}
        operands["partials"] = c.scratch("partials", (ceil_div(op.z.size // N, BR) * N,))
        constants |= {"DFACTOR_MODE": mode(op, "dfactor"), "SUM_BLOCK": BLOCK}
    grid, writes = lambda s: (ceil_div(rows(s), BR), N), "dx dz dfactor partials"
    c.launch(gated_backward, operands, constants, grid=grid, writes=writes)
