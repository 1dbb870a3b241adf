"""RMSNorm of each head of queries and keys, then rotary positions on half of a head's columns, in one pass.

Shapes: x, y (B, T, W), packed heads of D columns: those of the queries, then those of the keys; rstd (B, T, heads + kv_heads) fp32;
cos, sin (positions, D / 4) fp32. Columns 2i and 2i + 1 of a head are a plane for i < D / 4. The columns from D / 2 on stay as
they are. The angle is that of the row's place in the sequence, whatever its document."""

from dataclasses import dataclass
from math import log, pi

import numpy as np

from barellm.program.dtypes import encode
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe


@dataclass(frozen=True, eq=False)
class Yarn:
    """The angles and the softmax scale of a window, and how both change with it (YaRN, Peng et al. 2023). `frequencies`
    (D / 4,) fp32: the angle by which each plane turns from one position to the next."""

    frequencies: np.ndarray
    scale: float

    @classmethod
    def of_head(cls, head_size: int, *, base: float = 1024.0, scale: float = 0.1) -> "Yarn":
        """Frequencies from 1 down to 1 / base."""
        if head_size % 4:
            raise ValueError(f"half of a head's columns turn in pairs: head_size is {head_size}, expected a multiple of 4")
        powers = np.linspace(0, 1, head_size // 4, dtype=np.float32)
        return cls(np.float32(1 / base) ** powers, scale)

    def widened(self, old: int, new: int, *, slow: float = 1.0, fast: float = 32.0) -> "Yarn":
        """The angles and the scale for a window of `new` positions instead of `old`. The frequency of a plane that turns at most
        `slow` times within the old window is multiplied by old / new; one that turns `fast` times or more keeps its own; in between
        the factor changes linearly."""
        turns = (old / (2 * pi) * self.frequencies).astype(np.float32)
        ramp = np.clip((turns - slow) / (fast - slow), 0, 1).astype(np.float32)  # 0: slowed down, 1: left as it is
        slowed = np.float32(old / new)
        return Yarn(self.frequencies * (slowed + ramp * (1 - slowed)), self.scale * (1 + 0.2 * log(new / old)))

    def tables(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin (length, D / 4) of positions 0 .. length, numbers of bf16 held in fp32."""
        angle = np.arange(length, dtype=np.float32)[:, None] * self.frequencies[None, :]
        cos, sin = (encode(values, "bf16")[0].astype(np.float32) for values in (np.cos(angle), np.sin(angle)))
        return cos, sin


class _Heads(Op):
    """The part that both directions share. Attributes are heads and kv_heads; with `paired`, a head of odd number takes the angle
    of position 2t + 1 and one of even number that of 2t; with `shift`, the upper half of a key's columns is the last position's."""

    def head_size(self, x: Tensor, cos: Tensor, sin: Tensor) -> int:
        """D, the number of columns of a head. ValueError if x or the tables do not have the shapes above, the numbers of paired
        heads are odd, or the tables have fewer rows than positions."""
        count = self.heads + self.kv_heads
        fits = len(x.shape) == 3 and self.heads > 0 and self.kv_heads > 0 and int(x.shape[2]) % (4 * count) == 0
        D = int(x.shape[-1]) // count
        if not fits or len(cos.shape) != 2 or cos.shape != sin.shape or 4 * int(cos.shape[1]) != D:
            found = describe(x=x, cos=cos, sin=sin)
            expected = f"x (B, T, {self.heads} + {self.kv_heads} heads * D), cos and sin (positions, D / 4)"
            raise ValueError(f"{self.name} expects {expected}: {found}")
        if self.paired and (self.heads % 2 or self.kv_heads % 2):
            raise ValueError(f"{self.name} of pairs: {self.heads} and {self.kv_heads} heads, expected even numbers")
        if self.positions(x) > cos.shape[0]:
            raise ValueError(f"{self.name} of {self.positions(x)} positions, its tables have {int(cos.shape[0])}")
        return D

    def positions(self, x: Tensor) -> int:
        """Rows of the tables that are read."""
        return int(x.shape[1]) * (2 if self.paired else 1)

    def angles(self, table: np.ndarray, T: int) -> np.ndarray:
        """(T, heads + kv_heads, D / 4): the row of a table, cos or sin, for each position and head."""
        head = np.arange(self.heads + self.kv_heads)[None, :]
        t = np.arange(T)[:, None]
        return table[2 * t + head % 2 if self.paired else t + 0 * head]  # 0 * head: the index has the shape of both

    def bytes(self) -> int:
        unread = 1 - self.positions(self.x) / int(self.cos.shape[0])
        return super().bytes() - round(unread * (self.cos.nbytes + self.sin.nbytes))


class QKRotary(_Heads):
    """n = x * rstd with rstd = 1 / sqrt(mean(x^2) + eps) over each head's columns, then y0 = n0 cos + n1 sin and
    y1 = n1 cos - n0 sin in each plane (RoPE, Su et al. 2021; QK norm, Henry et al. 2020). Saves rstd."""

    name = "qk_rotary"

    def infer(self, x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Spec]:
        self.head_size(x, cos, sin)
        return {"y": (x.shape, x.dtype), "rstd": ((*x.shape[:2], self.heads + self.kv_heads), "fp32")}

    def reference(self, x, cos, sin):
        """RMSNorm per head, then rotate the first half of its columns; see the class's docstring."""
        B, T, W = x.shape
        half = 2 * cos.shape[1]
        n = x.reshape(B, T, -1, 2 * half)
        rstd = 1 / ((n**2).mean(-1) + self.eps) ** 0.5
        n = n * rstd[..., None]
        c, s = self.angles(cos, T), self.angles(sin, T)
        a, b = n[..., 0:half:2], n[..., 1:half:2]
        y = n.copy()
        y[..., 0:half:2], y[..., 1:half:2] = a * c + b * s, b * c - a * s
        if self.shift:
            y[:, 1:, self.heads :, half:] = n[:, :-1, self.heads :, half:]
        return {"y": y.reshape(B, T, W), "rstd": rstd}

    def gradient(self, g, y, rstd):
        assert rstd is None, "rstd is a saved value, not a differentiable output"
        names = ("heads", "kv_heads", "paired", "shift")
        operands = {"dy": y, "x": self.x, "rstd": self.rstd, "cos": self.cos, "sin": self.sin}
        g.write(QKRotaryBackward, {"dx": self.x}, **operands, **{name: self.attrs[name] for name in names})

    def flops(self) -> int:
        """3 for each number's norm, and 3 for each of the half that turns."""
        return 3 * self.x.size + 3 * self.x.size // 2


class QKRotaryBackward(_Heads):
    """dn is dy turned back, with the shifted columns at the position that they came from; then RMSNorm's gradient
    dx = rstd * (dn - n * mean(dn * n)), n = x * rstd."""

    name = "qk_rotary_backward"

    def infer(self, dy: Tensor, x: Tensor, rstd: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Spec]:
        self.head_size(x, cos, sin)
        if dy.shape != x.shape or rstd.shape != (*x.shape[:2], self.heads + self.kv_heads):
            raise ValueError(f"{self.name} expects dy like x, rstd (B, T, all heads): {describe(dy=dy, x=x, rstd=rstd)}")
        return {"dx": (x.shape, x.dtype)}

    def reference(self, dy, x, rstd, cos, sin):
        """Inverse rotation, undo the shift, then RMSNorm's gradient; see the class's docstring."""
        B, T, W = x.shape
        half = 2 * cos.shape[1]
        dy = dy.reshape(B, T, -1, 2 * half)
        c, s = self.angles(cos, T), self.angles(sin, T)
        a, b = dy[..., 0:half:2], dy[..., 1:half:2]
        dn = dy.copy()
        dn[..., 0:half:2], dn[..., 1:half:2] = a * c - b * s, b * c + a * s
        if self.shift:  # y[t] has n[t - 1]; position 0 keeps its own, and gives it to position 1 too
            keys = dy[:, :, self.heads :, half:]
            dn[:, 1:, self.heads :, half:] = 0
            dn[:, :-1, self.heads :, half:] += keys[:, 1:]
        n = x.reshape(dy.shape) * rstd[..., None]
        return {"dx": (rstd[..., None] * (dn - n * (dn * n).mean(-1, keepdims=True))).reshape(B, T, W)}

    def flops(self) -> int:
        """The operations of RMSNorm's gradient without a weight, and of the turn of half of the numbers."""
        return 8 * self.x.size + 3 * self.x.size // 2


class Calls(Graph):
    def yarn_tables(self, yarn: Yarn, length: int) -> tuple[Tensor, Tensor]:
        """The tables cos and sin (length, D / 4), as tensors "yarn.cos" and "yarn.sin" of the store, which begin with the angles of
        `yarn`. They are no state of the optimizer, so a checkpoint leaves them out. A wider window writes new ones."""
        cos, sin = yarn.tables(length)
        return self.constant("yarn.cos", cos), self.constant("yarn.sin", sin)

    def qk_rotary(
        self, x: Tensor, tables: tuple[Tensor, Tensor], *, heads: int, kv_heads: int = 0, paired: bool = False,
        shift: bool = False, eps: float,
    ) -> Tensor:  # fmt: skip
        """Normalize each head of x (B, T, (heads + kv_heads) * D), packed queries and keys, and apply RoPE to half of its columns.
        `kv_heads` 0 means as many as `heads`. With `paired`, odd heads are half a position later, so the tables have two rows for
        each position. With `shift`, the upper half of each key's columns is that of the position before."""
        cos, sin = tables
        attrs = {"heads": heads, "kv_heads": kv_heads or heads, "paired": paired, "shift": shift, "eps": eps}
        return self.apply(QKRotary, x=x, cos=cos, sin=sin, **attrs).y
