"""The loss scale, and gradient scales of residual branches, as kernels read them (`program.loss_scale`)."""

from barellm.cpu.kernel import Value, kernel
from barellm.cpu.kernels.loops import elementwise, flat
from barellm.cpu.kernels.numbers import FP32_BIAS, FP32_FRACTION, FP32_INFINITY, FP32_MAGNITUDE
from barellm.program.loss_scale import FIRST_SCALE


def scale_of(k, loss_scale) -> Value | None:
    """The loss scale as a float, a power of two whose exponent is state[0] + FIRST_SCALE; None without a loss scale."""
    if loss_scale is None:
        return None
    bits = k.op("i32", f"trunc {(loss_scale.get(0) + (FP32_BIAS + FIRST_SCALE)).typed} to i32") << FP32_FRACTION
    return k.op("float", f"bitcast i32 {bits.ref} to float")


@kernel("gradient_scale", also={"given": "i32", "wanted": "i32"}, constants=lambda op: {"filtered": op.filtered, **flat(op.y)})
def gradient_scale(k, y, x, given, wanted, *, filtered, dims, width, mode_y) -> None:
    """The kernel: y = x times the scale `wanted` (2) / the scale `given` (2); with `filtered` 0 where x is not finite."""
    factor = k.splat(scale_of(k, wanted) / scale_of(k, given))
    for i, mask, put in elementwise(k, k.num_elements(dims) * width, y, unroll=4, mode=mode_y):
        v = x.load(i, mask)
        if filtered:
            v = k.select((k.bitcast(v, k.ivec) & FP32_MAGNITUDE) < FP32_INFINITY, v, 0.0)
        put(v * factor)
