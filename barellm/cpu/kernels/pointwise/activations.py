"""Activations by their emitters: the value and the slope, on fp32 lanes. What they mean is said in program/ops/pointwise/elementwise.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from barellm.cpu.lang import Builder, Value
from barellm.cpu.lang.vector import gelu, gelu_slope
from barellm.program.ops.pointwise.elementwise import SLOPES

Function = Callable[[Builder, Value, str], Value]  # of fp32 lanes and the dtype that the result is rounded to


@dataclass(frozen=True)
class Emitter:
    """An activation's value and slope. `long` ones need registers and time: a product finishes them tile by tile from memory, and
    slopes beside the next tile."""

    value: Function
    slope: Function
    long: bool = False


def _relu2(k: Builder, x: Value, dtype: str) -> Value:
    x = k.max(0.0, x)  # of a number and a NaN the second: NaN stays
    return x * x


EMITTERS: dict[str, Emitter] = {
    "gelu": Emitter(gelu, gelu_slope, long=True),
    "relu": Emitter(lambda k, x, dtype: k.max(0.0, x), lambda k, x, dtype: k.select(x > 0.0, k.to(1.0, k.vec), 0.0)),
    "relu2": Emitter(_relu2, lambda k, x, dtype: 2.0 * k.max(0.0, x)),
}


def emitter_of(epilogue: str) -> Emitter | None:
    """The emitter of an activation, or of the activation that this is the slope of."""
    return EMITTERS.get(SLOPES[epilogue].name if epilogue in SLOPES else epilogue)
