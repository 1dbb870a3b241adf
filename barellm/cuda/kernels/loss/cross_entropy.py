"""Cross-entropy and its gradient. Shapes: logits, dlogits (rows, V), targets (rows) i32, -1 ignored; lse, losses, margins (rows)
fp32. Columns from VALID on are padding. `loss_scale`: the state of loss scaling (program/loss_scale.py), or None.

A program is a row, read twice: for the loss from memory, for the gradient, which may overwrite it, from L2. V elements of a row are
read, with the gradient as many written, at one exponential each time. BLOCK: columns at a time, of the full blocks without
padding; REST: of the rest. Full blocks have no masks: those of each column were a third of the instructions of both loops, and
issuing them took longer than moving the bytes (an H200's counters: 76 % of the issue slots, 41 % of the memory's)."""

from math import e, log2
from typing import Any

from barellm.cuda.kernel import Lowering, Size, lowering
from barellm.cuda.kernels.common import INV_TARGETS, MIN_SUM_COLUMNS, STORE, pow2, scalar_fp64, store_or_add
from barellm.cuda.lang import constant, device, tl
from barellm.program.loss_scale import FIRST_SCALE
from barellm.program.tensor import Tensor

SCALE_BIAS = constant(127 + FIRST_SCALE)  # fp32's exponent bias, plus the exponent that a new loss scale has
LN_2, LOG2_E = constant(1 / log2(e)), constant(log2(e))
BLOCK = 8192  # columns at a time: 2 x 16 bytes of bf16 for each of 512 threads
THREAD_COLUMNS = constant(8)  # adjacent columns of a row that a thread has: 16 bytes of bf16
LOWEST = constant(-1e38)  # where a maximum begins: columns of which all are padding keep it, and their sums are zeros
LOSSES = 4096  # that total_loss adds at a time


@device
def columns_of(logits, c, V, VALID, BLOCK):
    """(logits (BLOCK,) fp32 from column `c` of a row on, -inf in the padding; their columns). The load's mask is that of V: with
    that of VALID, which may be odd, each load would be one element wide."""
    i = c + tl.arange(0, BLOCK)
    return tl.where(i < VALID, tl.load(logits + i, mask=i < V, other=0.0).to(tl.float32), float("-inf")), i


@device
def online_softmax_step(top, sums, x):
    """(maxima, sums), (n,) each, of THREAD_COLUMNS columns a thread, after the next columns x (n * THREAD_COLUMNS,)."""
    x = tl.reshape(x, (top.shape[0], THREAD_COLUMNS))
    higher = tl.maximum(top, tl.max(x, 1))
    scaled = tl.math.exp2((x - higher[:, None]) * LOG2_E)
    return higher, sums * tl.math.exp2((top - higher) * LOG2_E) + tl.sum(scaled, 1)


@device
def max_and_sum(logits, V, VALID, BLOCK, REST):
    """(maximum, sum of exp(x - maximum)), fp32, of the VALID columns of one row of logits (V,): an online softmax in one pass.
    BLOCK columns at a time, without masks; then the others, REST at a time. BLOCK, REST: powers of two.

    Each THREAD_COLUMNS columns of a thread have a running maximum and sum of their own, so that threads synchronize only after the
    full blocks and after the rest; a common maximum would need it in every iteration."""
    FULL: tl.constexpr = VALID // BLOCK * BLOCK  # columns in full blocks
    top, sums = (tl.full((REST // THREAD_COLUMNS,), LOWEST, tl.float32), tl.zeros((REST // THREAD_COLUMNS,), tl.float32))
    for c in range(FULL, VALID, REST):
        top, sums = online_softmax_step(top, sums, columns_of(logits, c, V, VALID, REST)[0])
    highest = tl.max(top, 0)
    total = tl.sum(sums * tl.math.exp2((top - highest) * LOG2_E), 0)
    if FULL > 0:
        top, sums = (tl.full((BLOCK // THREAD_COLUMNS,), LOWEST, tl.float32), tl.zeros((BLOCK // THREAD_COLUMNS,), tl.float32))
        for c in range(0, FULL, BLOCK):
            top, sums = online_softmax_step(top, sums, tl.load(logits + c + tl.arange(0, BLOCK)).to(tl.float32))
        higher = tl.maximum(tl.max(top, 0), highest)  # of both parts of the row
        total *= tl.math.exp2((highest - higher) * LOG2_E)
        total += tl.sum(sums * tl.math.exp2((top - higher) * LOG2_E), 0)
        highest = higher
    return highest, total


@device
def log_sum_exp(logits, V, VALID, BLOCK, REST):
    """log(sum(exp(row))) over the VALID columns of a row."""
    top, sums = max_and_sum(logits, V, VALID, BLOCK, REST)
    return top + tl.math.log2(sums) * LN_2


@device
def scale_of(loss_scale):
    """The loss scale, a power of two in fp32: its exponent less FIRST_SCALE is the first number of the state."""
    return ((tl.load(loss_scale) + SCALE_BIAS) << 23).to(tl.float32, bitcast=True)


@device
def write_row_gradient(dlogits, logits, target, target_logit, lse, loss_scale, scalars, V, VALID, MODE, BLOCK, REST):
    """dlogits (V,) = (exp(logits - lse) - onehot(target)) * inv_targets, times the loss scale if there is one: one row, stored or
    added (MODE); zero where the target is ignored (-1), and in the padding from VALID on. lse: the row's log-sum-exp;
    `target_logit`: logits[target]; `logits` may be what is overwritten. BLOCK, REST: as in max_and_sum.

    To store, softmax * inv_targets goes everywhere, and then the target's element is corrected: comparisons are slow."""
    FULL: tl.constexpr = VALID // BLOCK * BLOCK  # columns in full blocks
    scale = tl.where(target >= 0, scalar_fp64(scalars, INV_TARGETS).to(tl.float32), 0.0)
    if loss_scale is not None:
        scale *= scale_of(loss_scale)
    for c in range(0, FULL, BLOCK):
        i = c + tl.arange(0, BLOCK)
        p = tl.math.exp2((tl.load(logits + i).to(tl.float32) - lse) * LOG2_E)  # softmax
        if MODE != STORE:
            p = tl.where(i == target, p - 1.0, p)
        store_or_add(dlogits + i, tl.full((BLOCK,), True, tl.int1), p * scale, scalars, MODE)
    for c in range(FULL, V, REST):
        x, i = columns_of(logits, c, V, VALID, REST)
        p = tl.math.exp2((x - lse) * LOG2_E)
        if MODE != STORE:
            p = tl.where(i == target, p - 1.0, p)
        store_or_add(dlogits + i, i < V, p * scale, scalars, MODE)
    if MODE == STORE:
        tl.debug_barrier()  # another thread has stored what this one corrects
        p = tl.math.exp2((target_logit - lse) * LOG2_E)
        tl.store(dlogits + target, (p - 1.0) * scale, mask=target >= 0)


@device
def row_losses(losses, lse, dlogits, logits, targets, loss_scale, scalars, V, VALID, BLOCK, REST):
    """Cross-entropy of one row, a program each: losses[row] = lse - logits[target], zero where the target is ignored; and lse
    (rows) fp32 and dlogits (rows, V) if they are given. logits (rows, V): what the classifier's GEMM wrote; targets (rows) i32.
    dlogits may alias logits: the target's logit is read before the reduction over the row, so before any thread writes."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    target_logit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    value = log_sum_exp(logits, V, VALID, BLOCK, REST)  # lse of the row
    tl.store(losses + row, tl.where(target >= 0, value - target_logit, 0.0))
    if lse is not None:
        tl.store(lse + row, value)
    if dlogits is not None:
        write_row_gradient(
            dlogits + row * V, logits, target, target_logit, value, loss_scale, scalars, V, VALID, STORE, BLOCK, REST
        )  # fmt: skip


@device
def row_scores(losses, margins, logits, targets, scalars, V, VALID, BLOCK, REST):
    """One row: losses = lse - logits[target] and margins = max(logits) - logits[target], zero where the target is ignored."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    target_logit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    top, sums = max_and_sum(logits, V, VALID, BLOCK, REST)
    tl.store(losses + row, tl.where(target >= 0, top + tl.math.log2(sums) * LN_2 - target_logit, 0.0))
    tl.store(margins + row, tl.where(target >= 0, top - target_logit, 0.0))


@device
def row_gradients(dlogits, logits, targets, lse, loss_scale, scalars, V, VALID, MODE, BLOCK, REST):
    """Backward pass of one row: store or add (MODE) dlogits, from logits, target and the lse of the forward pass."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target, value = tl.load(targets + row), tl.load(lse + row)
    target_logit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    write_row_gradient(dlogits + row * V, logits, target, target_logit, value, loss_scale, scalars, V, VALID, MODE, BLOCK, REST)


@device
def total_loss(loss, losses, scalars, rows, BLOCK):
    """loss (1) = inv_targets * sum of losses. One program, so one order."""
    sums, i = tl.zeros((BLOCK,), tl.float32), tl.arange(0, BLOCK)
    for r in range(0, rows, BLOCK):
        sums += tl.load(losses + r + i, mask=i < rows - r, other=0.0)
    tl.store(loss, tl.sum(sums, 0) * scalar_fp64(scalars, INV_TARGETS).to(tl.float32))


def launch_rows(c: Lowering, function: Any, operands: dict[str, Any], rows: Size, V: int, writes: str = "", **more: Any) -> None:
    """Launch `function` with one program for each row of V columns. `more`: further constants. Two programs of 16 warps share a
    multiprocessor (64 registers a thread): one reads while the other writes."""
    least = MIN_SUM_COLUMNS * THREAD_COLUMNS.value
    block = min(BLOCK, max(pow2(V), least))
    rest = min(block, max(pow2(V - c.op.valid_vocab // block * block), least))
    constants = {"V": V, "VALID": c.op.valid_vocab, "BLOCK": block, "REST": rest, **more}
    options = {"warps": max(1, block // 512), "registers": 64 if block == BLOCK and function is row_losses else 0}
    c.launch(function, operands, constants, grid=lambda s: (rows(s),), writes=writes, **options)


def launch_total(c: Lowering, loss: Tensor, losses: Any, rows: Size) -> None:
    """Launch loss (1) = inv_targets * sum of losses (rows)."""
    operands = {"loss": loss, "losses": losses, "rows": rows}
    c.launch(total_loss, operands, {"BLOCK": LOSSES}, grid=lambda s: (1,), writes="loss", warps=8)


@lowering("cross_entropy", also={"targets": "i32"})
def lower_cross_entropy(op: Any, c: Lowering) -> None:
    rows = c.rows(op.logits)
    losses = c.scratch("losses", (op.targets.size,))
    operands = {"losses": losses, "dlogits": None, "loss_scale": None}
    launch_rows(c, row_losses, operands, rows, int(op.logits.shape[-1]), "losses lse")
    launch_total(c, op.loss, losses, rows)


@lowering("cross_entropy_backward", starts="dlogits", also={"targets": "i32", "loss_scale": "i32"})
def lower_cross_entropy_backward(op: Any, c: Lowering) -> None:
    launch_rows(c, row_gradients, {}, c.rows(op.logits), int(op.logits.shape[-1]))


@lowering("token_losses", also={"targets": "i32"})
def lower_token_losses(op: Any, c: Lowering) -> None:
    launch_rows(c, row_scores, {}, c.rows(op.logits), int(op.logits.shape[-1]))
