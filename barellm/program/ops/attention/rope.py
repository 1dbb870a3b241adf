"""Rotary position embedding (Su et al. 2021) in Llama's half-split layout. Shapes: x, y (B, T, W); cos, sin (maxT, D / 2) fp32.

Head h owns columns h*D .. (h+1)*D. Its columns i and i + D/2 are a plane that turns by position * theta^(-2i/D). Only the first
`heads` heads turn; columns behind them pass through, so that one pass over packed q | k | v turns q and k."""

from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, check_rows, describe


@dataclass(frozen=True)
class Scaling:
    """How the frequencies are changed for texts longer than `old_seq`, the context length of pre-training, by `kind`:

    linear    all divided by `factor` (position interpolation, Chen et al. 2023)
    dynamic   NTK-aware: a larger theta, and only for tables of more than old_seq positions
    llama3    wavelengths beyond old_seq / low_factor become `factor` times as long, those below old_seq / high_factor stay, and
              between the two the change is smooth (Grattafiori et al. 2024)
    yarn      the same by number of turns within old_seq, from `low_factor` (beta_slow) to `high_factor` (beta_fast), linear in the
              plane's number, whose ends are whole numbers with `truncate` (Peng et al. 2023)
    longrope  each plane's frequency divided by its own number: of `short`, or of `long` for tables of more than old_seq positions
              (Ding et al. 2024)

    yarn and longrope multiply cosines and sines by `magnitude`; 0: by their papers' formulas."""

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    old_seq: int = 8192
    kind: str = "llama3"
    magnitude: float = 0.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def multiplier(self) -> float:
        """Of cosines and sines."""
        if self.kind not in ("yarn", "longrope") or self.factor <= 1:
            return self.magnitude or 1.0
        by_formula = 0.1 * log(self.factor) + 1
        if self.kind == "longrope":
            by_formula = sqrt(1 + log(self.factor) / log(self.old_seq))
        return self.magnitude or by_formula


def frequencies(head_size: int, *, theta: float, scaling: Scaling | None = None, length: int = 0) -> np.ndarray:
    """Angle per position of each rotated plane, (D / 2,) float64: theta^(-2i/D), scaled for tables of `length` positions."""
    D, s = head_size, scaling
    if s is not None and s.kind == "dynamic" and length > s.old_seq:
        theta *= (s.factor * length / s.old_seq - (s.factor - 1)) ** (D / (D - 2))
    base = np.exp(-log(theta) * np.arange(0, D, 2) / D)
    if s is None or s.kind == "dynamic":
        return base
    if s.kind == "linear":
        return base / s.factor
    if s.kind == "longrope":
        divisors = s.long if length > s.old_seq else s.short
        if len(divisors) != D // 2:
            raise ValueError(f"longrope of {len(divisors)} numbers, the head has {D // 2} planes that turn")
        return base / np.array(divisors)
    if s.kind == "yarn":
        # The plane, as a real number, that turns so often within the old length.
        bounds = [D * log(s.old_seq / (2 * pi * n)) / (2 * log(theta)) for n in (s.high_factor, s.low_factor)]
        first, last = (floor(bounds[0]), ceil(bounds[1])) if s.truncate else bounds
        first, last = max(first, 0), min(last, D - 1)  # up to D - 1, not to the last plane: as in YaRN's own code
        smooth = 1 - np.clip((np.arange(D // 2) - first) / (last - first or 1e-3), 0, 1)
    else:
        ratio = s.old_seq * base / (2 * pi)  # turns within the old length
        smooth = np.clip((ratio - s.low_factor) / (s.high_factor - s.low_factor), 0, 1)
    return base * (smooth + (1 - smooth) / s.factor)


class Rope(Op):
    """y[.., i] = x[.., i] cos - x[.., i + D/2] sin;  y[.., i + D/2] = x[.., i + D/2] cos + x[.., i] sin, at position pos + t.

    With `inverse` it turns back, which is its own gradient: sin changes its sign. With `positions` (B, T) i32 at these."""

    name = "rope"
    optional = ("positions",)
    scalars = ("pos",)

    def infer(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> dict[str, Spec]:
        """Check that the tables fit the heads and the positions; y has x's shape."""
        D = 2 * int(cos.shape[-1])
        fits = len(x.shape) == 3 and len(cos.shape) == 2 and cos.shape == sin.shape
        if not fits or not 0 < self.heads * D <= x.shape[2]:
            found = describe(x=x, cos=cos, sin=sin)
            raise ValueError(f"rope expects x (B, T, W >= {self.heads} heads * D), cos and sin (maxT, D / 2): {found}")
        check_rows("rope", positions, x)
        if positions is None and x.shape[1] > cos.shape[0]:
            raise ValueError(f"rope of {int(x.shape[1])} positions, its tables have {int(cos.shape[0])}")
        return {"y": (x.shape, x.dtype)}

    def index_limits(self) -> dict[str, tuple[int, int]]:
        return {"positions": (0, int(self.cos.shape[0]) - 1)}

    def reference(self, x, cos, sin, positions=None, pos=0):
        B, T, _ = x.shape
        D = 2 * cos.shape[1]
        at = pos + np.arange(T) if positions is None else positions
        c, s = cos[at][..., None, :], sin[at][..., None, :] * (-1 if self.inverse else 1)
        heads = x[..., : self.heads * D].reshape(B, T, self.heads, 2, D // 2)
        a, b = heads[..., 0, :], heads[..., 1, :]
        turned = np.stack([a * c - b * s, b * c + a * s], 3).reshape(B, T, self.heads * D)
        return {"y": np.concatenate([turned, x[..., self.heads * D :]], -1)}

    def gradient(self, g, y):
        g.write(Rope, {"y": self.x}, **self.inputs | {"x": y}, heads=self.heads, inverse=not self.inverse)

    def flops(self) -> int:
        return 3 * self.heads * 2 * int(self.cos.shape[1]) * (self.x.size // int(self.x.shape[2]))


class Calls(Graph):
    def rope_tables(
        self, length: int, head_size: int, *, theta: float, scaling: Scaling | None = None, rotated: int | None = None,
        name: str = "rope",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The tables cos and sin (length, head_size / 2) of positions 0 .. length, constants of the store called `name`.cos and
        `name`.sin. Only `rotated` columns of a head turn (None: all), the first rotated / 2 of each half; the others pass."""
        rotated = head_size if rotated is None else rotated
        if head_size % 2 or rotated % 2:
            raise ValueError(f"rope turns pairs of columns: {rotated} of {head_size}, expected even numbers")
        angle, multiplier = np.zeros((length, head_size // 2)), np.ones(head_size // 2)
        if rotated:
            turns = frequencies(rotated, theta=theta, scaling=scaling, length=length)
            angle[:, : rotated // 2] = np.arange(length)[:, None] * turns[None, :]
            multiplier[: rotated // 2] *= scaling.multiplier if scaling else 1.0
        cos, sin = ((f(angle) * multiplier).astype(np.float32) for f in (np.cos, np.sin))
        return self.constant(f"{name}.cos", cos), self.constant(f"{name}.sin", sin)

    def rope(self, x: Tensor, tables: tuple[Tensor, Tensor], *, heads: int, positions: Tensor | None = None) -> Tensor:
        """Turn the first `heads` heads of x (B, T, W) by the angle of their position: pos + t, or `positions` (B, T) i32."""
        cos, sin = tables
        return self.apply(Rope, x=x, cos=cos, sin=sin, positions=positions, heads=heads, inverse=False).y
