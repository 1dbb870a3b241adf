"""Muon (Jordan et al. 2024) without its orthogonalization (symmetric.py), and NorMuon. Each kernel does its step for many matrices
in one launch, by a table with the fields below (multi_tensor.py); each matrix of a bank has an entry.

Shapes: param, grad, m, u, x (rows, cols), n = units * UNIT elements each; partials (chunks); scales (rows), or (cols) of a wide x;
clip (2) = [gradient norm, factor that clips it], whose factor is NaN if the norm is not finite: then a step changes nothing.
ENTRIES, WIDE: `entry_constants`. HALF, FP16: the dtype of u and x (`matrix_constants`). SPAN: elements of a program."""

from typing import Any

from barellm.cuda.kernel import Lowering, lowering
from barellm.cuda.kernels.common import BLOCK, MOMENTUM, matrix_unit, scalar_fp64
from barellm.cuda.kernels.optim import multi_tensor
from barellm.cuda.kernels.optim.multi_tensor import aligned_pointer, find_entry, integer, matrix_pointer, number, pointer
from barellm.cuda.kernels.optim.optimizer import SPAN
from barellm.cuda.kernels.storage import lo_pointer, load_weight, store_weight, weight_constants, weight_operands, weight_pointer
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.grouping import members
from barellm.program.integers import ceil_div
from barellm.program.ops.optim.muon import LEAST
from barellm.program.ops.optim.optimizer import CHUNK
from barellm.program.scalars import SCALARS

MOMENTUM_FIELDS = ("first", "units", "m", "grad", "u", "partials")
NORMALIZE_FIELDS = ("first", "units", "x", "u", "partials", "count", "margin", "eps")
UPDATE_FIELDS = ("first", "units", "param", "lo", "x", "scales", "scale", "decay", "lr_scale", "cols")
UNITS = constant(1)
M, GRAD, U, PARTIALS = (constant(MOMENTUM_FIELDS.index(name)) for name in MOMENTUM_FIELDS[2:])
TO, FROM, SUMS, COUNT, MARGIN, EPSILON = (constant(NORMALIZE_FIELDS.index(name)) for name in NORMALIZE_FIELDS[2:])
PARAM, LO, X, SCALES, SCALE, DECAY, LR_SCALE, COLS = (constant(UPDATE_FIELDS.index(name)) for name in UPDATE_FIELDS[2:])
TINY = constant(LEAST)


@device
def muon_momentum(table, clip, scalars, ENTRIES, WIDE, UNIT, CHUNK, BLOCK, NESTEROV, HALF, FP16):
    """m = momentum m + (1 - momentum) g, g being the clipped gradient; u = the new m, or where NESTEROV momentum m + (1 - momentum)
    g once more; partials (chunks) fp32 = sums of u^2, for muon_normalize. A program does one CHUNK of a matrix, an entry of the
    table (MOMENTUM_FIELDS): grad and m (n) fp32, u of the dtype of HALF, FP16. If the gradient's norm is not finite (clip[1] is
    NaN), m stays and u is zero. CHUNK decides the bits of the sums."""
    entry, chunk = find_entry(table, ENTRIES, WIDE)
    n = integer(table, entry, UNITS, ENTRIES) * UNIT
    m = aligned_pointer(table, entry, M, ENTRIES, tl.float32, UNIT)
    grad = aligned_pointer(table, entry, GRAD, ENTRIES, tl.float32, UNIT)
    u = matrix_pointer(table, entry, U, ENTRIES, UNIT, HALF, FP16)
    scale, momentum = tl.load(clip + 1), scalar_fp64(scalars, MOMENTUM)
    finite = scale == scale  # NaN says that the gradient's norm is not finite
    momentum_fp32 = momentum.to(tl.float32)
    grad_factor = ((1.0 - momentum) * scale.to(tl.float64)).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, CHUNK, BLOCK):
        i = tl.max_contiguous(chunk * CHUNK + begin + tl.arange(0, BLOCK), 4)  # 16 bytes an access
        mask = i < n
        old = tl.load(m + i, mask=mask, other=0.0)
        g = tl.load(grad + i, mask=mask, other=0.0) * grad_factor  # clipped, times 1 - momentum
        new = momentum_fp32 * old + g
        update = momentum_fp32 * new + g if NESTEROV else new  # what is orthogonalized
        update = tl.where(finite, update, 0.0)
        tl.store(m + i, tl.where(finite, new, old), mask=mask)
        tl.store(u + i, update, mask=mask)
        total += tl.where(mask, update * update, 0.0)
    tl.store(pointer(table, entry, PARTIALS, ENTRIES, tl.float32, 4) + chunk, tl.sum(total, 0))


@lowering("muon_momentum")
def lower_momentum(op: Any, c: Lowering) -> None:
    """Plan one launch of muon_momentum for a group of ops, with a table entry for each of their matrices."""
    group: list[Any] = members(op)
    unit = matrix_unit(group[0], group[0].grad)
    columns = {"units": ("i64", multi_tensor.repeated(group, lambda o: o.grad.size // o.matrices // unit))}
    columns |= {name: multi_tensor.of_matrices(group, (getattr(o, name) for o in group)) for name in MOMENTUM_FIELDS[2:]}
    constants = {"UNIT": unit, "CHUNK": CHUNK, "BLOCK": 8 * BLOCK, "NESTEROV": bool(op.nesterov)}
    constants |= multi_tensor.matrix_constants(group[0].u.dtype)
    chunks, operands = multi_tensor.repeated(group, lambda o: o.chunks(o.grad)), {"clip": group[0].clip}
    multi_tensor.launch_multi_tensor(
        c, muon_momentum, MOMENTUM_FIELDS, chunks, columns, constants, writes="m u partials", operands=operands, warps=16
    )


@device
def muon_normalize(table, ENTRIES, WIDE, UNIT, SPAN, BLOCK, HALF, FP16, SUM_BLOCK):
    """x = u / (margin |u| + eps), the start of the Newton-Schulz steps: u and x (n) of the dtype of HALF, FP16. A program does SPAN
    elements of a matrix, an entry of the table (NORMALIZE_FIELDS). |u|^2 is the sum of the matrix's partial sums (of
    muon_momentum), which each program adds for itself: they are few. `margin` > 1: against rounding."""
    entry, block = find_entry(table, ENTRIES, WIDE)
    n, count = integer(table, entry, UNITS, ENTRIES) * UNIT, integer(table, entry, COUNT, ENTRIES)
    sums, j = pointer(table, entry, SUMS, ENTRIES, tl.float32, 4), tl.arange(0, SUM_BLOCK)  # partial sums of |u|^2
    total = tl.zeros((SUM_BLOCK,), tl.float64)
    for begin in range(0, count, SUM_BLOCK):
        total += tl.load(sums + begin + j, mask=begin + j < count, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, 0))
    factor = 1.0 / (norm * number(table, entry, MARGIN, ENTRIES) + number(table, entry, EPSILON, ENTRIES))  # fp64
    u = matrix_pointer(table, entry, FROM, ENTRIES, UNIT, HALF, FP16)
    x = matrix_pointer(table, entry, TO, ENTRIES, UNIT, HALF, FP16)
    for begin in range(block * SPAN, tl.minimum((block + 1) * SPAN, n), BLOCK):
        i = begin + tl.arange(0, BLOCK)
        value = tl.load(u + i, mask=i < n, other=0.0).to(tl.float32) * factor.to(tl.float32)
        tl.store(x + i, value, mask=i < n)


@lowering("muon_normalize")
def lower_normalize(op: Any, c: Lowering) -> None:
    """Plan one launch of muon_normalize for a group of ops, with a table entry for each of their matrices."""
    group: list[Any] = members(op)
    unit = matrix_unit(group[0], group[0].u)
    sizes = multi_tensor.repeated(group, lambda o: o.u.size // o.matrices)
    columns = {name: multi_tensor.of_matrices(group, (getattr(o, name) for o in group)) for name in ("x", "u", "partials")}
    columns["units"] = "i64", [n // unit for n in sizes]
    columns["count"] = "i64", multi_tensor.repeated(group, lambda o: o.chunks(o.u))
    columns |= {name: multi_tensor.floats_of(group, name) for name in ("margin", "eps")}
    spans = (ceil_div(n, SPAN) for n in sizes)
    constants = {"UNIT": unit, "SPAN": SPAN, "BLOCK": BLOCK, **multi_tensor.matrix_constants(group[0].u.dtype), "SUM_BLOCK": 64}
    multi_tensor.launch_multi_tensor(c, muon_normalize, NORMALIZE_FIELDS, spans, columns, constants, writes="x")


@device
def row_means(means, x, rows, C, BR, BC):
    """means (rows) = the mean of the squares of each row of x (rows, C). A program does BR rows, in blocks of BC columns."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    total = tl.zeros((BR, BC), tl.float32)
    for first in range(0, C, BC):
        column = first + tl.arange(0, BC)
        mask = (row < rows)[:, None] & (column < C)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += value * value
    tl.store(means + row, tl.sum(total, 1) / C, mask=row < rows)


@device
def column_means(means, x, rows, C, BR, BC):
    """means (C) fp32 = the mean of the squares of each column of x (rows, C), Muon's orthogonal matrix. A program does BC columns
    of one matrix of a bank (axis 1 of the grid), BR rows at a time; BR and BC, powers of two, decide the order of the sums."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    means += tl.program_id(1) * C
    x += tl.program_id(1).to(tl.int64) * rows * C
    total = tl.zeros((BR, BC), tl.float32)
    for first in range(0, rows, BR):
        row = first + tl.arange(0, BR)
        mask = (row < rows)[:, None] & (column < C)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += value * value
    tl.store(means + column, tl.sum(total, 0) / rows, mask=column < C)


@device
def scales_of_means(second, scales, means, clip, n, EACH, BETA2, BLOCK):
    """NorMuon's factors of the n rows (or columns) of a matrix: second = BETA2 second + (1 - BETA2) means, scales = ratio /
    sqrt(second), where the ratio is such that the scaled x has the norm of x. All (n) fp32; a program for each matrix.

    `means`: of the squares of EACH elements, of row_means or column_means; `second` is updated in place, and stays if the
    gradient's norm is not finite (clip[1] is NaN); muon_update reads `scales`."""
    second += tl.program_id(0) * n
    scales += tl.program_id(0) * n
    means += tl.program_id(0) * n
    scale, j = tl.load(clip + 1), tl.arange(0, BLOCK)  # scale: NaN if the norm is not finite
    sum_before, sum_after = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        mask = first + j < n
        mean = tl.load(means + first + j, mask=mask, other=0.0)
        old = tl.load(second + first + j, mask=mask, other=1.0)
        new = tl.where(scale == scale, BETA2 * old + (1.0 - BETA2) * mean, old)
        inv_root = 1.0 / tl.sqrt(tl.maximum(new, TINY))
        tl.store(second + first + j, new, mask=mask)
        sum_before += mean.to(tl.float64)
        sum_after += mean.to(tl.float64) * inv_root.to(tl.float64) * inv_root.to(tl.float64)
    norm, scaled = tl.sqrt(tl.sum(sum_before, 0) * EACH), tl.sqrt(tl.sum(sum_after, 0) * EACH)  # of x, before and after
    ratio = (norm / tl.maximum(scaled, TINY)).to(tl.float32)
    tl.debug_barrier()  # the second loop loads what other threads stored
    for first in range(0, n, BLOCK):
        mask = first + j < n
        new = tl.load(second + first + j, mask=mask, other=1.0)
        tl.store(scales + first + j, ratio / tl.sqrt(tl.maximum(new, TINY)), mask=mask)


@lowering("normuon_scales")
def lower_scales(op: Any, c: Lowering) -> None:
    """Plan two launches: the means of squares of the rows of x, or of the columns of a wide x, into scratch, then the factors."""
    rows, C = op.one(op.x)
    means = c.scratch("means", op.second.shape)
    operands, wide = {"means": means, "x": op.x}, rows < C
    BR, BC = (32, 32) if wide else (8, 128)
    constants, many = {"C": C, "BR": BR, "BC": BC}, rows * op.matrices
    if wide:
        grid = (ceil_div(C, BC), op.matrices)
        c.launch(column_means, operands | {"rows": rows}, constants, grid=lambda s: grid, writes="means")
    else:
        c.launch(row_means, operands | {"rows": many}, constants, grid=lambda s: (ceil_div(many, BR),), writes="means")
    operands = {**op.outputs, "means": means, "clip": op.clip, "n": op.second.size // op.matrices}
    constants = {"EACH": min(rows, C), "BETA2": float(op.beta2), "BLOCK": BLOCK}
    c.launch(scales_of_means, operands, constants, grid=lambda s: (op.matrices,), writes="second scales")


@device
def muon_update(table, clip, scalars, ENTRIES, WIDE, UNIT, SPAN, BLOCK, FORMAT, HALF, FP16, RATE, SCALED, CAUTIOUS, SQUARED):
    """param = p - decay p - update, update = size x, size = lr * scale, decay = lr * weight decay (times size if SQUARED), where lr
    is the scalar number RATE times lr_scale; in one pass, SPAN elements of a matrix (an entry: UPDATE_FIELDS) a program.

    x (n): the orthogonalized momentum, of gram_apply, dtype as HALF, FP16 say; param, lo: planes of the weight, FORMAT
    (storage.py). SCALED: x is multiplied by NorMuon's factor of its "rows" or "columns" (scales_of_means), or "" by none. CAUTIOUS:
    an element decays only where its update has the weight's sign, so that both make it smaller."""
    norm_factor = tl.load(clip + 1)
    if norm_factor == norm_factor:  # NaN says that the gradient's norm is not finite: nothing changes
        entry, block = find_entry(table, ENTRIES, WIDE)
        n = integer(table, entry, UNITS, ENTRIES) * UNIT
        cols = integer(table, entry, COLS, ENTRIES)
        param = weight_pointer(table, entry, PARAM, ENTRIES, UNIT, FORMAT)
        lo = None
        if FORMAT is not None:
            lo = lo_pointer(table, entry, LO, ENTRIES, UNIT, FORMAT)
        x = matrix_pointer(table, entry, X, ENTRIES, UNIT, HALF, FP16)
        rate = scalar_fp64(scalars, RATE) * number(table, entry, LR_SCALE, ENTRIES)
        size = (rate * number(table, entry, SCALE, ENTRIES)).to(tl.float32)
        decay_fp64 = rate * number(table, entry, DECAY, ENTRIES)
        if SQUARED:
            decay_fp64 *= rate * number(table, entry, SCALE, ENTRIES)
        decay = decay_fp64.to(tl.float32)
        begin = block * SPAN
        for first in range(begin, tl.minimum(begin + SPAN, n), BLOCK):
            i = tl.max_contiguous(first + tl.arange(0, BLOCK), 4)
            mask = i < n
            update = size * tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
            p = load_weight(param, lo, i, mask)
            if SCALED != "":
                scales = pointer(table, entry, SCALES, ENTRIES, tl.float32, 4)
                which = i // cols if SCALED == "rows" else i % cols  # row or column of each element
                update *= tl.load(scales + which, mask=mask, other=0.0)
            decayed = p * decay  # what weight decay takes off
            if CAUTIOUS:
                decayed = tl.where(update * p >= 0, decayed, 0.0)
            store_weight(param, lo, i, mask, p - decayed - update)


@lowering("muon_update", also={"param": PLANES})
def lower_update(op: Any, c: Lowering) -> None:
    """Plan one launch of muon_update for a group of ops with equal weight formats, a table entry for each matrix."""
    group: list[Any] = members(op)
    param = group[0].outputs["param"]
    unit = matrix_unit(group[0], param)
    sizes = multi_tensor.repeated(group, lambda o: o.x.size // o.matrices)
    scaled = group[0].scales is not None
    rows, cols = group[0].one(group[0].x)
    planes = [weight_operands("param", o.outputs["param"]) for o in group]
    lo = multi_tensor.of_matrices(group, (p["param_lo"] for p in planes)) if planes[0]["param_lo"] else ("i64", [0] * len(sizes))
    columns = {
        "units": ("i64", [n // unit for n in sizes]),
        "param": multi_tensor.of_matrices(group, (p["param"] for p in planes)),
        "lo": lo,
        "x": multi_tensor.of_matrices(group, (o.x for o in group)),
        "scales": multi_tensor.of_matrices(group, (o.scales for o in group)) if scaled else ("i64", [0] * len(sizes)),
        **{name: multi_tensor.floats_of(group, name) for name in ("scale", "lr_scale")},
        "decay": multi_tensor.floats_of(group, "weight_decay"),
        "cols": ("i64", multi_tensor.repeated(group, lambda o: int(o.x.shape[1]))),
    }  # fmt: skip
    constants = {
        "UNIT": unit, "SPAN": SPAN, "BLOCK": BLOCK, **weight_constants(param),
        **multi_tensor.matrix_constants(group[0].x.dtype), "CAUTIOUS": bool(group[0].cautious), "SQUARED": group[0].squared or None,
        "RATE": SCALARS[group[0].rate].index, "SCALED": ("columns" if rows < cols else "rows") if scaled else "",
    }  # fmt: skip
    spans, operands = (ceil_div(n, SPAN) for n in sizes), {"clip": group[0].clip}
    multi_tensor.launch_multi_tensor(c, muon_update, UPDATE_FIELDS, spans, columns, constants, writes="param lo", operands=operands)
