"""What follows a product before its sums are stored."""

from __future__ import annotations

from typing import Any

from barellm.cpu.choices import Tile
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.activations import emitter_of
from barellm.cpu.kernels.register_tile import prefetch_row
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.elementwise import SLOPES


class Epilogue:
    """What becomes of the sums in a panel's columns, from `col` on, when the bias has been added.

    `epilogues` in their order: "bias" adds it; an activation stores its input to `second`; "residual" adds `other`, and "scaled"
    adds `scale` times `other`; a slope multiplies the sum with an activation's slope at `other`.
    """

    def __init__(
        self, k: KernelBuilder, col: Value, tile: Tile, out: Pointer, second: Pointer | None, bias: Pointer | None,
        other: Pointer | None, *, cols: int, epilogues: tuple[str, ...], mode: str, early: bool, scale: Value | None = None,
    ) -> None:  # fmt: skip
        """`early`: bias and masks are made now and stay in registers."""
        self.k, self.col, self.cols, self.epilogues, self.mode = k, col, cols, epilogues, mode
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
        for name in self.epilogues:
            x = self._follow(name, x, at, bias, mask)
        if self.mode == "add":
            x = x + self.out.load(at, mask)
        self.out.store(x, at, mask)

    def _follow(self, name: str, x: Value, at: Value, bias: Value | None, mask: Value | None) -> Value:
        if name == "bias":
            return x + bias
        if name == "residual":
            return self.other.load(at, mask) + x
        if name == "scaled":
            return self.k.fma(self.other.load(at, mask), self.scale, x)
        emitter = emitter_of(name)
        assert emitter is not None, name
        if name in SLOPES:
            return x * emitter.slope(self.k, self.other.load(at, mask), self.out.dtype)
        self.second.store(x, at, mask)
        return emitter.value(self.k, x, self.out.dtype)

    def fetch(self, row: Value) -> None:
        """The lines of a row that `put` will write or read."""
        at = row * self.cols + self.col
        for p, write in ((self.out, True), (self.second, True), (self.other, False)):
            if p is not None:
                prefetch_row(self.k, p.at(at), self.span, write=write)
