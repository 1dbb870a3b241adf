"""What queries of attention see: the keys before their own or all, and at run time windows, documents, paired heads.

A `Reach` answers two questions about positions: which key is the first that a query sees, and which query is the last that sees a
key. Neither answer decreases along a sequence, so that a block of queries needs the keys from its first query's first one on, and
inside that range only register tiles at its two edges compare positions lane by lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e as E
from math import log2, sqrt
from typing import Any, NamedTuple

from barellm.cpu.kernel import KernelBuilder
from barellm.cpu.kernels.attention.attention_blocks import Geometry, Lower, Rows, dim_size, sizes
from barellm.cpu.lang import Pointer, Value
from barellm.program.ops.base import Op


class Bounds(NamedTuple):
    """Constants of an attention: positions of a token (2 of paired heads), the names of its run-time scalars, and whether queries
    see no later keys."""

    fold: int = 1
    window: str | None = None
    scale: str | None = None
    causal: bool = True

    @classmethod
    def of(cls, op: Op) -> Bounds:
        return cls(op.fold, op.window, op.scale, op.causal)

    def length(self, k: KernelBuilder, seq: str | int) -> Value:
        """Positions of a sequence."""
        return dim_size(k, seq) if self.fold == 1 else dim_size(k, seq) * self.fold

    def root(self, k: KernelBuilder, D: int) -> Any:
        """The factor that multiplies scores."""
        return k.splat(k.scalar(self.scale)) if self.scale else 1 / sqrt(D)

    def unit(self, k: KernelBuilder, D: int) -> Any:
        """The factor that makes scores exponents of 2."""
        return k.splat(k.scalar(self.scale) * log2(E)) if self.scale else log2(E) / sqrt(D)

    def rows(self, tensor: Pointer, position: Value, head: Value, *, D: int, heads: int, stride: int) -> Rows:
        """The rows of one of `heads` heads, from an even position on. `stride` is the number of elements from one token to the
        next."""
        if self.fold == 2 and stride == 2 * heads * D:  # nothing lies between the rows of two tokens
            stride //= 2
        elif self.fold == 2:
            return Rows(tensor.at((position >> 1) * stride + head * D), stride, heads * D)
        return Rows(tensor.at(position * stride + head * D), stride)


PLAIN = Bounds()


def dense_sizes(op: Op) -> dict[str, Any]:
    """Constants of the kernels of a dense attention. Heads are those of the long sequence where they are paired."""
    constants, bounds = sizes(op), Bounds.of(op)
    folded = {name: constants[name] // bounds.fold for name in ("heads", "kv_heads")}
    return constants | folded | {"bounds": bounds}


@dataclass(frozen=True)
class Reach:
    """The keys that the queries of one sequence of T positions may see. `starts` are those of its tokens."""

    T: Value
    fold: int
    window: Value | None
    starts: Pointer | None

    @classmethod
    def of(cls, k: KernelBuilder, bounds: Bounds, T: Value, starts: Pointer | None, sequence: Value) -> Reach | None:
        """The reach of a sequence, or None if every query sees all keys before its own."""
        if bounds.window is None and starts is None:
            return None
        window = None if bounds.window is None else k.min(k.scalar(bounds.window), T)
        return cls(T, bounds.fold, window, None if starts is None else starts.at(sequence * T // bounds.fold))

    def _document(self, t: Value) -> Value:
        """The position at which the document of a position starts."""
        assert self.starts is not None
        return self.starts.get(t) if self.fold == 1 else self.starts.get(t >> 1) * self.fold

    def first(self, k: KernelBuilder, t: Value) -> Value:
        """The first key that the query at t sees; of one behind the sequence, what its last sees."""
        t = k.min(t, self.T - 1)
        found = k.int(0)
        if self.window is not None:
            found = k.max(t - self.window, found)
        if self.starts is not None:
            found = k.max(self._document(t), found)
        return found

    def stop(self, k: KernelBuilder, key: Value) -> Value:
        """The position behind the last query that sees `key`."""
        high = self.T if self.window is None else k.min(key + self.window + 1, self.T)
        if self.starts is None:
            return high
        lower, upper = (
            k.var(key + 1),
            k.var(high),
        )  # the first query of a later document is at one of these or between them
        with k.while_(lambda: lower.value < upper.value):
            middle = (lower.value + upper.value) >> 1
            beyond = self._document(middle) > key
            upper.value, lower.value = (
                k.select(beyond, middle, upper.value),
                k.select(beyond, lower.value, middle + 1),
            )
        return lower.value

    def fill(self, k: KernelBuilder, g: Geometry, t: Value, least: Pointer) -> None:
        """Write, as i32, the first key that each query of the group from t on sees."""
        with k.loop(0, g.queries) as i:
            least.put(self.first(k, t + i), i)

    def lower(self, k: KernelBuilder, g: Geometry, t: Value, least: Pointer) -> Lower:
        """The bounds of the group from t on, which `fill` has written."""
        return Lower(self.first(k, t), self.first(k, t + (g.queries - 1)), least)
