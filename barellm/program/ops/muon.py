"""Muon: the update of a matrix is its momentum with all singular values made one (Jordan et al. 2024).

The way there is an iteration of matrix products (Newton and Schulz). Every primitive op of it is here: momentum, the division by
the norm, then in each turn the Gram matrix, a polynomial of it, and its product with what there is; at the end NorMuon's factors
(Li et al. 2025) and the weight's own step. optim/muon.py puts them in order.

Shapes: param, grad, momentum, x (rows, cols); the Gram matrix is (n, n) with n the smaller of both: x x^T of a wide or square
matrix, x^T x of a tall one. Both give the same iteration, for a polynomial of x x^T times x is x times that of x^T x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from barellm.program.ops.base import Op, Spec
from barellm.program.ops.optimizer import CHUNK
from barellm.program.tensor import Tensor, describe

LEAST = 1e-10  # of a mean square and of a norm that NorMuon divides by


def is_tall(x: Tensor | np.ndarray) -> bool:
    """Whether x has more rows than columns: its Gram matrix is then x^T x."""
    return x.shape[0] > x.shape[1]


def expect_matrix(name: str, x: Tensor) -> None:
    """ValueError for what is no matrix."""
    if len(x.shape) != 2:
        raise ValueError(f"{name} expects x (rows, cols): {describe(x=x)}")


class MuonMomentum(Op):
    """m = mu m + (1 - mu) g with g = grad * clip[1] and mu the scalar `momentum`; u = mu m + (1 - mu) g, which looks a step ahead
    (Nesterov), or without `nesterov` the new m itself; partials[i] = sum of squares of elements i * 65536 .. (i + 1) * 65536 of u.

    Where clip[1] is NaN, m stays and u is 0.
    """

    name = "muon_momentum"
    scalars = ("momentum",)
    inplace: ClassVar[dict[str, str]] = {"m": "m"}

    def infer(self, grad: Tensor, m: Tensor, clip: Tensor) -> dict[str, Spec]:
        if grad.shape != m.shape or clip.shape != (2,):
            raise ValueError(f"muon_momentum expects equal shapes and clip (2): {describe(grad=grad, m=m, clip=clip)}")
        chunks = -(-grad.size // CHUNK)
        return {"m": (m.shape, m.dtype), "u": (grad.shape, self.attrs["dtype"]), "partials": ((chunks,), "fp32")}

    def reference(self, grad, m, clip, momentum):
        if np.isnan(clip[1]):
            u = np.zeros_like(m)
        else:
            g = (1 - momentum) * clip[1] * grad
            m = momentum * m + g
            u = momentum * m + g if self.nesterov else m
        return {"m": m, "u": u, "partials": np.add.reduceat(u.reshape(-1) ** 2, np.arange(0, u.size, CHUNK))}

    def flops(self) -> int:
        return 9 * self.grad.size


class MuonNormalize(Op):
    """x = u / (margin * norm + eps), where norm is the square root of the sum of `partials`. No singular value is above 1 then,
    which the iteration needs; `margin` is for those that rounding makes too large."""

    name = "muon_normalize"

    def infer(self, u: Tensor, partials: Tensor) -> dict[str, Spec]:
        if partials.shape != (-(-u.size // CHUNK),):
            raise ValueError(
                f"muon_normalize expects a partial sum for {CHUNK} elements: {describe(u=u, partials=partials)}"
            )
        return {"x": (u.shape, u.dtype)}

    def reference(self, u, partials):
        return {"x": u / (self.margin * np.sqrt(partials.sum()) + self.eps)}

    def flops(self) -> int:
        return self.u.size


class Gram(Op):
    """a = x x^T, or x^T x of a tall x. It is symmetric to the bit: one triangle is computed, and that is what `flops` counts."""

    name = "gram"
    product = True

    def infer(self, x: Tensor) -> dict[str, Spec]:
        expect_matrix("gram", x)
        n = min(x.shape)
        return {"a": ((n, n), x.dtype)}

    def reference(self, x):
        return {"a": x.T @ x if is_tall(x) else x @ x.T}

    def flops(self) -> int:
        n, depth = min(self.x.shape), max(self.x.shape)
        return n * (n + 1) * depth


class GramPolynomial(Op):
    """b = linear * a + square * a a of a symmetric a (n, n): one triangle is computed."""

    name = "gram_polynomial"
    product = True

    def infer(self, a: Tensor) -> dict[str, Spec]:
        if len(a.shape) != 2 or a.shape[0] != a.shape[1]:
            raise ValueError(f"gram_polynomial expects a (n, n): {describe(a=a)}")
        return {"b": (a.shape, a.dtype)}

    def reference(self, a):
        return {"b": self.linear * a + self.square * (a @ a)}

    def flops(self) -> int:
        n = self.a.shape[0]
        return n * (n + 1) * n + 3 * n * n


class GramApply(Op):
    """y = scale * x + b x, or scale * x + x b of a tall x."""

    name = "gram_apply"
    product = True

    def infer(self, x: Tensor, b: Tensor) -> dict[str, Spec]:
        expect_matrix("gram_apply", x)
        if tuple(b.shape) != (min(x.shape), min(x.shape)) or b.dtype != x.dtype:
            raise ValueError(f"gram_apply expects x (rows, cols) and b of the smaller size: {describe(x=x, b=b)}")
        return {"y": (x.shape, x.dtype)}

    def reference(self, x, b):
        return {"y": self.scale * x + (x @ b if is_tall(x) else b @ x)}

    def flops(self) -> int:
        return 2 * self.x.size * self.b.shape[0] + 2 * self.x.size


class NorMuonScales(Op):
    """Factors that give the rows of x (the columns of a wide one) equal sizes in the long run, and leave its norm (NorMuon):

    v = mean square of each row or column;  second = beta2 second + (1 - beta2) v;  d = 1 / sqrt(max(second, 1e-10));
    scales = d |x| / max(|d x|, 1e-10).

    Both norms follow from v. `second` stays where clip[1] is NaN.
    """

    name = "normuon_scales"
    inplace: ClassVar[dict[str, str]] = {"second": "second"}

    def infer(self, x: Tensor, second: Tensor, clip: Tensor) -> dict[str, Spec]:
        expect_matrix("normuon_scales", x)
        if tuple(second.shape) != (lines(x),) or clip.shape != (2,):
            raise ValueError(f"normuon_scales expects second ({lines(x)}) and clip (2): {describe(x=x, second=second)}")
        return {"second": (second.shape, second.dtype), "scales": (second.shape, "fp32")}

    def reference(self, x, second, clip):
        by_column = x.shape[0] < x.shape[1]
        v = (x**2).mean(0 if by_column else 1)
        if not np.isnan(clip[1]):
            second = self.beta2 * second + (1 - self.beta2) * v
        d = 1 / np.sqrt(np.maximum(second, LEAST))
        each = min(x.shape)  # elements that a mean is of
        norm, scaled = np.sqrt(each * v.sum()), np.sqrt(each * (v * d * d).sum())
        return {"second": second, "scales": d * (norm / max(scaled, LEAST))}

    def flops(self) -> int:
        return 2 * self.x.size


def lines(x: Tensor) -> int:
    """Rows of x that NorMuon gives a factor each; columns where those are more."""
    return max(int(n) for n in x.shape)


class MuonUpdate(Op):
    """param = param - decay * rate * param - scale * rate * x with rate = lr * lr_scale; of x times its `scales` where given.

    `cautious`: only what x makes smaller too decays: where x * param >= 0 (Chen et al. 2025). Nothing changes if clip[1] is NaN.
    """

    name = "muon_update"
    optional = ("scales",)
    scalars = ("lr",)
    inplace: ClassVar[dict[str, str]] = {"param": "param"}

    def infer(self, param: Tensor, x: Tensor, clip: Tensor, scales: Tensor | None = None) -> dict[str, Spec]:
        expect_matrix("muon_update", x)
        if param.shape != x.shape or clip.shape != (2,):
            raise ValueError(f"muon_update expects equal shapes and clip (2): {describe(param=param, x=x, clip=clip)}")
        if scales is not None and tuple(scales.shape) != (lines(x),):
            raise ValueError(f"muon_update expects scales ({lines(x)}): {describe(x=x, scales=scales)}")
        return {"param": (param.shape, param.dtype)}

    def reference(self, param, x, clip, lr, scales=None):
        if np.isnan(clip[1]):
            return {"param": param}
        if scales is not None:
            x = x * (scales if x.shape[0] < x.shape[1] else scales[:, None])
        rate = lr * self.lr_scale
        decays = (x * param >= 0) if self.cautious else 1.0
        return {"param": param - decays * (rate * self.weight_decay) * param - rate * self.scale * x}

    def flops(self) -> int:
        return 5 * self.param.size


# --- constants of the iteration and of the step ---

# (scale, linear, square) of each turn: Jordan's five equal ones, and Polar Express's for values from 0.001 on (Amsel et al. 2025).
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


@dataclass(frozen=True)
class Iteration:
    """(scale, linear, square) of each turn, and what the first x is divided by: margin * norm + eps."""

    turns: tuple[tuple[float, float, float], ...]
    margin: float
    eps: float


ITERATIONS = {"polar-express": Iteration(POLAR_EXPRESS, 1.02, 1e-6), "jordan": Iteration(JORDAN, 1.0, 1e-7)}


def jordan_scale(rows: int, cols: int) -> float:
    """What Jordan multiplies the step of a matrix with."""
    return sqrt(max(1.0, rows / cols))


def moonshot_scale(rows: int, cols: int) -> float:
    """What makes a step as large as AdamW's usually are (Liu et al. 2025)."""
    return 0.2 * sqrt(max(rows, cols))


STEP_SCALES: dict[str, Callable[[int, int], float]] = {"jordan": jordan_scale, "moonshot": moonshot_scale}
