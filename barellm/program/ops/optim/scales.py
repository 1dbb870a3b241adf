"""Scales that follow the numbers they are for: delayed scaling, and the floating bias of blocksparse's QuantizeSpec.

Shapes: x any; a scale (1,) fp32; `sums` (4) of the op `measure`. A state belongs to one operand of one matmul and lasts from one
micro-batch to the next: `history` (entries) fp32, the largest |x| of the last micro-batches, the newest first; `bias` (2) fp32, the
largest exponent and how many micro-batches there were."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from barellm.config.number_formats import NumberFormat
from barellm.program.dtypes import LARGEST
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.gemm.fp8 import OPERANDS, PerTarget, Quantise, Quantised
from barellm.program.ops.optim.exponent_stats import SUMS, ExponentStats
from barellm.program.ops.pointwise.random import words

ENTRIES = 16  # micro-batches that a history remembers
MARGIN = 1.5  # by which the next numbers may be larger than all of them
BLOCKSPARSE = NumberFormat(mantissa_bits=3, exponents=15, largest=1.875)  # 1-4-3 bits, of which all codes are numbers
ABOVE = 2  # the largest exponent lies that far above the largest number's
DEVIATIONS = 4.0  # or is that of the mean and so many standard deviations
FARTHEST = 64  # of largest exponents, so that all numbers below are normal in fp32
FIRST, LAST = 4, 1024  # updates after so many micro-batches, then after twice as many, at last after every LAST


class Measure(ExponentStats):
    """The same, in any case: nothing is fused that would keep x from memory."""

    name = "measure"
    observer: ClassVar[bool] = False


class DelayedScale(Op):
    """scale = MARGIN times the largest number of the history / `largest`, or `first` where the history is empty."""

    name = "delayed_scale"

    def infer(self, history: Tensor) -> dict[str, Spec]:
        return {"scale": ((1,), "fp32")}

    def reference(self, history):
        top = np.float32(history.max())
        return {"scale": np.reshape(top * np.float32(MARGIN / self.largest) if top > 0 else np.float32(self.first), 1)}


class Remember(PerTarget):
    """history = [the largest |x|, what was in it but for the oldest]; of gradients (`per_target`) divided by inv_targets."""

    name = "remember"
    inplace: ClassVar[dict[str, str]] = {"history": "history"}

    def infer(self, history: Tensor, sums: Tensor) -> dict[str, Spec]:
        return {"history": (history.shape, history.dtype)}

    def reference(self, history, sums, inv_targets=1.0):
        top = np.float32(sums[SUMS.index("max_abs")]) / np.float32(inv_targets)
        return {"history": np.concatenate([[top], history[:-1]])}


def due(count: int) -> bool:
    """Whether a bias is updated in the micro-batch with this number: 0, 4, 8, 16 and so on (powers of 2), at last every 1024th."""
    return count == 0 or count % LAST == 0 or (FIRST <= count < LAST and not count & (count - 1))


class FloatBias(PerTarget):
    """bias = [the largest exponent, count + 1]. In micro-batches that are `due` the exponent becomes that of the largest |x| plus
    ABOVE; with `deviations` that of the mean of |x| plus DEVIATIONS standard deviations of x. Of x only the size is read."""

    name = "float_bias"
    inplace: ClassVar[dict[str, str]] = {"bias": "bias"}

    def infer(self, bias: Tensor, sums: Tensor, x: Tensor) -> dict[str, Spec]:
        if bias.shape != (2,):
            raise ValueError(f"float_bias expects a bias (2,): {describe(bias=bias)}")
        return {"bias": (bias.shape, bias.dtype)}

    def reference(self, bias, sums, x, inv_targets=1.0):
        """The class's formulas in fp32, as kernels compute them; other micro-batches only count."""
        if not due(int(bias[1])):
            return {"bias": np.array([bias[0], bias[1] + 1])}
        total, sum_abs, squares, top = (np.float32(v) for v in sums)
        if self.deviations:
            n = np.float32(x.size)
            mean = total / n
            variance = np.maximum(squares / n - mean * mean, np.float32(0))
            top = sum_abs / n + np.float32(DEVIATIONS) * np.sqrt(variance)
        top = top / np.float32(inv_targets)
        # floor(log2(top)), as the exponent field of fp32 has it.
        exponent = (int(top.view(np.int32)) >> 23) - 127 + (0 if self.deviations else ABOVE)
        exponent = max(min(exponent, FARTHEST), -FARTHEST)
        return {"bias": np.array([exponent if top > 0 else bias[0], bias[1] + 1])}


class RoundFloating(PerTarget):
    """y = x (of gradients x / inv_targets) rounded to the numbers of `format` whose largest exponent is bias[0], or with `of_scale`
    log2(bias[0]) rounded up; what is beyond the largest of them becomes it. `ties`: to nearest, and of two that are as near to the
    "even" one or "away" from zero; or "stochastic", to the upper neighbour where the 24 upper bits of the element's random word, as
    a fraction, are below x's way from the lower one to it (`program.ops.random`: stream `stream`, `sample` for all rows)."""

    name = "round_floating"
    passes_gradient: ClassVar[bool] = True
    optional = ("stream", "of_scale")
    rounded = ("x",)
    flops_per_element = (1, "x")

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        self.scalars += ("seed", "step", "sample") if attrs["ties"] == "stochastic" else ()

    def infer(self, x: Tensor, bias: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, self.dtype)}

    def reference(self, x, bias, inv_targets=1.0, **random):
        random_words = None
        if self.stream is not None:
            rows = np.arange(x.size // x.shape[-1])
            random_words = words(**random, stream=self.stream, rows=rows, columns=x.shape[-1]).reshape(x.shape)
        top = min((int(np.float32(bias[0]).view(np.int32)) + 0x7FFFFF >> 23) - 127, 127) if self.of_scale else int(bias[0])
        return {"y": round_floating(x / inv_targets, top, self.format, self.ties, random_words)}


def round_floating(x: np.ndarray, top: int, form: NumberFormat, ties: str = "even", random_words: Any = None) -> np.ndarray:
    """Round fp32 numbers to those of a format whose largest exponent is `top`, as `RoundFloating` says; float64. NaN stays, larger
    numbers and infinity saturate."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.asarray(x, np.float32).astype(np.float64)
        magnitude, least_normal = np.abs(x), 2.0 ** (top - form.exponents + 1)
        # The exponent that decides the unit is the number's own; denormals all have that of the least normal number.
        own_unit = magnitude >= least_normal if form.denormals else magnitude > 0
        _, exponent = np.frexp(np.where(np.isfinite(magnitude) & own_unit, magnitude, least_normal))
        unit = 2.0 ** (exponent - 1 - form.mantissa_bits)  # frexp's mantissa is in [1/2, 1)
        lower = np.floor(magnitude / unit)
        way = magnitude / unit - lower
        # A code is even where its last bit is 0: with a mantissa that of the mantissa, else that of the exponent.
        odd = (lower if form.mantissa_bits else (exponent - 1 - top + form.exponents) * own_unit) % 2 > 0
        if random_words is None:
            up = (way > 0.5) | ((way == 0.5) & (odd | (ties == "away")))
        else:
            up = (random_words >> np.uint32(8)) / 2**24 < way
        rounded = (lower + up) * unit
    rounded = rounded if form.denormals else np.where(rounded < least_normal, 0.0, rounded)
    largest = form.largest * 2.0**top
    return np.copysign(np.where(rounded > largest, largest, rounded), x)


@dataclass(frozen=True)
class Delayed:
    """Scales from the largest numbers of the micro-batches before; `first` has those of x, weight and dy for the first one. The
    states are called by the matmul's `name`."""

    name: str
    first: tuple[float, float, float]

    def codes(self, p: Graph, x: Tensor, which: str) -> Quantised:
        dtype, first = OPERANDS[which], self.first[list(OPERANDS).index(which)]
        history, per_target = p.state(f"{self.name}.{which}.history", (ENTRIES,)), which == "dy"
        scale = p.apply(DelayedScale, history=history, first=first, largest=LARGEST[dtype]).scale
        codes = p.apply(Quantise, x=x, scale=scale, dtype=dtype, per_target=per_target).y
        p.apply(Remember, history=history, sums=p.apply(Measure, x=x).sums, per_target=per_target)
        return codes, scale


@dataclass(frozen=True)
class Floating:
    """Numbers of 1-4-3 bits, forward and backward, each operand with a largest exponent of its own that follows its statistics,
    from the first micro-batch on. Matmuls see numbers of the program's dtype, for no machine multiplies such codes."""

    name: str
    deviations: bool = False
    denormals: bool = True

    def codes(self, p: Graph, x: Tensor, which: str) -> Quantised:
        bias, per_target = p.state(f"{self.name}.{which}.bias", (2,)), which == "dy"
        sums = p.apply(Measure, x=x).sums
        bias = p.apply(FloatBias, bias=bias, sums=sums, x=x, deviations=self.deviations, per_target=per_target).bias
        form = replace(BLOCKSPARSE, denormals=self.denormals)
        options = {"dtype": p.compute, "format": form, "ties": "away", "per_target": per_target}
        return p.apply(RoundFloating, x=x, bias=bias, **options).y, p.constant("one", np.ones(1, np.float32))
