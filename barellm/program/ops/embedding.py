"""Token and position embedding. Shapes: tokens (B, T) i32, wte (V, C), wpe (maxT, C) or none, positions (B, T)
i32 or none, y (B, T, C), fp32 unless the attribute `dtype` says otherwise."""

from typing import Any

import numpy as np

from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, check_rows, describe
from barellm.program.ops.gemm.matmul import Matmul


class Embedding(Op):
    """y[b, t] = wte[tokens[b, t]] + wpe[positions[b, t]], or without positions wpe[pos + t]; `pos` is 0 in training. Without wpe
    only the first. Ids are checked where they are written."""

    name = "embedding"
    optional = ("wpe", "positions")
    flops_per_element = (1, "y")

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        super().__init__(inputs, attrs)
        self.scalars = ("pos",) if inputs.get("wpe") is not None else ()

    def infer(self, tokens: Tensor, wte: Tensor, wpe: Tensor | None = None, positions: Tensor | None = None) -> dict[str, Spec]:
        if len(tokens.shape) != 2 or len(wte.shape) != 2 or (wpe is not None and wte.shape[1:] != wpe.shape[1:]):
            found = describe(tokens=tokens, wte=wte, wpe=wpe)
            raise ValueError(f"embedding expects tokens (B, T), wte (V, C) and wpe (maxT, C): {found}")
        check_rows("embedding", positions, tokens)
        if wpe is not None and positions is None and tokens.shape[1] > wpe.shape[0]:
            raise ValueError(f"embedding of {int(tokens.shape[1])} tokens, wpe has {int(wpe.shape[0])} positions")
        return {"y": ((*tokens.shape, wte.shape[1]), self.attrs.get("dtype", "fp32"))}

    def index_limits(self) -> dict[str, tuple[int, int]]:
        tables = {"tokens": self.wte} | ({} if self.wpe is None else {"positions": self.wpe})
        return {name: (0, int(t.shape[0]) - 1) for name, t in tables.items()}

    def reference(self, tokens, wte, wpe=None, positions=None, pos=0):
        y = wte[tokens]
        at = slice(pos, pos + tokens.shape[1]) if positions is None else positions
        return {"y": y if wpe is None else y + wpe[at]}

    def gradient(self, g, y):
        g.write(EmbeddingDwte, {"dweight": self.wte}, tokens=self.tokens, dy=y, rows=self.wte.shape[0])
        if self.wpe is not None and self.positions is not None:
            g.write(EmbeddingDwte, {"dweight": self.wpe}, tokens=self.positions, dy=y, rows=self.wpe.shape[0])
        elif self.wpe is not None:
            g.write(EmbeddingDwpe, {"dweight": self.wpe}, dy=y, rows=self.wpe.shape[0])

    def bytes(self) -> int:
        weights = [t for t in (self.wte, self.wpe) if t is not None]
        indices = self.tokens.nbytes * (1 if self.positions is None else 2)
        return indices + self.y.nbytes + sum(min(t.nbytes, self.y.nbytes) for t in weights)


class EmbeddingDwte(Op):
    """dweight[v] = sum of dy over the tokens equal to v, in token order. Rows not hit: zero (mode add: untouched)."""

    name = "embedding_dwte"
    flops_per_element = (1, "dy")

    def infer(self, tokens: Tensor, dy: Tensor) -> dict[str, Spec]:
        if tokens.shape != dy.shape[:-1]:
            raise ValueError(f"embedding_dwte expects tokens (B, T) and dy (B, T, C): {describe(tokens=tokens, dy=dy)}")
        return {"dweight": ((self.attrs["rows"], dy.shape[-1]), "fp32")}

    def reference(self, tokens, dy):
        dweight = np.zeros((self.rows, dy.shape[-1]), dtype=dy.dtype)
        np.add.at(dweight, tokens.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        return {"dweight": dweight}

    def bytes(self) -> int:
        hit = min(self.dweight.nbytes, self.dy.nbytes)
        written = 2 * hit if self.modes["dweight"] == "add" else self.dweight.nbytes
        return self.tokens.nbytes + self.dy.nbytes + written


class EmbeddingDwpe(Op):
    """dweight[t] = sum of dy over the batch; rows beyond the sequence are zero. Training starts at position 0."""

    name = "embedding_dwpe"
    flops_per_element = (1, "dy")

    def infer(self, dy: Tensor) -> dict[str, Spec]:
        return {"dweight": ((self.attrs["rows"], dy.shape[-1]), "fp32")}

    def reference(self, dy):
        dweight = np.zeros((self.rows, dy.shape[-1]), dtype=dy.dtype)
        dweight[: dy.shape[1]] = dy.sum(0)
        return {"dweight": dweight}


class LastRow(Op):
    """y = x[:, T-1:T] for x (B, T, C), y (B, 1, C): in decoding only the last position goes on to the classifier."""

    name = "last_row"

    def infer(self, x: Tensor) -> dict[str, Spec]:
        if len(x.shape) != 3:
            raise ValueError(f"last_row expects x (B, T, C): {describe(x=x)}")
        return {"y": ((x.shape[0], 1, x.shape[2]), x.dtype)}

    def reference(self, x):
        return {"y": x[:, -1:]}

    def bytes(self) -> int:
        return 2 * self.y.nbytes


class Calls(Graph):
    def embedding(
        self, tokens: Tensor, wte: Tensor, wpe: Tensor | None = None, *, positions: Tensor | None = None, dtype: str | None = None
    ) -> Tensor:
        """tokens (B, T) i32 -> (B, T, C) fp32, the residual stream, or in `dtype`; with learned positions where there is a wpe
        (maxT, C): of each token the row `positions` (B, T) i32, where they are given."""
        more: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        return self.apply(Embedding, tokens=tokens, wte=wte, wpe=wpe, positions=positions, **more).y

    def last_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """fp32 logits (B, 1, Vp) of the last position of x (B, T, C)."""
        return self.apply(Matmul, x=self.apply(LastRow, x=x).y, weight=weight, dtype="fp32").y
