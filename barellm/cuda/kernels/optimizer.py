"""The gradient's norm, clipping and AdamW. Shapes: grad, param, m, v flat, n elements; partials (chunks); clip (2)."""

from __future__ import annotations

from math import gcd, log2
from typing import Any

from barellm.cuda.kernel import Lowering, cdiv, lowering
from barellm.cuda.kernels.common import BLOCK, LR, STEP, VECTOR, double, flat, pow2
from barellm.cuda.kernels.random import halves, sample_key
from barellm.cuda.kernels.storage import (
    load_moment,
    load_weight,
    moment_constants,
    moment_operand,
    store_moment,
    store_weight,
    weight_operands,
)
from barellm.cuda.lang import device, tl
from barellm.program.ops.optimizer import CHUNK
from barellm.runtime.lowering import part

TOGETHER = 16  # tensors of partial sums that one launch adds up


@device
def sum_squares(partials, x, units, UNIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """A program sums one chunk: few of them for a small matrix, so each has many loads under way."""
    chunk = tl.program_id(0)
    n = units.to(tl.int64) * UNIT
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, CHUNK, BLOCK):
        i = chunk.to(tl.int64) * CHUNK + first + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < n, other=0.0)
        total += v * v
    tl.store(partials + chunk, tl.sum(total, 0))


@lowering("sum_squares")
def lower_sum_squares(op: Any, c: Lowering) -> None:
    n = op.x.size
    unit = gcd(n, VECTOR)
    c.launch(
        sum_squares,
        {"partials": op.partials, "x": op.x, "units": n // unit},
        {"UNIT": unit, "CHUNK": CHUNK, "BLOCK": 8192},
        grid=lambda s: (cdiv(n, CHUNK),),
        writes="partials",
        warps=16,
    )


@device
def add_up(total, p, n, BLOCK: tl.constexpr):
    """total (1) fp64 = the sum of p (n)."""
    t = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        t += tl.load(p + i, mask=i < n, other=0.0).to(tl.float64)
    tl.store(total, tl.sum(t, 0))


@device
def add_partials(
    totals,
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """totals (up to 16) fp64 = the sums of as many tensors, a program each. GPT-2 has 148 of them, of 1 to 590 values: a launch
    for each would take a good part of what the update takes."""
    j = tl.program_id(0)
    if j == 0:
        add_up(totals + 0, p0, n0, BLOCK)
    if j == 1:
        add_up(totals + 1, p1, n1, BLOCK)
    if j == 2:
        add_up(totals + 2, p2, n2, BLOCK)
    if j == 3:
        add_up(totals + 3, p3, n3, BLOCK)
    if j == 4:
        add_up(totals + 4, p4, n4, BLOCK)
    if j == 5:
        add_up(totals + 5, p5, n5, BLOCK)
    if j == 6:
        add_up(totals + 6, p6, n6, BLOCK)
    if j == 7:
        add_up(totals + 7, p7, n7, BLOCK)
    if j == 8:
        add_up(totals + 8, p8, n8, BLOCK)
    if j == 9:
        add_up(totals + 9, p9, n9, BLOCK)
    if j == 10:
        add_up(totals + 10, p10, n10, BLOCK)
    if j == 11:
        add_up(totals + 11, p11, n11, BLOCK)
    if j == 12:
        add_up(totals + 12, p12, n12, BLOCK)
    if j == 13:
        add_up(totals + 13, p13, n13, BLOCK)
    if j == 14:
        add_up(totals + 14, p14, n14, BLOCK)
    if j == 15:
        add_up(totals + 15, p15, n15, BLOCK)


@device
def clip_scale(clip, skipped, totals, LIMIT: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """clip (2) = [norm, min(1, limit / norm)]; a norm that is not finite gives NaN and counts in skipped."""
    i = tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.sum(tl.load(totals + i, mask=i < N, other=0.0), 0))
    scale = tl.where(norm > LIMIT, LIMIT / norm, 1.0) if LIMIT > 0 else tl.full((), 1.0, tl.float64)
    finite = norm.to(tl.float32) < float("inf")  # false for NaN as well
    tl.store(clip, norm.to(tl.float32))
    tl.store(clip + 1, tl.where(finite, scale, float("nan")).to(tl.float32))
    tl.store(skipped, tl.load(skipped) + tl.where(finite, 0, 1))


@lowering("clip_scale")
def lower_clip_scale(op: Any, c: Lowering) -> None:
    partials = [t for name, t in op.inputs.items() if name != "skipped"]
    totals = c.scratch("totals", (len(partials),), "fp64")
    for first in range(0, len(partials), TOGETHER):
        group = partials[first : first + TOGETHER]
        filled = group + [group[0]] * (TOGETHER - len(group))  # the rest is nobody's: one code for all groups
        operands: dict[str, Any] = {f"p{i}": t for i, t in enumerate(filled)}
        operands |= {f"n{i}": t.size for i, t in enumerate(filled)}
        operands["totals"] = (part(totals, 8 * first, 8 * (first + len(group))), "fp64")
        count = len(group)
        c.launch(add_partials, operands, {"BLOCK": 512}, grid=lambda s, count=count: (count,), writes="totals")
    c.launch(
        clip_scale,
        {"clip": op.outputs["clip"], "skipped": op.outputs["skipped"], "totals": totals},
        {"LIMIT": float(op.attrs["clip"]), "N": len(partials), "BLOCK": pow2(len(partials))},
        grid=lambda s: (1,),
        writes="clip skipped",
    )


@device
def adamw(
    param, param_lo, m, v, grad, clip, scalars, units, stream,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr,
    M_MANTISSA: tl.constexpr, M_SIGNED: tl.constexpr, V_MANTISSA: tl.constexpr, V_SIGNED: tl.constexpr,
):  # fmt: skip
    """p (1 - lr wd) - lr m^ / (sqrt(v^) + eps): everything read and written once. The step's factors are computed in double. With a
    `stream` 16-bit moments are rounded stochastically."""
    scale = tl.load(clip + 1)
    if scale == scale:  # NaN says that the gradient's norm is not finite: nothing changes
        lr, step = double(scalars, LR), tl.load(scalars + STEP).to(tl.float64)
        shrink = (1.0 - lr * DECAY).to(tl.float32)
        rate = (lr / (1.0 - tl.exp2(step * LOG_BETA1))).to(tl.float32)
        unbias = (1.0 / tl.sqrt(1.0 - tl.exp2(step * LOG_BETA2))).to(tl.float32)
        i, mask = flat(units, UNIT, BLOCK)
        dither_m, dither_v = None, None
        if stream is not None:
            k0, k1 = sample_key(scalars, tl.full((), 0, tl.int64), stream)
            bits = halves(k0, k1, tl.program_id(0) * BLOCK, BLOCK)
            dither_m, dither_v = bits & 0x3FFF, bits >> 3
        g = tl.load(grad + i, mask=mask, other=0.0) * scale
        first = BETA1 * load_moment(m, i, mask, M_MANTISSA, M_SIGNED) + (1.0 - BETA1) * g
        second = BETA2 * load_moment(v, i, mask, V_MANTISSA, V_SIGNED) + (1.0 - BETA2) * g * g
        update = rate * first / (tl.sqrt(second) * unbias + EPSILON)
        store_weight(param, param_lo, i, mask, load_weight(param, param_lo, i, mask) * shrink - update)
        store_moment(m, i, mask, first, dither_m, M_MANTISSA, M_SIGNED)
        store_moment(v, i, mask, second, dither_v, V_MANTISSA, V_SIGNED)


@lowering("adamw")
def lower_adamw(op: Any, c: Lowering) -> None:
    n = op.grad.size
    unit = gcd(n, VECTOR)
    operands = {
        **weight_operands("param", op.outputs["param"]), "m": moment_operand(op.outputs["m"]),
        "v": moment_operand(op.outputs["v"]), "grad": op.grad, "clip": op.clip, "units": n // unit, "stream": op.stream,
    }  # fmt: skip
    beta1, beta2 = float(op.beta1), float(op.beta2)
    constants = {
        "UNIT": unit, "BLOCK": BLOCK, "BETA1": beta1, "BETA2": beta2, "LOG_BETA1": log2(beta1), "LOG_BETA2": log2(beta2),
        "EPSILON": float(op.eps), "DECAY": float(op.weight_decay),
        **moment_constants("M", op.outputs["m"]), **moment_constants("V", op.outputs["v"]),
    }  # fmt: skip
    c.launch(adamw, operands, constants, grid=lambda s: (cdiv(n, BLOCK),), writes="param param_lo m v")
