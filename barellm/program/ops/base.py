"""The contract of a primitive op: shape rule, reference, gradient rule, cost."""

from typing import Any, ClassVar, Protocol

import numpy as np

from barellm.program.dtypes import FORMATS
from barellm.program.tensor import Dim, Span, Tensor, View, describe

# All that files of ops need.
__all__ = ["Dim", "Gradients", "OfLogits", "Op", "Span", "Spec", "Tensor", "View", "check_rows", "describe", "operand_bytes"]

Spec = tuple[tuple[int, ...], str]  # shape, dtype


def check_rows(name: str, positions: Tensor | None, rows: Tensor) -> None:
    """ValueError unless there are no positions, or an i32 one for each row of `rows` (B, T, ...)."""
    if positions is not None and (positions.shape != rows.shape[:2] or positions.dtype != "i32"):
        raise ValueError(f"{name} expects positions (B, T) i32: {describe(positions=positions, rows=rows)}")


def operand_bytes(t: Tensor) -> int:
    """The number of bytes that a matmul reads of a tensor: of a split parameter those of its bf16 plane."""
    return FORMATS[FORMATS[t.dtype].operand].nbytes(t.size)


class Gradients(Protocol):
    """The interface through which a gradient rule writes; the reverse walk (`program.backward`) implements it. `loss_scale` is the
    state that multiplies the gradient of the loss, if there is one. `graph` is what ops are appended to."""

    graph: Any
    loss_scale: Tensor | None

    def apply(self, op_type: "type[Op]", /, **operands: Any) -> "Op":
        """Append an op whose outputs are no gradients: what the ops that `write` appends read."""
        ...

    def cast(self, grad: Tensor, dtype: str) -> Tensor:
        """`grad` as a matmul operand of `dtype`."""
        ...

    def alias(self, forward: Tensor, grad: Tensor) -> None:
        """The gradient of `forward` is `grad` unchanged: no copy, unless it meets another contribution."""

    def write(self, op_type: "type[Op]", targets: dict[str, Tensor], /, **operands: Any) -> None:
        """Append `op_type`; each of its outputs named in `targets` contributes to that forward tensor's gradient."""


class Op:
    """One step of a program. A subclass defines

    `infer(**inputs) -> {output: (shape, dtype)}`   the shape rule; ValueError with the offending shapes
    `reference(**arrays) -> {output: array}`         the meaning, in NumPy float64 on the arrays' actual sizes
    `gradient(g, **douts)`                            appends the backward ops (`douts`: one tensor or None per output)
    `flops()`                                         operations at the planned maximum sizes, or `flops_per_element`

    Inputs, outputs and attrs are read as attributes: `self.x`, `self.y`, `self.eps`; an absent optional one is None.
    `scalars` names the run-time scalars that the reference gets as further keywords. Targets and tokens stay integers.
    An output that is also an input (`inplace`) is the same tensor: optimizer state, caches."""

    name: str
    optional: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    inplace: ClassVar[dict[str, str]] = {}  # output -> the input whose tensor it overwrites
    flops_per_element: ClassVar[tuple[int, str]] = (0, "")  # operations for each element of an input or output
    rounded: tuple[str, ...] = ()  # inputs of which a split parameter gives its bf16 plane only
    product: ClassVar[bool] = False  # multiplies and adds operands of one dtype, at the peak of that dtype
    passes_gradient: ClassVar[bool] = False  # the gradient of its only output y is x's, unchanged (straight-through estimator)
    observer: ClassVar[bool] = False  # looks at what is there anyway: fusions are made as if it was not (`program.fusion`)

    def __init__(self, inputs: dict[str, Tensor | None], attrs: dict[str, Any]) -> None:
        self.inputs: dict[str, Tensor] = {k: t for k, t in inputs.items() if t is not None}
        self.attrs = attrs
        self.outputs: dict[str, Tensor] = {}
        # How each output is written: "store"; "add" to what is there; "start": store, or add where `accumulate` is set.
        self.modes: dict[str, str] = {}
        self.segment: str | None = None
        self.branch: str | None = None  # the residual branch that it belongs to (`Graph.branch`)
        # Whether its operations are the model's, and whether it is an optimizer's step over a parameter (`optim.rules`).
        self.counted, self.update = self.product, False
        self.recomputed = False  # a copy that the backward walk made: its FLOPs are not the model's

    def __getattr__(self, name: str) -> Any:
        for table in ("inputs", "outputs", "attrs"):
            values = self.__dict__.get(table, {})
            if name in values:
                return values[name]
        if name in type(self).optional or name in self.__dict__.get("optional", ()):
            return None
        raise AttributeError(f"{type(self).__name__} has no input, output or attribute {name!r}")

    @property
    def kernel(self) -> str:
        """The name under which backends register how this op is done."""
        return self.name

    def infer(self, **inputs: Any) -> dict[str, Spec]:
        raise NotImplementedError(self.name)

    def reference(self, **arrays: Any) -> dict[str, np.ndarray]:
        raise NotImplementedError(self.name)

    def gradient(self, g: Gradients, **douts: Tensor | None) -> None:
        raise ValueError(f"{self.name} has no gradient rule: it cannot be on the way from a parameter to the loss")

    def run(self, arrays: dict[str, np.ndarray], scalars: dict[str, Any], current: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The reference, added to `current`: what the outputs hold whose mode, in this run, is to add."""
        results = self.reference(**arrays, **{name: scalars[name] for name in self.scalars})
        for name, before in current.items():
            results[name] = before + results[name].reshape(before.shape)
        return results

    def index_limits(self) -> dict[str, tuple[int, int]]:
        """Least and most of what each integer input may hold, by its name."""
        return {}

    def flops(self) -> int:
        count, name = self.flops_per_element
        return count * getattr(self, name).size if count else 0

    def adds(self, output: str, scalars: dict[str, Any]) -> bool:
        """Whether this run adds to what `output` holds."""
        mode = self.modes[output]
        return mode == "add" or (mode == "start" and bool(scalars["accumulate"]))

    def bytes(self) -> int:
        """Fewest bytes that must move: every input read once (of a matrix that goes into a matmul the plane that it reads),
        every output written once (and read where added to)."""
        sizes = {t: operand_bytes(t) if k in self.rounded else t.nbytes for k, t in self.inputs.items()}
        read = sum(sizes.values())
        write = sum(t.nbytes for t in self.outputs.values())
        again = sum(t.nbytes for k, t in self.outputs.items() if self.modes.get(k) == "add")
        return read + write + again

    def __repr__(self) -> str:
        outs = ", ".join(t.name for t in self.outputs.values())
        return f"{outs} = {self.name}({', '.join(t.name for t in self.inputs.values())})"


class OfLogits(Op):
    """What ops of logits and targets share."""

    def check(self, name: str, logits: Tensor, targets: Tensor) -> None:
        """ValueError unless the targets have the shape of the logits, whose last axis has room for the vocabulary."""
        if logits.shape[:-1] != targets.shape or not 0 < self.valid_vocab <= logits.shape[-1]:
            found = describe(logits=logits, targets=targets)
            raise ValueError(f"{name} expects logits (B, T, V >= {self.valid_vocab}), targets (B, T): {found}")

    def index_limits(self) -> dict[str, tuple[int, int]]:
        return {"targets": (-1, self.valid_vocab - 1)}
