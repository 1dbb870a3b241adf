"""RMSNorm over the last axis. Shapes: x, y (..., C); weight (C) or none; rstd (...) fp32. Of heads: (..., H*D), (D), (..., H)."""

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.pointwise.elementwise import Add


class RMSNorm(Op):
    """y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019). Saves rstd per row."""

    name = "rmsnorm"
    optional = ("weight",)
    flops_per_element = (4, "x")

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


class RMSNormDx(Op):
    """dx = rstd * (dn - n * mean(dn * n)), with n = x * rstd the normalised row and dn = dy * weight."""

    name = "rmsnorm_dx"
    optional = ("weight",)
    flops_per_element = (8, "x")

    def infer(self, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None = None) -> dict[str, Spec]:
        if dy.shape != x.shape or rstd.shape != x.shape[:-1]:
            raise ValueError(f"rmsnorm_dx expects dy like x and rstd (...): {describe(dy=dy, x=x, rstd=rstd)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x, rstd, weight=None):
        n = x * rstd[..., None]
        dn = dy if weight is None else dy * weight
        return {"dx": rstd[..., None] * (dn - n * (dn * n).mean(-1, keepdims=True))}


class RMSNormDweight(Op):
    """dweight = sum over rows of dy * n, in a tree fixed by their number."""

    name = "rmsnorm_dweight"
    flops_per_element = (3, "x")

    def infer(self, dy: Tensor, x: Tensor, rstd: Tensor) -> dict[str, Spec]:
        return {"dweight": ((x.size // rstd.size,), "fp32")}

    def reference(self, dy, x, rstd):
        return {"dweight": ((dy * x).reshape(rstd.size, -1) * rstd.reshape(-1, 1)).sum(0)}


def heads_of(op: Op) -> Tensor:
    """What has the shape (..., H, D) of a head norm's x (..., H*D), whose rows are heads."""
    heads = op.rstd.shape
    return Tensor(op.x.name, (*heads, int(op.x.shape[-1]) // int(heads[-1])), op.x.dtype, op.x.role)


class HeadRMSNorm(Op):
    """RMSNorm of each head by itself, D columns of x (..., H*D), all with one weight (D) (QK-norm, Dehghani et al. 2023)."""

    name = "head_rmsnorm"
    flops_per_element = (4, "x")

    def infer(self, x: Tensor, weight: Tensor) -> dict[str, Spec]:
        D = int(weight.shape[-1])
        if len(weight.shape) != 1 or x.shape[-1] % D:
            raise ValueError(f"head_rmsnorm expects x (..., heads * D) and weight (D): {describe(x=x, weight=weight)}")
        return {"y": (x.shape, x.dtype), "rstd": ((*x.shape[:-1], int(x.shape[-1]) // D), "fp32")}

    def reference(self, x, weight):
        heads = x.reshape(*x.shape[:-1], -1, len(weight))
        rstd = 1 / ((heads**2).mean(-1) + self.eps) ** 0.5
        return {"y": (heads * rstd[..., None] * weight).reshape(x.shape), "rstd": rstd}

    def gradient(self, g, y, rstd):
        assert rstd is None, "rstd is a saved value, not a differentiable output"
        g.write(HeadRMSNormDx, {"dx": self.x}, dy=y, x=self.x, weight=self.weight, rstd=self.rstd)
        g.write(HeadRMSNormDweight, {"dweight": self.weight}, dy=y, x=self.x, rstd=self.rstd)


class HeadRMSNormDx(RMSNormDx):
    """`RMSNormDx` of each head."""

    name = "head_rmsnorm_dx"

    def infer(self, dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> dict[str, Spec]:
        if dy.shape != x.shape or rstd.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"head_rmsnorm_dx expects dy like x and rstd (..., H): {describe(dy=dy, x=x, rstd=rstd)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x, rstd, weight):
        D = len(weight)
        found = super().reference(dy.reshape(*rstd.shape, D), x.reshape(*rstd.shape, D), rstd, weight)
        return {"dx": found["dx"].reshape(x.shape)}


class HeadRMSNormDweight(RMSNormDweight):
    """`RMSNormDweight` over rows and heads."""

    name = "head_rmsnorm_dweight"


class Calls(Graph):
    def unit_offset(self, weight: Tensor) -> Tensor:
        """1 + weight (C), fp32: what a norm multiplies by whose weights are stored around 0, as Gemma's are."""
        n = int(weight.shape[0])
        return self.apply(Add, a=self.constant(f"ones.{n}", np.ones(n, np.float32)), b=weight).y

    def rmsnorm(self, x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
        """x (..., C) fp32, weight (C) or none -> (..., C) in the compute dtype, normalised over the last axis."""
        return self.apply(RMSNorm, x=x, weight=weight, eps=eps, dtype=self.compute).y

    def head_rmsnorm(self, x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
        """x (..., heads * D), weight (D) -> (..., heads * D) in x's dtype: each head normalised by itself."""
        return self.apply(HeadRMSNorm, x=x, weight=weight, eps=eps).y
