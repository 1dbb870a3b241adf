"""Softmax over the last axis. Shapes: x, y, dy, dx (..., C)."""

from math import isfinite

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe


class Softmax(Op):
    """y = exp(scale x) / sum(exp(scale x)) of each row. The row's largest element is taken off first, so that nothing overflows."""

    name = "softmax"
    flops_per_element = (6, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if not x.shape or not (isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"softmax expects x (..., C) and a scale above 0, it is {self.scale}: {describe(x=x)}")
        return {"y": (x.shape, self.attrs["dtype"])}

    def reference(self, x):
        e = np.exp((x - x.max(-1, keepdims=True)) * self.scale)
        return {"y": e / e.sum(-1, keepdims=True)}

    def gradient(self, g, y):
        g.write(SoftmaxDx, {"dx": self.x}, dy=y, y=self.y, scale=self.scale, dtype=self.x.dtype)


class SoftmaxDx(Op):
    """dx = scale y (dy - sum(dy y))."""

    name = "softmax_dx"
    flops_per_element = (5, "y")

    def infer(self, dy: Tensor, y: Tensor) -> dict[str, Spec]:
        if dy.shape != y.shape:
            raise ValueError(f"softmax_dx expects equal shapes: {describe(dy=dy, y=y)}")
        return {"dx": (y.shape, self.attrs["dtype"])}

    def reference(self, dy, y):
        return {"dx": self.scale * y * (dy - (dy * y).sum(-1, keepdims=True))}


class Calls(Graph):
    def softmax(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """x (..., C) -> (..., C) in the compute dtype: exp(scale x) over its sum, in each row."""
        return self.apply(Softmax, x=x, scale=float(scale), dtype=self.compute).y
