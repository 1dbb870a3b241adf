"""Cross-entropy loss of the classifier and its gradient. Shapes: logits, dlogits (rows, V), targets (rows) i32, -1 ignored; lse,
losses, margins (rows) fp32. Columns from `valid` on are padding. (dims, inner): sizes whose product is the run's number of rows.

Every kernel handles at most `row_limit` rows from `row_begin` on, and its pointers are to the first of them: a lowering may call it
for all rows or for a chunk (chunked logits). Gradients may overwrite the logits."""

from collections.abc import Callable
from operator import add
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Tensor, Value, lowering, part
from barellm.cpu.kernels.loops import CHAINS, Vector, columns, fill, new_accumulators, row_grain, shape_of, tree_reduce, vectors
from barellm.cpu.kernels.loss.loss_scale import scale_of
from barellm.cpu.lang.vector import exp, ln

ALL_ROWS = 1 << 62  # a `row_limit` that is none


def num_rows(k, dims, inner, row_begin, row_limit) -> Value:
    """How many rows a call computes: of the run's k.num_elements(dims) * inner those in [row_begin, row_begin + row_limit)."""
    return k.max(k.min(k.num_elements(dims) * inner - row_begin, row_limit), 0)


def highest(k, logits, valid: int) -> Value:
    """The maximum of the first `valid` elements of a row, as a float, by CHAINS independent running maxima."""
    maxima = [k.var(k.to(float("-inf"), k.vec)) for _ in range(CHAINS)]
    for c, mask, j in columns(k, valid, unroll=CHAINS):
        x = logits.load(c, mask)
        maxima[j].value = k.max(x if mask is None else k.select(mask, x, float("-inf")), maxima[j].value)
    return k.maximum(tree_reduce(maxima, k.max))


def sums_over(k, C: int, terms: Callable[[Any, Value | None], list[Value]], count: int) -> list[Value]:
    """`count` sums over C columns, as floats: terms(column, mask) gives a vector to add to each, without its masked lanes."""
    chains = [new_accumulators(k, CHAINS) for _ in range(count)]
    for c, mask, j in columns(k, C, unroll=CHAINS):
        for chain, v in zip(chains, terms(c, mask), strict=True):
            chain[j].value = chain[j].value + (v if mask is None else k.select(mask, v, 0.0))
    return [k.sum(tree_reduce(chain, add)) for chain in chains]


def sum_of(k, C: int, term: Vector) -> Value:
    """`sums_over` with one sum."""
    return sums_over(k, C, lambda c, mask: [term(c, mask)], 1)[0]


def logarithm(k, x) -> Value:
    """ln of a float."""
    return k.lane(ln(k, k.splat(x)), 0)


def sum_above(k, logits, valid: int, top) -> Value:
    """The log-sum-exp of a row as a float, ln(sum(exp(row))), given the row's maximum `top`."""
    shift = k.splat(top)
    return top + logarithm(k, sum_of(k, valid, lambda c, mask: exp(k, logits.load(c, mask) - shift)))


def write_gradient(k, dlogits, logits, target, lse, loss_factor, *, V: int, valid: int, mode: str) -> None:
    """A gradient's row, dlogits (V) = (softmax - onehot) * inv_targets * loss_factor, stored or added (`mode`), with softmax =
    exp(logits - lse); zero where the target is ignored (-1), and from `valid` on (padding). `loss_factor`: loss scale, or None.
    Logits may be overwritten."""
    counted = target >= 0
    scale = k.to(k.scalar("inv_targets"), "float")
    scale = k.select(counted, scale if loss_factor is None else scale * loss_factor, 0.0)
    factor, shift = k.splat(scale), k.splat(lse)
    column = k.max(target, 0)  # that may be read; written only where counted
    target_gradient = (k.lane(exp(k, k.splat(logits.get(column)) - shift), 0) - 1.0) * scale  # before it is overwritten
    if mode == "add":
        target_gradient = target_gradient + dlogits.get(column)

    def softmax_gradient(c, mask) -> Value:
        return exp(k, logits.load(c, mask) - shift) * factor

    overwrite_row(k, dlogits, softmax_gradient, [(column, counted, target_gradient)], V=V, valid=valid, mode=mode)


def overwrite_row(k, dlogits, softmax_gradient: Vector, at_targets, *, V: int, valid: int, mode: str) -> None:
    """A row of a gradient, dlogits (V): the vectors softmax_gradient(column, mask), stored or added (`mode`), zeros from column
    `valid` on, and then the elements of the targets, of each (column, whether it is counted, what to store)."""
    for c, mask, _ in columns(k, valid, unroll=CHAINS):
        d = softmax_gradient(c, mask)
        dlogits.store(dlogits.load(c, mask) + d if mode == "add" else d, c, mask)
    if mode == "store" and valid < V:
        fill(k, dlogits.at(valid), 0.0, V - valid)
    for column, counted, value in at_targets:
        with k.when(counted):
            dlogits.put(value, column)


def row_losses(k, lse, losses, logits, targets, row_begin, row_limit, *, V, valid, dims, inner) -> None:
    """Forward pass: lse (None: not stored) and losses = lse - logits[target], zero where the target is ignored, of each row. A row
    is one thread's; `valid`: columns that count; (row_begin, row_limit): as the module says."""
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        write_loss(k, lse, losses, logits.at(row * V), targets.get(row), row, valid)


def write_loss(k, lse, losses, logits, target, row, valid: int) -> Value:
    """Store losses[row] = lse - logits[target], zero where the target is ignored (-1), and lse[row] unless `lse` is None. `logits`
    points to the row. Returns the row's log-sum-exp."""
    value = sum_above(k, logits, valid, highest(k, logits, valid))
    if lse is not None:
        lse.put(value, row)
    losses.put(k.select(target >= 0, value - logits.get(k.max(target, 0)), 0.0), row)
    return value


def row_scores(k, losses, margins, logits, targets, row_begin, row_limit, *, V, valid, dims, inner) -> None:
    """losses = lse - logits[target] and margins = max(logits) - logits[target], zero where the target is ignored, of each row."""
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src, target = logits.at(row * V), targets.get(row)
        top, target_logit = highest(k, src, valid), src.get(k.max(target, 0))
        value = sum_above(k, src, valid, top)
        losses.put(k.select(target >= 0, value - target_logit, 0.0), row)
        margins.put(k.select(target >= 0, top - target_logit, 0.0), row)


def row_losses_and_gradients(k, losses, logits, targets, loss_scale, row_begin, row_limit, *, V, valid, dims, inner) -> None:
    """Forward and backward pass in one: losses as in `row_losses`, and the gradient over the logits, whose row is cached."""
    loss_factor = scale_of(k, loss_scale)
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        src, target = logits.at(row * V), targets.get(row)
        lse = write_loss(k, None, losses, src, target, row, valid)
        write_gradient(k, src, src, target, lse, loss_factor, V=V, valid=valid, mode="store")


def row_gradients(k, dlogits, logits, targets, lse, loss_scale, row_begin, row_limit, *, V, valid, dims, inner, mode) -> None:
    """Backward pass: store or add (`mode`) dlogits, from logits, targets and the forward pass's lse (`write_gradient`). dlogits may
    be the logits: a row is one thread's, read before it is written."""
    loss_factor = scale_of(k, loss_scale)
    with k.parallel_range(num_rows(k, dims, inner, row_begin, row_limit), row_grain(V)) as (begin, end), k.loop(begin, end) as row:
        offset = row * V
        write_gradient(
            k, dlogits.at(offset), logits.at(offset), targets.get(row), lse.get(row), loss_factor, V=V, valid=valid, mode=mode
        )


def total_loss(k, loss, losses, *, dims, inner) -> None:
    """loss (1) = inv_targets * sum of losses, over all rows of the run."""
    with k.parallel_for(1):
        sums = new_accumulators(k, CHAINS)
        for i, mask, j in vectors(k, 0, k.num_elements(dims) * inner, unroll=CHAINS):
            sums[j].value = sums[j].value + losses.load(i, mask)
        loss.put(k.sum(tree_reduce(sums, add)) * k.to(k.scalar("inv_targets"), "float"))


def constants_of(op: Op, logits: int, like: Tensor) -> dict[str, Any]:
    """The kernels' compile-time constants: `logits` = V; the product of the sizes of `like` is the number of rows."""
    return {"V": logits, "valid": op.valid_vocab, **shape_of(like)}


@lowering("cross_entropy", also={"targets": "i32"})
def cross_entropy(op: Op, c: Lowering) -> None:
    """Losses and lse of all rows, then their mean over the targets."""
    losses = (part(c.workspace("losses", 4 * op.targets.size)), "fp32")
    operands = {"losses": losses, "row_begin": 0, "row_limit": ALL_ROWS}
    c.call(row_losses, operands, constants_of(op, int(op.logits.shape[-1]), op.logits), writes="lse losses")
    c.call(total_loss, {"loss": op.loss, "losses": losses}, shape_of(op.logits), writes="loss")


@lowering("cross_entropy_backward", adds="dlogits", also={"targets": "i32", "loss_scale": "i32"})
def cross_entropy_backward(op: Op, c: Lowering) -> None:
    constants = constants_of(op, int(op.logits.shape[-1]), op.logits) | {"mode": op.modes["dlogits"]}
    c.call(row_gradients, {"row_begin": 0, "row_limit": ALL_ROWS}, constants)


@lowering("token_losses", also={"targets": "i32"})
def token_losses(op: Op, c: Lowering) -> None:
    constants = constants_of(op, int(op.logits.shape[-1]), op.logits)
    c.call(row_scores, {"row_begin": 0, "row_limit": ALL_ROWS}, constants)
