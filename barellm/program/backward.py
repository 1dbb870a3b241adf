"""The reverse walk: from a list of forward ops to the backward ops that follow it.

Each gradient has an ordered list of writers fixed by this walk. An activation's gradient is stored by its first writer
and added to by the others; a parameter's first writer is "start": it stores on the first micro-batch, then adds.
Nothing is zeroed first, and no add is emitted where a gradient merely passes through (`alias`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from barellm.program.ops.base import Op
from barellm.program.ops.elementwise import Add, Cast
from barellm.program.tensor import Tensor, describe

if TYPE_CHECKING:
    from barellm.program.builder import Program


class Gradients:
    """What gradient rules write through. Keys are forward tensors; recomputed copies count as their originals."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.of: dict[Tensor, Tensor] = {}
        self.holders: Counter[Tensor] = Counter()  # forward tensors whose pending gradient is this tensor
        self.origin: dict[Tensor, Tensor] = {}
        self.written: set[Tensor] = set()  # parameter gradients with a first writer
        self.needs: set[Tensor] = set()  # forward tensors that a parameter leads to

    def key(self, forward: Tensor) -> Tensor:
        return self.origin.get(forward, forward)

    def take(self, forward: Tensor) -> Tensor | None:
        """The finished gradient of an op's output. It stays held until the op's rule is done (`release`), so that the
        rule cannot add into what it still reads: y = x + linear(x) gives x and linear(x) the same gradient tensor."""
        return self.of.pop(self.key(forward), None)

    def release(self, grads: Iterable[Tensor | None]) -> None:
        self.holders.subtract(grad for grad in grads if grad is not None)

    def cast(self, grad: Tensor, dtype: str) -> Tensor:
        """`grad` as a matmul operand of `dtype`."""
        return grad if grad.dtype == dtype else self.program.apply(Cast, x=grad, dtype=dtype).y

    def alias(self, forward: Tensor, grad: Tensor) -> None:
        """The gradient passes through unchanged: no copy, unless it meets another contribution."""
        forward = self.key(forward)
        if forward not in self.needs:
            return
        if forward.role == "parameter":
            raise ValueError(f"{forward.name} is a parameter and meets its gradient unchanged: no op stores that")
        have = self.of.get(forward)
        if have is None:
            self._hold(forward, grad)
        else:
            self.holders[have] -= 1
            self._hold(forward, self.program.apply(Add, a=have, b=grad).y)

    def write(self, op_type: type[Op], targets: dict[str, Tensor], /, **operands: Any) -> None:
        """Append `op_type`; each of its outputs named in `targets` contributes to that forward tensor's gradient."""
        targets = {out: self.key(t) for out, t in targets.items()}
        wanted = {out: t for out, t in targets.items() if t in self.needs}
        if not wanted:
            return
        into: dict[str, tuple[Tensor, str]] = {}
        for out, forward in wanted.items():
            if forward.role == "parameter":
                grad = self.program.gradient_of(forward)
                into[out] = (grad, "add" if forward in self.written else "start")
                self.written.add(forward)
            else:
                have = self.of.get(forward)
                # In place only where no other forward tensor still waits for the same gradient.
                if have is not None and self.holders[have] == 1:
                    into[out] = (have, "add")
        op = self.program.apply(op_type, into=into, **operands)
        for out, forward in wanted.items():
            if forward.role != "parameter" and out not in into:
                self.alias(forward, op.outputs[out])

    def _hold(self, forward: Tensor, grad: Tensor) -> None:
        self.of[forward] = grad
        self.holders[grad] += 1


def reachable(ops: list[Op]) -> set[Tensor]:
    """Tensors that depend on a parameter, the parameters included: only they need gradients."""
    needs: set[Tensor] = set()
    for op in ops:
        needs |= {t for t in op.inputs.values() if t.role == "parameter"}
        if any(t in needs for t in op.inputs.values()):
            needs |= set(op.outputs.values())
    return needs


def backward(program: Program, loss: Tensor, *, recompute: bool = False) -> None:
    """Append the backward ops of `loss`. With `recompute`, what a segment computed is dropped after the forward pass
    and computed again, from the segment's inputs, just before its backward ops (Chen et al. 2016)."""
    if tuple(loss.shape) != (1,):
        raise ValueError(f"backward starts from a loss of shape (1,): {describe(loss=loss)}")
    forward = list(program.ops)
    g = Gradients(program)
    g.needs = reachable(forward)
    if loss not in g.needs:
        raise ValueError(f"{loss.name} depends on no parameter: nothing to differentiate")
    segments: dict[str, list[Op]] = {}
    if recompute:
        for op in forward:
            if op.segment is not None:
                segments.setdefault(op.segment, []).append(op)
    copies: dict[Op, Op] = {}
    g.needs.add(loss)
    seeded = False
    for op in reversed(forward):
        if op.segment in segments:
            copies |= _again(program, g, segments.pop(op.segment))
        if not seeded and loss in op.outputs.values():
            douts: dict[str, Tensor | None] = dict.fromkeys(op.outputs)
            seeded = True  # d loss / d loss = 1: the loss op's rule needs no incoming gradient
        else:
            douts = {name: g.take(t) for name, t in op.outputs.items()}
            if all(d is None for d in douts.values()):
                continue
        with program.segment(op.segment):
            copies.get(op, op).gradient(g, **douts)
        g.release(douts.values())
    program.eliminate_dead()


def _again(program: Program, g: Gradients, ops: list[Op]) -> dict[Op, Op]:
    """Append copies of a segment's ops that write fresh tensors; what nobody reads is eliminated later."""
    fresh: dict[Tensor, Tensor] = {}
    copies: dict[Op, Op] = {}
    for op in ops:
        operands = {name: fresh.get(t, t) for name, t in op.inputs.items()}
        with program.segment(op.segment):
            copy = program.apply(type(op), **operands, **op.attrs)
        copy.recomputed = True
        copies[op] = copy
        for name, t in op.outputs.items():
            fresh[t] = copy.outputs[name]
            g.origin[copy.outputs[name]] = t
    return copies
