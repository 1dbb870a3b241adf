"""Attention masks: causal or full, sliding windows (constant or at run time), documents (packed sequences), paired heads; and what
becomes of a score before the softmax.

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
from barellm.cpu.lang.vector import tanh


class MaskSpec(NamedTuple):
    """The mask as constants of the code: `fold` positions per token (2 of paired heads); the `window` of keys before a query's own
    and the `scale`, each a number or the name of a run-time scalar; whether it is causal; the `softcap` of scores, or 0."""

    fold: int = 1
    window: str | int | None = None
    scale: str | float | None = None
    causal: bool = True
    softcap: float = 0.0

    @classmethod
    def of(cls, op: Op, length: int) -> MaskSpec:
        """Of an attention over sequences of `length` positions at most."""
        window = op.keys_before(length) if op.window is None else op.window
        return cls(op.fold, window, op.scale, op.causal, op.softcap)

    def keys_before(self, k: KernelBuilder) -> Value:
        """The window."""
        return k.scalar(self.window) if isinstance(self.window, str) else k.int(self.window)

    def length(self, k: KernelBuilder, seq: str | int) -> Value:
        """Positions of a sequence."""
        return runtime_size(k, seq) if self.fold == 1 else runtime_size(k, seq) * self.fold

    def score_scale(self, k: KernelBuilder, D: int, by: float = 1.0) -> Any:
        """The factor of q k^T, times `by`."""
        if isinstance(self.scale, str):
            return k.splat(k.scalar(self.scale) * by if by != 1.0 else k.scalar(self.scale))
        return self.scale * by if self.scale else by / sqrt(D)

    def softmax_scale(self, k: KernelBuilder, D: int, by: float = 1.0) -> Any:
        """The factor, times `by`, of what the softmax is made of: of q k^T, or of its `capped` form."""
        return self.softcap * by if self.softcap else self.score_scale(k, D, by)

    def softmax_scale_log2(self, k: KernelBuilder, D: int) -> Any:
        """The factor that makes it exponents of 2."""
        return self.softmax_scale(k, D, log2(E))

    def capped(self, k: KernelBuilder, x: Value, D: int) -> Value:
        """The score x of q k^T, or with a softcap tanh(x scale / softcap): between -1 and 1."""
        return tanh(k, x * self.score_scale(k, D, 1 / self.softcap)) if self.softcap else x

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
    constants = size_constants(op)
    mask_spec = MaskSpec.of(op, op.fold * int(op.out.shape[1]))
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
        window = None if mask_spec.window is None else k.min(mask_spec.keys_before(k), T)
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
