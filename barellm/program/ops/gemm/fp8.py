"""Products in 8 bits: operands divided by a scale and rounded to e4m3 or e5m2, sums in fp32, and the scales multiplied back in.

Shapes: x (..., K), weight (K, N), y (..., N); a scale is (1,) fp32, from `Static` or scales.py. Forward operands are e4m3, and
gradients e5m2, which reaches further. The gradient goes through the rounding as if there was none (Bengio et al. 2013): dx = dy
weight^T and dweight = x^T dy, of the codes."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from barellm.program.dtypes import LARGEST, round_to_eight
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.gemm.matmul import tokens
from barellm.program.ops.pointwise.elementwise import Cast

Quantised = tuple[Tensor, Tensor]  # codes and their scale


def divisor(scale: np.ndarray, inv_targets: float | None) -> np.float32:
    """What numbers are divided by to become codes: the scale, which for gradients (`per_target`) is times the run's inv_targets."""
    number = np.float32(scale.reshape(()))
    return number if inv_targets is None else number * np.float32(inv_targets)


class PerTarget(Op):
    """The part that ops of numbers or, `per_target`, of gradients share: to the latter inv_targets is given."""

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        self.scalars = ("inv_targets",) if attrs["per_target"] else ()


class Quantise(PerTarget):
    """y = x / scale in fp32, rounded to the nearest number of `dtype`, ties to even; what is beyond the largest becomes it. With
    `per_target` the scale is times inv_targets, so that it holds for any number of micro-batches in a step."""

    name = "quantise"
    rounded = ("x",)
    flops_per_element = (1, "x")

    def infer(self, x: Tensor, scale: Tensor) -> dict[str, Spec]:
        if scale.shape != (1,) or self.dtype not in LARGEST:
            found = f"{describe(scale=scale)}, {self.dtype}"
            raise ValueError(f"quantise expects a scale (1,) and one of {', '.join(LARGEST)}: {found}")
        return {"y": (x.shape, self.dtype)}

    def reference(self, x, scale, inv_targets=None):
        with np.errstate(over="ignore"):
            y = np.asarray(x, np.float32) / divisor(scale, inv_targets)
        return {"y": round_to_eight(y, self.dtype).astype(np.float64)}


class Product(Op):
    """The part that the three matmuls share: a dy among the inputs brings the scalar inv_targets, a factor of the sums."""

    product = True

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        self.scalars = ("inv_targets",) if "dy" in inputs else ()

    def check(self, *pairs: tuple[int, int], **codes: Tensor) -> None:
        """ValueError where `pairs` of sizes differ, or where some operands are codes and others are not."""
        kinds = {t.dtype if t.dtype not in LARGEST else "codes" for t in codes.values()}
        if any(a != b for a, b in pairs) or len(kinds) > 1:
            expected = f"operands that fit, all of {' or '.join(LARGEST)} or of one dtype"
            raise ValueError(f"{self.name} expects {expected}: {describe(**codes)}")


class ScaledMatmul(Product):
    """y = x @ weight * (x_scale * weight_scale), in `dtype`. `source` are the tensors that x and weight are the codes of; their
    gradients are made with the `scaling`."""

    name = "scaled_matmul"

    def infer(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> dict[str, Spec]:
        self.check((len(weight.shape), 2), (int(x.shape[-1]), int(weight.shape[0])), x=x, weight=weight)
        return {"y": ((*x.shape[:-1], weight.shape[1]), self.dtype)}

    def reference(self, x, weight, x_scale, weight_scale):
        return {"y": x @ weight * (x_scale * weight_scale)}

    def gradient(self, g, y):
        x, weight = self.source
        dy, scale = self.scaling.codes(g.graph, y, "dy")
        g.write(ScaledMatmulDx, {"dx": x}, dy=dy, weight=self.weight, dy_scale=scale, weight_scale=self.weight_scale,
                dtype=x.dtype)  # fmt: skip
        g.write(ScaledMatmulDw, {"dweight": weight}, x=self.x, dy=dy, x_scale=self.x_scale, dy_scale=scale)

    def flops(self) -> int:
        return 2 * tokens(self.x) * self.weight.size


class ScaledMatmulDx(Product):
    """dx = dy @ weight^T * (dy_scale * inv_targets * weight_scale), in `dtype`."""

    name = "scaled_matmul_dx"

    def infer(self, dy: Tensor, weight: Tensor, dy_scale: Tensor, weight_scale: Tensor) -> dict[str, Spec]:
        self.check((int(dy.shape[-1]), int(weight.shape[1])), dy=dy, weight=weight)
        return {"dx": ((*dy.shape[:-1], weight.shape[0]), self.dtype)}

    def reference(self, dy, weight, dy_scale, weight_scale, inv_targets):
        return {"dx": dy @ weight.T * (dy_scale * inv_targets * weight_scale)}

    def flops(self) -> int:
        return 2 * tokens(self.dy) * self.weight.size


class ScaledMatmulDw(Product):
    """dweight = x^T @ dy * (x_scale * dy_scale * inv_targets), summed over tokens in order, fp32."""

    name = "scaled_matmul_dw"

    def infer(self, x: Tensor, dy: Tensor, x_scale: Tensor, dy_scale: Tensor) -> dict[str, Spec]:
        self.check((tokens(x), tokens(dy)), x=x, dy=dy)
        return {"dweight": ((x.shape[-1], dy.shape[-1]), "fp32")}

    def reference(self, x, dy, x_scale, dy_scale, inv_targets):
        sums = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
        return {"dweight": sums * (x_scale * dy_scale * inv_targets)}

    def flops(self) -> int:
        return 2 * self.x.size * int(self.dy.shape[-1])


OPERANDS = {"x": "e4m3", "weight": "e4m3", "dy": "e5m2"}  # of a matmul, and the dtype of their codes


class Scaling(Protocol):
    """A way to choose scales: `codes` appends what makes codes of an operand x of a matmul; `which`: one of OPERANDS."""

    def codes(self, p: Graph, x: Tensor, which: str) -> Quantised: ...


@dataclass(frozen=True)
class Static:
    """Constant scales of x, weight and dy, of the matmul `name`. The largest number that a code stands for is 448 (e4m3) times the
    scale of x and of the weight, and 57344 (e5m2) times that of the gradient and 1 / targets."""

    name: str
    x: float
    weight: float
    dy: float

    def codes(self, p: Graph, x: Tensor, which: str) -> Quantised:
        scale = p.constant(f"{self.name}.{which}_scale", np.array([getattr(self, which)], np.float32))
        return p.apply(Quantise, x=x, scale=scale, dtype=OPERANDS[which], per_target=which == "dy").y, scale


def scaled_matmul(p: Graph, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """x (..., K), weight (K, N) -> x @ weight (..., N), in FP8 in both passes, with scales that `scaling` chooses."""
    if p.precision.scaled:
        raise ValueError(f"products in 8 bits scale their gradients themselves: expected fp32 or bf16, not {p.compute}")
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"scaled_matmul expects x (..., K) and weight (K, N): {describe(x=x, weight=weight)}")
    x = x if x.dtype == p.compute else p.apply(Cast, x=x, dtype=p.compute).y
    (codes, x_scale), (of_weight, weight_scale) = scaling.codes(p, x, "x"), scaling.codes(p, weight, "weight")
    operands: dict[str, Any] = {"x": codes, "weight": of_weight, "x_scale": x_scale, "weight_scale": weight_scale}
    return p.apply(ScaledMatmul, **operands, dtype=p.compute, source=(x, weight), scaling=scaling).y
