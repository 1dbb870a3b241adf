"""RMSNorm over the last axis. Shapes: x, y (..., C); weight (C) or none; rstd (...) fp32."""

from __future__ import annotations

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec
from barellm.program.tensor import Tensor, describe


class RMSNorm(Op):
    """y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019). Saves rstd per row."""

    name = "rmsnorm"
    optional = ("weight",)

    def infer(self, x: Tensor, weight: Tensor | None = None) -> dict[str, Spec]:
        if weight is not None and weight.shape != x.shape[-1:]:
            raise ValueError(f"rmsnorm expects x (..., C) and weight (C): {describe(x=x, weight=weight)}")
        return {"y": (x.shape, self.attrs["dtype"]), "rstd": (x.shape[:-1], "fp32")}

    def reference(self, x, weight=None):
        rstd = 1 / ((x**2).mean(-1) + self.eps) ** 0.5
        n = x * rstd[..., None]
        return {"y": n if weight is None else n * weight, "rstd": rstd}

    def gradient(self, g, y, rstd):
        assert rstd is None, "rstd is a saved value, not a differentiable output"
        g.write(RMSNormDx, {"dx": self.x}, dy=y, x=self.x, weight=self.weight, rstd=self.rstd)
        if self.weight is not None:
            g.write(RMSNormDweight, {"dweight": self.weight}, dy=y, x=self.x, rstd=self.rstd)

    def flops(self) -> int:
        return 4 * self.x.size


class RMSNormDx(Op):
    """dx = rstd * (dn - n * mean(dn * n)), with n = x * rstd the normalised row and dn = dy * weight."""

    name = "rmsnorm_dx"
    optional = ("weight",)

    def infer(self, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None = None) -> dict[str, Spec]:
        if dy.shape != x.shape or rstd.shape != x.shape[:-1]:
            raise ValueError(f"rmsnorm_dx expects dy like x and rstd (...): {describe(dy=dy, x=x, rstd=rstd)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x, rstd, weight=None):
        n = x * rstd[..., None]
        dn = dy if weight is None else dy * weight
        return {"dx": rstd[..., None] * (dn - n * (dn * n).mean(-1, keepdims=True))}

    def flops(self) -> int:
        return 8 * self.x.size


class RMSNormDweight(Op):
    """dweight = sum over rows of dy * n, in a tree fixed by the row count."""

    name = "rmsnorm_dweight"

    def infer(self, dy: Tensor, x: Tensor, rstd: Tensor) -> dict[str, Spec]:
        return {"dweight": (x.shape[-1:], "fp32")}

    def reference(self, dy, x, rstd):
        C = x.shape[-1]
        return {"dweight": (dy * x * rstd[..., None]).reshape(-1, C).sum(0)}

    def flops(self) -> int:
        return 3 * self.x.size


class Calls(Graph):
    """The methods of Program that append these ops."""

    def rmsnorm(self, x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
        """x (..., C) fp32, weight (C) or none -> (..., C) in the compute dtype, normalised over the last axis."""
        return self.apply(RMSNorm, x=x, weight=weight, eps=eps, dtype=self.compute).y
