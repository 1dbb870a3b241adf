"""Cross-entropy of softcapped logits z = SCALE sigmoid((x + SHIFT) / WIDTH) with multi-token prediction (MTP: a row predicts the
next PREDICT = 1 to 3 tokens, with a run-time weight each), and its gradient. One program does one row. SCALE 0: not capped, z = x.

Shapes: logits, dlogits (rows, V), of which columns from VALID on are padding; losses, nexts, lse (rows) fp32; targets (rows) i32,
-1 where ignored. Row r of a launch is row `first` + r of the run, in sequences of `length` rows; `targets` begins at row `first`
and reaches to the run's end, because the target AHEAD tokens further is that of the row AHEAD rows below.

With a cap z is below SCALE, so that exp(z - SCALE) needs no row maximum. An element costs two exponentials and a division."""

from math import e, log2
from typing import Any

from barellm.cuda.kernel import MODES, Lowering, lowering, mode
from barellm.cuda.kernels.common import INV_TARGETS, axis_size, flat_indices, kernel, scalar_fp64, store_or_add
from barellm.cuda.kernels.loss.cross_entropy import columns_of, launch_rows, launch_total, log_sum_exp, scale_of
from barellm.cuda.lang import constant, device, tl
from barellm.program.dtypes import EIGHTS
from barellm.program.ops.base import Op
from barellm.program.ops.softcap import MTP, cap_of
from barellm.program.scalars import SCALARS
from barellm.program.tensor import Tensor

FIRST_WEIGHT = constant(SCALARS[MTP[0]].index)  # the others follow it
LN_2, LOG2_E = constant(1 / log2(e)), constant(log2(e))
SATURATED = constant(2.0**60)  # exp(-u) at most: sigmoid or slope are as good as zero there, and their products finite


@device
def sigmoid_and_slope(x, SHIFT, WIDTH):
    """(s, s (1 - s)): the sigmoid s of u = (x + SHIFT) / WIDTH, and its slope. 1 - s is s exp(-u), which loses no digits."""
    exp_minus_u = tl.math.exp2((x + SHIFT) * (-LOG2_E / WIDTH))
    exp_minus_u = tl.where(exp_minus_u > SATURATED, SATURATED, exp_minus_u)  # NaN stays
    s = 1.0 / (1.0 + exp_minus_u)
    return s, s * s * exp_minus_u


@device
def capped(x, SCALE, SHIFT, WIDTH):
    """z and dz/dx of logits x, fp32."""
    if SCALE == 0.0:
        z, slope = x, 1.0
    else:
        s, slope = sigmoid_and_slope(x, SHIFT, WIDTH)
        z = s * SCALE
        slope *= SCALE / WIDTH
    return z, slope


@device
def softcap_log_sum_exp(logits, V, VALID, SCALE, SHIFT, WIDTH, BLOCK, REST):
    """log(sum(exp(z))), fp32, of the capped logits z = SCALE sigmoid((x + SHIFT) / WIDTH) of one row (V,), over its VALID columns,
    BLOCK at a time: z is below SCALE, so there is no maximum to find. SCALE 0: z = x (cross_entropy.py)."""
    if SCALE == 0.0:
        lse = log_sum_exp(logits, V, VALID, BLOCK, REST)
    else:
        sums = tl.zeros((BLOCK,), tl.float32)
        for c in range(0, VALID, BLOCK):
            x, i = columns_of(logits, c, V, VALID, BLOCK)
            s, _ = sigmoid_and_slope(x, SHIFT, WIDTH)  # z = SCALE s
            sums += tl.where(i < VALID, tl.math.exp2((s - 1.0) * (SCALE * LOG2_E)), 0.0)
        lse = SCALE + tl.math.log2(tl.sum(sums, 0)) * LN_2
    return lse


@device
def target_of(targets, row, position, length, scalars, AHEAD, PREDICT):
    """(target, weight): the target AHEAD tokens further than the row's own, and its MTP weight; (-1, 0) beyond the sequence's end,
    where the target is ignored, or where AHEAD >= PREDICT. `position`: the row's index in its sequence."""
    target, weight = -1, 0.0
    if AHEAD < PREDICT:
        target = tl.load(targets + row + AHEAD, mask=position + AHEAD < length, other=-1)
        weight = tl.where(target >= 0, scalar_fp64(scalars, FIRST_WEIGHT + AHEAD).to(tl.float32), 0.0)
    return target, weight


@device
def capped_at(logits, target, AHEAD, PREDICT, SCALE, SHIFT, WIDTH):
    """The capped logit z of column `target` of a row (of column 0 if it is -1); 0 where AHEAD >= PREDICT."""
    z = 0.0
    if AHEAD < PREDICT:
        z, _ = capped(tl.load(logits + tl.maximum(target, 0)).to(tl.float32), SCALE, SHIFT, WIDTH)
    return z


@device
def write_softcap_gradient(
    dlogits, logits, lse, t0, w0, t1, w1, t2, w2, loss_scale, scale, scalars, V, VALID, SCALE, SHIFT, WIDTH, PREDICT, MODE, BLOCK
):
    """One row of the gradient (V,), stored or added (MODE): dlogits = (sum of weights * softmax(z) - weight of the column) * dz/dx
    * factor. t0, t1, t2 are the columns of the next tokens (-1: ignored) and w0, w1, w2 their MTP weights; other columns have none,
    and padding becomes zero. The factor is inv_targets * loss scale; with a `scale` (1) dlogits are 8-bit codes of the value code *
    scale * inv_targets, so it is 1 / scale. lse: softcap_log_sum_exp of the row. dlogits may alias logits."""
    factor = scalar_fp64(scalars, INV_TARGETS).to(tl.float32)
    if scale is not None:
        factor = 1.0 / tl.load(scale)
    if loss_scale is not None:
        factor *= scale_of(loss_scale)
    weights = w0 + w1 + w2  # of the softmax
    for c in range(0, V, BLOCK):
        x, i = columns_of(logits, c, V, VALID, BLOCK)
        z, slope = capped(x, SCALE, SHIFT, WIDTH)
        d = tl.math.exp2((z - lse) * LOG2_E) * weights  # softmax times the sum of weights
        d = tl.where(i == t0, d - w0, d)
        if PREDICT > 1:
            d = tl.where(i == t1, d - w1, d)
        if PREDICT > 2:
            d = tl.where(i == t2, d - w2, d)
        store_or_add(dlogits + i, i < V, tl.where(i < VALID, d * (slope * factor), 0.0), scalars, MODE)


@device
def softcap_row_losses(
    losses, nexts, lse, dlogits, logits, targets, loss_scale, scalars, first, length,
    V, VALID, SCALE, SHIFT, WIDTH, PREDICT, BLOCK, REST,
):  # fmt: skip
    """Softcapped cross-entropy with multi-token prediction of one row, a program each: losses = sum of w_j (lse - z[t_j]) over the
    next PREDICT tokens t_j with run-time weights w_j; `nexts` = lse - z[t_0], the next token alone; and lse and dlogits if they are
    given. Operands and shapes: of the module. dlogits may alias logits: the targets' logits are read before any write."""
    row = tl.program_id(0).to(tl.int64)
    position = (first + row) % length  # in its sequence
    logits += row * V
    t0, w0 = target_of(targets, row, position, length, scalars, 0, PREDICT)
    t1, w1 = target_of(targets, row, position, length, scalars, 1, PREDICT)
    t2, w2 = target_of(targets, row, position, length, scalars, 2, PREDICT)
    z0 = capped_at(logits, t0, 0, PREDICT, SCALE, SHIFT, WIDTH)
    z1 = capped_at(logits, t1, 1, PREDICT, SCALE, SHIFT, WIDTH)
    z2 = capped_at(logits, t2, 2, PREDICT, SCALE, SHIFT, WIDTH)
    value = softcap_log_sum_exp(logits, V, VALID, SCALE, SHIFT, WIDTH, BLOCK, REST)
    next_loss = tl.where(t0 >= 0, value - z0, 0.0)
    tl.store(nexts + row, next_loss)  # without a weight
    loss = w0 * next_loss
    if PREDICT > 1:
        loss += tl.where(t1 >= 0, w1 * (value - z1), 0.0)
    if PREDICT > 2:
        loss += tl.where(t2 >= 0, w2 * (value - z2), 0.0)
    tl.store(losses + row, loss)
    if lse is not None:
        tl.store(lse + row, value)
    if dlogits is not None:
        write_softcap_gradient(
            dlogits + row * V, logits, value, t0, w0, t1, w1, t2, w2, loss_scale, None, scalars,
            V, VALID, SCALE, SHIFT, WIDTH, PREDICT, 0, BLOCK,
        )  # fmt: skip


@device
def softcap_row_gradients(
    dlogits, logits, targets, lse, loss_scale, scale, scalars, first, length,
    V, VALID, SCALE, SHIFT, WIDTH, PREDICT, MODE, BLOCK, REST,
):  # fmt: skip
    """Backward pass of one row, a program each: dlogits (rows, V) stored or added (MODE), computed from logits, targets and the lse
    of the forward pass; as 8-bit codes if there is a `scale` (1). REST: not used."""
    row = tl.program_id(0).to(tl.int64)
    position = (first + row) % length  # in its sequence
    t0, w0 = target_of(targets, row, position, length, scalars, 0, PREDICT)
    t1, w1 = target_of(targets, row, position, length, scalars, 1, PREDICT)
    t2, w2 = target_of(targets, row, position, length, scalars, 2, PREDICT)
    write_softcap_gradient(
        dlogits + row * V, logits + row * V, tl.load(lse + row), t0, w0, t1, w1, t2, w2, loss_scale, scale, scalars,
        V, VALID, SCALE, SHIFT, WIDTH, PREDICT, MODE, BLOCK,
    )  # fmt: skip


def constants_of(op: Op) -> dict[str, Any]:
    """SCALE, SHIFT and WIDTH of the cap, and PREDICT."""
    scale, shift, width = cap_of(op) or (0.0, 0.0, 1.0)
    return {"SCALE": float(scale), "SHIFT": float(shift), "WIDTH": float(width), "PREDICT": op.predict}


def position_operands(op: Op, first: int = 0) -> dict[str, Any]:
    """The operands `first` (row of the run that the launch begins with) and `length` (rows of a sequence)."""
    return {"first": first, "length": axis_size(op.targets, -1)}


@lowering("softcap_cross_entropy", also={"targets": "i32"})
def lower_softcap_cross_entropy(op: Any, c: Lowering) -> None:
    """Launch the loss of each row, then the sums over the rows: loss, and next_loss of the next token alone."""
    rows = c.rows(op.logits)
    losses, nexts = (c.scratch(name, (op.targets.size,)) for name in ("losses", "nexts"))
    operands = {"losses": losses, "nexts": nexts, "dlogits": None, "loss_scale": None, **position_operands(op)}
    V = int(op.logits.shape[-1])
    launch_rows(c, softcap_row_losses, operands, rows, V, "losses nexts lse", **constants_of(op))
    launch_total(c, op.loss, losses, rows)
    launch_total(c, op.next_loss, nexts, rows)


@lowering("softcap_cross_entropy_backward", starts="dlogits", also={"targets": "i32", "loss_scale": "i32"})
def lower_softcap_cross_entropy_backward(op: Any, c: Lowering) -> None:
    lower_gradients(op, c, op.dlogits, mode(op, "dlogits"), loss_scale=op.loss_scale)


@lowering("softcap_codes", also={"targets": "i32", "y": EIGHTS})
def lower_softcap_codes(op: Any, c: Lowering) -> None:
    lower_gradients(op, c, op.y, MODES["store"], scale=op.scale)


def lower_gradients(op: Any, c: Lowering, dlogits: Tensor, mode: int, **more: Any) -> None:
    """Launch softcap_row_gradients into `dlogits`; `more`: its operand loss_scale or scale."""
    operands = {"dlogits": dlogits, "loss_scale": None, "scale": None, **position_operands(op), **more}
    constants = constants_of(op) | {"MODE": mode}
    V = int(op.logits.shape[-1])
    launch_rows(c, softcap_row_gradients, operands, c.rows(op.logits), V, "dlogits", **constants)


@kernel("softcap", starts="y", constants=lambda op: dict(zip(("SCALE", "SHIFT", "WIDTH"), op.cap, strict=True)))
def softcap(y, x, scalars, units, SCALE, SHIFT, WIDTH, UNIT, BLOCK, MODE):
    """y = z for a cap with a SHIFT. Without one z is centred, y = z - SCALE / 2, which is c tanh(x / c) with c = SCALE / 2."""
    i, mask = flat_indices(units, UNIT, BLOCK)
    z, _ = capped(tl.load(x + i, mask=mask, other=0.0).to(tl.float32), SCALE, SHIFT, WIDTH)
    if SHIFT == 0.0:
        z -= SCALE / 2
    store_or_add(y + i, mask, z, scalars, MODE)
