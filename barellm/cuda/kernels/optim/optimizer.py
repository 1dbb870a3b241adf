"""Global gradient norm, clipping and AdamW, each for all parameters in one launch, by a table with the fields below
(multi_tensor.py). Shapes: grad, param, m, v flat, n = units * UNIT elements each; partials (chunks); clip (2) = [norm, factor that
clips], whose factor is NaN if the norm is not finite: then the step changes nothing. ENTRIES, WIDE: `entry_constants`."""

from math import log2
from typing import Any

from barellm.cuda.kernel import COUNTER, Lowering, Table, lowering
from barellm.cuda.kernels import storage
from barellm.cuda.kernels.common import BLOCK, LR, STEP, scalar_fp64, unit_of
from barellm.cuda.kernels.loss.cross_entropy import scale_of
from barellm.cuda.kernels.optim import multi_tensor
from barellm.cuda.kernels.optim.multi_tensor import find_entry, integer, number, pointer
from barellm.cuda.kernels.pointwise.random import sample_key, shared_words
from barellm.cuda.kernels.single_pass_reduction import is_last_program
from barellm.cuda.kernels.storage import (
    WHOLE,
    lo_pointer,
    load_moment,
    load_weight,
    store_moment,
    store_weight,
    to_bf16,
    weight_pointer,
)
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import PLANES
from barellm.program.grouping import members
from barellm.program.integers import ceil_div
from barellm.program.loss_scale import FIRST_SCALE, GROWTH_STEPS, LEAST_SCALE, MOST_SCALE
from barellm.program.ops.optim.optimizer import CHUNK
from barellm.runtime.lowering import part

# Elements of one parameter that a program updates: enough that the look-ups in the table cost little.
SPAN = 4 * BLOCK
SUM_FIELDS = ("first", "units", "x", "partials")
UPDATE_FIELDS = ("first", "units", "param", "lo", "m", "v", "grad", "decay", "stream", "origin")
GROWTH = constant(GROWTH_STEPS)
LEAST_POWER, MOST_POWER = constant(LEAST_SCALE - FIRST_SCALE), constant(MOST_SCALE - FIRST_SCALE)
UNITS, X, PARTIALS = (constant(SUM_FIELDS.index(name)) for name in ("units", "x", "partials"))
PARAM, LO, M, V, GRAD, WEIGHT_DECAY, STREAM, ORIGIN = (constant(UPDATE_FIELDS.index(name)) for name in UPDATE_FIELDS[2:])


@device
def sum_squares(table, ENTRIES, WIDE, UNIT, CHUNK, BLOCK):
    """partials (chunks) fp32 = the sums of squares of the CHUNKs of each tensor x (n), fp32 gradients, a program for each chunk of
    each table entry (SUM_FIELDS). A small matrix has few chunks, so BLOCK is large: each program needs many loads in flight."""
    entry, chunk = find_entry(table, ENTRIES, WIDE)
    n = integer(table, entry, UNITS, ENTRIES) * UNIT
    x = pointer(table, entry, X, ENTRIES, tl.float32, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, CHUNK, BLOCK):
        i = chunk * CHUNK + first + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < n, other=0.0)
        total += v * v
    tl.store(pointer(table, entry, PARTIALS, ENTRIES, tl.float32, 4) + chunk, tl.sum(total, 0))


@lowering("sum_squares", floats="fp32", spans="x partials")
def lower_sum_squares(op: Any, c: Lowering) -> None:
    """Plan one launch of sum_squares for a group of gradients."""
    sums: list[Any] = members(op)
    unit = unit_of(sums[0].x)
    columns = {"units": ("i64", [s.x.size // unit for s in sums])}
    columns |= {name: ("*fp32", [part(getattr(s, name)) for s in sums]) for name in ("x", "partials")}
    chunks, constants = (ceil_div(s.x.size, CHUNK) for s in sums), {"UNIT": unit, "CHUNK": CHUNK, "BLOCK": 8192}
    multi_tensor.launch_multi_tensor(c, sum_squares, SUM_FIELDS, chunks, columns, constants, writes="partials", warps=16)


@device
def store_sum(total, partials, n, BLOCK):
    """total (1) fp64 = the sum of partials (n) fp32."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        sums += tl.load(partials + i, mask=i < n, other=0.0).to(tl.float64)
    tl.store(total, tl.sum(sums, 0))


@device
def clip_scale(clip, skipped, loss_scale, totals, counter, table, LIMIT, ENTRIES, WIDE, BLOCK):
    """Global gradient norm and clipping: totals (tensors) fp64 = the sum of each tensor's partial sums (of sum_squares), a program
    each. The last program to arrive then writes clip (2) fp32 = [norm, min(1, LIMIT / norm)], norm = sqrt(sum of totals), both
    divided by the loss scale if there is one. A norm that is not finite gives NaN and counts in `skipped` (1) i32."""
    j = tl.program_id(0)  # tensor
    store_sum(totals + j, pointer(table, j, 0, ENTRIES, tl.float32, 16), integer(table, j, 1, ENTRIES), BLOCK)
    if is_last_program(counter):
        i = tl.arange(0, WIDE)
        norm = tl.sqrt(tl.sum(tl.load(totals + i, mask=i < ENTRIES, other=0.0), 0))
        if loss_scale is not None:
            by = scale_of(loss_scale).to(tl.float64)
            norm /= by
        scale = tl.where(norm > LIMIT, LIMIT / norm, 1.0) if LIMIT > 0 else tl.full((), 1.0, tl.float64)
        finite = norm.to(tl.float32) < float("inf")  # false for NaN as well
        if loss_scale is not None:
            scale /= by
        tl.store(clip, norm.to(tl.float32))
        tl.store(clip + 1, tl.where(finite, scale, float("nan")).to(tl.float32))
        tl.store(skipped, tl.load(skipped) + tl.where(finite, 0, 1))


@device
def update_scale(scale, totals, counter, table, ENTRIES, WIDE, BLOCK):
    """Dynamic loss scaling: totals as in `clip_scale`. The last program to arrive then updates scale (2) i32 = [exponent less that
    of the first scale, good steps in a row]: it doubles after GROWTH steps whose sum is finite, halves after one that is not."""
    j = tl.program_id(0)  # tensor
    store_sum(totals + j, pointer(table, j, 0, ENTRIES, tl.float32, 16), integer(table, j, 1, ENTRIES), BLOCK)
    if is_last_program(counter):
        i = tl.arange(0, WIDE)
        finite = tl.sum(tl.load(totals + i, mask=i < ENTRIES, other=0.0), 0).to(tl.float32) < float("inf")
        power, good = tl.load(scale), tl.load(scale + 1) + 1
        grows = good >= GROWTH
        kept = tl.where(grows, tl.minimum(power + 1, MOST_POWER), power)
        tl.store(scale, tl.where(finite, kept, tl.maximum(power - 1, LEAST_POWER)))
        tl.store(scale + 1, tl.where(finite & (grows == 0), good, 0))


@lowering("clip_scale", floats="fp32", also={"skipped": "i32", "loss_scale": "i32"})
def lower_clip_scale(op: Any, c: Lowering) -> None:
    operands = {"clip": op.outputs["clip"], "skipped": op.outputs["skipped"], "loss_scale": op.inputs.get("loss_scale")}
    _launch_on_partials(op, c, clip_scale, operands, "clip skipped", LIMIT=float(op.attrs["clip"]))


@lowering("update_scale", floats="fp32", also={"scale": "i32"})
def lower_update_scale(op: Any, c: Lowering) -> None:
    _launch_on_partials(op, c, update_scale, {"scale": op.outputs["scale"]}, "scale")


def _launch_on_partials(op: Any, c: Lowering, function: Any, operands: dict[str, Any], writes: str, **constants: Any) -> None:
    """Launch a program for each of the op's tensors p0, p1, ... of partial sums."""
    partials = [t for name, t in op.inputs.items() if name not in (*op.inplace, "loss_scale")]
    count = len(partials)
    fields = {"partials": ("*fp32", [part(t) for t in partials]), "count": ("i64", [t.size for t in partials])}
    c.launch(
        function, {**operands, "totals": c.scratch("totals", (count,), "fp64"), "counter": COUNTER, "table": Table(fields)},
        {**constants, **multi_tensor.entry_constants(count), "BLOCK": 512}, grid=lambda s: (count,), writes=f"totals {writes}",
    )  # fmt: skip


@device
def step_factors(factors, scalars, LOG_BETA1, LOG_BETA2, LR_SCALE, CAUTIOUS):
    """Compute the step's factors (2) in fp64: [lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step)], the first times sqrt(1 -
    beta2^step) where CAUTIOUS. LOG_BETA: log2 of a beta. A launch of one program does it: it takes 90 instructions."""
    lr = scalar_fp64(scalars, LR) * LR_SCALE
    step = tl.load(scalars + STEP).to(tl.float64)
    rate = lr / (1.0 - tl.exp2(step * LOG_BETA1))
    root = tl.sqrt(1.0 - tl.exp2(step * LOG_BETA2))
    if CAUTIOUS:
        rate *= root
    tl.store(factors, rate.to(tl.float32))
    tl.store(factors + 1, (1.0 / root).to(tl.float32))


@device
def moment_dither(table, entry, scalars, first, ENTRIES, BLOCK):
    """Random bits (BLOCK,) int32 for the stochastic rounding of m and of v, elements `first` on: as many as their codes drop of
    fp32's mantissa, 23 - 9 and 23 - 10. From the parameter's random stream; element 0 is number ORIGIN of the whole tensor."""
    k0, k1 = sample_key(scalars, tl.full((), 0, tl.int64), integer(table, entry, STREAM, ENTRIES))
    bits = shared_words(k0, k1, integer(table, entry, ORIGIN, ENTRIES) + first, BLOCK)
    return (bits & 0x3FFF).to(tl.int32), (bits >> 19).to(tl.int32)


@device
def adamw(
    table, clip, factors, scalars,
    ENTRIES, WIDE, UNIT, SPAN, BLOCK, BETA1, BETA2, EPSILON, LR_SCALE, FORMAT, STOCHASTIC, CAUTIOUS, BF16, M_MANTISSA, M_SIGNED,
    V_MANTISSA, V_SIGNED,
):  # fmt: skip
    """AdamW: param = p (1 - lr wd) - lr m^ / (sqrt(v^) + eps), with m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2 and
    m^, v^ bias-corrected, for all parameters in one pass; a program has SPAN elements of one entry of the table (UPDATE_FIELDS).

    Reads grad (n) fp32, clip (2) of clip_scale, whose factor multiplies it, and factors (2) of step_factors; updates param, lo, m,
    v (n) in place. CAUTIOUS: modded-nanogpt's Adam, whose eps is added before the second bias correction, and whose decay lr^2 wd p
    applies only where it has the update's sign. Formats: FORMAT, the planes of a weight (storage.py); M_ and V_MANTISSA, _SIGNED,
    the moments; BF16: the new weight is rounded to bf16. STOCHASTIC: 16-bit moments are rounded stochastically, by the parameter's
    random stream from element ORIGIN on (a rank's shard begins there). LR_SCALE: times the run's lr."""
    scale = tl.load(clip + 1)
    if scale == scale:  # NaN says that the gradient's norm is not finite: nothing changes
        entry, block = find_entry(table, ENTRIES, WIDE)
        n = integer(table, entry, UNITS, ENTRIES) * UNIT
        param = weight_pointer(table, entry, PARAM, ENTRIES, WHOLE, FORMAT)
        lo = None
        if FORMAT is not None:
            lo = lo_pointer(table, entry, LO, ENTRIES, UNIT, FORMAT)
        m = pointer(table, entry, M, ENTRIES, tl.float32 if M_MANTISSA is None else tl.int16, 16)
        v = pointer(table, entry, V, ENTRIES, tl.float32 if V_MANTISSA is None else tl.int16, 16)
        grad = pointer(table, entry, GRAD, ENTRIES, tl.float32, 16)
        lr = scalar_fp64(scalars, LR) * LR_SCALE
        decay = lr * number(table, entry, WEIGHT_DECAY, ENTRIES)
        rate, unbias = tl.load(factors), tl.load(factors + 1)  # bias corrections of m, with lr, and of sqrt(v)
        if CAUTIOUS:
            cautious_decay = (lr * decay).to(tl.float32)
        else:
            decay_factor = (1.0 - decay).to(tl.float32)
        begin = block * SPAN
        for first in range(begin, tl.minimum(begin + SPAN, n), BLOCK):
            # Four elements at a time: with eight of a 16-bit plane, loads of fp32 would touch each sector twice, and stores go
            # through shared memory.
            i = tl.max_contiguous(first + tl.arange(0, BLOCK), 4)
            mask = i < n
            dither_m, dither_v = None, None
            if STOCHASTIC:
                dither_m, dither_v = moment_dither(table, entry, scalars, first, ENTRIES, BLOCK)
            # The new moments, then the new weight.
            g = tl.load(grad + i, mask=mask, other=0.0) * scale  # clipped
            mean = BETA1 * load_moment(m, i, mask, M_MANTISSA, M_SIGNED) + (1.0 - BETA1) * g  # m
            square = BETA2 * load_moment(v, i, mask, V_MANTISSA, V_SIGNED) + (1.0 - BETA2) * g * g  # v
            p = load_weight(param, lo, i, mask)
            if CAUTIOUS:
                update = rate * mean / (tl.sqrt(square) + EPSILON)
                p = p - update - tl.where(update * p > 0, p * cautious_decay, 0.0)
            else:
                p = p * decay_factor - rate * mean / (tl.sqrt(square) * unbias + EPSILON)
            if BF16:
                p = to_bf16(p)
            # Store all three in their formats.
            store_weight(param, lo, i, mask, p)
            store_moment(m, i, mask, mean, dither_m, M_MANTISSA, M_SIGNED)
            store_moment(v, i, mask, square, dither_v, V_MANTISSA, V_SIGNED)


def _log2(beta: float) -> float:
    """log2 of a decay rate; for 0 an exponent whose power of two is 0 in fp64."""
    return log2(beta) if beta else -2048.0


@lowering("adamw", "cautious_adam", floats="fp32", also={"param": PLANES, "m": "e6m9", "v": "ue6m10"}, spans="param grad")
def lower_update(op: Any, c: Lowering) -> None:
    """Plan two launches: step_factors, and adamw for a group of parameters with equal formats and hyperparameters."""
    updates: list[Any] = members(op)
    cautious = updates[0].name == "cautious_adam"
    params, ms, vs = ([u.outputs[name] for u in updates] for name in ("param", "m", "v"))
    unit = unit_of(params[0])
    columns = {
        "units": ("i64", [p.size // unit for p in params]),
        **storage.weight_columns(params),
        "m": multi_tensor.column(storage.moment_operand(m) for m in ms),
        "v": multi_tensor.column(storage.moment_operand(v) for v in vs),
        "grad": multi_tensor.column(u.grad for u in updates),
        "decay": ("fp64", [float(u.weight_decay) for u in updates]),
        "stream": ("i64", [u.stream or 0 for u in updates]),
        "origin": ("i64", [u.grad.first_element for u in updates]),  # in the whole tensor, of a rank's share
    }
    beta1, beta2 = float(op.beta1), float(op.beta2)
    both = {"LR_SCALE": float(updates[0].lr_scale), "CAUTIOUS": cautious or None}
    factors = c.scratch("factors", (2,))
    c.launch(
        step_factors, {"factors": factors}, both | {"LOG_BETA1": _log2(beta1), "LOG_BETA2": _log2(beta2)},
        grid=lambda s: (1,), writes="factors", warps=1,
    )  # fmt: skip
    constants = both | {
        "UNIT": unit, "SPAN": SPAN, "BLOCK": BLOCK,
        "BETA1": beta1, "BETA2": beta2, "EPSILON": float(op.eps), **storage.weight_constants(params[0]),
        "STOCHASTIC": updates[0].stream is not None, "BF16": updates[0].bf16,
        **storage.moment_constants("M", ms[0]), **storage.moment_constants("V", vs[0]),
    }  # fmt: skip
    spans, operands = (ceil_div(p.size, SPAN) for p in params), {"clip": updates[0].clip, "factors": factors}
    multi_tensor.launch_multi_tensor(c, adamw, UPDATE_FIELDS, spans, columns, constants, writes="param lo m v", operands=operands)
