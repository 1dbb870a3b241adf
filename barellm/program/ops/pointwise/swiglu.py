"""SwiGLU, the gated activation of Llama's MLP. Shapes: gate, up, y (..., F), of equal shapes; gate and up may be views of one
packed product (..., 2F)."""

from __future__ import annotations

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec
from barellm.program.tensor import Tensor, describe


def sigmoid(x):
    import numpy as np

    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


class SwiGLU(Op):
    """y = silu(gate) * up, silu(x) = x / (1 + exp(-x)) (Shazeer 2020)."""

    name = "swiglu"

    def infer(self, gate: Tensor, up: Tensor) -> dict[str, Spec]:
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(f"swiglu expects gate and up alike: {describe(gate=gate, up=up)}")
        return {"y": (gate.shape, gate.dtype)}

    def reference(self, gate, up):
        return {"y": gate * sigmoid(gate) * up}

    def gradient(self, g, y):
        g.write(SwiGLUBackward, {"dgate": self.gate, "dup": self.up}, dy=y, gate=self.gate, up=self.up)

    def flops(self) -> int:
        return 10 * self.gate.size


class SwiGLUBackward(Op):
    """dgate = dy * up * silu'(gate), silu' = s (1 + gate (1 - s)) with s = sigmoid(gate);  dup = dy * silu(gate)."""

    name = "swiglu_backward"

    def infer(self, dy: Tensor, gate: Tensor, up: Tensor) -> dict[str, Spec]:
        if not dy.shape == gate.shape == up.shape:
            raise ValueError(f"swiglu_backward expects equal shapes: {describe(dy=dy, gate=gate, up=up)}")
        return {"dgate": (gate.shape, gate.dtype), "dup": (up.shape, up.dtype)}

    def reference(self, dy, gate, up):
        s = sigmoid(gate)
        return {"dgate": dy * up * s * (1 + gate * (1 - s)), "dup": dy * gate * s}

    def flops(self) -> int:
        return 16 * self.gate.size


class Calls(Graph):
    """The methods of Program that append these ops."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both (..., F): two tensors, or two views of one (`split`)."""
        return self.apply(SwiGLU, gate=gate, up=up).y
