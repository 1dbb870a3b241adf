"""Unit scaling (Blake et al. 2023, arXiv 2303.11257): weights are drawn from N(0, 1), and constants of the model keep
activations and gradients at a root of the mean square (rms) of about one.

A sum over n products of unit numbers has an rms of sqrt(n). So a product with a weight (N, K) is divided by sqrt(K) on the way
forward and by sqrt(N) on the way back. Two factors instead of one make a gradient that is the true one times a constant; a
parameter's gradient may have any constant, for AdamW divides it out. But where a branch comes back to the residual stream its
gradient must stand in the true proportion to the stream's. So all factors of a branch have the same product on both ways.

All operands of products are of unit size, on both ways: factors come behind the products. Gradients of weights are sums over the
tokens of a step, so their rms is about the root of the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor

GELU_RMS = 0.652069  # of GELU (tanh) of unit normals


def attention_rms(length: int) -> float:
    """The rms that attention makes of unit values, at the positions 1 to `length` together. A query sees t keys; its scores are
    normals of variance 1, so the squares of its t probabilities add up to about e / (e + t - 1)."""
    return sqrt(sum(e / (e + t) for t in range(length)) / length)


def gain(p: Program, C: int, value: float) -> Tensor:
    import numpy as np

    return p.constant(f"gain.{value:.6g}", np.full(C, value, np.float32))


@dataclass(frozen=True)
class Branch:
    """One branch of a residual stream, between a norm and the addition: a product into it, one out of it. `number` branches came
    before, and the stream is the sum of them all and of the embedding, divided so that it has unit size: each has the same share.
    `inside` is the rms of what the second product reads.

    On the way forward the second product is multiplied by the branch's share, on the way back the first one is."""

    number: int
    inside: float = 1.0

    @property
    def share(self) -> float:
        return 1.0 / sqrt(self.number + 2)

    def into(self, p: Program, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """x (..., K) times the weight `first` (N, K)."""
        forward = 1.0 / sqrt(int(first.shape[1]))
        ahead, back = self._second(second)
        return p.scaled_linear(x, first, forward=forward, backward=forward * ahead / back)

    def out_of(self, p: Program, x: Tensor, second: Tensor) -> Tensor:
        ahead, back = self._second(second)
        return p.scaled_linear(x, second, forward=ahead, backward=back)

    def add(self, p: Program, stream: Tensor, x: Tensor) -> Tensor:
        """The stream with the branch's result x."""
        return p.mix((stream, sqrt(1.0 - self.share**2)), (x, 1.0))

    def _second(self, weight: Tensor) -> tuple[float, float]:
        """The factors of the second product, forward and backward."""
        N, K = (int(n) for n in weight.shape)
        return self.share / (self.inside * sqrt(K)), 1.0 / sqrt(N)
