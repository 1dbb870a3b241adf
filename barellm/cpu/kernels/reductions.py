"""Deterministic reductions: column sums over tokens, the sum of squares of a gradient, the global gradient norm.

Split reductions: rows form chunks whose number depends on the row count alone; each chunk is summed by one thread into its row of
partials, then these are added in order. So the bits do not depend on the threads. (dims, inner): their product is the rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from operator import add
from typing import Any

from barellm.cpu.kernel import Lowering, Op, Pointer, Region, Tensor, Value, lowering, part
from barellm.cpu.kernels import loops
from barellm.cpu.kernels.loss.loss_scale import scale_of
from barellm.program.loss_scale import FIRST_SCALE, GROWTH_STEPS, LEAST_SCALE, MOST_SCALE
from barellm.program.ops.optim.optimizer import CHUNK

CHUNKS, CHUNK_ROWS = 64, 32  # at most so many chunks, of at least so many rows


def rows_per_chunk(k, rows) -> Value:
    return k.max(k.ceil_div(rows, CHUNKS), CHUNK_ROWS)


@contextmanager
def chunks_of_rows(k, partials, rows, C: int, count: int) -> Iterator[tuple[Pointer | None, Value, Value]]:
    """Loop in parallel over chunks of rows; yields (the chunk's partial sums (count, C), cleared, if any; its rows' begin, end)."""
    chunk_rows = rows_per_chunk(k, rows)
    with k.parallel_for((rows + chunk_rows - 1) // chunk_rows) as chunk:
        dst = None if partials is None else partials.at(chunk * (count * C))
        if dst is not None:
            loops.fill(k, dst, 0.0, count * C)
        begin = chunk * chunk_rows
        yield dst, begin, k.min(begin + chunk_rows, rows)


def column_sums(k, partials, rows, C: int, count: int) -> Iterator[tuple[Value, loops.Written]]:
    """`for row, columns in column_sums(...)`, and `for c, mask, add in columns`: add(...) is given `count` vectors, the terms at
    column c; partials (chunks, count, C) are their sums over the rows of each chunk. One row at a time: memory is then read in the
    order of its addresses, which saves more than it costs to load and store the sums, in L1."""
    with chunks_of_rows(k, partials, rows, C, count) as (dst, begin, end), k.loop(begin, end) as row:
        assert dst is not None

        def add_terms(c, mask, *terms) -> None:
            for t, value in enumerate(terms):
                dst.store(dst.load(t * C + c, mask) + value, t * C + c, mask)

        yield row, ((c, mask, partial(add_terms, c, mask)) for c, mask, _ in loops.columns(k, C))


def combine_sums(k, out, partials, *, C, stride, dims, inner, mode) -> None:
    """out (C) = the sum of the chunks' partial sums, in order, stored or added (`mode`). `stride`: floats between chunks."""
    rows = k.num_elements(dims) * inner
    chunk_rows = rows_per_chunk(k, rows)
    add_chunks(k, out, partials, (rows + chunk_rows - 1) // chunk_rows, C, stride, mode)


def add_chunks(k, out, partials, chunks, C: int, stride: int, mode: str) -> None:
    """out (C) = the sum over `chunks` of partials[chunk * stride + column], in order, stored or added (`mode`)."""
    with k.parallel_range(C, 4 * k.lanes) as (begin, end):
        for c, mask, _ in loops.vectors(k, begin, end, unroll=1):
            total = k.var(k.to(0.0, k.vec))
            with k.loop(0, chunks) as chunk:
                total.value = total.value + partials.load(chunk * stride + c, mask)
            out.store(loops.accumulate(k, out, c, mask, total.value, mode), c, mask)


def lower_column_sums(c: Lowering, emit: Callable[..., None], operands: dict[str, Any], like: Tensor, outputs: dict[str, Tensor],
        modes: dict[str, str], *, writes: str = "", **constants) -> None:  # fmt: skip
    """Append a call of `emit`, which computes the operand `partials` (chunks, len(outputs), C; None without outputs) and the
    operands that `writes` names; then for each of the `outputs` (C) a call that adds up its partial sums, in its mode. `like`: the
    tensor (rows, C) that is summed; `constants`: further ones of `emit`."""
    C = int(like.shape[-1])
    stride = len(outputs) * C
    partials = lower_partials(c, like, stride)
    shape = loops.shape_of(like)
    sizes = {"C": C, "count": len(outputs), **shape, **constants}
    c.call(emit, {"partials": partials, **operands}, sizes, writes=f"partials {writes}")
    for i, (name, out) in enumerate(outputs.items()):
        assert partials is not None
        region, dtype = partials
        own_column = (part(region.tensor, i * C * 4), dtype)
        mode = {"C": C, "stride": stride, "mode": modes[name], **shape}
        c.call(combine_sums, {"out": out, "partials": own_column}, mode, writes="out")


def lower_partials(c: Lowering, like: Tensor, count: int) -> tuple[Region, str] | None:
    """The operand for `count` partial sums of each chunk of the rows of `like`, in scratch; None if `count` is 0."""
    chunks = min(CHUNKS, -(-(like.size // int(like.shape[-1])) // CHUNK_ROWS))
    return (part(c.workspace("partials", chunks * count * 4)), "fp32") if count else None


def combine_scalars(k, out0, out1, out2, out3, partials, *, modes, dims, inner) -> None:
    """Each out (1) = the sum of its column of partials (chunks, outs), in the chunks' order, stored or added (`modes`)."""
    rows, count = k.num_elements(dims) * inner, len(modes)
    with k.parallel_for(1):
        total, mask = k.var_vec(0.0), k.mask_first(count)
        with k.loop(0, k.ceil_div(rows, rows_per_chunk(k, rows))) as chunk:
            total.value = total.value + partials.load(chunk * count, mask)
        for i, (out, mode) in enumerate(zip((out0, out1, out2, out3), modes, strict=False)):
            loops.accumulate_scalar(k, out, 0, k.lane(total.value, i), mode)


def lower_scalars(c: Lowering, partials: tuple[Region, str] | None, like: Tensor, outputs: dict[str, Tensor],
        modes: dict[str, str]) -> None:  # fmt: skip
    """Append the call that adds up at most four columns of partials, one for each of `outputs`; none if `partials` is None."""
    if partials is None:
        return
    outs = dict(zip_longest(("out0", "out1", "out2", "out3"), outputs.values()))
    constants = {"modes": tuple(modes[name] for name in outputs), **loops.shape_of(like)}
    c.call(combine_scalars, {"partials": partials, **outs}, constants, writes=" ".join(outs))


def bias_grad_partials(k, partials, dy, *, C, count, dims, inner) -> None:
    for row, columns in column_sums(k, partials, k.num_elements(dims) * inner, C, count):
        src = dy.at(row * C)
        for c, mask, add_terms in columns:
            add_terms(src.load(c, mask))


@lowering("bias_grad", starts="dbias")
def bias_grad(op: Op, c: Lowering) -> None:
    lower_column_sums(c, bias_grad_partials, {"dy": op.dy}, op.dy, {"dbias": op.dbias}, op.modes)


# --- the gradient norm ---

CHAINS = 8


def sum_squares(k, partials, x, n) -> None:
    """partials (ceil(n / CHUNK)) = the sum of squares of each CHUNK of x (n)."""
    with k.parallel_for((n + CHUNK - 1) // CHUNK) as chunk:
        sums = loops.new_accumulators(k, CHAINS)
        for i, mask, j in loops.vectors(k, chunk * CHUNK, k.min((chunk + 1) * CHUNK, n), unroll=CHAINS):
            v = x.load(i, mask)
            sums[j].value = k.fma(v, v, sums[j].value)
        partials.put(k.sum(loops.tree_reduce(sums, add)), chunk)


@lowering("sum_squares", floats="fp32 bf16", spans="x partials")
def lower_sum_squares(op: Op, c: Lowering) -> None:
    c.call(sum_squares, {"partials": op.partials, "x": op.x, "n": op.x.size}, writes="partials")


def add_partials(k, total, partials, n) -> None:
    """total (1) fp64 = sum of partials (n) in order."""
    with k.parallel_for(1):
        total.put(sum_in_order(k, partials, n))


def sum_in_order(k, partials, n) -> Value:
    """The sum of partials (n) in fp64, one after the other."""
    total = k.var(k.const(0.0, "double"))
    with k.loop(0, n) as i:
        total.value = total.value + k.to(partials.get(i), "double")
    return total.value


def clip_scale(k, clip, skipped, loss_scale, totals, n, *, limit) -> None:
    """The kernel: clip (2) = [norm, min(1, limit / norm)], norm = sqrt(sum of totals (n) fp64); `limit` 0: no clipping. A norm that
    is not finite makes the factor NaN and counts in skipped (1). Both are divided by the gradients' loss scale (None: 1)."""
    with k.parallel_for(1):
        norm, loss_factor = k.sqrt(sum_in_order(k, totals, n)), scale_of(k, loss_scale)
        norm = k.to(norm if loss_factor is None else norm / k.to(loss_factor, "double"), "float")
        finite = norm < float("inf")  # false for NaN as well
        scale = k.select(norm > limit, limit / norm, 1.0) if limit > 0 else k.float(1.0)
        scale = scale if loss_factor is None else scale / loss_factor
        clip.put(norm, 0)
        clip.put(k.select(finite, scale, float("nan")), 1)
        with k.otherwise(finite):
            skipped.put(skipped.get(0) + 1, 0)


def update_scale(k, scale, totals, n) -> None:
    """The kernel: update `scale` (2) = [its power of two, good steps since it changed]: halved after a step in which the sum of
    totals (n) fp64 is not finite, doubled after GROWTH_STEPS others."""
    with k.parallel_for(1):
        finite = k.to(sum_in_order(k, totals, n), "float") < float("inf")  # false for NaN as well
        power, good = scale.get(0), scale.get(1) + 1
        grows = finite & (good >= GROWTH_STEPS)
        up, down = k.min(power + 1, MOST_SCALE - FIRST_SCALE), k.max(power - 1, LEAST_SCALE - FIRST_SCALE)
        scale.put(k.select(finite, k.select(grows, up, power), down), 0)
        scale.put(k.select(finite, k.select(grows, 0, good), 0), 1)


@lowering("update_scale", floats="fp32", also={"scale": "i32"})
def lower_update_scale(op: Op, c: Lowering) -> None:
    c.call(update_scale, {"scale": op.outputs["scale"], **_totals(op, c)}, {}, writes="scale")


def _totals(op: Op, c: Lowering) -> dict[str, Any]:
    """Append the sums, in fp64, of the op's tensors p0, p1, ... of partial sums."""
    partials = [t for name, t in op.inputs.items() if name not in (*op.inplace, "loss_scale")]
    totals = c.workspace("totals", 8 * len(partials))
    for i, t in enumerate(partials):
        c.call(add_partials, {"total": (part(totals, 8 * i, 8 * i + 8), "fp64"), "partials": t, "n": t.size}, writes="total")
    return {"totals": (part(totals), "fp64"), "n": len(partials)}


@lowering("clip_scale", floats="fp32", also={"skipped": "i32", "loss_scale": "i32"})
def lower_clip_scale(op: Op, c: Lowering) -> None:
    """The sum of each tensor's partial sums of squares, in fp64, then the clipping factor."""
    operands = {"clip": op.outputs["clip"], "skipped": op.outputs["skipped"], "loss_scale": op.inputs.get("loss_scale")}
    c.call(clip_scale, operands | _totals(op, c), {"limit": float(op.attrs["clip"])}, writes="clip skipped")
