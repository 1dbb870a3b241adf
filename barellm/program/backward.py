"""The reverse walk: from a list of forward ops to the backward ops that follow it.

Each gradient has an ordered list of writers fixed by this walk. An activation's gradient is stored by its first writer
and added to by the others; a parameter's first writer is "start": it stores on the first micro-batch, then adds.
Nothing is zeroed first, and no add is emitted where a gradient merely passes through (`alias`). The gradient of a view is the
same columns of its base's gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from barellm.program.graph import Graph
from barellm.program.loss_scale import loss_scale_of
from barellm.program.ops.base import Op
from barellm.program.ops.elementwise import Add, Cast
from barellm.program.tensor import Tensor, View, describe


@dataclass
class Parts:
    """A gradient that is written by columns: the tensor, and the (first, width) that have been stored."""

    grad: Tensor
    stored: list[tuple[int, int]] = field(default_factory=list)

    def mode(self, view: View) -> str:
        """How the view's columns are written next. ValueError where they overlap others in part."""
        first, width = view.first_column, int(view.shape[-1])
        if (first, width) in self.stored:
            return "add"
        for a, n in self.stored:
            if a < first + width and first < a + n:
                raise ValueError(f"{view.name} overlaps columns {a} to {a + n}, which have a gradient of their own")
        self.stored.append((first, width))
        return "store"

    def whole(self) -> Tensor:
        """The gradient of all columns. ValueError for those that nobody stored."""
        at = 0
        for first, width in sorted(self.stored):
            if first > at:
                break
            at = first + width
        if at < self.grad.shape[-1]:
            raise ValueError(
                f"no gradient reaches columns from {at} on of {self.grad.name}: no view that leads on has them"
            )
        return self.grad


class Gradients:
    """The `ops.base.Gradients` of one walk. Keys are forward tensors; recomputed copies count as their originals."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.loss_scale = loss_scale_of(graph)
        self.of: dict[Tensor, Tensor] = {}
        self.parts: dict[Tensor, Parts] = {}  # gradients so far written through views only
        self.holders: Counter[Tensor] = Counter()  # forward tensors whose pending gradient is this tensor
        self.origin: dict[Tensor, Tensor] = {}
        self.written: set[Tensor] = set()  # parameter gradients with a first writer
        self.needs: set[Tensor] = set()  # forward tensors that a parameter leads to

    def key(self, forward: Tensor) -> Tensor:
        if isinstance(forward, View):
            return forward.on(self.key(forward.base))
        return self.origin.get(forward, forward)

    def take(self, forward: Tensor) -> Tensor | None:
        """The finished gradient of an op's output. It stays held until the op's rule is done (`release`), so that the
        rule cannot add into what it still reads: y = x + linear(x) gives x and linear(x) the same gradient tensor."""
        key = self.key(forward)
        self._join(key)
        return self.of.pop(key, None)

    def release(self, grads: Iterable[Tensor | None]) -> None:
        self.holders.subtract(grad for grad in grads if grad is not None)

    def cast(self, grad: Tensor, dtype: str) -> Tensor:
        return grad if grad.dtype == dtype else self.graph.apply(Cast, x=grad, dtype=dtype).y

    def alias(self, forward: Tensor, grad: Tensor) -> None:
        forward = self.key(forward)
        if forward.base not in self.needs:
            return
        if forward.role == "parameter":
            raise ValueError(f"{forward.name} is a parameter and meets its gradient unchanged: no op stores that")
        if isinstance(forward, View):
            target = self._columns(forward, grad.dtype)
            self.graph.apply(Cast, into={"y": target}, x=grad, dtype=grad.dtype)
            return
        self._join(forward)
        have = self.of.get(forward)
        if have is None:
            self._hold(forward, grad)
        else:
            self.holders[have] -= 1
            self._hold(forward, self.graph.apply(Add, a=have, b=grad).y)

    def write(self, op_type: type[Op], targets: dict[str, Tensor], /, **operands: Any) -> None:
        targets = {out: self.key(t) for out, t in targets.items()}
        wanted = {out: t for out, t in targets.items() if t.base in self.needs}
        if not wanted:
            return
        into: dict[str, tuple[Tensor, str]] = {}
        places = Counter(_place(t) for t in wanted.values())
        for out, forward in wanted.items():
            if places[_place(forward)] > 1:
                continue  # an op of the same value twice: its outputs cannot both go to one place
            if forward.role == "parameter":
                grad = self.graph.gradient_of(forward)
                into[out] = (grad, "add" if forward in self.written else "start")
                self.written.add(forward)
            elif isinstance(forward, View):
                into[out] = self._columns(forward, forward.dtype)
            else:
                self._join(forward)
                have = self.of.get(forward)
                # In place only where no other forward tensor still waits for the same gradient.
                if have is not None and self.holders[have] == 1:
                    into[out] = (have, "add")
        op = self.graph.apply(op_type, into=into, **operands)
        for out, forward in wanted.items():
            if forward.role != "parameter" and out not in into:
                self.alias(forward, op.outputs[out])

    def _columns(self, view: View, dtype: str) -> tuple[Tensor, str]:
        """Where a writer of the view's gradient writes, and how."""
        base = view.base
        have = self.of.get(base)
        if have is not None and self.holders[have] > 1:  # another forward tensor waits for this very gradient: a copy
            self.holders[have] -= 1
            have = self.graph.apply(Cast, x=have, dtype=have.dtype).y
            self._hold(base, have)
        if have is not None:
            return view.on(have), "add"
        if base not in self.parts:
            self.parts[base] = Parts(self.graph.activation(f"{base.name}.grad", base.shape, dtype))
        parts = self.parts[base]
        if parts.grad.dtype != dtype:
            raise ValueError(f"{view.name} has a gradient in {dtype}, other columns have theirs in {parts.grad.dtype}")
        return view.on(parts.grad), parts.mode(view)

    def _join(self, forward: Tensor) -> None:
        """From now on a gradient that was written by columns is one of the whole tensor."""
        if forward in self.parts:
            self._hold(forward, self.parts.pop(forward).whole())

    def _hold(self, forward: Tensor, grad: Tensor) -> None:
        self.of[forward] = grad
        self.holders[grad] += 1


def _place(t: Tensor) -> tuple[Tensor, int, int]:
    """What tells a tensor or a view of it from others."""
    return t.base, t.first_column, int(t.shape[-1])


def reachable(ops: list[Op]) -> set[Tensor]:
    """Tensors that depend on a parameter, the parameters included: only they need gradients."""
    needs: set[Tensor] = set()
    for op in ops:
        inputs = [t.base for t in op.inputs.values()]
        needs |= {t for t in inputs if t.role == "parameter"}
        if any(t in needs for t in inputs):
            needs |= {t.base for t in op.outputs.values()}
    return needs


def backward(graph: Graph, loss: Tensor, *, recompute: bool = False) -> None:
    """Append the backward ops of `loss`. With `recompute`, what a segment computed is dropped after the forward pass
    and computed again, from the segment's inputs, just before its backward ops (Chen et al. 2016)."""
    if tuple(loss.shape) != (1,):
        raise ValueError(f"backward starts from a loss of shape (1,): {describe(loss=loss)}")
    forward = list(graph.ops)
    g = Gradients(graph)
    g.needs = reachable(forward)
    if loss not in g.needs:
        raise ValueError(f"{loss.name} depends on no parameter: nothing to differentiate")
    segments: dict[str, list[Op]] = {}
    if recompute:
        for op in forward:
            if op.segment is not None:
                segments.setdefault(op.segment, []).append(op)
    copies: dict[Op, Op] = {}
    seeded = False
    for op in reversed(forward):
        if op.segment in segments:
            copies |= _again(graph, g, segments.pop(op.segment))
        if not seeded and loss in op.outputs.values():
            douts: dict[str, Tensor | None] = dict.fromkeys(op.outputs)
            seeded = True  # d loss / d loss = 1: the loss op's rule needs no incoming gradient
        else:
            douts = {name: g.take(t) for name, t in op.outputs.items()}
            if all(d is None for d in douts.values()):
                continue
        with graph.segment(op.segment):
            copies.get(op, op).gradient(g, **douts)
        g.release(douts.values())
    graph.eliminate_dead()


def _again(graph: Graph, g: Gradients, ops: list[Op]) -> dict[Op, Op]:
    """Append copies of a segment's ops that write fresh tensors; what nobody reads is eliminated later."""
    fresh: dict[Tensor, Tensor] = {}
    copies: dict[Op, Op] = {}

    def now(t: Tensor) -> Tensor:
        return t.on(fresh.get(t.base, t.base)) if isinstance(t, View) else fresh.get(t, t)

    for op in ops:
        operands = {name: now(t) for name, t in op.inputs.items()}
        with graph.segment(op.segment):
            copy = graph.apply(type(op), **operands, **op.attrs)
        copy.recomputed = True
        copies[op] = copy
        for name, t in op.outputs.items():
            fresh[t] = copy.outputs[name]
            g.origin[copy.outputs[name]] = t
    return copies
