"""Cross-entropy of softcapped logits z = scale sigmoid((x + shift) / width) with multi-token prediction (MTP: a row predicts the
next 1 to 3 tokens), and its gradient. `cap` = (scale, shift, width); None: z = x, the plain logits.

Shapes: logits and dlogits (rows, V), of which columns from `valid` on are padding; lse, losses, nexts (rows) fp32; targets (rows)
i32, -1 where ignored. A call serves `row_limit` rows from row `row_begin` of the run on; its pointers begin at that row, but
`targets` reaches to the run's last row, because the further targets of a row are those of the rows below it. `predict`: targets of
a row; `length`: rows of a sequence; (dims, inner): sizes whose product is the number of rows.

z is below the cap's scale, so that exp(z - scale) needs no row maximum: one pass makes the sum of a row. Where the gradient
follows, exp(z - scale) times the slope of z stays in this thread's scratch, and the second pass is one multiplication."""

from dataclasses import dataclass
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Value, kernel, lowering, part
from barellm.cpu.kernels.loops import Vector, elementwise, flat, row_grain, shape_of
from barellm.cpu.kernels.loss.cross_entropy import ALL_ROWS, highest, logarithm, num_rows, overwrite_row, sum_of, total_loss
from barellm.cpu.kernels.loss.loss_scale import scale_of
from barellm.cpu.lang.vector import LOG2E, exp, exp2_within
from barellm.program.dtypes import EIGHTS
from barellm.program.ops.softcap import MTP, Cap, cap_of, centre
from barellm.program.tensor import Dim, Tensor

SATURATED = 60.0  # |u| log2(e) at most: sigmoid or slope are as good as zero there, and their products finite


def sigmoid_and_slope(k, x, cap: Cap) -> tuple[Value, Value]:
    """(s, s (1 - s)): the sigmoid s of u = (x + shift) / width, and its slope. The capped logit is z = scale s. The slope is
    computed as s^2 exp(-u), because 1 - s loses its digits where u is large."""
    _, shift, width = cap
    u = k.fma(x, -LOG2E / width, k.to(-LOG2E * shift / width, k.vec))
    e = exp2_within(k, k.max(-SATURATED, k.min(SATURATED, u)))  # of a number and a NaN the second: NaN stays
    s = 1.0 / (1.0 + e)
    return s, s * s * e


def exponential(k, x, shift, cap: Cap | None) -> tuple[Value, Value]:
    """(e, e dz/dx / steepness) of a vector x of logits, where e = exp(z - shift) and z is the capped logit."""
    if cap is None:
        e = exp(k, x - shift)
        return e, e
    s, slope = sigmoid_and_slope(k, x, cap)
    e = exp2_within(k, k.fma(s, cap[0] * LOG2E, shift * -LOG2E))
    return e, e * slope


def steepness(cap: Cap | None) -> float:
    """dz/dx divided by the slope of the sigmoid: the constant scale / width."""
    return 1.0 if cap is None else cap[0] / cap[2]


@dataclass
class Target:
    """One target of a row: its column (0 if there is none); whether it counts; its MTP weight (0 if it doesn't count); the capped
    logit z of its column; and the slope dz/dx / steepness there."""

    column: Value
    counted: Value
    weight: Value
    z: Value
    slope: Value


def targets_of(k, logits, targets, row, row_begin, *, cap: Cap | None, predict: int, length: str | int) -> list[Target]:
    """Load the `predict` targets of a row, the tokens that follow it; one beyond the end of the row's sequence (`length`) does not
    count. `logits` points to the row's first logit; `targets` (i32) to the target of the call's row 0; `row_begin`: its number."""
    seq = k.scalar(length) if isinstance(length, str) else k.int(length)
    position, result = (row_begin + row) % seq, []  # of the row in its sequence
    for ahead in range(predict):
        inside = position + ahead < seq
        target = k.select(inside, targets.get(k.select(inside, row + ahead, row)), -1)
        column, counted = k.max(target, 0), target >= 0
        z, slope = logits.get(column), k.to(1.0, "float")
        if cap is not None:
            s, slope = (k.lane(v, 0) for v in sigmoid_and_slope(k, k.splat(z), cap))
            z = s * cap[0]
        weight = k.select(counted, k.to(k.scalar(MTP[ahead]), "float"), 0.0)
        result.append(Target(column, counted, weight, z, slope))
    return result


def weights_of(row_targets: list[Target]) -> Value:
    """The sum of the targets' weights."""
    return sum_values([t.weight for t in row_targets])


def sum_values(values) -> Value:
    """The sum of scalars or vectors, added in the order of the list."""
    return sum(values[1:], values[0])


def log_sum_exp(k, logits, exponentials, valid: int, cap: Cap | None) -> tuple[Value, Value]:
    """(ln(sum(exp(z))), sum(exp(z - shift))) over the `valid` columns of a row of logits (V). The shift is the cap's scale, which
    bounds z, or without a cap the row's maximum. `exponentials` [V] fp32, if given, gets exp(z - shift) dz/dx / steepness: divided
    by the second sum it is softmax times slope."""
    shift = highest(k, logits, valid) if cap is None else k.to(cap[0], "float")
    shift_vector = k.splat(shift)

    def term(c, mask) -> Value:
        e, sloped = exponential(k, logits.load(c, mask), shift_vector, cap)
        if exponentials is not None:
            exponentials.store(sloped, c, mask)
        return e

    total = sum_of(k, valid, term)
    return shift + logarithm(k, total), total


def write_loss(k, losses, nexts, row, row_targets: list[Target], lse) -> None:
    """Store losses[row] = the sum of weight (lse - z) over the row's targets, and nexts[row] = lse - z of the next token alone."""
    nexts.put(k.select(row_targets[0].counted, lse - row_targets[0].z, 0.0), row)
    losses.put(sum_values([k.select(t.counted, t.weight * (lse - t.z), 0.0) for t in row_targets]), row)


def write_gradient(k, dlogits, row_targets: list[Target], lse, scale, softmax_gradient: Vector, *, V: int, valid: int,
        mode: str) -> None:  # fmt: skip
    """One row of the gradient, dlogits (V) = (sum of weights * softmax - weight of the column) * slope * scale, stored or added
    (`mode`); only the targets' columns have a weight. softmax_gradient(column, mask) gives a vector of the first term alone, which
    is written to all columns; then the targets' columns are overwritten. Padding becomes zero. dlogits may alias the logits."""
    target_gradients = []  # before the loop below overwrites what they are made of
    for t in row_targets:
        p = k.lane(exp(k, k.splat(t.z - lse)), 0)  # softmax at the target
        # Two of the targets may be the same column.
        column_weight = sum_values([k.select(o.counted & o.column.equals(t.column), o.weight, 0.0) for o in row_targets])
        value = (weights_of(row_targets) * p - column_weight) * t.slope * scale
        target_gradients.append(dlogits.get(t.column) + value if mode == "add" else value)

    at_targets = [(t.column, t.counted, value) for t, value in zip(row_targets, target_gradients, strict=True)]
    overwrite_row(k, dlogits, softmax_gradient, at_targets, V=V, valid=valid, mode=mode)


def factor_of(k, loss_scale, cap: Cap | None, fp8_scale=None) -> Value:
    """The factor of every logit gradient: inv_targets (1 / number of targets) * steepness * loss scale. With an `fp8_scale` (1) the
    gradient is stored as FP8 codes of the value code * fp8_scale * inv_targets, so their factor is steepness / fp8_scale."""
    if fp8_scale is not None:
        return steepness(cap) / fp8_scale.get(0)
    factor = k.to(k.scalar("inv_targets"), "float") * steepness(cap)
    loss_factor = scale_of(k, loss_scale)
    return factor if loss_factor is None else factor * loss_factor


def row_losses(k, lse, losses, nexts, logits, targets, row_begin, row_limit, *, V, valid, dims, inner, cap, **more) -> None:
    """Forward pass: store lse (None: not stored), losses and nexts (`write_loss`) of each row, one pass over its logits."""
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src = logits.at(row * V)
        value, _ = log_sum_exp(k, src, None, valid, cap)
        if lse is not None:
            lse.put(value, row)
        write_loss(k, losses, nexts, row, targets_of(k, src, targets, row, row_begin, cap=cap, **more), value)


def row_losses_and_gradients(k, losses, nexts, logits, targets, loss_scale, row_begin, row_limit, *, V, valid, dims, inner, cap,
        **more) -> None:  # fmt: skip
    """The kernel of a forward and backward pass in one: losses and nexts (rows) as in `row_losses`, and the gradient, which
    overwrites the logits (rows, V) while their row is in the cache. `loss_scale`: the state of dynamic loss scaling, None: off.
    Scratch `exponentials`: [V] fp32. A row is one thread's. `more`: predict, length, of `targets_of`."""
    factor, exponentials = factor_of(k, loss_scale, cap), k.thread_scratch()
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src = logits.at(row * V)
        row_targets = targets_of(k, src, targets, row, row_begin, cap=cap, **more)
        lse, total = log_sum_exp(k, src, exponentials, valid, cap)
        write_loss(k, losses, nexts, row, row_targets, lse)
        scale = k.splat(factor * weights_of(row_targets) / total)
        write_gradient(k, src, row_targets, lse, factor, lambda c, mask, scale=scale: exponentials.load(c, mask) * scale, V=V,
            valid=valid, mode="store")  # fmt: skip


def row_gradients(k, dlogits, logits, targets, lse, loss_scale, scale, row_begin, row_limit, *, V, valid, dims, inner, cap, mode,
        **more) -> None:  # fmt: skip
    """The kernel of the backward pass: dlogits (rows, V), stored or added (`mode`), from logits, targets and the forward pass's lse
    (rows). With a `scale` (1), dlogits are stored as FP8 codes relative to it. `loss_scale`: dynamic loss scaling, or None. `more`:
    predict, length."""
    factor = factor_of(k, loss_scale, cap, scale)
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src, row_lse = logits.at(row * V), lse.get(row)  # the row's logits and log-sum-exp
        row_targets = targets_of(k, src, targets, row, row_begin, cap=cap, **more)
        weight, lse_vector = k.splat(factor * weights_of(row_targets)), k.splat(row_lse)

        def softmax_gradient(c, mask, src=src, weight=weight, lse_vector=lse_vector):
            return exponential(k, src.load(c, mask), lse_vector, cap)[1] * weight

        write_gradient(k, dlogits.at(row * V), row_targets, row_lse, factor, softmax_gradient, V=V, valid=valid, mode=mode)


def constants_of(op: Op, logits: int, like: Tensor) -> dict[str, Any]:
    """The kernels' compile-time constants: `logits` = V; the product of the sizes of `like` is the number of rows."""
    length = op.targets.shape[-1]
    return {"V": logits, "valid": op.valid_vocab, "cap": cap_of(op), "predict": op.predict,
        "length": length.name if isinstance(length, Dim) else int(length), **shape_of(like)}  # fmt: skip


@lowering("softcap_cross_entropy", also={"targets": "i32"})
def softcap_cross_entropy(op: Op, c: Lowering) -> None:
    losses, nexts = ((part(c.workspace(name, 4 * op.targets.size)), "fp32") for name in ("losses", "nexts"))
    operands = {"losses": losses, "nexts": nexts, "row_begin": 0, "row_limit": ALL_ROWS}
    c.call(row_losses, operands, constants_of(op, int(op.logits.shape[-1]), op.logits), writes="lse losses nexts")
    for loss, of_rows in ((op.loss, losses), (op.next_loss, nexts)):
        c.call(total_loss, {"loss": loss, "losses": of_rows}, shape_of(op.logits), writes="loss")


@lowering("softcap_cross_entropy_backward", adds="dlogits", also={"targets": "i32", "loss_scale": "i32"})
@lowering("softcap_codes", also={"targets": "i32", "y": EIGHTS})
def lower_gradients(op: Op, c: Lowering) -> None:
    """Call row_gradients: into dlogits, or as the FP8 codes y."""
    result = "y" if op.name == "softcap_codes" else "dlogits"
    operands = {"dlogits": op.outputs[result], "loss_scale": op.inputs.get("loss_scale"), "scale": op.inputs.get("scale")}
    constants = constants_of(op, int(op.logits.shape[-1]), op.logits) | {"mode": op.modes.get(result, "store")}
    c.call(row_gradients, {**operands, "row_begin": 0, "row_limit": ALL_ROWS}, constants, writes="dlogits")


@kernel("softcap", constants=lambda op: {"cap": op.cap, **flat(op.y)})
def softcap(k, y, x, *, cap, dims, width, mode_y) -> None:
    """y = z for a cap with a shift. Without one z is centred, y = z - scale / 2, which is c tanh(x / c) with c = scale / 2."""
    for i, mask, put in elementwise(k, k.num_elements(dims) * width, y, mode=mode_y):
        z = sigmoid_and_slope(k, x.load(i, mask), cap)[0] * cap[0]
        put(z - centre(cap) if centre(cap) else z)
