"""AdamW: one pass over gradient, both moments and the weight. All tensors flat, `n` elements."""

from __future__ import annotations

from collections.abc import Callable

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.storage import Moment, Weight, moment_operand, weight_operands
from barellm.cpu.lang import Value, random
from barellm.program.ops.base import Op
from barellm.program.ops.random import HALF

GRAIN = 65536  # elements a claim: 2 MB of memory, some 40 us


def power(k: KernelBuilder, base: float, exponent: Value) -> Value:
    """base^exponent in double, by squaring; exponent (i64) >= 0."""
    result, square, left = k.var(k.const(1.0, "double")), k.var(k.const(base, "double")), k.var(exponent)
    with k.while_(lambda: left.value > 0):
        odd = (left.value & 1).differs(0)
        result.value = result.value * k.select(odd, square.value, 1.0)
        square.value = square.value * square.value
        left.value = left.value >> 1
    return result.value


def adamw(k: KernelBuilder, param, param_lo, m, v, grad, clip, n, stream, *, beta1, beta2, eps, weight_decay) -> None:
    """p (1 - lr wd) - lr m^ / (sqrt(v^) + eps); the step's factors are computed in double. With a `stream` 16-bit moments are
    rounded stochastically."""
    lr, step = k.scalar("lr"), k.scalar("step")
    shrink = k.splat(1.0 - lr * weight_decay)
    rate = k.splat(lr / (1.0 - power(k, beta1, step)))
    unbias = k.splat(1.0 / k.sqrt(1.0 - power(k, beta2, step)))
    scale = clip.get(1)
    weights, means, squares = Weight(k, param, param_lo), Moment(k, m, "e6m9"), Moment(k, v, "ue6m10")
    factor = k.splat(scale)
    key = None if stream is None else random.sample_key(k, k.scalar("seed"), step, 0, stream)

    def body(i, mask, dithers):
        """Adjacent vectors from element i, each with its random bits or None."""
        updated, first, second = [], [], []
        for j in range(len(dithers)):
            at = i + j * k.lanes
            g = grad.load(at, mask) * factor
            first.append(k.fma(means.load(at, mask), beta1, g * (1.0 - beta1)))
            second.append(k.fma(squares.load(at, mask), beta2, g * g * (1.0 - beta2)))
            update = rate * first[j] / k.fma(k.sqrt(second[j]), unbias, k.to(eps, k.vec))
            updated.append(k.fma(weights.load(at, mask), shrink, -update))
        random_bits = None not in dithers
        means.store_all(first, i, mask, dither=[bits & 0x3FFF for bits in dithers] if random_bits else None)
        squares.store_all(second, i, mask, dither=[bits >> 3 for bits in dithers] if random_bits else None)
        weights.store_all(updated, i, mask)

    # NaN says that the gradient's norm is not finite: nobody claims anything.
    with k.claim(k.select(scale.equals(scale), n, 0), GRAIN) as (begin, end):
        if key is None:
            sweep_pairs(k, begin, end, body)
        else:
            sweep_dithered(k, begin, end, key, body)


def sweep_pairs(k: KernelBuilder, begin: Value, end: Value, body: Callable[..., None]) -> None:
    """body(index, None, [None, None]) for pairs of vectors of elements [begin, end), body(index, mask, [None]) for the rest."""
    whole = begin + ((end - begin) & -2 * k.lanes)
    with k.loop(begin, whole, 2 * k.lanes) as i:
        body(i, None, [None, None])
    with k.loop(whole, end, k.lanes) as i:
        body(i, k.mask_first(end - i), [None])


def sweep_dithered(
    k: KernelBuilder, begin: Value, end: Value, key: tuple[Value, Value], body: Callable[..., None]
) -> None:
    """The same with 16 random bits for each lane. A call of the generator has them for four elements, so these go in blocks;
    `begin` is the start of one."""
    width = 4 * HALF

    def block(first: Value, *, masked: bool) -> None:
        bits = random.halves(k, key, first // width)
        for j in range(0, len(bits), 2):
            at = first + j * k.lanes
            if masked:
                for i in range(2):
                    body(at + i * k.lanes, k.mask_first(end - at - i * k.lanes), [bits[j + i]])
            else:
                body(at, None, bits[j : j + 2])

    whole = begin + ((end - begin) & -width)
    with k.loop(begin, whole, width) as first:
        block(first, masked=False)
    with k.loop(whole, end, width) as first:
        block(first, masked=True)


@lowering("adamw")
def lower_adamw(op: Op, c: Lowering) -> None:
    operands = {**weight_operands("param", op.outputs["param"]), "m": moment_operand(op.outputs["m"]),
                "v": moment_operand(op.outputs["v"]), "grad": op.grad, "clip": op.clip, "n": op.grad.size,
                "stream": op.stream}  # fmt: skip
    names = ("beta1", "beta2", "eps", "weight_decay")
    c.call(adamw, operands, {name: float(op.attrs[name]) for name in names}, writes="param param_lo m v")
