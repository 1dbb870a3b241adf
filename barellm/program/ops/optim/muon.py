"""Muon: the update of a matrix is its momentum with all singular values made one (Jordan et al. 2024).

Newton-Schulz iteration: matmuls only. Every primitive op of it is here: momentum, the division by
the norm, then in each step the Gram matrix, a polynomial of it, and its matmul with what there is; at the end NorMuon's factors
(Li et al. 2025) and the weight's own step. optim/muon.py puts them in order.

Shapes: param, grad, momentum, x (rows, cols); the Gram matrix is (n, n) with n the smaller of both: x x^T of a wide or square
matrix, x^T x of a tall one. Both give the same iteration, for a polynomial of x x^T times x is x times that of x^T x.

Each op takes a bank as well: `matrices` equal ones, one below the other, each of which goes its own way. Q, K and V in one weight
are a bank of three. The shapes above are then of one matrix, and the first axis of every operand is `matrices` times as long."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

import numpy as np

from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.optim.optimizer import CHUNK

LEAST = 1e-10  # of a mean square and of a norm that NorMuon divides by


class OfMatrices(Op):
    """The part that all ops of a bank of matrices share."""

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, {"matrices": 1} | attrs)

    def one(self, x: Tensor | np.ndarray) -> tuple[int, int]:
        """Rows and columns of one matrix of x."""
        return int(x.shape[0]) // self.matrices, int(x.shape[1])

    def is_tall(self, x: Tensor | np.ndarray) -> bool:
        """Whether a matrix of x has more rows than columns: its Gram matrix is then x^T x."""
        rows, cols = self.one(x)
        return rows > cols

    def each(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.matrices, -1, x.shape[1])

    def expect(self, **tensors: Tensor) -> None:
        """Raise a ValueError unless the tensor is a bank of that many matrices."""
        for name, x in tensors.items():
            if len(x.shape) != 2 or int(x.shape[0]) % self.matrices:
                many = f"{self.matrices} matrices, each " if self.matrices > 1 else ""
                raise ValueError(f"{self.name} expects {name} of {many}(rows, cols): {describe(**{name: x})}")

    def chunks(self, x: Tensor) -> int:
        """Partial sums of the squares of one matrix of x."""
        return -(-(x.size // self.matrices) // CHUNK)


class MuonMomentum(OfMatrices):
    """m = mu m + (1 - mu) g with g = grad * clip[1] and mu the scalar `momentum`; u = mu m + (1 - mu) g, which looks a step ahead
    (Nesterov), or without `nesterov` the new m itself; partials[i] = sum of squares of elements i * 65536 .. (i + 1) * 65536 of u,
    of each matrix again.

    Where clip[1] is NaN, m stays and u is 0."""

    name = "muon_momentum"
    scalars = ("momentum",)
    flops_per_element = (9, "grad")
    inplace: ClassVar[dict[str, str]] = {"m": "m"}

    def infer(self, grad: Tensor, m: Tensor, clip: Tensor) -> dict[str, Spec]:
        self.expect(grad=grad)
        if grad.shape != m.shape or clip.shape != (2,):
            raise ValueError(f"muon_momentum expects equal shapes and clip (2): {describe(grad=grad, m=m, clip=clip)}")
        partials = (self.matrices * self.chunks(grad),)
        return {"m": (m.shape, m.dtype), "u": (grad.shape, self.attrs["dtype"]), "partials": (partials, "fp32")}

    def reference(self, grad, m, clip, momentum):
        """The class's formulas; clip[1] is NaN after a step with non-finite gradients, which must change nothing."""
        if np.isnan(clip[1]):
            u = np.zeros_like(m)
        else:
            g = (1 - momentum) * clip[1] * grad
            m = momentum * m + g
            u = momentum * m + g if self.nesterov else m
        squares = u.reshape(self.matrices, -1) ** 2
        return {"m": m, "u": u, "partials": np.add.reduceat(squares, np.arange(0, squares.shape[1], CHUNK), axis=1).reshape(-1)}


class MuonNormalize(OfMatrices):
    """x = u / (margin * norm + eps), where norm is the square root of the sum of a matrix's `partials`. No singular value is above
    1 then, which the iteration needs; `margin` is for those that rounding makes too large."""

    name = "muon_normalize"
    flops_per_element = (1, "u")

    def infer(self, u: Tensor, partials: Tensor) -> dict[str, Spec]:
        self.expect(u=u)
        if partials.shape != (self.matrices * self.chunks(u),):
            raise ValueError(f"muon_normalize expects a partial sum for {CHUNK} elements: {describe(u=u, partials=partials)}")
        return {"x": (u.shape, u.dtype)}

    def reference(self, u, partials):
        norms = np.sqrt(partials.reshape(self.matrices, -1).sum(1))
        return {"x": (self.each(u) / (self.margin * norms + self.eps)[:, None, None]).reshape(u.shape)}


class Gram(OfMatrices):
    """a = x x^T, or x^T x of a tall x. It is symmetric to the bit: one triangle is computed, and that is what `flops` counts."""

    name = "gram"
    product = True

    def infer(self, x: Tensor) -> dict[str, Spec]:
        self.expect(x=x)
        n = min(self.one(x))
        return {"a": ((self.matrices * n, n), x.dtype)}

    def reference(self, x):
        each = self.each(x)
        across = each.swapaxes(1, 2)
        a = across @ each if self.is_tall(x) else each @ across
        return {"a": a.reshape(-1, a.shape[2])}

    def flops(self) -> int:
        n, depth = sorted(self.one(self.x))
        return self.matrices * n * (n + 1) * depth


class GramPolynomial(OfMatrices):
    """b = linear * a + square * a a of a symmetric a (n, n): one triangle is computed."""

    name = "gram_polynomial"
    product = True

    def infer(self, a: Tensor) -> dict[str, Spec]:
        self.expect(a=a)
        if len(set(self.one(a))) > 1:
            raise ValueError(f"gram_polynomial expects a (n, n): {describe(a=a)}")
        return {"b": (a.shape, a.dtype)}

    def reference(self, a):
        each = self.each(a)
        return {"b": self.linear * a + (self.square * (each @ each)).reshape(a.shape)}

    def flops(self) -> int:
        n = int(self.a.shape[1])
        return self.matrices * (n * (n + 1) * n + 3 * n * n)


class GramApply(OfMatrices):
    """y = scale * x + b x, or scale * x + x b of a tall x."""

    name = "gram_apply"
    product = True

    def infer(self, x: Tensor, b: Tensor) -> dict[str, Spec]:
        self.expect(x=x, b=b)
        n = min(self.one(x))
        if self.one(b) != (n, n) or b.dtype != x.dtype:
            raise ValueError(f"gram_apply expects x (rows, cols) and b of the smaller size: {describe(x=x, b=b)}")
        return {"y": (x.shape, x.dtype)}

    def reference(self, x, b):
        each, of_each = self.each(x), self.each(b)
        return {"y": self.scale * x + (each @ of_each if self.is_tall(x) else of_each @ each).reshape(x.shape)}

    def flops(self) -> int:
        return 2 * self.x.size * int(self.b.shape[1]) + 2 * self.x.size


class NorMuonScales(OfMatrices):
    """Factors that give the rows of x (the columns of a wide one) equal sizes in the long run, and leave its norm (NorMuon):

    v = mean square of each row or column;  second = beta2 second + (1 - beta2) v;  d = 1 / sqrt(max(second, 1e-10));
    scales = d |x| / max(|d x|, 1e-10).

    Both norms follow from v. `second` stays where clip[1] is NaN."""

    name = "normuon_scales"
    flops_per_element = (2, "x")
    inplace: ClassVar[dict[str, str]] = {"second": "second"}

    def infer(self, x: Tensor, second: Tensor, clip: Tensor) -> dict[str, Spec]:
        self.expect(x=x)
        if clip.shape != (2,):
            raise ValueError(f"{self.name} expects clip (2): {describe(clip=clip)}")
        if tuple(second.shape) != (lines(x, self.matrices),):
            raise ValueError(f"normuon_scales expects second ({lines(x, self.matrices)}): {describe(x=x, second=second)}")
        return {"second": (second.shape, second.dtype), "scales": (second.shape, "fp32")}

    def reference(self, x, second, clip):
        rows, cols = self.one(x)
        v, second = (self.each(x) ** 2).mean(1 if rows < cols else 2), second.reshape(self.matrices, -1)
        if not np.isnan(clip[1]):
            second = self.beta2 * second + (1 - self.beta2) * v
        d = 1 / np.sqrt(np.maximum(second, LEAST))
        count = min(rows, cols)  # elements that a mean is of
        norm, scaled = (np.sqrt(count * squares.sum(1, keepdims=True)) for squares in (v, v * d * d))
        return {"second": second.reshape(-1), "scales": (d * (norm / np.maximum(scaled, LEAST))).reshape(-1)}


def lines(x: Tensor, matrices: int = 1) -> int:
    """Rows of x that NorMuon gives a factor each; columns where those are more. Those of all matrices of a bank."""
    return matrices * max(int(x.shape[0]) // matrices, int(x.shape[1]))


class MuonUpdate(OfMatrices):
    """param = param - decay * param - step * x with step = scale * rate and decay = weight_decay * rate, where the rate is the
    scalar that `rate` names (default: lr) times lr_scale; of x times its `scales` where given.

    `squared`: decay = weight_decay * rate * step, which falls with the square of the rate. `cautious`: only what x makes smaller
    too decays: where x * param >= 0 (Chen et al. 2025). Nothing changes if clip[1] is NaN."""

    name = "muon_update"
    optional = ("scales",)
    scalars = ("lr",)
    flops_per_element = (5, "param")
    inplace: ClassVar[dict[str, str]] = {"param": "param"}

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, {"squared": False, "rate": "lr"} | attrs)
        self.scalars = (self.rate,)

    def infer(self, param: Tensor, x: Tensor, clip: Tensor, scales: Tensor | None = None) -> dict[str, Spec]:
        self.expect(x=x)
        if param.shape != x.shape or clip.shape != (2,):
            raise ValueError(f"muon_update expects equal shapes and clip (2): {describe(param=param, x=x, clip=clip)}")
        if param.base.bf16:
            raise ValueError(f"muon_update keeps all bits of a weight, and {describe(param=param)} is declared with bf16")
        if scales is not None and tuple(scales.shape) != (lines(x, self.matrices),):
            raise ValueError(f"muon_update expects scales ({lines(x, self.matrices)}): {describe(x=x, scales=scales)}")
        return {"param": (param.shape, param.dtype)}

    def reference(self, param, x, clip, scales=None, **rates):
        """The class's formulas; x is the orthogonalized momentum, `scales` NorMuon's factors of its rows or columns."""
        if np.isnan(clip[1]):
            return {"param": param}
        if scales is not None:
            rows, cols = self.one(x)
            scales = scales.reshape(self.matrices, 1, cols) if rows < cols else scales.reshape(self.matrices, rows, 1)
            x = (self.each(x) * scales).reshape(x.shape)
        rate = rates[self.rate] * self.lr_scale
        step = rate * self.scale
        decay = rate * self.weight_decay * (step if self.squared else 1.0)
        decays = (x * param >= 0) if self.cautious else 1.0
        return {"param": param - decays * decay * param - step * x}


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
    """The turns of an iteration, as (scale, linear, square) each. Before the first turn x is divided by margin * norm + eps."""

    turns: tuple[tuple[float, float, float], ...]
    margin: float
    eps: float


ITERATIONS = {"polar-express": Iteration(POLAR_EXPRESS, 1.02, 1e-6), "jordan": Iteration(JORDAN, 1.0, 1e-7)}


def jordan_scale(rows: int, cols: int) -> float:
    """Jordan's factor for the step of a matrix."""
    return sqrt(max(1.0, rows / cols))


def moonshot_scale(rows: int, cols: int) -> float:
    """A factor that makes a step as large as AdamW's usually are (Liu et al. 2025)."""
    return 0.2 * sqrt(max(rows, cols))


STEP_SCALES: dict[str, Callable[[int, int], float]] = {"jordan": jordan_scale, "moonshot": moonshot_scale}
