"""Sigmoid gates, of which each multiplies a group of columns. Shapes: x (rows, k) and extra (rows, K - k), columns of wider rows;
weight (N, K); z, dz (rows, N) fp32, the gates' logits; base, y, dy, dx (rows, C), in N groups of D = C / N columns. `factor` (1): a
learned number, or None. (dims, inner): sizes whose product is the number of rows; (batch, seq): the same as two axes."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle
from operator import add
from typing import Any

from barellm.cpu.kernel import PLANES, Lowering, Op, Value, batch_and_seq, lowering
from barellm.cpu.kernels import loops
from barellm.cpu.kernels.reductions import chunks_of_rows, combine_sums, lower_partials, lower_scalars
from barellm.cpu.lang.vector import exp

# --- logits ---


def logits_constants(op: Op) -> dict[str, Any]:
    """Compile-time constants. `strides`: elements from one row of x and of extra to the next; `widths`: their columns."""
    read = [op.x] if op.extra is None else [op.x, op.extra]
    widths, strides = tuple(int(t.shape[-1]) for t in read), tuple(t.row_stride for t in read)
    return {"N": int(op.weight.shape[0]), "widths": widths, "strides": strides, **loops.shape_of(op.x)}


def gate_logits(k, z, x, extra, weight, *, N, widths, strides, dims, inner) -> None:
    """The kernel: z (rows, N) fp32 = [x, extra] @ weight^T, weight (N, K): a dot product of K columns for each of N gates;
    `widths`: columns of x and of extra. From the second gate on the columns of a row are in L1."""
    K = sum(widths)
    with k.parallel_range(k.num_elements(dims) * inner, loops.row_grain(N * K)) as (begin, end), k.loop(begin, end) as row:
        x_rows = [p.at(row * stride) for p, stride in zip((x, extra), strides, strict=False)]
        with k.loop(0, N) as n:
            sums, first = loops.new_accumulators(k, loops.ROW_UNROLL), 0
            for src, columns in zip(x_rows, widths, strict=True):
                w = weight.at(n * K + first)
                for c, mask, j in loops.columns(k, columns):
                    sums[j].value = k.fma(src.load(c, mask), w.load(c, mask), sums[j].value)
                first += columns
            z.put(k.sum(loops.tree_reduce(sums, add)), row * N + n)


@lowering("gate_logits", also={"weight": PLANES}, views="x extra")
def lower_gate_logits(op: Op, c: Lowering) -> None:
    c.call(gate_logits, {}, logits_constants(op))


def gate_logits_backward(k, partials, dx, dextra, dz, x, extra, weight, *, N, widths, strides, dstrides, modes, dims,
        inner) -> None:  # fmt: skip
    """The kernel: [dx, dextra] = dz @ weight, and partials (chunks, N, K) fp32 = dz^T @ [x, extra] of each chunk of rows, in one
    pass. Sums of few gates stay in registers, of many in L1. `strides`: of x, extra; `dstrides`, `modes`: of dx, dextra."""
    K = sum(widths)
    starts = [sum(widths[:i]) for i in range(len(widths))]  # first column of weight for x, for extra
    # The vectors of a row: (0 for x or 1 for extra, first column there, mask).
    vectors = [(i, c, mask) for i, columns in enumerate(widths) for c, mask in k.columns(columns)]
    in_registers = N * len(vectors) <= k.isa.registers // 2
    with chunks_of_rows(k, partials, k.num_elements(dims) * inner, N * K, 1) as (dst, begin, end):
        assert dst is not None
        acc = {(n, v): k.var_vec(0.0) for n in range(N) for v in range(len(vectors))} if in_registers else {}
        with k.loop(begin, end) as row:
            dz_row = dz.at(row * N)
            for v, (i, c, mask) in enumerate(vectors):
                gradient = (dx, dextra)[i].at(row * dstrides[i])
                value = (x, extra)[i].at(row * strides[i]).load(c, mask)
                total = k.var_vec(0.0)  # of the gradient, over the gates
                w = starts[i] + c  # column of weight
                for n in loops.steps(k, 0, N, unrolled=in_registers):
                    gate_dz = k.splat(dz_row.get(n))
                    total.value = k.fma(gate_dz, weight.load(n * K + w, mask), total.value)
                    if in_registers:
                        acc[n, v].value = k.fma(gate_dz, value, acc[n, v].value)
                    else:
                        dst.store(k.fma(gate_dz, value, dst.load(n * K + w, mask)), n * K + w, mask)
                gradient.store(loops.accumulate(k, gradient, c, mask, total.value, modes[i]), c, mask)
        for (n, v), sums in acc.items():
            i, c, mask = vectors[v]
            dst.store(sums.value, n * K + starts[i] + c, mask)


@lowering("gate_logits_backward", starts="dx dextra dweight", also={"weight": PLANES}, views="x extra dx dextra")
def lower_gate_logits_backward(op: Op, c: Lowering) -> None:
    """Append the kernel with partial sums of dweight, then the sum of these in order."""
    results = [t for t in (op.dx, op.dextra) if t is not None]
    partials = lower_partials(c, op.x, op.weight.size)
    constants = logits_constants(op) | {
        "dstrides": tuple(t.row_stride for t in results),
        "modes": tuple(op.modes.get(name, "store") for name in ("dx", "dextra")),
    }
    c.call(gate_logits_backward, {"partials": partials}, constants, writes="partials dx dextra")
    size = op.weight.size
    sums = {"C": size, "stride": size, "mode": op.modes["dweight"], **loops.shape_of(op.x)}
    c.call(combine_sums, {"out": op.dweight, "partials": partials}, sums, writes="out")


# --- gated values ---


def gated_constants(op: Op) -> dict[str, Any]:
    """Compile-time constants. `strides`: (name, elements from one row to the next) of each operand and result."""
    strides = tuple((name, t.row_stride) for name, t in (op.inputs | op.outputs).items() if len(t.shape) == 3)
    sizes = {**batch_and_seq(op.x), "C": int(op.x.shape[2]), "N": int(op.z.shape[2])}
    return {**sizes, "strides": strides, "scale": op.scale, "squash": op.squash, "shift": op.shift}


def sigmoid(k, x) -> Value:
    return 1.0 / (1.0 + exp(k, -x))


def gate_scale(k, factor, scale: float, *, squash: bool) -> tuple[Value, Value | None]:
    """(what a gate is multiplied by, its derivative by `factor`), in all lanes: `scale` times the factor, or with `squash` times
    its sigmoid. Without a factor: (scale, None)."""
    if factor is None:
        return k.to(scale, k.vec), None
    factor_value = k.splat(factor.get(0))
    if not squash:
        return factor_value * scale, k.to(scale, k.vec)
    s = sigmoid(k, factor_value)
    return s * scale, s * (1.0 - s) * scale


def gated(k, y, base, x, z, factor, *, batch, seq, C, N, strides, scale, squash, shift, mode_y) -> None:
    """The kernel: y (rows, C) = base + gate * x[t - shift] (x before the sequence's begin: 0), gate = gate_scale * sigmoid(z), z
    (rows, N) fp32: one for each group of D = C / N columns; `base` None: 0. A row's gates are first computed to scratch. `scale`,
    `squash`: of `gate_scale`; `strides`: (name, row stride) of each operand."""
    T, D, stride = k.size(seq), C // N, dict(strides)  # positions, columns of a gate, row strides
    rows, gates = k.size(batch) * T, k.thread_scratch()
    factor_scale, _ = gate_scale(k, factor, scale, squash=squash)
    whole_lines = D % (loops.ROW_UNROLL * k.lanes) == 0
    nontemporal = rows * (C * y.itemsize) > loops.STREAM_BYTES if mode_y == "store" and whole_lines else None
    with k.parallel_range(rows, loops.row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        for c, mask, _ in loops.columns(k, N):
            gates.store(factor_scale * sigmoid(k, z.at(row * N).load(c, mask)), c, mask)
        dst, base_row = y.at(row * C), None if base is None else base.at(row * stride["base"])
        source = x.at((row - shift) * stride["x"])

        for has_source in source_branches(k, row % T < shift if shift else None):
            with k.loop(0, N) as n:  # the columns of group n
                gate = k.splat(gates.get(n))
                for c, mask, put in loops.write_row(k, dst.at(n * D), D, nontemporal=nontemporal):
                    column = n * D + c
                    value = k.to(0.0, k.vec) if base_row is None else base_row.load(column, mask)
                    if has_source:
                        gated_x = source.load(column, mask)
                        value = gated_x * gate if base_row is None else k.fma(gated_x, gate, value)
                    put(loops.accumulate(k, dst, column, mask, value, mode_y))


def source_branches(k, is_first) -> Iterator[bool]:
    """`for has_source in ...`: the body for rows whose gates have an x; and, if the op shifts x, for the rows where `is_first` (i1;
    None: no shift), the first ones of a sequence, whose gates have none."""
    if is_first is not None:
        with k.when(is_first):
            yield False
    with nullcontext() if is_first is None else k.otherwise(is_first):
        yield True


@lowering("gated", starts="y", views="x base factor")
def lower_gated(op: Op, c: Lowering) -> None:
    c.thread_scratch(4 * gates_of(op, c))
    c.call(gated, {}, gated_constants(op) | {"mode_y": op.modes["y"]})


def gates_of(op: Op, c: Lowering) -> int:
    """The gates of a row, padded to vectors."""
    return -(-int(op.z.shape[2]) // c.isa.lanes) * c.isa.lanes


def gated_backward(k, partials, dx, dz, dy, x, z, factor, *, batch, seq, C, N, strides, scale, squash, shift, modes) -> None:
    """The kernel: dx[t - shift] = gate dy[t]; dz (rows, N) = gate_scale s (1 - s) dot, s = sigmoid(z) and dot = sum(dy x) over a
    group's columns; partials (chunks) = sums of s dot, for the factor's gradient. Scratch: `gates`, the sigmoids of a row, then its
    `dots`. `modes`: of dx and dz. `scale`, `squash`, `strides`: as in `gated`."""
    T, D, stride = k.size(seq), C // N, dict(strides)  # positions, columns of a gate, row strides
    rows, padded = k.size(batch) * T, -(-N // k.lanes) * k.lanes
    gates = k.thread_scratch()
    dots = gates.at(padded)
    factor_scale, derivative = gate_scale(k, factor, scale, squash=squash)
    # Added to, or not in whole cache lines.
    to_caches = modes[0] != "store" or D % (loops.ROW_UNROLL * k.lanes) != 0 or stride["dx"] != C
    nontemporal = None if to_caches else rows * (C * dx.itemsize) > loops.STREAM_BYTES
    with chunks_of_rows(k, partials, rows, 1, 1) as (dst, begin, end):
        total = k.var_vec(0.0)  # sum of s dot
        with k.loop(begin, end) as row:
            z_row, dz_row, dy_row = z.at(row * N), dz.at(row * N), dy.at(row * C)
            x_row = x.at((row - shift) * stride["x"])
            dx_row = dx.at((row - shift) * stride["dx"])
            t = row % T if shift else None
            for has_source in source_branches(k, None if t is None else t < shift):
                if not has_source:
                    for c, mask, _ in loops.columns(k, N):
                        dz_row.store(loops.accumulate(k, dz_row, c, mask, k.to(0.0, k.vec), modes[1]), c, mask)
                    continue
                for c, mask, _ in loops.columns(k, N):
                    gates.store(sigmoid(k, z_row.load(c, mask)), c, mask)
                gated_dx(k, dx_row, dots, dy_row, x_row, gates, factor_scale, N=N, D=D, nontemporal=nontemporal, mode=modes[0])
                for c, mask, _ in loops.columns(k, N):
                    s, dot = gates.load(c, mask), dots.load(c, mask)
                    if factor is not None:
                        total.value = k.fma(s, dot, total.value)
                    new_dz = factor_scale * (s * (1.0 - s)) * dot
                    dz_row.store(loops.accumulate(k, dz_row, c, mask, new_dz, modes[1]), c, mask)
            if t is not None:
                last = dx.at(row * stride["dx"])  # of the last `shift` positions no gate reads x
                with k.when(t >= T - shift):
                    for _, _, put in loops.write_row(k, last, C, nontemporal=None, mode=modes[0]):
                        put(k.to(0.0, k.vec))
        if derivative is not None:
            assert dst is not None
            dst.put(k.lane(derivative, 0) * k.sum(total.value), 0)


def gated_dx(k, dx, dots, dy, x, gates, factor_scale, *, N: int, D: int, nontemporal, mode: str) -> None:
    """A row's dx (C) = gate_scale gates dy, and dots (N) fp32 = sum(dy x) over the D columns of each gate, for which dy is read
    once. `gates` (N) fp32: sigmoids."""
    with k.loop(0, N) as n:
        gate = k.splat(gates.get(n)) * factor_scale
        sums = loops.new_accumulators(k, loops.ROW_UNROLL)
        chains = cycle(sums)  # consecutive vectors go to different accumulators
        for c, mask, put in loops.write_row(k, dx.at(n * D), D, nontemporal=nontemporal):
            column, chain = n * D + c, next(chains)
            d = dy.load(column, mask)
            chain.value = k.fma(d, x.load(column, mask), chain.value)
            put(loops.accumulate(k, dx, column, mask, d * gate, mode))
        dots.put(k.sum(loops.tree_reduce(sums, add)), n)


@lowering("gated_backward", starts="dx dz dfactor", views="x dx factor dfactor")
def lower_gated_backward(op: Op, c: Lowering) -> None:
    c.thread_scratch(8 * gates_of(op, c))
    learned = {} if op.factor is None else {"dfactor": op.dfactor}
    partials = lower_partials(c, op.dy, len(learned))
    constants = gated_constants(op) | {"modes": (op.modes["dx"], op.modes["dz"])}
    c.call(gated_backward, {"partials": partials}, constants, writes="partials dx dz")
    lower_scalars(c, partials, op.dy, learned, op.modes)
