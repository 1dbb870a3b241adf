"""Rotary position embedding (Su et al. 2021) in Llama's half-split layout. Shapes: x, y (B, T, W); cos, sin (maxT, D / 2) fp32.

Head h owns columns h*D .. (h+1)*D. Its columns i and i + D/2 are a plane that turns by position * theta^(-2i/D). Only the first
`heads` heads turn; columns behind them pass through, so that one pass over packed q | k | v turns q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi
from typing import TYPE_CHECKING

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec
from barellm.program.tensor import Tensor, describe

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Scaling:
    """Llama-3.1's stretch of the frequencies for longer texts. Wavelengths beyond old_seq / low_factor become `factor` times as
    long, those below old_seq / high_factor stay, and between the two the change is smooth."""

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    old_seq: int = 8192


def frequencies(head_size: int, *, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """(D / 2,) float64: the angle by which each plane turns from one position to the next."""
    import numpy as np

    turn = np.exp(-log(theta) * np.arange(0, head_size, 2) / head_size)
    if scaling is None:
        return turn
    ratio = scaling.old_seq * turn / (2 * pi)  # turns within the old length
    smooth = np.clip((ratio - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0, 1)
    return turn * (smooth + (1 - smooth) / scaling.factor)


class Rope(Op):
    """y[.., i] = x[.., i] cos - x[.., i + D/2] sin;  y[.., i + D/2] = x[.., i + D/2] cos + x[.., i] sin, at position pos + t.

    With `inverse` it turns back, which is its own gradient: sin changes its sign.
    """

    name = "rope"
    scalars = ("pos",)

    def infer(self, x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Spec]:
        D = 2 * int(cos.shape[-1])
        fits = len(x.shape) == 3 and len(cos.shape) == 2 and cos.shape == sin.shape
        if not fits or not 0 < self.heads * D <= x.shape[2]:
            found = describe(x=x, cos=cos, sin=sin)
            raise ValueError(f"rope expects x (B, T, W >= {self.heads} heads * D), cos and sin (maxT, D / 2): {found}")
        if x.shape[1] > cos.shape[0]:
            raise ValueError(f"rope of {int(x.shape[1])} positions, its tables have {int(cos.shape[0])}")
        return {"y": (x.shape, x.dtype)}

    def reference(self, x, cos, sin, pos):
        import numpy as np

        B, T, _ = x.shape
        D = 2 * cos.shape[1]
        c, s = cos[pos : pos + T, None, :], sin[pos : pos + T, None, :] * (-1 if self.inverse else 1)
        heads = x[..., : self.heads * D].reshape(B, T, self.heads, 2, D // 2)
        a, b = heads[..., 0, :], heads[..., 1, :]
        turned = np.stack([a * c - b * s, b * c + a * s], 3).reshape(B, T, self.heads * D)
        return {"y": np.concatenate([turned, x[..., self.heads * D :]], -1)}

    def gradient(self, g, y):
        g.write(Rope, {"y": self.x}, x=y, cos=self.cos, sin=self.sin, heads=self.heads, inverse=not self.inverse)

    def flops(self) -> int:
        return 3 * self.heads * 2 * int(self.cos.shape[1]) * (self.x.size // int(self.x.shape[2]))


class Calls(Graph):
    """The methods of Program that append these ops."""

    def rope_tables(
        self, length: int, head_size: int, *, theta: float, scaling: Scaling | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tables cos and sin (length, head_size / 2) of positions 0 .. length, as constants of the store."""
        import numpy as np

        if head_size % 2:
            raise ValueError(f"rope turns pairs of columns: head_size is {head_size}, expected an even number")
        angle = np.arange(length)[:, None] * frequencies(head_size, theta=theta, scaling=scaling)[None, :]
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        return self.constant("rope.cos", cos), self.constant("rope.sin", sin)

    def rope(self, x: Tensor, tables: tuple[Tensor, Tensor], *, heads: int) -> Tensor:
        """Turn the first `heads` heads of x (B, T, W) by the angle of their position."""
        cos, sin = tables
        return self.apply(Rope, x=x, cos=cos, sin=sin, heads=heads, inverse=False).y
