"""Activations by their emitters: the value and the slope, on fp32 lanes. program/ops/pointwise/elementwise.py defines them."""

from collections.abc import Callable
from dataclasses import dataclass

from barellm.cpu.lang import Builder, Value
from barellm.cpu.lang.vector import gelu, gelu_erf, gelu_erf_and_slope, gelu_slope, silu, silu_and_slope
from barellm.program.ops.pointwise.elementwise import SLOPES

Function = Callable[[Builder, Value, str], Value]  # of fp32 lanes and the dtype that the result is rounded to


@dataclass(frozen=True)
class Emitter:
    """Emits an activation's value and slope. `long`: many registers and instructions, so a GEMM's epilogue runs it tile by tile
    from memory, and the slope overlapped with the next tile."""

    value: Function
    slope: Function
    long: bool = False
    fused: Callable[[Builder, Value, str], tuple[Value, Value]] | None = None  # value and slope for less than one by one

    def both(self, k, x, dtype: str) -> tuple[Value, Value]:
        return self.fused(k, x, dtype) if self.fused else (self.value(k, x, dtype), self.slope(k, x, dtype))


def _relu2(k, x, dtype: str) -> Value:
    x = k.max(0.0, x)  # of a number and a NaN the second: NaN stays
    return x * x


EMITTERS: dict[str, Emitter] = {
    "gelu": Emitter(gelu, gelu_slope, long=True),
    "gelu_erf": Emitter(gelu_erf, lambda k, x, dtype: gelu_erf_and_slope(k, x)[1], True, lambda k, x, _: gelu_erf_and_slope(k, x)),
    "silu": Emitter(silu, lambda k, x, dtype: silu_and_slope(k, x, dtype)[1], True, silu_and_slope),
    "relu": Emitter(lambda k, x, dtype: k.max(0.0, x), lambda k, x, dtype: k.select(x > 0.0, k.to(1.0, k.vec), 0.0)),
    "relu2": Emitter(_relu2, lambda k, x, dtype: 2.0 * k.max(0.0, x)),
}


def emitter_of(epilogue: str) -> Emitter | None:
    """The emitter of an activation, or of the activation that this is the slope of."""
    return EMITTERS.get(SLOPES[epilogue].name if epilogue in SLOPES else epilogue)
