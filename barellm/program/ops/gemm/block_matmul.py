"""Products with block-sparse matrices (Gray, Radford and Kingma 2017): the blocks that a layout lists are stored one under the
other, and what is not listed is zero and never computed.

Shapes: x (..., C), y (..., K), leading axes are tokens. A layout is (C / bs, K / bs) blocks. weight (blocks * bs, bs): block (c, k)
is what the columns of block c of x give to those of block k of y. The constants `columns`, `rows` and `places` are the layout's
tables (`program/block_layouts.py`)."""

from typing import Any

from barellm.program.block_layouts import BlockLayout
from barellm.program.graph import Graph
from barellm.program.ops.base import Op, Spec, Tensor, describe
from barellm.program.ops.gemm.matmul import Bias, tokens
from barellm.program.ops.pointwise.elementwise import operand


class _BlockProduct(Op):
    """Has the attribute `layout`."""

    product = True

    def check(self, given: Tensor, width: int, weight: Tensor | None = None) -> None:
        layout: BlockLayout = self.layout
        if given.shape[-1] != width * layout.block:
            expected = f"{width * layout.block} columns"
            raise ValueError(f"{self.name} expects {expected} for this layout: {describe(given=given)}")
        if weight is not None and weight.shape != (len(layout) * layout.block, layout.block):
            expected = f"weight ({len(layout)} blocks * {layout.block}, {layout.block})"
            raise ValueError(f"{self.name} expects {expected}: {describe(weight=weight)}")

    def work(self, count: int) -> int:
        return 2 * count * len(self.layout) * self.layout.block**2


class BlockMatmul(_BlockProduct):
    """y = x W."""

    name = "block_matmul"
    rounded = ("weight",)

    def infer(self, x: Tensor, weight: Tensor, columns: Tensor, rows: Tensor, places: Tensor) -> dict[str, Spec]:
        self.check(x, self.layout.shape[0], weight)
        return {"y": ((*x.shape[:-1], self.layout.shape[1] * self.layout.block), x.dtype)}

    def reference(self, x, weight, columns, rows, places):
        return {"y": x @ self.layout.dense(weight)}

    def gradient(self, g, y):
        dy = g.cast(y, self.x.dtype)
        g.write(BlockMatmulDx, {"dx": self.x}, dy=dy, weight=self.weight, rows=self.rows, **self.attrs)
        g.write(BlockMatmulDw, {"dweight": self.weight}, dy=dy, x=self.x, places=self.places, **self.attrs)

    def flops(self) -> int:
        return self.work(tokens(self.x))

    def bytes(self) -> int:
        """Of the layout's tables only `columns` is read here; the others are for the gradients."""
        return super().bytes() - self.rows.nbytes - self.places.nbytes


class BlockMatmulDx(_BlockProduct):
    """dx = dy W^T."""

    name = "block_matmul_dx"
    rounded = ("weight",)

    def infer(self, dy: Tensor, weight: Tensor, rows: Tensor) -> dict[str, Spec]:
        self.check(dy, self.layout.shape[1], weight)
        return {"dx": ((*dy.shape[:-1], self.layout.shape[0] * self.layout.block), dy.dtype)}

    def reference(self, dy, weight, rows):
        return {"dx": dy @ self.layout.dense(weight).T}

    def flops(self) -> int:
        return self.work(tokens(self.dy))


class BlockMatmulDw(_BlockProduct):
    """dweight = x^T dy for the columns of each block, summed over tokens in order: one accumulation chain per element."""

    name = "block_matmul_dw"

    def infer(self, dy: Tensor, x: Tensor, places: Tensor) -> dict[str, Spec]:
        self.check(x, self.layout.shape[0])
        self.check(dy, self.layout.shape[1])
        return {"dweight": ((len(self.layout) * self.layout.block, self.layout.block), "fp32")}

    def reference(self, dy, x, places):
        whole = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
        return {"dweight": self.layout.blocks_of(whole)}

    def flops(self) -> int:
        return self.work(tokens(self.x))


class Calls(Graph):
    def block_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: BlockLayout) -> Tensor:
        """x (..., C), weight (blocks * bs, bs), bias (K) -> x W + bias (..., K)."""
        tables: dict[str, Any] = {}
        for name, values in layout.tables.items():
            tables[name] = self.constant(f"blocks.{layout.digest}.{name}", values, "i32")
        y = self.apply(BlockMatmul, x=operand(self, x), weight=weight, layout=layout, **tables).y
        return y if bias is None else self.apply(Bias, x=y, bias=bias).y
