"""The loss scale as kernels read it (`program.loss_scale`)."""

from barellm.cpu.kernel import Value
from barellm.cpu.kernels.numbers import FP32_BIAS, FP32_FRACTION
from barellm.program.loss_scale import FIRST_SCALE


def scale_of(k, loss_scale) -> Value | None:
    """The loss scale as a float, a power of two whose exponent is state[0] + FIRST_SCALE; None without a loss scale."""
    if loss_scale is None:
        return None
    bits = k.op("i32", f"trunc {(loss_scale.get(0) + (FP32_BIAS + FIRST_SCALE)).typed} to i32") << FP32_FRACTION
    return k.op("float", f"bitcast i32 {bits.ref} to float")
