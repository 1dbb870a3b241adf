"""The operations that follow a product before its sums are stored."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from barellm.cpu.gemm_config import Tile
from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.gemm.microkernel import prefetch_row
from barellm.cpu.kernels.loops import store_all
from barellm.cpu.kernels.pointwise.activations import emitter_of
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.pointwise.elementwise import SLOPES


class Epilogue:
    """The operations on the sums in the columns of a panel, from `col` on.

    `epilogues` are done in their order: "rescale" multiplies with `factor`; "bias" adds it; an activation stores its input to
    `second`; "residual" adds `other`, and "scaled" adds `scale` times `other`; "times" multiplies the sum with `scale`, and a slope
    with an activation's slope at `other`.
    """

    def __init__(
        self, k: KernelBuilder, col: Value, tile: Tile, out: Pointer, second: Pointer | None, bias: Pointer | None,
        other: Pointer | None, *, cols: int, strides: Mapping[str, int], epilogues: tuple[str, ...], mode: str, early: bool,
        scale: Value | None = None, factor: float = 1.0, past: Value | None = None,
    ) -> None:  # fmt: skip
        """`strides`: elements from a row to the next, where those are not `cols`. `early`: bias and masks are made now and stay in
        registers. `past`: whether rows go past the caches; only where `put_row` may store whole lines."""
        self.k, self.col, self.cols, self.epilogues, self.mode = k, col, cols, epilogues, mode
        self.out, self.second, self.bias, self.other, self.scale, self.factor = out, second, bias, other, scale, factor
        self.span, self.past = tile.nr(k.isa), past
        there = {"out": out, "second": second, "other": other}
        self.stride = {name: strides.get(name, cols) for name, p in there.items() if p is not None}
        self.early = [self._bias_and_mask(v) for v in range(tile.vectors)] if early else []

    def _bias_and_mask(self, v: Any) -> tuple[Value | None, Value | None]:
        first = self.col + v * self.k.lanes
        mask = self.k.mask_first(self.cols - first) if self.cols % self.span else None
        return None if self.bias is None else self.bias.load(first, mask), mask

    def put(self, row: Value, v: Any, x: Value) -> None:
        """Vector v of a row's finished sums, to memory; v is a number of Python's where `early`."""
        at = self._at(row, v)
        bias, mask = self.early[v] if self.early else self._bias_and_mask(v)
        for name in self.epilogues:
            x = self._follow(name, x, at, bias, mask)
        if self.mode == "add":
            x = x + self.out.load(at["out"], mask)
        self.out.store(x, at["out"], mask)

    def put_row(self, row: Value, sums: list[Value]) -> None:
        """All vectors of a row's finished sums. Those of 16 bits are stored together: half a line past the caches costs as much
        as a whole one."""
        if self.past is None:
            for v, x in enumerate(sums):
                self.put(row, v, x)
            return
        before: list[Value] = []
        after = []
        for v, x in enumerate(sums):
            at, (bias, mask) = self._at(row, v), self._bias_and_mask(v)
            for name in self.epilogues:
                x = self._follow(name, x, at, bias, mask, before)
            after.append(x)
        at = self._at(row, 0)
        if before:
            store_all(self.k, self.second, before, at["second"], self.past)
        store_all(self.k, self.out, after, at["out"], self.past)

    def _at(self, row: Value, v: Any = None) -> dict[str, Value]:
        """The places in each operand of the panel's vector v of a row, or of its first column."""
        at = {stride: row * stride + self.col for stride in dict.fromkeys(self.stride.values())}
        if v is not None:
            skipped = v * self.k.lanes
            at = {stride: first + skipped for stride, first in at.items()}
        return {name: at[stride] for name, stride in self.stride.items()}

    def _follow(
        self,
        name: str,
        x: Value,
        at: dict[str, Value],
        bias: Value | None,
        mask: Value | None,
        before: list | None = None,
    ) -> Value:
        """x after an epilogue. An activation adds its input to the list `before`, or stores it where there is none."""
        if name == "bias":
            return x + bias
        if name == "rescale":
            return x * self.factor
        if name == "residual":
            return self.other.load(at["other"], mask) + x
        if name == "scaled":
            return self.k.fma(self.other.load(at["other"], mask), self.scale, x)
        if name == "times":
            return x * self.scale
        emitter = emitter_of(name)
        assert emitter is not None, name
        if name in SLOPES:
            return x * emitter.slope(self.k, self.other.load(at["other"], mask), self.out.dtype)
        if before is None:
            self.second.store(x, at["second"], mask)
        else:
            before.append(x)
        return emitter.value(self.k, x, self.out.dtype)

    def fetch(self, row: Value) -> None:
        """The lines of a row that `put` will write or read. What goes past the caches is not fetched."""
        at = self._at(row)
        if self.other is not None:
            prefetch_row(self.k, self.other.at(at["other"]), self.span, write=False)
        with nullcontext() if self.past is None else self.k.otherwise(self.past):
            for name, p in (("out", self.out), ("second", self.second)):
                if p is not None:
                    prefetch_row(self.k, p.at(at[name]), self.span, write=True)
