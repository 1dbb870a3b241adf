"""Add, cast, zeros, and activations by their formulas. Shapes: any, equal on all operands."""

from collections.abc import Callable
from math import erfc, pi, sqrt
from typing import Any, ClassVar

import numpy as np

from barellm.program.graph import Graph
from barellm.program.loss_scale import scale_of
from barellm.program.ops.base import Dim, Op, Spec, Tensor, describe

GELU_SCALE = sqrt(2.0 / pi)
GELU_CUBIC = 0.044715


class Add(Op):
    """y = a + b with a's dtype: the residual stream comes first."""

    name = "add"
    flops_per_element = (1, "a")

    def infer(self, a: Tensor, b: Tensor) -> dict[str, Spec]:
        if a.shape != b.shape:
            raise ValueError(f"add expects equal shapes: {describe(a=a, b=b)}")
        return {"y": (a.shape, a.dtype)}

    def reference(self, a, b):
        return {"y": a + b}

    def gradient(self, g, y):
        g.alias(self.a, y)
        g.alias(self.b, y)


class Cast(Op):
    """y = x rounded to `dtype`, to nearest even."""

    name = "cast"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, self.attrs["dtype"])}

    def reference(self, x):
        return {"y": x}

    def gradient(self, g, y):
        g.alias(self.x, g.cast(y, self.x.dtype))


class Rescale(Op):
    """y = forward x, and dx = backward dy: two constants, which unit scaling chooses each for its own way. So where
    they differ, the gradient is not that of y, but a multiple of it."""

    name = "rescale"
    flops_per_element = (1, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, x.dtype)}

    def reference(self, x):
        return {"y": self.forward * x}

    def gradient(self, g, y):
        if self.backward == 1.0:
            g.alias(self.x, y)
        else:
            g.write(Rescale, {"y": self.x}, x=y, forward=self.backward, backward=self.forward)


class GradientScale(Op):
    """y = x 2^(wanted - given), fp32: the gradient x, which carries the scale `given`, with the scale `wanted`, exactly; both are
    states (`program.loss_scale`). Where it is `filtered`, zero replaces what is not finite, so that no overflow leaves a branch."""

    name = "gradient_scale"
    flops_per_element = (1, "x")

    def infer(self, x: Tensor, given: Tensor, wanted: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, "fp32")}

    def reference(self, x, given, wanted):
        x = np.where(np.isfinite(x), x, 0.0) if self.filtered else x
        return {"y": x * (scale_of(wanted) / scale_of(given))}


class Zeros(Op):
    """y = 0: columns of a gradient that nobody else writes. `shape` may hold Dims."""

    name = "zeros"

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        self.scalars = tuple(n.name for n in attrs["shape"] if isinstance(n, Dim))

    def infer(self) -> dict[str, Spec]:
        return {"y": (self.shape, self.dtype)}

    def reference(self, **sizes):
        return {"y": np.zeros([sizes[n.name] if isinstance(n, Dim) else n for n in self.shape])}


class Activation(Op):
    """y = value(x), as its definition says."""

    definition: "ClassVar[Elementwise]"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, x.dtype)}

    def reference(self, x):
        return {"y": self.definition.value(x)}

    def gradient(self, g, y):
        g.write(self.definition.backward, {"dx": self.x}, dy=y, x=self.x)

    def flops(self) -> int:
        return self.definition.operations[0] * self.x.size


class ActivationBackward(Op):
    """dx = dy * slope(x)."""

    definition: "ClassVar[Elementwise]"

    def infer(self, dy: Tensor, x: Tensor) -> dict[str, Spec]:
        if dy.shape != x.shape:
            raise ValueError(f"{self.name} expects equal shapes: {describe(dy=dy, x=x)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x):
        return {"dx": dy * self.definition.slope(x)}

    def flops(self) -> int:
        return self.definition.operations[1] * self.x.size


class Elementwise:
    """An activation by its formula. It has two ops, `forward` called `name` and `backward` called `name`_backward.

    A backend needs an emitter of both (its kernels/activations.py). From them come the kernels of the two ops and the epilogues of
    matmuls: y = activation(x weight^T + bias), and dx = (dy weight) * slope."""

    def __init__(self, name: str, *, value: Callable[[Any], Any], slope: Callable[[Any], Any], operations: tuple[int, int]) -> None:
        """`value` and `slope` are functions of NumPy's float64 arrays; `operations` are those of an element in the two ops."""
        self.name, self.value, self.slope, self.operations = name, value, slope, operations
        members = {"definition": self}
        self.forward: type[Op] = type(name.title(), (Activation,), members | {"name": name})
        backward = {"name": f"{name}_backward", "__doc__": ActivationBackward.__doc__}
        self.backward: type[Op] = type(f"{name.title()}Backward", (ActivationBackward,), members | backward)


def _tanh(x: Any) -> Any:
    return np.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3))


def _gelu_slope(x: Any) -> Any:
    t = _tanh(x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)


def _normal(x: Any) -> tuple[Any, Any]:
    """Probability that a normal number is below x, and its density there."""
    below = np.vectorize(lambda z: 0.5 * erfc(-z / sqrt(2.0)), otypes=[np.float64])(x)
    return below, np.exp(-0.5 * x * x) / sqrt(2.0 * pi)


def _gelu_erf_slope(x: Any) -> Any:
    below, density = _normal(x)
    return below + x * density


def sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _silu_slope(x: Any) -> Any:
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def _relu(x: Any) -> Any:
    return np.maximum(x, 0.0)


ACTIVATIONS: dict[str, Elementwise] = {
    a.name: a
    for a in (
        # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, the form that GPT-2 uses).
        Elementwise("gelu", value=lambda x: 0.5 * x * (1 + _tanh(x)), slope=_gelu_slope, operations=(12, 20)),
        # max(x, 0); its slope at 0 is 0.
        Elementwise("relu", value=_relu, slope=lambda x: 1.0 * (x > 0), operations=(1, 2)),
        # max(x, 0)^2 (So et al. 2021).
        Elementwise("relu2", value=lambda x: _relu(x) ** 2, slope=lambda x: 2 * _relu(x), operations=(2, 3)),
        # x P(N(0, 1) < x) (Hendrycks and Gimpel 2016), by the error function.
        Elementwise("gelu_erf", value=lambda x: x * _normal(x)[0], slope=_gelu_erf_slope, operations=(16, 20)),
        # x / (1 + exp(-x)) (Hendrycks and Gimpel 2016; Ramachandran et al. 2017 call it swish).
        Elementwise("silu", value=lambda x: x * sigmoid(x), slope=_silu_slope, operations=(9, 14)),
    )
}
SLOPES: dict[str, Elementwise] = {a.backward.name: a for a in ACTIVATIONS.values()}


def operand(p: Graph, x: Tensor) -> Tensor:
    """Append a cast of x to the dtype that matmuls take."""
    return x if x.dtype == p.compute else p.apply(Cast, x=x, dtype=p.compute).y


class Calls(Graph):
    def gelu(self, x: Tensor) -> Tensor:
        """GELU in its tanh form, as GPT-2 has it (Hendrycks and Gimpel 2016). Any shape."""
        return self.activate(x, "gelu")

    def activate(self, x: Tensor, name: str) -> Tensor:
        """An activation by its name, element by element. Any shape."""
        if name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {name!r} (known: {', '.join(ACTIVATIONS)})")
        return self.apply(ACTIVATIONS[name].forward, x=x).y

    def rescale(self, x: Tensor, *, forward: float, backward: float) -> Tensor:
        """x times `forward`, whose gradient is the one that arrives times `backward`. Any shape."""
        return self.apply(Rescale, x=x, forward=float(forward), backward=float(backward)).y

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b of equal shapes: the residual stream, fp32, and what a block adds to it."""
        return self.apply(Add, a=a, b=b).y
