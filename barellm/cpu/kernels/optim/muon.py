"""Muon (Jordan et al. 2024) but for its symmetric GEMMs (symmetric.py): momentum, normalization, the last GEMM of a Newton-Schulz
step, NorMuon's factors, and the weight update. Shapes: param, grad, m, u, x, y (rows, cols), flat where nothing else is said; clip
(2) = [gradient norm, factor that clips it], whose factor is NaN if the norm is not finite: then a step changes nothing.

A bank holds several matrices of one shape. Each has calls of its own, on bytes of its own, so no thread waits between them."""

from collections.abc import Iterator
from operator import add
from typing import Any

from barellm.cpu.kernel import PLANES, Lowering, Op, lowering, part, share
from barellm.cpu.kernels import loops, numbers, storage
from barellm.cpu.kernels.gemm.gemm import gemm, gemm_scratch_bytes
from barellm.cpu.kernels.optim.optimizer import GRAIN as UPDATE_GRAIN
from barellm.cpu.kernels.optim.optimizer import pairs
from barellm.cpu.kernels.reductions import sum_in_order
from barellm.cpu.tuning import select_config
from barellm.program.ops.optim.muon import LEAST
from barellm.program.ops.optim.optimizer import CHUNK


def each_matrix(op: Op, **operands) -> Iterator[dict[str, Any]]:
    """Yield the operands for each matrix of the op's bank: the i-th share of every operand, None where it is None."""
    for i in range(op.matrices):
        yield {name: t if t is None else share(t, i, op.matrices) for name, t in operands.items()}


def muon_momentum(k, m, u, partials, grad, clip, n, *, nesterov) -> None:
    """The kernel: m (n) = momentum m + (1 - momentum) g, g being the clipped gradient; u (n) = the new m, or with `nesterov`
    momentum m + (1 - momentum) g once more; partials (chunks) = sums of squares of u, one for each CHUNK of elements, which is a
    work item. If the gradient's norm is not finite, m stays and u is 0. `momentum`: the run-time scalar."""
    momentum, scale = k.scalar("momentum"), clip.get(1)
    finite = scale.equals(scale)  # NaN says that the gradient's norm is not finite
    momentum_vector, grad_factor = k.splat(momentum), k.splat((1.0 - momentum) * scale)
    with k.parallel_for((n + CHUNK - 1) // CHUNK) as chunk:
        sums = loops.new_accumulators(k, loops.CHAINS)
        for i, mask, j in loops.vectors(k, chunk * CHUNK, k.min((chunk + 1) * CHUNK, n), unroll=loops.CHAINS):
            old = m.load(i, mask)
            g = grad.load(i, mask) * grad_factor
            new = k.fma(old, momentum_vector, g)
            lookahead = k.fma(new, momentum_vector, g) if nesterov else new  # what is orthogonalized
            m.store(k.select(finite, new, old), i, mask)
            lookahead = k.select(finite, lookahead, 0.0)
            u.store(lookahead, i, mask)
            sums[j].value = k.fma(lookahead, lookahead, sums[j].value)
        partials.put(k.sum(loops.tree_reduce(sums, add)), chunk)


@lowering("muon_momentum")
def lower_momentum(op: Op, c: Lowering) -> None:
    for matrix in each_matrix(op, **op.outputs, grad=op.grad):
        operands = {**matrix, "clip": op.clip, "n": op.grad.size // op.matrices}
        c.call(muon_momentum, operands, {"nesterov": bool(op.nesterov)}, writes="m u partials")


def muon_normalize(k, x, u, partials, n, count, *, margin, eps) -> None:
    """x (n) = u / (margin |u| + eps), the start of the Newton-Schulz steps; |u|^2 is the sum of partials (count), which each thread
    computes for itself, in order: they are few. `margin` > 1 keeps the spectral norm below 1 in spite of rounding."""
    norm = k.sqrt(sum_in_order(k, partials, count))
    factor = k.splat(1.0 / (norm * margin + eps))
    with k.parallel_range(n, loops.GRAIN) as (begin, end):
        for i, mask, _ in loops.vectors(k, begin, end):
            x.store(u.load(i, mask) * factor, i, mask)


@lowering("muon_normalize")
def lower_normalize(op: Op, c: Lowering) -> None:
    sizes = {"n": op.u.size // op.matrices, "count": op.partials.size // op.matrices}
    for matrix in each_matrix(op, x=op.x, u=op.u, partials=op.partials):
        c.call(muon_normalize, {**matrix, **sizes}, {"margin": float(op.margin), "eps": float(op.eps)}, writes="x")


def gram_apply(k, y, a, b, x, scale, *, rows, cols, depth, config) -> None:
    """y (rows, cols) = scale x + a (rows, depth) @ b (depth, cols): the last GEMM of a Newton-Schulz step; one of a and b is x.
    `scale` is a run-time argument, because it differs between steps."""
    factor = k.splat(numbers.number(k, scale))
    gemm(k, y, None, a, b, None, x, 0, rows, cols=cols, depth=depth, transposed=False, dims=(), inner=rows,
            epilogues=("scaled",), mode="store", config=config, scale=factor)  # fmt: skip


@lowering("gram_apply")
def lower_apply(op: Op, c: Lowering) -> None:
    """y = scale x + x b of a tall x, scale x + b x of a wide one; b is the symmetric polynomial of x's Gram matrix."""
    rows, cols = op.one(op.x)
    a, b, depth = (op.x, op.b, cols) if op.is_tall(op.x) else (op.b, op.x, rows)
    config = select_config(c, "input_gradient", op.x.dtype, cols, depth, rows)
    c.thread_scratch(gemm_scratch_bytes(c.isa, op.x.dtype, depth, config))
    constants = {"rows": rows, "cols": cols, "depth": depth, "config": config}
    for matrix in each_matrix(op, y=op.y, a=a, b=b, x=op.x):
        c.call(gram_apply, {**matrix, "scale": numbers.bits(op.scale)}, constants, writes="y")


# --- NorMuon ---


def row_means(k, means, x, rows, *, C) -> None:
    """means (rows) = the mean of the squares of each row of x (rows, C), a range of rows for each work item."""
    with k.parallel_range(rows, max(1, loops.GRAIN // C)) as (begin, end), k.loop(begin, end) as row:
        sums, src = loops.new_accumulators(k, loops.CHAINS), x.at(row * C)
        for c, mask, j in loops.columns(k, C, unroll=loops.CHAINS):
            value = src.load(c, mask)
            sums[j].value = k.fma(value, value, sums[j].value)
        means.put(k.sum(loops.tree_reduce(sums, add)) / float(C), row)


def column_means(k, means, x, rows, *, C) -> None:
    """means (C) = the mean of the squares of each column of x (rows, C). A work item is loops.CHAINS vectors of columns."""
    with k.parallel_range(C, loops.CHAINS * k.lanes) as (begin, end):
        for c, mask, _ in loops.vectors(k, begin, end, unroll=1):
            total = k.var(k.to(0.0, k.vec))
            with k.loop(0, rows) as row:
                value = x.load(row * C + c, mask)
                total.value = k.fma(value, value, total.value)
            means.store(total.value / k.to(rows, "float"), c, mask)


def scales_of_means(k, second, scales, means, clip, n, *, beta2, each) -> None:
    """The kernel of NorMuon's factors of rows or columns: second (n) = beta2 second + (1 - beta2) means; scales (n) = ratio /
    sqrt(second), with the ratio that gives the scaled x the norm of x. means (n), from `row_means` or `column_means`: the mean
    squares of `each` elements. They are few: one thread does all, in double. If the norm is not finite, `second` stays. Before the
    last loop, which multiplies by the ratio, `scales` has 1 / sqrt(second)."""
    finite = clip.get(1).equals(clip.get(1))
    with k.parallel_for(1):
        sum_before, sum_after = k.var(k.const(0.0, "double")), k.var(k.const(0.0, "double"))
        with k.loop(0, n) as i:
            mean, old = means.get(i), second.get(i)
            new = k.select(finite, k.fma(old, k.float(beta2), mean * (1.0 - beta2)), old)
            inv_root = 1.0 / k.sqrt(k.max(new, k.float(LEAST)))  # the factor without the ratio
            second.put(new, i)
            scales.put(inv_root, i)
            mean = k.to(mean, "double")
            sum_before.value = sum_before.value + mean
            sum_after.value = sum_after.value + mean * k.to(inv_root, "double") * k.to(inv_root, "double")
        norm, scaled = k.sqrt(sum_before.value * float(each)), k.sqrt(sum_after.value * float(each))
        ratio = k.splat(norm / k.max(scaled, LEAST))
        for i, mask, _ in loops.vectors(k, 0, n):
            scales.store(scales.load(i, mask) * ratio, i, mask)


@lowering("normuon_scales")
def lower_scales(op: Op, c: Lowering) -> None:
    rows, C = op.one(op.x)
    means = (part(c.workspace("means", 4 * op.second.size)), "fp32")
    for matrix in each_matrix(op, means=means, x=op.x):
        c.call(row_means if rows >= C else column_means, {**matrix, "rows": rows}, {"C": C}, writes="means")
    constants = {"beta2": float(op.beta2), "each": min(rows, C)}
    for matrix in each_matrix(op, **op.outputs, means=means):
        operands = {**matrix, "clip": op.clip, "n": op.second.size // op.matrices}
        c.call(scales_of_means, operands, constants, writes="second scales")


# --- the weight ---


def muon_update(k, param, param_lo, x, clip, scales, rows, *, C, by_column, rate, lr_scale, scale, weight_decay, squared,
        cautious) -> None:  # fmt: skip
    """The kernel: param (rows, C) = (1 - lr weight_decay) param - lr scale x in one pass, lr = the run-time scalar named `rate`
    times `lr_scale`. `param_lo`: a weight's second plane (storage.py), or None. `scales`: NorMuon's factor for each row of x, or
    each column if `by_column`; None: 1. `squared`: the decay is lr^2 scale weight_decay instead. `cautious`: an element decays only
    where its update has the weight's sign (both shrink it)."""
    lr = k.scalar(rate) * lr_scale
    decay_fp64 = lr * lr * (weight_decay * scale) if squared else lr * weight_decay  # Adam-like modded-nanogpt decay, or AdamW's
    shrink, decay, size = k.splat(1.0 - decay_fp64), k.splat(decay_fp64), k.splat(lr * scale)
    weights, clip_scale = storage.Weight(k, param, param_lo), clip.get(1)  # clip[1]: NaN if the norm is not finite

    def update_range(begin, end, factor) -> None:
        """param -= factor(index, mask) x for the elements [begin, end), with weight decay; the factor contains lr scale."""
        for i, mask, vectors in pairs(k, begin, end):
            updated = []
            for j in range(len(vectors)):
                offset = i + j * k.lanes
                p, update = weights.load(offset, mask), x.load(offset, mask) * factor(offset, mask)
                if cautious:
                    same_sign = update * p >= 0.0  # the update shrinks the weight: only then it decays, too
                    updated.append(p - k.select(same_sign, p * decay, 0.0) - update)
                else:
                    updated.append(k.fma(p, shrink, -update))
            weights.store_all(updated, i, mask)

    # NaN says that the gradient's norm is not finite: no work items.
    with k.parallel_range(k.select(clip_scale.equals(clip_scale), rows, 0), max(1, UPDATE_GRAIN // C)) as (begin, end):
        if scales is None:
            update_range(begin * C, end * C, lambda offset, mask: size)
            return
        with k.loop(begin, end) as row:
            first = row * C
            if by_column:
                update_range(first, first + C, lambda offset, mask: scales.load(offset - first, mask) * size)
            else:
                row_factor = k.splat(scales.get(row)) * size
                update_range(first, first + C, lambda offset, mask: row_factor)


@lowering("muon_update", also={"param": PLANES})
def lower_update(op: Op, c: Lowering) -> None:
    rows, C = op.one(op.x)
    constants = {name: float(op.attrs[name]) for name in ("lr_scale", "scale", "weight_decay")}
    cautious = bool(op.cautious and op.weight_decay)
    constants |= {"rate": op.rate, "C": C, "by_column": rows < C, "squared": op.squared, "cautious": cautious}
    operands = {**storage.weight_operands("param", op.outputs["param"]), "x": op.x, "scales": op.scales}
    for matrix in each_matrix(op, **operands):
        c.call(muon_update, {**matrix, "clip": op.clip, "rows": rows}, constants, writes="param param_lo")
