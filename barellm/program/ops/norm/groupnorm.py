"""Normalisation of images by groups of channels. Shapes: x, y (N, C, H, W); weight, bias (C); mean, rstd (N, groups)."""

from typing import Any

from barellm.program.graph import Graph
from barellm.program.ops.base import Dim, Op, Spec, Tensor, describe


def grouped_rows(x: Any, groups: int) -> Any:
    """(N, C, H, W) as (N, groups, the numbers of a group)."""
    return x.reshape(x.shape[0], groups, -1)


class GroupNorm(Op):
    """y = (x - mean) * rstd * weight + bias, with the mean and the deviation of each image's `groups` groups of channels
    (Wu and He 2018). Saves mean and rstd in fp32."""

    name = "group_norm"
    flops_per_element = (8, "x")

    def infer(self, x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Spec]:
        found = describe(x=x, weight=weight, bias=bias)
        if len(x.shape) != 4 or any(isinstance(n, Dim) for n in x.shape[1:]):
            raise ValueError(f"group_norm expects x (N, C, H, W), of which N may be a Dim: {found}")
        if weight.shape != x.shape[1:2] or bias.shape != weight.shape or self.groups < 1 or x.shape[1] % self.groups:
            raise ValueError(f"group_norm expects weight and bias (C), and groups that divide C: {self.groups}, {found}")
        rows = (x.shape[0], self.groups)
        return {"y": (x.shape, x.dtype), "mean": (rows, "fp32"), "rstd": (rows, "fp32")}

    def reference(self, x, weight, bias):
        rows = grouped_rows(x, self.groups)
        mean = rows.mean(-1)
        rstd = 1 / (((rows - mean[..., None]) ** 2).mean(-1) + self.eps) ** 0.5
        n = ((rows - mean[..., None]) * rstd[..., None]).reshape(x.shape)
        return {"y": n * weight[:, None, None] + bias[:, None, None], "mean": mean, "rstd": rstd}

    def gradient(self, g, y, mean, rstd):
        assert mean is None and rstd is None, "statistics are saved values, not differentiable outputs"
        saved = {"x": self.x, "mean": self.mean, "rstd": self.rstd}
        g.write(GroupNormDx, {"dx": self.x}, dy=y, weight=self.weight, **saved)
        g.write(GroupNormDparams, {"dweight": self.weight, "dbias": self.bias}, dy=y, **saved)


class GroupNormDx(Op):
    """dx = rstd * (dn - mean(dn) - n * mean(dn * n)), with n the normalised numbers and dn = dy * weight."""

    name = "group_norm_dx"
    flops_per_element = (14, "x")

    def infer(self, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Spec]:
        if dy.shape != x.shape:
            raise ValueError(f"group_norm_dx expects dy like x: {describe(dy=dy, x=x)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x, weight, mean, rstd):
        groups = mean.shape[-1]
        mean, rstd = mean[..., None], rstd[..., None]
        n = (grouped_rows(x, groups) - mean) * rstd
        dn = grouped_rows(dy * weight[:, None, None], groups)
        dx = rstd * (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True))
        return {"dx": dx.reshape(x.shape)}


class GroupNormDparams(Op):
    """dweight = sum over images and pixels of dy * n, dbias = sum of dy."""

    name = "group_norm_dparams"
    flops_per_element = (5, "x")

    def infer(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> dict[str, Spec]:
        return {"dweight": (x.shape[1:2], "fp32"), "dbias": (x.shape[1:2], "fp32")}

    def reference(self, dy, x, mean, rstd):
        n = ((grouped_rows(x, mean.shape[-1]) - mean[..., None]) * rstd[..., None]).reshape(x.shape)
        return {"dweight": (dy * n).sum((0, 2, 3)), "dbias": dy.sum((0, 2, 3))}


class Calls(Graph):
    def group_norm(self, x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float = 1e-5) -> Tensor:
        """x (N, C, H, W), weight and bias (C) -> the same shape, normalised over each image's `groups` groups of channels."""
        return self.apply(GroupNorm, x=x, weight=weight, bias=bias, groups=groups, eps=eps).y
