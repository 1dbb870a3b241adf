"""Exponent statistics of a tensor (its dynamic range): the histogram of its fp32 exponents and four sums, in one pass."""

from typing import ClassVar

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe

BINS = 256  # exponents of fp32: bin e has the numbers of magnitude 2^(e - 127) and more, below 2^(e - 126)
NOT_FINITE = BINS - 1  # the bin of infinities and NaN; that of zero and of what is below 2^-126 is 0
SUMS = ("sum", "sum_abs", "sum_squares", "max_abs")  # the numbers of `sums`, in their order


class ExponentStats(Op):
    """counts (256) i32 = how many elements of x have each exponent, as fp32 writes it; sums (4) = [sum of x, of |x|, of x^2, and
    the largest |x|] of the elements that are finite. Of a parameter in two planes, what GEMMs read."""

    name = "exponent_stats"
    rounded = ("x",)
    flops_per_element = (5, "x")
    observer: ClassVar[bool] = True

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if x.size >= 1 << 31:
            raise ValueError(f"exponents counts in 32 bits, expected fewer than 2^31 elements: {describe(x=x)}")
        return {"counts": ((BINS,), "i32"), "sums": ((len(SUMS),), "fp32")}

    def reference(self, x):
        bins = (x.astype(np.float32).reshape(-1).view(np.int32) >> 23) & NOT_FINITE
        finite = x.reshape(-1)[bins != NOT_FINITE].astype(np.float64)
        size = np.abs(finite)
        sums = np.array([finite.sum(), size.sum(), (finite**2).sum(), size.max(initial=0.0)])
        return {"counts": np.bincount(bins, minlength=BINS).astype(np.int32), "sums": sums}


class Calls(Graph):
    def exponent_stats(self, x: Tensor, *, counts: Tensor | None = None, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The histogram of the exponents of x (256) i32, and its sums (4); any shape. They go to `counts` and `sums` where those
        are given. It changes no fusion of the ops around it."""
        into = {name: (t, "store") for name, t in (("counts", counts), ("sums", sums)) if t is not None}
        op = self.apply(ExponentStats, into=into, x=x)
        return op.counts, op.sums
