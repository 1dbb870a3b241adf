"""Softmax over rows of any length. Shapes: x, y, dy, dx (rows, C)."""

from __future__ import annotations

from operator import add

from barellm.cpu.kernel import KernelBuilder, Lowering, kernel, lowering
from barellm.cpu.kernels.loops import added, past_caches, row_grain, shape_of, write_row
from barellm.cpu.kernels.loss.cross_entropy import highest, sum_of
from barellm.cpu.kernels.norm.layernorm import row_sums
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import exp
from barellm.program.ops.base import Op

KEPT = 32768  # columns whose exponentials a thread keeps: 128 KB, a part of the second cache
BLOCK = 4096  # columns of a longer row that are looked at together: 16 KB, a part of the first
SPARE = 12  # vectors that exp needs beside a row in registers: on AVX2 four are left, 32 columns; on AVX-512 20, 320 columns


def in_registers(k: KernelBuilder, C: int) -> bool:
    return k.lanes * (k.isa.registers - SPARE) >= C


def finite(k: KernelBuilder, top: Value) -> Value:
    """The maximum, or 0 for a row of nothing but -inf: -inf less -inf would be NaN."""
    return k.select(top > float("-inf"), top, 0.0)


def softmax(k: KernelBuilder, y, x, *, C, scale, dims, inner) -> None:
    """A row is read once from memory: it stays in registers, or its exponentials in the second cache. A row that is longer than
    that is read twice, and its exponentials are computed twice: first for a running sum, which shrinks whenever a block has a
    new maximum, then for the result."""
    rows = k.num_elements(dims) * inner
    past = past_caches(k, rows, C, y)
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        of, to = x.at(row * C), y.at(row * C)
        if in_registers(k, C):
            short_row(k, to, of, C, scale, past)
        elif C <= KEPT:
            kept_row(k, to, of, C, scale, past)
        else:
            long_row(k, to, of, C, scale, past)


def power(k: KernelBuilder, x: Value, top: Value, scale: float) -> Value:
    """exp(scale (x - top))."""
    return exp(k, (x - top) if scale == 1 else (x - top) * scale)


def short_row(k: KernelBuilder, to: Pointer, of: Pointer, C: int, scale: float, past: Value | None) -> None:
    held: dict[int, Value] = {}
    most: Value | None = None
    for c, mask in k.columns(C):
        v = of.load(c, mask)
        held[c] = v if mask is None else k.select(mask, v, float("-inf"))
        most = held[c] if most is None else k.max(held[c], most)
    assert most is not None
    top = k.splat(k.maximum(most))
    held = {c: power(k, v, top, scale) for c, v in held.items()}
    chains = list(held.values())
    while len(chains) > 1:
        chains = [*map(add, chains[::2], chains[1::2]), *chains[len(chains) & -2 :]]
    by = k.splat(1.0 / k.sum(chains[0]))
    write_row(k, to, C, lambda c, mask: held[c] * by, past=past, unrolled=True)


def kept_row(k: KernelBuilder, to: Pointer, of: Pointer, C: int, scale: float, past: Value | None) -> None:
    top, kept = k.splat(highest(k, of, C)), k.thread_scratch()

    def term(c, mask):
        e = power(k, of.load(c, mask), top, scale)
        kept.store(e, c, mask)
        return e

    by = k.splat(1.0 / sum_of(k, C, term))
    write_row(k, to, C, lambda c, mask: kept.load(c, mask) * by, past=past)


def long_row(k: KernelBuilder, to: Pointer, of: Pointer, C: int, scale: float, past: Value | None) -> None:
    top, total = k.var(float("-inf")), k.var(0.0)

    def block(at: Pointer, size: int) -> None:
        before, here = top.value, highest(k, at, size)
        now = k.max(before, here)
        shift = k.splat(finite(k, now))
        shrunk = total.value * k.lane(power(k, k.splat(before), shift, scale), 0)
        total.value = shrunk + sum_of(k, size, lambda c, mask: power(k, at.load(c, mask), shift, scale))
        top.value = now

    with k.loop(0, C - C % BLOCK, BLOCK) as c:
        block(of.at(c), BLOCK)
    if C % BLOCK:
        block(of.at(C - C % BLOCK), C % BLOCK)
    shift, by = k.splat(finite(k, top.value)), k.splat(1.0 / total.value)
    write_row(k, to, C, lambda c, mask: power(k, of.load(c, mask), shift, scale) * by, past=past)


@lowering("softmax")
def lower_softmax(op: Op, c: Lowering) -> None:
    C = int(op.x.shape[-1])
    c.thread_scratch(4 * C if C <= KEPT else 0)
    c.call(softmax, {"y": op.y, "x": op.x}, {"C": C, "scale": op.scale, **shape_of(op.x)}, writes="y")


@kernel("softmax_dx", constants=lambda op: {"C": int(op.y.shape[-1]), "scale": op.scale, **shape_of(op.y)})
def softmax_dx(k: KernelBuilder, dx, dy, y, *, C, scale, dims, inner, mode_dx) -> None:
    """The second pass finds the row in a cache, unless it is longer than those."""
    rows = k.num_elements(dims) * inner
    past = past_caches(k, rows, C, dx) if mode_dx == "store" else None
    with k.parallel_range(rows, row_grain(C)) as (begin, end), k.loop(begin, end) as row:
        of, result, to = dy.at(row * C), y.at(row * C), dx.at(row * C)
        (total,) = row_sums(k, C, lambda c, mask, j: (of.load(c, mask), result.load(c, mask)), of_u=False)
        mean = k.splat(total)

        def vector(c, mask):
            new = (of.load(c, mask) - mean) * result.load(c, mask)
            return added(k, to, c, mask, new if scale == 1 else new * scale, mode_dx)

        write_row(k, to, C, vector, past=past)
