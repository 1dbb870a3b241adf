"""The largest elements of rows. Shapes: x, dx (..., C); values, dvalues, indices (..., K)."""

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe


class TopK(Op):
    """The K largest elements of each row and their columns, the largest first, of equal ones the lowest column. NaN: infinity."""

    name = "top_k"
    flops_per_element = (32, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        K = self.attrs["K"]
        if not x.shape or not 1 <= K <= int(x.shape[-1]):
            raise ValueError(f"top_k expects x (..., C) and 1 <= K <= C, K is {K}: {describe(x=x)}")
        shape = (*x.shape[:-1], K)
        return {"values": (shape, x.dtype), "indices": (shape, "i32")}

    def reference(self, x):
        order = np.argsort(np.where(np.isnan(x), -np.inf, -x), -1, kind="stable")[..., : self.K]
        return {"values": np.take_along_axis(x, order, -1), "indices": order.astype(np.int32)}

    def gradient(self, g, values, indices):
        assert indices is None, "columns are no numbers that change by degrees"
        g.write(TopKDx, {"dx": self.x}, dvalues=values, indices=self.indices, C=int(self.x.shape[-1]))


class TopKDx(Op):
    """dx = dvalues in the columns `indices`, which differ, and 0 elsewhere."""

    name = "top_k_dx"

    def infer(self, dvalues: Tensor, indices: Tensor) -> dict[str, Spec]:
        if dvalues.shape != indices.shape:
            raise ValueError(f"top_k_dx expects equal shapes: {describe(dvalues=dvalues, indices=indices)}")
        return {"dx": ((*dvalues.shape[:-1], self.attrs["C"]), dvalues.dtype)}

    def reference(self, dvalues, indices):
        dx = np.zeros((*dvalues.shape[:-1], self.C))
        np.put_along_axis(dx, indices.astype(np.int64), dvalues, -1)
        return {"dx": dx}

    def index_limits(self) -> dict[str, tuple[int, int]]:
        return {"indices": (0, self.C - 1)}


class Calls(Graph):
    def top_k(self, x: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """x (..., C) -> the K largest elements of each row (..., K), in order, and their columns (..., K) i32."""
        op = self.apply(TopK, x=x, K=K)
        return op.values, op.indices
