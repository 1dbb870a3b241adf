"""Attention masks: causal or full, sliding windows (constant or at run time), documents (packed sequences), paired heads; and the
scale and softcap of scores before the softmax.

A `KeyRange` gives the first key that a query sees, and the end of the queries that see a key. Neither decreases along a sequence,
so a block of queries needs the keys from its first query's first one on, and inside that range only register tiles at its two edges
apply a mask lane by lane; blocks outside it are skipped.

Paired heads (modded-nanogpt) attend over a folded sequence of twice the length, in which two heads of a token are two positions."""

from dataclasses import dataclass
from math import e, log2, sqrt
from typing import Any, NamedTuple

from barellm.cpu.kernel import Op, Pointer, Value
from barellm.cpu.kernels.attention.attention_microkernels import HeadRows, KeyBounds, kv_head_of, size_constants
from barellm.cpu.lang.vector import tanh

LOWEST = -1e30  # initial maximum where a query's first block may be fully masked (-inf - -inf would be NaN)


class MaskSpec(NamedTuple):
    """What is known of a mask at compile time. `fold`: positions per token, 2 for paired heads. `window`: keys before a query's own
    that it sees, None: all; `scale`: the factor of q k^T, None: 1 / sqrt(D); each is a number or the name of a run-time scalar.
    `softcap`: scores become softcap * tanh(score / softcap); 0: they don't."""

    fold: int = 1
    window: str | int | None = None
    scale: str | float | None = None
    causal: bool = True
    softcap: float = 0.0

    @classmethod
    def of(cls, op: Op, length: int) -> "MaskSpec":
        """The spec of an attention op over sequences of at most `length` positions."""
        window = op.keys_before(length) if op.window is None else op.window
        return cls(op.fold, window, op.scale, op.causal, op.softcap)

    def keys_before(self, k) -> Value:
        """The window at run time, in keys."""
        return k.scalar(self.window) if isinstance(self.window, str) else k.int(self.window)

    def length(self, k, seq: str | int) -> Value:
        """Positions of a folded sequence of `seq` tokens."""
        return k.size(seq) if self.fold == 1 else k.size(seq) * self.fold

    def score_scale(self, k, D: int, factor: float = 1.0) -> Any:
        """The factor of q k^T, times `factor`."""
        if isinstance(self.scale, str):
            return k.splat(k.scalar(self.scale) * factor if factor != 1.0 else k.scalar(self.scale))
        return self.scale * factor if self.scale else factor / sqrt(D)

    def softmax_scale(self, k, D: int, factor: float = 1.0) -> Any:
        """The factor of the softmax's argument, times `factor`: `softcap` if there is one (see `capped`), else q k^T's scale."""
        return self.softcap * factor if self.softcap else self.score_scale(k, D, factor)

    def softmax_scale_log2(self, k, D: int) -> Any:
        """`softmax_scale` times log2(e), as exponentials are computed as powers of 2."""
        return self.softmax_scale(k, D, log2(e))

    def capped(self, k, x, D: int) -> Value:
        """The score x = q k^T, or with a softcap tanh(x scale / softcap), in [-1, 1]; `softmax_scale` multiplies it afterwards."""
        return tanh(k, x * self.score_scale(k, D, 1 / self.softcap)) if self.softcap else x

    def rows(self, tensor, position, head, *, D: int, heads: int, stride: int) -> HeadRows:
        """The HeadRows of head `head` of `heads` in a tensor (B, T, heads * D), from `position` on (even with paired heads).
        `stride`: elements from one token to the next. With paired heads a token's two positions are heads * D elements apart."""
        if self.fold == 2 and stride == 2 * heads * D:  # nothing lies between the rows of two tokens
            stride //= 2
        elif self.fold == 2:
            return HeadRows(tensor.at((position >> 1) * stride + head * D), stride, heads * D)
        return HeadRows(tensor.at(position * stride + head * D), stride)

    def rows_of(self, tensors, position, head, *, D: int, heads: int, kv_heads: int, strides) -> list[HeadRows]:
        """`rows` of query head `head` in the first of three tensors, and of its head of keys in the others, each with its stride;
        six tensors: the same of another three, the gradients."""
        counts = (heads, kv_heads, kv_heads) * (len(tensors) // 3)  # heads of each tensor
        triples = zip(tensors, counts, strides, strict=True)
        return [self.rows(p, position, kv_head_of(head, heads, n), D=D, heads=n, stride=stride) for p, n, stride in triples]


PLAIN = MaskSpec()


def dense_constants(op: Op) -> dict[str, Any]:
    """Compile-time constants of the dense attention kernels. With paired heads those of the folded sequence."""
    constants = size_constants(op)
    mask_spec = MaskSpec.of(op, op.fold * int(op.out.shape[1]))
    folded = {name: constants[name] // mask_spec.fold for name in ("heads", "kv_heads")}
    return constants | folded | {"mask_spec": mask_spec}


@dataclass(frozen=True)
class KeyRange:
    """The keys that the queries of one sequence of T positions see: at most `window` keys back (None: no window), and none before
    the start of their document; `starts` has each token's document start, as a token's index (None: one document)."""

    T: Value
    fold: int
    window: Value | None
    starts: Pointer | None

    @classmethod
    def of(cls, k, mask_spec: MaskSpec, T, starts, sequence) -> "KeyRange | None":
        """The range of a sequence; None where the mask is only causal or full."""
        if mask_spec.window is None and starts is None:
            return None
        window = None if mask_spec.window is None else k.min(mask_spec.keys_before(k), T)
        return cls(T, mask_spec.fold, window, None if starts is None else starts.at(sequence * T // mask_spec.fold))

    def _document(self, t) -> Value:
        """The position at which the document of position t starts."""
        assert self.starts is not None
        return self.starts.get(t) if self.fold == 1 else self.starts.get(t >> 1) * self.fold

    def first_key(self, k, t) -> Value:
        """The first key that the query at position t sees; for t beyond the sequence, that of its last query."""
        t = k.min(t, self.T - 1)
        first = k.int(0)
        if self.window is not None:
            first = k.max(t - self.window, first)
        if self.starts is not None:
            first = k.max(self._document(t), first)
        return first

    def query_end(self, k, key) -> Value:
        """The end (exclusive) of the queries that see `key`: by its window, or by binary search in `starts` of its document."""
        window_end = self.T if self.window is None else k.min(key + self.window + 1, self.T)
        if self.starts is None:
            return window_end
        lo, hi = k.var(key + 1), k.var(window_end)  # the end is in [lo, hi]
        with k.while_(lambda: lo.value < hi.value):
            middle = (lo.value + hi.value) >> 1
            is_later_document = self._document(middle) > key
            hi.value, lo.value = k.select(is_later_document, middle, hi.value), k.select(is_later_document, lo.value, middle + 1)
        return lo.value

    def store_first_keys(self, k, g, t, first_keys) -> None:
        """first_keys (g.queries) i32 = the first key that each query of the group from position t on sees."""
        with k.loop(0, g.queries) as i:
            first_keys.put(self.first_key(k, t + i), i)

    def bounds_of(self, k, g, t, first_keys) -> KeyBounds:
        """The bounds of the group of queries from position t on; `first_keys` was filled by `store_first_keys`."""
        return KeyBounds(self.first_key(k, t), self.first_key(k, t + (g.queries - 1)), first_keys)
