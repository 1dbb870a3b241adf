"""Attention masks: causal or full, and at run time sliding windows, documents (packed sequences) and paired heads.

A `KeyRange` gives the first key that a query sees, and the end of the queries that see a key. Neither decreases along a sequence,
so a block of queries needs the keys from its first query's first one on, and inside that range only register tiles at its two
edges apply a mask lane by lane; blocks outside it are skipped."""

from __future__ import annotations

from dataclasses import dataclass
from math import e as E
from math import log2, sqrt
from typing import Any, NamedTuple

from barellm.cpu.kernel import KernelBuilder, Op, Pointer, Value
from barellm.cpu.kernels.attention.attention_microkernels import Geometry, KeyBounds, Rows, runtime_size, size_constants


class MaskSpec(NamedTuple):
    """The mask as constants of the code: `fold` positions per token (2 of paired heads), the names of its run-time scalars `window`
    and `scale`, and whether it is causal."""

    fold: int = 1
    window: str | None = None
    scale: str | None = None
    causal: bool = True

    @classmethod
    def of(cls, op: Op) -> MaskSpec:
        return cls(op.fold, op.window, op.scale, op.causal)

    def length(self, k: KernelBuilder, seq: str | int) -> Value:
        """Positions of a sequence."""
        return runtime_size(k, seq) if self.fold == 1 else runtime_size(k, seq) * self.fold

    def softmax_scale(self, k: KernelBuilder, D: int) -> Any:
        """The factor that multiplies scores."""
        return k.splat(k.scalar(self.scale)) if self.scale else 1 / sqrt(D)

    def softmax_scale_log2(self, k: KernelBuilder, D: int) -> Any:
        """The factor that makes scores exponents of 2."""
        return k.splat(k.scalar(self.scale) * log2(E)) if self.scale else log2(E) / sqrt(D)

    def rows(self, tensor: Pointer, position: Value, head: Value, *, D: int, heads: int, stride: int) -> Rows:
        """The rows of one of `heads` heads, from an even position on. `stride`: elements from one token to the next. Of paired
        heads (fold 2) a token's two positions are two heads of it, heads * D elements apart."""
        if self.fold == 2 and stride == 2 * heads * D:  # nothing lies between the rows of two tokens
            stride //= 2
        elif self.fold == 2:
            return Rows(tensor.at((position >> 1) * stride + head * D), stride, heads * D)
        return Rows(tensor.at(position * stride + head * D), stride)


PLAIN = MaskSpec()


def dense_constants(op: Op) -> dict[str, Any]:
    """Constants of the kernels of a dense attention. Of paired heads they are those of the folded sequence."""
    constants, mask_spec = size_constants(op), MaskSpec.of(op)
    folded = {name: constants[name] // mask_spec.fold for name in ("heads", "kv_heads")}
    return constants | folded | {"mask_spec": mask_spec}


@dataclass(frozen=True)
class KeyRange:
    """The keys that the queries of one sequence of T positions may see: at most `window` keys back, and not before the start of the
    document, which `starts` has for each token (token numbers)."""

    T: Value
    fold: int
    window: Value | None
    starts: Pointer | None

    @classmethod
    def of(cls, k: KernelBuilder, mask_spec: MaskSpec, T: Value, starts: Pointer | None, sequence: Value) -> KeyRange | None:
        """The range of a sequence, or None where the mask is causal or full only."""
        if mask_spec.window is None and starts is None:
            return None
        window = None if mask_spec.window is None else k.min(k.scalar(mask_spec.window), T)
        return cls(T, mask_spec.fold, window, None if starts is None else starts.at(sequence * T // mask_spec.fold))

    def _document(self, t: Value) -> Value:
        """The position at which the document of a position starts."""
        assert self.starts is not None
        return self.starts.get(t) if self.fold == 1 else self.starts.get(t >> 1) * self.fold

    def first_key(self, k: KernelBuilder, t: Value) -> Value:
        """The first key that the query at t sees; of a query behind the sequence that of the last one."""
        t = k.min(t, self.T - 1)
        first = k.int(0)
        if self.window is not None:
            first = k.max(t - self.window, first)
        if self.starts is not None:
            first = k.max(self._document(t), first)
        return first

    def query_end(self, k: KernelBuilder, key: Value) -> Value:
        """The end of the queries that see `key`."""
        high = self.T if self.window is None else k.min(key + self.window + 1, self.T)
        if self.starts is None:
            return high
        # Binary search for the first query of a later document.
        lo, hi = k.var(key + 1), k.var(high)
        with k.while_(lambda: lo.value < hi.value):
            middle = (lo.value + hi.value) >> 1
            beyond = self._document(middle) > key
            hi.value, lo.value = k.select(beyond, middle, hi.value), k.select(beyond, lo.value, middle + 1)
        return lo.value

    def store_first_keys(self, k: KernelBuilder, g: Geometry, t: Value, first_keys: Pointer) -> None:
        """Write, as i32, the first key that each query of the group from t on sees."""
        with k.loop(0, g.queries) as i:
            first_keys.put(self.first_key(k, t + i), i)

    def bounds_of(self, k: KernelBuilder, g: Geometry, t: Value, first_keys: Pointer) -> KeyBounds:
        """The bounds of the group from t on; `first_keys` was filled by `store_first_keys`."""
        return KeyBounds(self.first_key(k, t), self.first_key(k, t + (g.queries - 1)), first_keys)
