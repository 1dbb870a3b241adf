"""Sums of squares of a matrix's blocks. Kernels of matmuls take BLOCK from here, and should not depend on the optimizers."""

import numpy as np

from barellm.program.ops.base import Op, Spec, Tensor, describe

BLOCK = 32  # rows and columns of a matrix per partial sum: fixed, so that the sum's bits depend on the shape only


class BlockSquares(Op):
    """partials[i, j] = sum of squares of rows 32 i .. 32 (i + 1) and columns 32 j .. 32 (j + 1) of x (N, K): what a kernel that
    writes x block by block can add up on the way."""

    name = "block_squares"
    flops_per_element = (2, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if len(x.shape) != 2:
            raise ValueError(f"block_squares expects a matrix: {describe(x=x)}")
        return {"partials": (tuple(-(-int(n) // BLOCK) for n in x.shape), "fp32")}

    def reference(self, x):
        rows, columns = (np.arange(0, n, BLOCK) for n in x.shape)
        return {"partials": np.add.reduceat(np.add.reduceat(x**2, rows, axis=0), columns, axis=1)}
