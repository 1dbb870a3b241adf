"""Reverse-mode differentiation of a program: from a list of forward ops to the backward ops that follow it.
Each gradient has an ordered list of writers fixed by this walk. An activation's gradient is stored by its first writer and added to
by the others; a parameter's first writer is "start": it stores on the first micro-batch, then adds. No add is emitted where a
gradient merely passes through (`alias`). The gradient of a view is the same columns of its base's gradient. Nothing is zeroed
first, except columns that no view writes, once the whole gradient is read."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from barellm.errors import UserError
from barellm.program.graph import Graph
from barellm.program.loss_scale import branch_scale, loss_scale_of
from barellm.program.ops.base import Op, Tensor, View, describe
from barellm.program.ops.pointwise.elementwise import Add, Cast, GradientScale, Rescale, Zeros


@dataclass
class Parts:
    """A gradient that is written by columns: its tensor, the mode of the first write of a column ("store" or "start"), and the
    (first, width) of the columns that have been stored."""

    graph: Graph
    grad: Tensor
    first_mode: str
    written: list[tuple[int, int]] = field(default_factory=list)

    def mode(self, forward: Tensor) -> str:
        """The mode in which the gradient of `forward`, a view or the whole tensor, is written next; those of its columns that are
        not stored yet become zero first where others are."""
        begin, width = forward.first_column, int(forward.shape[-1])
        if all(begin + width <= first or first + n <= begin for first, n in self.written):
            self.written.append((begin, width))
            return self.first_mode
        self.complete(begin, width)
        return "add"

    def complete(self, begin: int = 0, width: int | None = None) -> Tensor:
        """The gradient, after appending ops that zero the unwritten columns of [begin, begin + width); default: all columns."""
        end = int(self.grad.shape[-1]) if width is None else begin + width
        for first, n in [*sorted(self.written), (end, 0)]:  # the gaps before each written range, and behind the last
            gap = min(first, end) - begin
            if gap > 0:
                columns = View(self.grad, begin, gap)
                self.graph.apply(Zeros, into={"y": (columns, self.first_mode)}, shape=columns.shape, dtype=columns.dtype)
                self.written.append((begin, gap))
            begin = max(begin, first + n)
        return self.grad


class Gradients:
    """The gradients of one reverse walk: the implementation of the protocol `ops.base.Gradients`. The keys of its tables are
    forward tensors, a recomputed copy being looked up as its original (`key`)."""

    def __init__(self, graph: Graph) -> None:
        """Empty tables; `needs` is set by the walk."""
        self.graph = graph
        self.loss_scale = loss_scale_of(graph)
        self.of: dict[Tensor, Tensor] = {}  # pending: written, and not yet taken by the op that made the forward tensor
        self.parts: dict[Tensor, Parts] = {}  # gradients so far written through views only
        self.holders: Counter[Tensor] = Counter()  # gradient -> how many forward tensors have it as theirs
        # Output of a recomputed op -> the original; y of an op that passes its gradient on -> x.
        self.origin: dict[Tensor, Tensor] = {op.y: op.x for op in graph.ops if op.passes_gradient}
        self.parameters: dict[Tensor, Parts] = {}  # their gradients, from the first writer on
        self.needs: set[Tensor] = set()  # forward tensors that a parameter leads to
        # Forward tensor -> its finished gradient, and the op that wrote it last.
        self.found: dict[Tensor, tuple[Tensor, Op]] = {}
        # With `Precision.branch_scales`: forward tensor -> the residual branch whose scale its gradient carries; the op whose
        # rule is running, and its branch. None: the loss's.
        self.branches: dict[Tensor, str | None] = {}
        self.branch: str | None = None
        self.op: Op | None = None

    def key(self, forward: Tensor) -> Tensor:
        """The tensor whose gradient is also that of `forward`: see `origin`; of a view the same columns of it."""
        if isinstance(forward, View):
            return forward.on(self.key(forward.base))
        return self.origin.get(forward, forward)

    def take(self, forward: Tensor) -> Tensor | None:
        """The finished gradient of an op's output. It stays held until the op's rule is done (`release`), so that the
        rule cannot add into what it still reads: y = x + linear(x) gives x and linear(x) the same gradient tensor."""
        key = self.key(forward)
        self._join(key)
        grad = self.of.pop(key, None)
        if grad is not None and (last := last_writer(self.graph.ops, grad)):
            self.found[key] = grad, last
        return grad

    def release(self, grads: Iterable[Tensor | None]) -> None:
        self.holders.subtract(grad for grad in grads if grad is not None)

    def apply(self, op_type: type[Op], /, **operands: Any) -> Op:
        return self.graph.apply(op_type, **operands)

    def cast(self, grad: Tensor, dtype: str) -> Tensor:
        return grad if grad.dtype == dtype else self.graph.apply(Cast, x=grad, dtype=dtype).y

    def alias(self, forward: Tensor, grad: Tensor) -> None:
        """Add `grad` to the gradient of `forward` without computing: the first contribution becomes the gradient itself (aliased),
        a second one is added into a new tensor. For views and parameters it is copied into their storage."""
        forward = self.key(forward)
        if forward.base not in self.needs:
            return
        if forward.role == "parameter":
            self.write(Rescale, {"y": forward}, x=grad, forward=1.0, backward=1.0)  # which stores it
            return
        if self._crosses(forward):
            self._check_exit()
            of, self.branch = self.branch, self.branches.get(forward.base)
            scales = {"given": branch_scale(self.graph, of), "wanted": branch_scale(self.graph, self.branch)}
            self.write(GradientScale, {"y": forward}, x=grad, **scales, filtered=True)
            self.branch = of
            return
        if isinstance(forward, View):
            self.graph.apply(Cast, into={"y": self._columns(forward, grad.dtype)}, x=grad, dtype=grad.dtype)
            return
        self._join(forward)
        pending = self.of.get(forward)
        if pending is None:
            self._hold(forward, grad)
        else:
            self.holders[pending] -= 1
            self._hold(forward, self.graph.apply(Add, a=pending, b=grad).y)

    def write(self, op_type: type[Op], targets: dict[str, Tensor], /, **operands: Any) -> None:
        """Append `op_type`, whose outputs are contributions to the gradients of `targets` (output name -> forward tensor). An
        output is written or added in place where that is safe; otherwise it gets a new tensor, contributed by `alias`."""
        targets = {out: self.key(t) for out, t in targets.items()}
        wanted = {out: t for out, t in targets.items() if t.base in self.needs}
        if not wanted:
            return
        into: dict[str, tuple[Tensor, str]] = {}
        for out, forward in wanted.items():
            if sum(_overlap(forward, other) for other in wanted.values()) > 1:
                continue  # an op of the same value twice: its outputs cannot both go to one place
            if self._crosses(forward):
                continue
            if forward.role == "parameter":
                into[out] = self._of_parameter(forward)
            elif isinstance(forward, View):
                into[out] = self._columns(forward, forward.dtype)
            else:
                self._join(forward)
                pending = self.of.get(forward)
                # In place only where no other forward tensor still waits for the same gradient.
                if pending is not None and self.holders[pending] == 1:
                    into[out] = (pending, "add")
        op = self.graph.apply(op_type, into=into, **operands)
        for out, forward in wanted.items():
            if out in into:
                continue
            if forward.role == "parameter":
                self.graph.apply(Cast, into={"y": self._of_parameter(forward)}, x=op.outputs[out], dtype="fp32")
            else:
                self.alias(forward, op.outputs[out])

    def finish(self) -> None:
        """Columns of a parameter's gradient that no view has become zero."""
        for parts in self.parameters.values():
            parts.complete()

    def _check_exit(self) -> None:
        """Raise a UserError where a residual branch does not begin with a norm whose weight is trained: what overflows on the way
        to its exit must show in a parameter's gradient."""
        assert self.op is not None
        name, weight = self.op.name, self.op.inputs.get("weight")
        if self.branch and not (name in ("layernorm", "rmsnorm") and weight is not None and weight.base in self.needs):
            found = f"train.branch_scales is true, and the residual branch {self.branch} begins with {name}"
            raise UserError(f"{found}, expected a norm with a trained weight")

    def _crosses(self, forward: Tensor) -> bool:
        """Whether the gradient of an activation has another scale than that of the op whose rule is running."""
        return forward.role != "parameter" and self.branches.get(forward.base) != self.branch

    def _of_parameter(self, forward: Tensor) -> tuple[Tensor, str]:
        """The tensor and the mode in which the next writer of a parameter's gradient, or of some of its columns, writes."""
        base = forward.base
        if self.graph.store.branches.setdefault(base, self.branch) != self.branch:
            raise UserError(f"train.branch_scales is true, and {base.name} is read in a residual branch and elsewhere")
        if base not in self.parameters:
            self.parameters[base] = Parts(self.graph, self.graph.gradient_of(base), "start")
        parts = self.parameters[base]
        return (forward.on(parts.grad) if isinstance(forward, View) else parts.grad), parts.mode(forward)

    def _columns(self, view: View, dtype: str) -> tuple[Tensor, str]:
        """(columns of the base's gradient, mode "store" or "add") for the next contribution, in `dtype`, to a view's gradient."""
        base = view.base
        pending = self.of.get(base)
        if pending is not None and self.holders[pending] > 1:  # another forward tensor waits for it: add into a copy
            self.holders[pending] -= 1
            pending = self.graph.apply(Cast, x=pending, dtype=pending.dtype).y
            self._hold(base, pending)
        if pending is not None:
            return view.on(pending), "add"
        if base not in self.parts:
            self.parts[base] = Parts(self.graph, self.graph.activation(f"{base.name}.grad", base.shape, dtype), "store")
        parts = self.parts[base]
        if parts.grad.dtype != dtype:
            raise ValueError(f"{view.name} has a gradient in {dtype}, other columns have theirs in {parts.grad.dtype}")
        return view.on(parts.grad), parts.mode(view)

    def _join(self, forward: Tensor) -> None:
        """Turn a gradient that was written by columns into one gradient of the whole tensor."""
        if forward in self.parts:
            self._hold(forward, self.parts.pop(forward).complete())

    def _hold(self, forward: Tensor, grad: Tensor) -> None:
        """Make `grad` the pending gradient of `forward`."""
        self.of[forward] = grad
        self.holders[grad] += 1


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, or views of them, have columns in common."""
    disjoint = (
        a.first_column + a.shape[-1] <= b.first_column or b.first_column + b.shape[-1] <= a.first_column
        if a.shape and b.shape
        else False
    )
    return a.base is b.base and not disjoint


def reachable(ops: list[Op], roots: Iterable[Tensor] = ()) -> set[Tensor]:
    """Tensors that depend on a trained parameter or on one of the `roots`, those included: only they need gradients."""
    needs: set[Tensor] = set(roots)
    for op in ops:
        inputs = [t.base for t in op.inputs.values()]
        needs |= {t for t in inputs if t.role == "parameter" and not t.frozen}
        if any(t in needs for t in inputs):
            needs |= {t.base for t in op.outputs.values()}
    return needs


def last_writer(ops: list[Op], t: Tensor) -> Op | None:
    """The last op that writes a tensor or some of its columns; None where it is given."""
    return next((op for op in reversed(ops) if any(out.base is t.base for out in op.outputs.values())), None)


def backward(graph: Graph, loss: Tensor, *, recompute: bool = False) -> dict[Tensor, tuple[Tensor, Op]]:
    """Append the backward ops of `loss`; returns the gradient of each forward tensor that has one, with the last op that writes it
    as its gradient (later ops may reuse the tensor). With `recompute` (activation checkpointing, Chen et al. 2016) a segment's
    activations are dropped after the forward pass and recomputed from its inputs right before its backward ops."""
    if tuple(loss.shape) != (1,):
        raise ValueError(f"backward starts from a loss of shape (1,): {describe(loss=loss)}")
    forward = list(graph.ops)
    g = Gradients(graph)
    g.needs = reachable(forward)
    if graph.precision.branch_scales:
        g.branches = {t.base: op.branch for op in forward if op.branch for t in op.outputs.values()}
        if not g.branches:
            raise UserError("train.branch_scales is true, and the model has no residual branches (Program.branch)")
    if loss not in g.needs:
        raise ValueError(f"{loss.name} depends on no parameter that is trained: nothing to differentiate")
    segments: dict[str, list[Op]] = {}
    if recompute:
        for op in forward:
            if op.segment is not None:
                segments.setdefault(op.segment, []).append(op)
    copies: dict[Op, Op] = {}  # a segment's forward op -> its recomputed copy, whose outputs the gradient rule reads instead
    seeded = False
    for op in reversed(forward):
        if op.segment in segments:
            copies |= _recompute_segment(graph, g, segments.pop(op.segment))
        if op.passes_gradient:
            continue
        if not seeded and loss in op.outputs.values():
            douts: dict[str, Tensor | None] = dict.fromkeys(op.outputs)
            seeded = True  # d loss / d loss = 1: the loss op's rule needs no incoming gradient
        else:
            douts = {name: g.take(t) for name, t in op.outputs.items()}
            if all(d is None for d in douts.values()):
                continue
        g.op, g.branch = op, op.branch if g.branches else None
        with graph.segment(op.segment):
            copies.get(op, op).gradient(g, **douts)
        g.release(douts.values())
    g.finish()
    graph.eliminate_dead()
    return g.found


def pullback(graph: Graph, seeds: dict[Tensor, Tensor], roots: Iterable[Tensor]) -> list[Tensor]:
    """Append the vector-Jacobian product: from gradients of results, `seeds` (result -> gradient), to the gradients of the inputs
    `roots`, each in the root's dtype and in a tensor of its own."""
    roots = list(roots)
    forward = list(graph.ops)
    g = Gradients(graph)
    g.needs = reachable(forward, roots)
    for y, dy in seeds.items():
        g._hold(y, dy)
    for op in reversed([op for op in forward if not op.passes_gradient]):
        douts = {name: g.take(t) for name, t in op.outputs.items()}
        if any(d is not None for d in douts.values()):
            op.gradient(g, **douts)
            g.release(douts.values())
    results: list[Tensor] = []
    for root in roots:
        grad = g.take(root)
        if grad is None:
            raise ValueError(f"no result depends on {root.name} in a way that has a gradient")
        if grad.dtype != root.dtype or grad in seeds.values() or grad in results:  # a tensor of its own: copied by a cast
            # Kernels may leave out an output that is an activation of a weight's shape, such as the bias gradient of a norm
            # without bias. This one is read, by the cast, so it must not count as such.
            grad.role = "output"
            grad = graph.apply(Cast, x=grad, dtype=root.dtype).y
        results.append(grad)
    return results


def _recompute_segment(graph: Graph, g: Gradients, ops: list[Op]) -> dict[Op, Op]:
    """Append copies of a segment's ops on the segment's inputs; returns {op: copy}. Unread copies are eliminated later."""
    fresh: dict[Tensor, Tensor] = {}  # output of an op -> that of its copy
    copies: dict[Op, Op] = {}

    def recomputed(t: Tensor) -> Tensor:
        return t.on(fresh.get(t.base, t.base)) if isinstance(t, View) else fresh.get(t, t)

    for op in ops:
        operands = {name: recomputed(t) for name, t in op.inputs.items()}
        with graph.segment(op.segment):
            copy = graph.apply(type(op), **operands, **op.attrs)
        copy.recomputed = True
        copies[op] = copy
        for name, t in op.outputs.items():
            fresh[t] = copy.outputs[name]
            g.origin[copy.outputs[name]] = g.key(t)
    return copies
