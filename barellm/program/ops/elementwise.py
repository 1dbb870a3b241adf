"""Add, cast and GELU (tanh form). Shapes: any, equal on all operands."""

from __future__ import annotations

from math import pi, sqrt

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec
from barellm.program.tensor import Tensor, describe

GELU_SCALE = sqrt(2.0 / pi)
GELU_CUBIC = 0.044715


class Add(Op):
    """y = a + b with a's dtype: the residual stream comes first."""

    name = "add"

    def infer(self, a: Tensor, b: Tensor) -> dict[str, Spec]:
        if a.shape != b.shape:
            raise ValueError(f"add expects equal shapes: {describe(a=a, b=b)}")
        return {"y": (a.shape, a.dtype)}

    def reference(self, a, b):
        return {"y": a + b}

    def gradient(self, g, y):
        g.alias(self.a, y)
        g.alias(self.b, y)

    def flops(self) -> int:
        return self.a.size


class Cast(Op):
    """y = x rounded to `dtype`, to nearest even."""

    name = "cast"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, self.attrs["dtype"])}

    def reference(self, x):
        return {"y": x}

    def gradient(self, g, y):
        g.alias(self.x, g.cast(y, self.x.dtype))


class Gelu(Op):
    """y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, the form that GPT-2 uses)."""

    name = "gelu"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"y": (x.shape, x.dtype)}

    def reference(self, x):
        import numpy as np

        return {"y": 0.5 * x * (1 + np.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3)))}

    def gradient(self, g, y):
        g.write(GeluBackward, {"dx": self.x}, dy=y, x=self.x)

    def flops(self) -> int:
        return 12 * self.x.size


class GeluBackward(Op):
    """dx = dy * gelu'(x)."""

    name = "gelu_backward"

    def infer(self, dy: Tensor, x: Tensor) -> dict[str, Spec]:
        if dy.shape != x.shape:
            raise ValueError(f"gelu_backward expects equal shapes: {describe(dy=dy, x=x)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x):
        import numpy as np

        t = np.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)
        return {"dx": dy * slope}

    def flops(self) -> int:
        return 20 * self.x.size


def operand(p: Graph, x: Tensor) -> Tensor:
    """x in the dtype that products take."""
    return x if x.dtype == p.compute else p.apply(Cast, x=x, dtype=p.compute).y


class Calls(Graph):
    """What a model calls."""

    def gelu(self, x: Tensor) -> Tensor:
        """GELU in its tanh form, as GPT-2 has it (Hendrycks and Gimpel 2016). Any shape."""
        return self.apply(Gelu, x=x).y

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b of equal shapes: the residual stream, fp32, and what a block adds to it."""
        return self.apply(Add, a=a, b=b).y
