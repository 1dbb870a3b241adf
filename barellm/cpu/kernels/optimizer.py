"""AdamW: one pass over gradient, both moments and the weight. All tensors flat, `n` elements."""

from __future__ import annotations

from barellm.cpu.kernel import KernelBuilder, Lowering, lowering
from barellm.cpu.kernels.loops import sweep
from barellm.cpu.kernels.storage import Weight, weight_operands
from barellm.cpu.lang import Value
from barellm.program.ops.base import Op

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


def adamw(k: KernelBuilder, param, param_lo, m, v, grad, clip, n, *, beta1, beta2, eps, weight_decay) -> None:
    """p (1 - lr wd) - lr m^ / (sqrt(v^) + eps); the step's factors are computed in double."""
    lr, step = k.scalar("lr"), k.scalar("step")
    shrink = k.splat(1.0 - lr * weight_decay)
    rate = k.splat(lr / (1.0 - power(k, beta1, step)))
    unbias = k.splat(1.0 / k.sqrt(1.0 - power(k, beta2, step)))
    scale = clip.get(1)
    weights = Weight(k, param, param_lo)
    factor = k.splat(scale)

    def body(i, mask, j):
        g = grad.load(i, mask) * factor
        first = k.fma(m.load(i, mask), beta1, g * (1.0 - beta1))
        second = k.fma(v.load(i, mask), beta2, g * g * (1.0 - beta2))
        m.store(first, i, mask)
        v.store(second, i, mask)
        update = rate * first / k.fma(k.sqrt(second), unbias, k.to(eps, k.vec))
        weights.store(k.fma(weights.load(i, mask), shrink, -update), i, mask)

    # NaN says that the gradient's norm is not finite: nobody claims anything.
    with k.claim(k.select(scale.equals(scale), n, 0), GRAIN) as (begin, end):
        sweep(k, begin, end, body)


@lowering("adamw")
def lower_adamw(op: Op, c: Lowering) -> None:
    operands = {**weight_operands("param", op.outputs["param"]), "m": op.outputs["m"], "v": op.outputs["v"],
                "grad": op.grad, "clip": op.clip, "n": op.grad.size}  # fmt: skip
    names = ("beta1", "beta2", "eps", "weight_decay")
    c.call(adamw, operands, {name: float(op.attrs[name]) for name in names}, writes="param param_lo m v")
