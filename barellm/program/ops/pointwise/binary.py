"""Products of signs (Courbariaux and Hubara et al. 2016): 32 of them packed into a word, multiplied by xor and a count of ones.

The sign of x is +1 where x >= 0, which is a one bit, else -1, a zero bit; that of NaN is -1. Bit j of word w belongs to column 32 w
+ j, and the bits behind the last column are zero. Shapes: a (..., K), b (N, K), their i32 words (..., W), (N, W), W = ceil(K / 32).

The gradient goes straight through the sign, as if it were the identity, where |x| <= 1, and is zero elsewhere."""

from typing import Any

import numpy as np

from barellm.program.dtypes import FORMATS
from barellm.program.graph import Graph
from barellm.program.integers import ceil_div
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.gemm.matmul import MatmulDw, MatmulDx

BITS = 32  # of a word
MOST = 1 << 24  # columns: fp32 holds every integer up to there


def words_of(columns: int) -> int:
    return ceil_div(columns, BITS)


def pack(x: np.ndarray) -> np.ndarray:
    """The words (int32) of the signs of x (..., K)."""
    bits = np.zeros((*x.shape[:-1], words_of(x.shape[-1]) * BITS), np.uint8)
    bits[..., : x.shape[-1]] = x >= 0
    return np.packbits(bits, axis=-1, bitorder="little").view("<i4")


def unpack(words: np.ndarray, columns: int) -> np.ndarray:
    """The signs, -1 and 1, of the first `columns` columns."""
    bits = np.unpackbits(np.ascontiguousarray(words.astype("<i4")).view(np.uint8), axis=-1, bitorder="little")
    return 2.0 * bits[..., :columns] - 1.0


class PackSigns(Op):
    """words = the signs of x, one bit for each."""

    name = "pack_signs"
    rounded = ("x",)
    flops_per_element = (1, "x")

    def infer(self, x: Tensor) -> dict[str, Spec]:
        return {"words": ((*x.shape[:-1], words_of(int(x.shape[-1]))), "i32")}

    def reference(self, x):
        return {"words": pack(x)}

    def gradient(self, g, words):
        """The gradient of words is that of the signs in them, (..., K)."""
        g.write(StraightThrough, {"dx": self.x}, dy=words, x=self.x)


class StraightThrough(Op):
    """dx = dy where |x| <= 1, else 0: the gradient of a sign as that of the identity, cut off where x is far from the step."""

    name = "straight_through"
    rounded = ("x",)
    flops_per_element = (1, "x")

    def infer(self, dy: Tensor, x: Tensor) -> dict[str, Spec]:
        if dy.shape != x.shape:
            raise ValueError(f"straight_through expects equal shapes: {describe(dy=dy, x=x)}")
        return {"dx": (x.shape, "fp32" if FORMATS[x.dtype].planes else x.dtype)}

    def reference(self, dy, x):
        return {"dx": np.where(abs(x) <= 1, dy, 0.0)}


class UnpackSigns(Op):
    """signs = -1 or 1 for each of the `columns` bits of a row of words."""

    name = "unpack_signs"
    flops_per_element = (1, "signs")

    def infer(self, words: Tensor) -> dict[str, Spec]:
        if words.dtype != "i32" or words.shape[-1] != words_of(self.columns):
            raise ValueError(f"unpack_signs expects words (..., {words_of(self.columns)}) i32: {describe(words=words)}")
        return {"signs": ((*words.shape[:-1], self.columns), self.attrs["dtype"])}

    def reference(self, words):
        return {"signs": unpack(words, self.columns)}


class BinaryMatmul(Op):
    """y = signs of a @ (signs of b).T = columns - 2 * (ones of a xor b): integers, exact in fp32. The matmuls of its gradients
    multiply signs with numbers, in `dtype`."""

    name = "binary_matmul"

    def infer(self, a: Tensor, b: Tensor) -> dict[str, Spec]:
        W = words_of(self.columns)
        if a.dtype != "i32" or b.dtype != "i32" or len(b.shape) != 2 or not a.shape[-1] == b.shape[1] == W:
            raise ValueError(f"binary_matmul expects a (..., {W}) and b (N, {W}) of i32 words: {describe(a=a, b=b)}")
        if self.columns > MOST:
            raise ValueError(f"binary_matmul adds {self.columns} signs, expected at most {MOST}")
        return {"y": ((*a.shape[:-1], b.shape[0]), "fp32")}

    def reference(self, a, b):
        return {"y": unpack(a, self.columns) @ unpack(b, self.columns).T}

    def gradient(self, g, y):
        dy = g.cast(y, self.dtype)
        signs = {"columns": self.columns, "dtype": self.dtype}
        g.write(MatmulDx, {"dx": self.a}, dy=dy, weight=g.apply(UnpackSigns, words=self.b, **signs).signs)
        g.write(MatmulDw, {"dweight": self.b}, dy=dy, x=g.apply(UnpackSigns, words=self.a, **signs).signs)

    def flops(self) -> int:
        """A xor, a count and an addition for each pair of words."""
        return 3 * self.y.size * int(self.b.shape[1])


class Calls(Graph):
    def binary_linear(self, x: Tensor, weight: Tensor, *, dtype: str | None = None) -> Tensor:
        """The signs of x (..., K) times those of weight (N, K) -> (..., N), fp32. `dtype` is that of its gradients' matmuls,
        which is the program's unless given."""
        if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
            raise ValueError(f"binary_linear expects x (..., K) and weight (N, K): {describe(x=x, weight=weight)}")
        words: list[Any] = [self.apply(PackSigns, x=t).words for t in (x, weight)]
        return self.apply(BinaryMatmul, a=words[0], b=words[1], columns=int(weight.shape[1]), dtype=dtype or self.compute).y
