"""Softmax over rows of any length. Shapes: x, y, dy, dx (rows, C). (dims, inner): sizes whose product is the number of rows."""

from operator import add

from barellm.cpu.kernel import Lowering, Op, Value, kernel, lowering
from barellm.cpu.kernels.loops import exceeds_caches, pieces, row_grain, shape_of, write_row
from barellm.cpu.kernels.loss.cross_entropy import highest, sum_of
from barellm.cpu.kernels.norm.layernorm import row_sums
from barellm.cpu.lang.vector import exp

CACHED_COLUMNS = 32768  # whose exponentials a thread keeps in scratch: 128 KB of L2
BLOCK = 4096  # columns of an online-softmax step of a longer row: 16 KB of L1
EXP_REGISTERS = 12  # that exp needs besides a row in registers: on AVX2 four are left, 32 columns; on AVX-512 20, 320 columns


def finite(k, top) -> Value:
    """The maximum, or 0 for a row that is all -inf: -inf - -inf would be NaN."""
    return k.select(top > float("-inf"), top, 0.0)


def softmax(k, y, x, *, C, scale, dims, inner) -> None:
    """The kernel: y (rows, C) = softmax(scale x) of each row. A row is read once from memory: it stays in registers (`short_row`),
    or its exponentials in the L2 (`cached_row`). A longer one is read twice (`long_row`, online softmax)."""
    rows = k.num_elements(dims) * inner
    nontemporal = exceeds_caches(k, rows, C, y)
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        src, dst = x.at(row * C), y.at(row * C)
        if k.lanes * (k.isa.registers - EXP_REGISTERS) >= C:
            short_row(k, dst, src, C, scale, nontemporal)
        elif C <= CACHED_COLUMNS:
            cached_row(k, dst, src, C, scale, nontemporal)
        else:
            long_row(k, dst, src, C, scale, nontemporal)


def power(k, x, top, scale: float) -> Value:
    """exp(scale (x - top))."""
    return exp(k, (x - top) if scale == 1 else (x - top) * scale)


def short_row(k, dst, src, C: int, scale: float, nontemporal) -> None:
    """dst (C) = softmax(scale src) of a row that stays in registers, as {column: vector}; masked lanes are -inf (exponential 0)."""
    row: dict[int, Value] = {}
    maxima: Value | None = None
    for c, mask in k.columns(C):
        v = src.load(c, mask)
        row[c] = v if mask is None else k.select(mask, v, float("-inf"))
        maxima = row[c] if maxima is None else k.max(row[c], maxima)
    assert maxima is not None
    top = k.splat(k.maximum(maxima))
    row = {c: power(k, v, top, scale) for c, v in row.items()}
    sums = list(row.values())
    while len(sums) > 1:  # pairwise; an odd last one waits
        sums = [*map(add, sums[::2], sums[1::2]), *sums[len(sums) & -2 :]]
    inverse_sum = k.splat(1.0 / k.sum(sums[0]))
    for c, _, put in write_row(k, dst, C, nontemporal=nontemporal, unrolled=True):
        put(row[c] * inverse_sum)


def cached_row(k, dst, src, C: int, scale: float, nontemporal) -> None:
    """dst (C) = softmax(scale src) of a row whose exponentials stay in the thread's scratch [C] fp32 until their sum is known."""
    top, exponentials = k.splat(highest(k, src, C)), k.thread_scratch()

    def term(c, mask):
        e = power(k, src.load(c, mask), top, scale)
        exponentials.store(e, c, mask)
        return e

    inverse_sum = k.splat(1.0 / sum_of(k, C, term))
    for c, mask, put in write_row(k, dst, C, nontemporal=nontemporal):
        put(exponentials.load(c, mask) * inverse_sum)


def long_row(k, dst, src, C: int, scale: float, nontemporal) -> None:
    """dst (C) = softmax(scale src) of a row, online (Milakov and Gimelshein 2018): a first pass over blocks keeps the maximum so
    far and the sum of exponentials relative to it, which is rescaled when the maximum grows; a second pass recomputes them."""
    top = k.var(float("-inf"))
    total = k.var(0.0)
    for c, size in pieces(k, C, BLOCK):
        columns = src.at(c)
        old_top, block_top = top.value, highest(k, columns, size)
        new_top = k.max(old_top, block_top)
        shift = k.splat(finite(k, new_top))
        rescaled = total.value * k.lane(power(k, k.splat(old_top), shift, scale), 0)  # what was summed, relative to the new maximum
        block_sum = sum_of(k, size, lambda c, mask, row=columns, shift=shift: power(k, row.load(c, mask), shift, scale))
        total.value, top.value = rescaled + block_sum, new_top
    shift, inverse_sum = k.splat(finite(k, top.value)), k.splat(1.0 / total.value)
    for c, mask, put in write_row(k, dst, C, nontemporal=nontemporal):
        put(power(k, src.load(c, mask), shift, scale) * inverse_sum)


@lowering("softmax")
def lower_softmax(op: Op, c: Lowering) -> None:
    C = int(op.x.shape[-1])
    c.thread_scratch(4 * C if C <= CACHED_COLUMNS else 0)
    c.call(softmax, {"y": op.y, "x": op.x}, {"C": C, "scale": op.scale, **shape_of(op.x)}, writes="y")


@kernel("softmax_dx", constants=lambda op: {"C": int(op.y.shape[-1]), "scale": op.scale, **shape_of(op.y)})
def softmax_dx(k, dx, dy, y, *, C, scale, dims, inner, mode_dx) -> None:
    """dx = scale y (dy - sum(dy y)) of each row, stored or added (mode_dx). The second pass finds the row in a cache."""
    rows = k.num_elements(dims) * inner
    nontemporal = exceeds_caches(k, rows, C, dx) if mode_dx == "store" else None
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        dy_row, y_row, dst = dy.at(row * C), y.at(row * C), dx.at(row * C)
        (total,) = row_sums(k, C, lambda c, mask, j: (dy_row.load(c, mask), y_row.load(c, mask)), of_u=False)
        dot = k.splat(total)
        for c, mask, put in write_row(k, dst, C, nontemporal=nontemporal, mode=mode_dx):
            new = (dy_row.load(c, mask) - dot) * y_row.load(c, mask)
            put(new if scale == 1 else new * scale)
