"""Gated activations of an MLP (Shazeer 2020): SwiGLU, which is Llama's, and the same with other activations. Shapes: gate, up, y
(..., F), of equal shapes; gate and up may be views of one packed matmul (..., 2F)."""

from typing import ClassVar

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS, Elementwise


class Gated(Op):
    """y = activation(gate) * up."""

    definition: ClassVar[Elementwise]
    backward: ClassVar[type[Op]]

    def infer(self, gate: Tensor, up: Tensor) -> dict[str, Spec]:
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(f"{self.name} expects gate and up alike: {describe(gate=gate, up=up)}")
        return {"y": (gate.shape, gate.dtype)}

    def reference(self, gate, up):
        return {"y": self.definition.value(gate) * up}

    def gradient(self, g, y):
        g.write(self.backward, {"dgate": self.gate, "dup": self.up}, dy=y, gate=self.gate, up=self.up)

    def flops(self) -> int:
        return (self.definition.operations[0] + 1) * self.gate.size


class GatedBackward(Op):
    """dgate = dy * up * slope(gate);  dup = dy * activation(gate)."""

    definition: ClassVar[Elementwise]

    def infer(self, dy: Tensor, gate: Tensor, up: Tensor) -> dict[str, Spec]:
        if not dy.shape == gate.shape == up.shape:
            raise ValueError(f"{self.name} expects equal shapes: {describe(dy=dy, gate=gate, up=up)}")
        return {"dgate": (gate.shape, gate.dtype), "dup": (up.shape, up.dtype)}

    def reference(self, dy, gate, up):
        return {"dgate": dy * up * self.definition.slope(gate), "dup": dy * self.definition.value(gate)}

    def flops(self) -> int:
        return (self.definition.operations[1] + 2) * self.gate.size


def _gated(activation: str) -> type[Gated]:
    name, title = ("swiglu", "SwiGLU") if activation == "silu" else (f"gated_{activation}", f"Gated{activation.title()}")
    members = {"definition": ACTIVATIONS[activation]}
    backward = type(f"{title}Backward", (GatedBackward,), members | {"name": f"{name}_backward"})
    return type(title, (Gated,), members | {"name": name, "backward": backward})


GATED: dict[str, type[Gated]] = {name: _gated(name) for name in ACTIVATIONS}  # by their activations
SwiGLU, SwiGLUBackward = GATED["silu"], GATED["silu"].backward


class Calls(Graph):
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both (..., F): two tensors, or two views of one (`split`)."""
        return self.gated_linear_unit(gate, up, "silu")

    def gated_linear_unit(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """The same with an activation by its name."""
        return self.apply(GATED[activation], gate=gate, up=up).y
