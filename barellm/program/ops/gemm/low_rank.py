"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021): y = x W^T + s (x A^T) B^T with a frozen W.

Shapes: x (..., K), W (N, K), y (..., N), A (ranks, K), u = s x A^T (..., ranks). Where W is several matrices one below the other,
as q, k and v, each that is adapted has rows of A of its own, and a B (rows, rank) for its columns of y."""

from dataclasses import dataclass
from typing import Any, ClassVar

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, View, describe
from barellm.program.ops.gemm.matmul import Matmul, MatmulDw, MatmulDx, tokens
from barellm.program.ops.pointwise.dropout import Dropout
from barellm.program.ops.pointwise.elementwise import Rescale

MOST_BLOCKS = 3  # of one weight: q, k and v


@dataclass(frozen=True)
class LowRank:
    """The LoRA adapter of a linear layer: A, and of each block its first column of y and its B. `dropout` is of A's input."""

    a: Tensor
    blocks: tuple[tuple[int, Tensor], ...]
    scale: float
    dropout: float = 0.0

    def append(self, p: Graph, x: Tensor, y: Tensor) -> Tensor:
        """Append the adapter's term y += s drop(x) A^T B^T, in place; x is the operand of the layer's own matmul. Returns y."""
        if p.training and self.dropout:
            x = p.apply(Dropout, x=x, rate=self.dropout, stream=p.random_stream(self.dropout)).y
        u = p.apply(Matmul, x=x, weight=self.a).y
        if self.scale != 1.0:
            u = p.apply(Rescale, x=u, forward=self.scale, backward=self.scale).y
        operands: dict[str, Any] = {f"b{i}": b for i, (_, b) in enumerate(self.blocks)}
        operands["firsts"] = tuple(first for first, _ in self.blocks)
        return p.apply(LowRankUpdate, y=y, u=u, **operands).y


class LowRankUpdate(Op):
    """y[:, first : first + N_i] += u_i B_i^T for each block i, in place. `firsts` are the first columns, and u_i are as many
    columns of u as B_i has, one block's after the other's."""

    name = "low_rank_update"
    inplace: ClassVar[dict[str, str]] = {"y": "y"}
    rounded = tuple(f"b{i}" for i in range(MOST_BLOCKS))
    product = True

    def infer(self, y: Tensor, u: Tensor, **b: Tensor) -> dict[str, Spec]:
        ranks = sum(int(t.shape[1]) for t in b.values())
        ends = [first + int(t.shape[0]) for first, t in zip(self.firsts, b.values(), strict=True)]
        if u.shape[:-1] != y.shape[:-1] or ranks != u.shape[-1] or max(ends) > y.shape[-1]:
            raise ValueError(f"low_rank_update expects u (..., ranks) and each b (columns, rank): {describe(y=y, u=u, **b)}")
        return {"y": (y.shape, y.dtype)}

    def blocks(self, y: Any, u: Any) -> list[tuple[Any, Any, Tensor]]:
        """Of each block: its columns of y and of u, both tensors or arrays, and B."""
        found, at = [], 0
        for i, first in enumerate(self.firsts):
            b = self.inputs[f"b{i}"]
            found.append((columns(y, first, int(b.shape[0])), columns(u, at, int(b.shape[1])), b))
            at += int(b.shape[1])
        return found

    def reference(self, y, u, **b):
        y = y.copy()
        for (columns_y, columns_u, _), matrix in zip(self.blocks(y, u), b.values(), strict=True):
            columns_y += columns_u @ matrix.T
        return {"y": y}

    def gradient(self, g, y):
        dy = g.cast(y, self.u.dtype)
        for block, u, b in self.blocks(dy, self.u):
            g.write(MatmulDx, {"dx": u}, dy=block, weight=b)
            g.write(MatmulDw, {"dweight": b}, dy=block, x=u)
        g.alias(self.inputs["y"], dy)

    def flops(self) -> int:
        return 2 * tokens(self.u) * sum(t.size for name, t in self.inputs.items() if name in self.rounded)


def columns(t: Any, first: int, width: int) -> Any:
    """Some columns of a tensor or an array; of a tensor that has no others, itself."""
    if not isinstance(t, Tensor):
        return t[..., first : first + width]
    return t if width == t.shape[-1] else View(t, first, width)
