"""LayerNorm over the last axis. Shapes: x, y (..., C); weight, bias (C); mean, rstd (...)."""

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe


class LayerNorm(Op):
    """y = (x - mean) * rstd * weight + bias (Ba et al. 2016). Saves mean and rstd per row in fp32."""

    name = "layernorm"
    optional = ("bias",)
    flops_per_element = (8, "x")

    def infer(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Spec]:
        if weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
            found = describe(x=x, weight=weight, bias=bias)
            raise ValueError(f"layernorm expects x (..., C), weight and bias (C): {found}")
        rows = x.shape[:-1]
        return {"y": (x.shape, self.attrs["dtype"]), "mean": (rows, "fp32"), "rstd": (rows, "fp32")}

    def reference(self, x, weight, bias=None):
        mean = x.mean(-1)
        centred = x - mean[..., None]
        rstd = 1 / ((centred**2).mean(-1) + self.eps) ** 0.5
        y = centred * rstd[..., None] * weight
        return {"y": y if bias is None else y + bias, "mean": mean, "rstd": rstd}

    def gradient(self, g, y, mean, rstd):
        assert mean is None and rstd is None, "statistics are saved values, not differentiable outputs"
        g.write(LayerNormDx, {"dx": self.x}, dy=y, x=self.x, weight=self.weight, mean=self.mean, rstd=self.rstd)
        targets = {"dweight": self.weight} | ({"dbias": self.bias} if self.bias is not None else {})
        g.write(LayerNormDparams, targets, dy=y, x=self.x, mean=self.mean, rstd=self.rstd)


class LayerNormDx(Op):
    """dx = rstd * (dn - mean(dn) - n * mean(dn * n)), with n the normalised row and dn = dy * weight."""

    name = "layernorm_dx"
    flops_per_element = (14, "x")

    def infer(self, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Spec]:
        if dy.shape != x.shape or mean.shape != x.shape[:-1]:
            raise ValueError(f"layernorm_dx expects dy like x and mean (...): {describe(dy=dy, x=x, mean=mean)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x, weight, mean, rstd):
        n = (x - mean[..., None]) * rstd[..., None]
        dn = dy * weight
        return {"dx": rstd[..., None] * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))}


class LayerNormDparams(Op):
    """dweight = sum over rows of dy * n, dbias = sum of dy, in a tree fixed by the row count."""

    name = "layernorm_dparams"
    flops_per_element = (5, "x")

    def infer(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Spec]:
        return {"dweight": (x.shape[-1:], "fp32"), "dbias": (x.shape[-1:], "fp32")}

    def reference(self, dy, x, mean, rstd):
        C = x.shape[-1]
        n = (x - mean[..., None]) * rstd[..., None]
        return {"dweight": (dy * n).reshape(-1, C).sum(0), "dbias": dy.reshape(-1, C).sum(0)}


class Calls(Graph):
    def layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
        """x (..., C) fp32, weight and bias (C) -> (..., C) in the compute dtype, normalised over the last axis (Ba et al. 2016)."""
        return self.apply(LayerNorm, x=x, weight=weight, bias=bias, eps=eps, dtype=self.compute).y
