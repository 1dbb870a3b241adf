"""What becomes of the sums of a product before they are stored."""

from __future__ import annotations

from typing import Any

from barellm.cpu.choices import Tile
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.register_tile import prefetch_row
from barellm.cpu.lang import Pointer, Value
from barellm.cpu.lang.vector import gelu, gelu_slope


class Epilogue:
    """What becomes of the sums in a panel's columns, from `col` on, when the bias has been added.

    "store"; "gelu": second = the sum, out = gelu of it; "residual": out = other + the sum; "scaled": out = scale other + the sum;
    "gelu_backward": out = the sum times the slope of gelu at other.
    """

    def __init__(
        self, k: KernelBuilder, col: Value, tile: Tile, out: Pointer, second: Pointer | None, bias: Pointer | None,
        other: Pointer | None, *, cols: int, kind: str, mode: str, early: bool, scale: Value | None = None,
    ) -> None:  # fmt: skip
        """`early`: bias and masks are made now and stay in registers."""
        self.k, self.col, self.cols, self.kind, self.mode = k, col, cols, kind, mode
        self.out, self.second, self.bias, self.other, self.scale = out, second, bias, other, scale
        self.span = tile.span(k.isa)
        self.early = [self._bias_and_mask(v) for v in range(tile.vectors)] if early else []

    def _bias_and_mask(self, v: Any) -> tuple[Value | None, Value | None]:
        first = self.col + v * self.k.lanes
        mask = self.k.mask_first(self.cols - first) if self.cols % self.span else None
        return None if self.bias is None else self.bias.load(first, mask), mask

    def put(self, row: Value, v: Any, x: Value) -> None:
        """Vector v of a row's finished sums, to memory; v is a number of Python's where `early`."""
        at = row * self.cols + self.col + v * self.k.lanes
        bias, mask = self.early[v] if self.early else self._bias_and_mask(v)
        if bias is not None:
            x = x + bias
        if self.kind == "gelu":
            self.second.store(x, at, mask)
            x = gelu(self.k, x, self.out.dtype)
        elif self.kind == "residual":
            x = self.other.load(at, mask) + x
        elif self.kind == "scaled":
            x = self.k.fma(self.other.load(at, mask), self.scale, x)
        elif self.kind == "gelu_backward":
            x = x * gelu_slope(self.k, self.other.load(at, mask), self.out.dtype)
        if self.mode == "add":
            x = x + self.out.load(at, mask)
        self.out.store(x, at, mask)

    def fetch(self, row: Value) -> None:
        """The lines of a row that `put` will write or read."""
        at = row * self.cols + self.col
        for p, write in ((self.out, True), (self.second, True), (self.other, False)):
            if p is not None:
                prefetch_row(self.k, p.at(at), self.span, write=write)
