"""Cross-entropy of softcapped logits with multi-token prediction, and its gradient. Shapes and rows as in cross_entropy.py:
rows from `row_begin` on, pointers to the first of them; `targets` reaches to the last row of the run.

z is below the cap's scale, so that exp(z - scale) needs no row maximum: one pass makes the sum of a row. Where the gradient
follows, exp(z - scale) times the slope of z stays in this thread's scratch, and the second pass is one multiplication an element.
"""

from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import KernelBuilder, Lowering, Op, Pointer, Value, kernel, lowering, part
from barellm.cpu.kernels.loops import Vector, elementwise_map, flat, foreach_column, row_grain, shape_of
from barellm.cpu.kernels.loss.cross_entropy import ALL_ROWS, highest, logarithm, num_rows, sum_of, total_loss
from barellm.cpu.kernels.loss.loss_scale import scale_of
from barellm.cpu.lang.vector import LOG2E, exp, exp2_within
from barellm.program.dtypes import EIGHTS
from barellm.program.ops.softcap import MTP, Cap, cap_of, centre
from barellm.program.tensor import Dim, Tensor

SATURATED = 60.0  # |u| log2(e) at most: sigmoid or slope are as good as zero there, and their products finite


def sigmoid_and_slope(k: KernelBuilder, x: Value, cap: Cap) -> tuple[Value, Value]:
    """s = sigmoid(u), u = (x + shift) / width, and s (1 - s), computed as s^2 exp(-u): its digits do not cancel. The capped logit
    is z = cap scale * s."""
    _, shift, width = cap
    u = k.fma(x, -LOG2E / width, k.to(-LOG2E * shift / width, k.vec))
    e = exp2_within(k, k.max(-SATURATED, k.min(SATURATED, u)))  # of a number and a NaN the second: NaN stays
    s = 1.0 / (1.0 + e)
    return s, s * s * e


def exponential(k: KernelBuilder, x: Value, less: Value, cap: Cap | None) -> tuple[Value, Value]:
    """exp(z - less) of the capped logit z of x, and the same times dz/dx without its constant factor `steepness`. No `cap`: z =
    x."""
    if cap is None:
        e = exp(k, x - less)
        return e, e
    s, slope = sigmoid_and_slope(k, x, cap)
    e = exp2_within(k, k.fma(s, cap[0] * LOG2E, less * -LOG2E))
    return e, e * slope


def steepness(cap: Cap | None) -> float:
    """The factor by which dz/dx is larger than the slope of the sigmoid."""
    return 1.0 if cap is None else cap[0] / cap[2]


@dataclass
class Target:
    """One target of a row: its column; whether there is one; its weight, which is 0 if there is none; the capped logit there; and
    its slope without the factor `steepness`."""

    column: Value
    counted: Value
    weight: Value
    z: Value
    slope: Value


def targets_of(
    k: KernelBuilder, logits: Pointer, targets: Pointer, row: Value, row_begin: Value,
    *, cap: Cap | None, predict: int, length: str | int,
) -> list[Target]:  # fmt: skip
    """The `predict` targets of a row of logits, those of the next tokens, as far as the sequence reaches: the row is number
    row_begin + row of the run, whose sequences have `length` rows."""
    seq = k.scalar(length) if isinstance(length, str) else k.int(length)
    position, found = (row_begin + row) % seq, []
    for ahead in range(predict):
        inside = position + ahead < seq
        target = k.select(inside, targets.get(k.select(inside, row + ahead, row)), -1)
        column, counted = k.max(target, 0), target >= 0
        z, slope = logits.get(column), k.to(1.0, "float")
        if cap is not None:
            s, slope = (k.lane(v, 0) for v in sigmoid_and_slope(k, k.splat(z), cap))
            z = s * cap[0]
        weight = k.select(counted, k.to(k.scalar(MTP[ahead]), "float"), 0.0)
        found.append(Target(column, counted, weight, z, slope))
    return found


def weights_of(found: list[Target]) -> Value:
    """The sum of the targets' weights."""
    return sum_values([t.weight for t in found])


def sum_values(values: list[Value]) -> Value:
    return sum(values[1:], values[0])


def log_sum_exp(k: KernelBuilder, logits: Pointer, kept: Pointer | None, valid: int, cap: Cap | None) -> tuple[Value, Value]:
    """Of a row: ln(sum(exp(z))), and sum(exp(z - shift)). `kept` (V), if given, becomes exp(z - shift) times the slope of z;
    divided by that sum it is softmax times slope. The shift is the bound of z, or without a `cap` the row's maximum."""
    shift = highest(k, logits, valid) if cap is None else k.to(cap[0], "float")
    less = k.splat(shift)

    def term(c: Any, mask: Value | None) -> Value:
        e, sloped = exponential(k, logits.load(c, mask), less, cap)
        if kept is not None:
            kept.store(sloped, c, mask)
        return e

    total = sum_of(k, valid, term)
    return shift + logarithm(k, total), total


def write_loss(k: KernelBuilder, losses: Pointer, nexts: Pointer, row: Value, found: list[Target], lse: Value) -> None:
    """losses[row] = the weighted sum of lse - z over the row's targets; nexts[row] = that of the next token alone, unweighted."""
    nexts.put(k.select(found[0].counted, lse - found[0].z, 0.0), row)
    losses.put(sum_values([k.select(t.counted, t.weight * (lse - t.z), 0.0) for t in found]), row)


def write_gradient(
    k: KernelBuilder, dlogits: Pointer, found: list[Target], lse: Value, scale: Value, elsewhere: Vector,
    *, V: int, valid: int, mode: str,
) -> None:  # fmt: skip
    """Write one row of the gradient, (sum of weights * softmax - weights of the targets) * slope * scale. elsewhere(column, mask)
    gives it where no target is; from `valid` on (padding) it is zero. dlogits may be the logits."""
    at_targets = []  # read before anything is overwritten
    for t in found:
        p = k.lane(exp(k, k.splat(t.z - lse)), 0)
        # Two of the targets may be the same column.
        weight_here = sum_values([k.select(o.counted & o.column.equals(t.column), o.weight, 0.0) for o in found])
        value = (weights_of(found) * p - weight_here) * t.slope * scale
        at_targets.append(dlogits.get(t.column) + value if mode == "add" else value)

    def body(c: Any, mask: Value | None, j: int) -> None:
        d = elsewhere(c, mask)
        dlogits.store(dlogits.load(c, mask) + d if mode == "add" else d, c, mask)

    foreach_column(k, valid, body)
    if mode == "store" and valid < V:
        padding = dlogits.at(valid)
        foreach_column(k, V - valid, lambda c, mask, j: padding.store(0.0, c, mask))
    for t, value in zip(found, at_targets, strict=True):
        with k.when(t.counted):
            dlogits.put(value, t.column)


def factor_of(k: KernelBuilder, loss_scale: Pointer | None, cap: Cap | None, divisor: Pointer | None = None) -> Value:
    """The factor that every logit gradient is multiplied by: inv_targets, the constant factor of dz/dx, and the loss scale. Of FP8
    codes of the gradient, whose scale is `divisor` * inv_targets, it is divided by that."""
    if divisor is not None:
        return steepness(cap) / divisor.get(0)
    factor = k.to(k.scalar("inv_targets"), "float") * steepness(cap)
    by = scale_of(k, loss_scale)
    return factor if by is None else factor * by


def row_losses(
    k: KernelBuilder, lse, losses, nexts, logits, targets, row_begin, row_limit,
    *, V, valid, dims, inner, cap, **more,
) -> None:  # fmt: skip
    """lse (None: not wanted), and losses and nexts as `write_loss` has them, for rows [row_begin, row_begin + row_limit)."""
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src = logits.at(row * V)
        value, _ = log_sum_exp(k, src, None, valid, cap)
        if lse is not None:
            lse.put(value, row)
        write_loss(k, losses, nexts, row, targets_of(k, src, targets, row, row_begin, cap=cap, **more), value)


def row_losses_and_gradients(
    k: KernelBuilder, losses, nexts, logits, targets, loss_scale, row_begin, row_limit,
    *, V, valid, dims, inner, cap, **more,
) -> None:  # fmt: skip
    """losses and nexts as in `row_losses`, and the gradient in place of the logits: its row is in the cache then."""
    factor, kept = factor_of(k, loss_scale, cap), k.thread_scratch()
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src = logits.at(row * V)
        found = targets_of(k, src, targets, row, row_begin, cap=cap, **more)
        lse, total = log_sum_exp(k, src, kept, valid, cap)
        write_loss(k, losses, nexts, row, found, lse)
        scale = k.splat(factor * weights_of(found) / total)
        write_gradient(
            k, src, found, lse, factor, lambda c, mask, scale=scale: kept.load(c, mask) * scale,
            V=V, valid=valid, mode="store",
        )  # fmt: skip


def row_gradients(
    k: KernelBuilder, dlogits, logits, targets, lse, loss_scale, scale, row_begin, row_limit,
    *, V, valid, dims, inner, cap, mode, **more,
) -> None:  # fmt: skip
    """dlogits from logits and lse, or with a `scale` (1) their FP8 codes."""
    factor = factor_of(k, loss_scale, cap, scale)
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src, value = logits.at(row * V), lse.get(row)
        found = targets_of(k, src, targets, row, row_begin, cap=cap, **more)
        weight, less = k.splat(factor * weights_of(found)), k.splat(value)

        def elsewhere(c, mask, src=src, weight=weight, less=less):
            return exponential(k, src.load(c, mask), less, cap)[1] * weight

        write_gradient(k, dlogits.at(row * V), found, value, factor, elsewhere, V=V, valid=valid, mode=mode)


def constants_of(op: Op, logits: int, like: Tensor) -> dict[str, Any]:
    """`logits` columns, and the activation `like` whose sizes count the rows."""
    length = op.targets.shape[-1]
    return {
        "V": logits, "valid": op.valid_vocab, "cap": cap_of(op), "predict": op.predict,
        "length": length.name if isinstance(length, Dim) else int(length), **shape_of(like),
    }  # fmt: skip


@lowering("softcap_cross_entropy", also={"targets": "i32"})
def softcap_cross_entropy(op: Op, c: Lowering) -> None:
    losses, nexts = ((part(c.workspace(name, 4 * op.targets.size)), "fp32") for name in ("losses", "nexts"))
    operands = {"losses": losses, "nexts": nexts, "row_begin": 0, "row_limit": ALL_ROWS}
    c.call(row_losses, operands, constants_of(op, int(op.logits.shape[-1]), op.logits), writes="lse losses nexts")
    for loss, of_rows in ((op.loss, losses), (op.next_loss, nexts)):
        c.call(total_loss, {"loss": loss, "losses": of_rows}, shape_of(op.logits), writes="loss")


@lowering("softcap_cross_entropy_backward", adds="dlogits", also={"targets": "i32", "loss_scale": "i32"})
def softcap_cross_entropy_backward(op: Op, c: Lowering) -> None:
    lower_gradients(op, c, op.dlogits, op.modes["dlogits"], loss_scale=op.loss_scale)


@lowering("softcap_codes", also={"targets": "i32", "y": EIGHTS})
def softcap_codes(op: Op, c: Lowering) -> None:
    lower_gradients(op, c, op.y, "store", scale=op.scale)


def lower_gradients(op: Op, c: Lowering, dlogits: Tensor, mode: str, **more: Any) -> None:
    operands = {"dlogits": dlogits, "loss_scale": None, "scale": None, "row_begin": 0, "row_limit": ALL_ROWS, **more}
    constants = constants_of(op, int(op.logits.shape[-1]), op.logits) | {"mode": mode}
    c.call(row_gradients, operands, constants, writes="dlogits")


@kernel("softcap", constants=lambda op: {"cap": op.cap, **flat(op.y)})
def softcap(k: KernelBuilder, y, x, *, cap, dims, width, mode_y) -> None:
    def less_centre(z: Value) -> Value:
        return z - centre(cap) if centre(cap) else z

    elementwise_map(
        k, k.num_elements(dims) * width, y, lambda i, mask: less_centre(sigmoid_and_slope(k, x.load(i, mask), cap)[0] * cap[0]),
        mode=mode_y,
    )  # fmt: skip
