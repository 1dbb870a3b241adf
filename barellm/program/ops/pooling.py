"""The mean over the pixels of images. Shapes: x (N, C, H, W), y (N, C)."""

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Dim, Op, Spec, Tensor, describe


class MeanPixels(Op):
    """y[n, c] = the mean of x[n, c] over its pixels."""

    name = "mean_pixels"
    flops_per_element = (1, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if len(x.shape) != 4 or any(isinstance(n, Dim) for n in x.shape[1:]):
            raise ValueError(f"mean_pixels expects x (N, C, H, W), of which N may be a Dim: {describe(x=x)}")
        return {"y": (x.shape[:2], x.dtype)}

    def reference(self, x):
        return {"y": x.mean((2, 3))}

    def gradient(self, g, y):
        g.write(MeanPixelsBackward, {"dx": self.x}, dy=y, size=tuple(int(n) for n in self.x.shape[2:]))


class MeanPixelsBackward(Op):
    """dx = dy / (H W) at every pixel. `size` is (H, W)."""

    name = "mean_pixels_backward"
    flops_per_element = (1, "dx")

    def infer(self, dy: Tensor) -> dict[str, Spec]:
        return {"dx": ((*dy.shape, *self.size), dy.dtype)}

    def reference(self, dy):
        H, W = self.size
        return {"dx": np.repeat(dy / (H * W), H * W, -1).reshape(*dy.shape, H, W)}


class Calls(Graph):
    def mean_pixels(self, x: Tensor) -> Tensor:
        """x (N, C, H, W) -> (N, C): global average pooling (Lin et al. 2014)."""
        return self.apply(MeanPixels, x=x).y
