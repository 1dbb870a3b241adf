"""The list of ops that a program is, and the persistent tensors that programs share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from barellm.program.dtypes import ALIASES, PRECISIONS, Precision
from barellm.program.tensor import PERSISTENT, Role, Span, Tensor, View, describe

if TYPE_CHECKING:  # the families of ops import this file
    import numpy as np

    from barellm.program.ops.base import Op


class Store:
    """Persistent tensors by name, shared by the programs of one arena: parameters, gradients, states, caches, constants."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.positions = 0  # of the longest sequence of its programs; 0: as many as the model has
        self.branches: dict[Tensor, str | None] = {}  # parameter -> the branch whose scale its gradient carries; None: the loss's
        self.one_arithmetic = False  # a token has the same bits in a prompt and alone
        self.exact: set[Tensor] = set()  # parameters that some op reads as they are, not only as matmuls do
        self.trains: Callable[[str], bool] = lambda name: True  # whether the parameter of a name is trained; the others are frozen
        self.frozen_dtype: str | None = None  # of frozen matrices; None: as the program's precision says
        self.linears: dict[str, Tensor] = {}  # weights of linear layers, by name
        self.adapters: dict[str, Any] = {}  # of linear layers, by the names of their weights (`ops.gemm.low_rank.LowRank`)
        self.matrices: dict[str, Any] = {}  # frozen weights that are codes, by name (`assembly.quantized.Matrix`)

    def get(self, name: str, shape: tuple[int, ...], dtype: str, role: Role, **more: Any) -> Tensor:
        have = self.tensors.get(name)
        if have is None:
            have = self.tensors[name] = Tensor(name, shape, dtype, role, **more)
        elif (tuple(have.shape), have.dtype, have.role) != (tuple(shape), dtype, role):
            raise ValueError(f"{name} is declared twice: {have} {have.role} and {shape} {dtype} {role}")
        return have

    def of_role(self, role: Role) -> list[Tensor]:
        return [t for t in self.tensors.values() if t.role == role]

    @property
    def counts(self) -> tuple[int, int]:
        """How many parameters there are, and how many of them are trained."""
        given = [*self.of_role("parameter"), *(m.parameter for m in self.matrices.values() if not m.stays)]
        return sum(t.trained for t in given), sum(t.trained for t in self.trainable)

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters that training changes: all but the frozen ones."""
        return [t for t in self.tensors.values() if t.role == "parameter" and not t.frozen]


class Graph:
    """Ops in the order in which they run, over tensors of a store. Each call appends; nothing runs.

    `compute` names a row of `dtypes.PRECISIONS` ("fp32", "bf16", "fp16"), or is a Precision of your own."""

    def __init__(self, store: Store, *, compute: str | Precision = "fp32") -> None:
        """`compute`: the name of a precision in PRECISIONS ("fp32", "bf16", "fp16"), or a Precision. ValueError if unknown."""
        if isinstance(compute, str) and compute not in PRECISIONS:
            raise ValueError(f"compute dtype is {compute!r}, expected {', '.join(map(repr, PRECISIONS))}")
        self.store = store
        self.precision = PRECISIONS[compute] if isinstance(compute, str) else compute
        self.ops: list[Op] = []
        self.named: dict[str, Tensor] = {}  # inputs and outputs, which a session reads and writes by name
        self._names: dict[str, int] = {}
        self._segment: str | None = None
        self._branch: str | None = None
        self._streams = 0  # random ops so far: each draws from its own stream
        self.training = False  # whether adapters have their dropout

    @property
    def compute(self) -> str:
        """The dtype of matmul operands and of the activations between them."""
        return self.precision.operands

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "i32") -> Tensor:
        """What a session writes before a run, by this name."""
        self.named[name] = t = Tensor(name, shape, dtype, "input")
        return t

    def output(self, name: str, t: Tensor) -> Tensor:
        """Keep `t` until the program's end, readable as `name`."""
        if t.base is not t:
            raise ValueError(f"{t.name} is a view, which has no bytes of its own to keep: make {t.base.name} the output")
        t.role = "output"
        self.named[name] = t
        return t

    def parameter(
        self, name: str, shape: tuple[int, ...], *, std: float | None = None, bound: float | None = None,
        transposed: str = "", value: float = 0.0, valid_rows: int = 0, dtype: str | None = None, bf16: bool = False,
    ) -> Tensor:  # fmt: skip
        """Declare a parameter, or find it if another program has. Initialized with normals of deviation `std`, uniformly within
        +-`bound`, as the transpose of the parameter `transposed`, or with `value`. Matrices are stored in the precision's weight
        format, the rest in fp32, unless `dtype` names a format (`program.dtypes`). `bf16`: initial values and updates by AdamW or
        Adam are rounded to bf16, whatever the storage. Rows from `valid_rows` on are padding."""
        # The format: `dtype`, else of a frozen matrix the store's `frozen_dtype` where one was chosen, else the precision's.
        frozen = not self.store.trains(name)
        if dtype is None and frozen and len(shape) == 2:
            dtype = self.store.frozen_dtype
        dtype = dtype or (self.precision.weights if len(shape) == 2 else "fp32")
        dtype = ALIASES.get(dtype, dtype)
        # The beginning: the first of `std`, `bound` and `transposed` that is given, else `value`.
        init: tuple[str, float | str] = ("constant", value)
        if std is not None:
            init = ("normal", std)
        elif bound is not None:
            init = ("uniform", bound)
        elif transposed:
            init = ("transposed", transposed)
        options = {"valid_rows": valid_rows or int(shape[0]), "bf16": bf16, "frozen": frozen}  # valid_rows 0: all
        return self.store.get(name, shape, dtype, "parameter", init=init, **options)

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Its gradient, fp32, which lives in the store under `NAME.grad`; of a span of a parameter the same elements of it."""
        if isinstance(parameter, Span):
            return Span(self.gradient_of(parameter.base), parameter.first_element, parameter.size)
        return self.store.get(f"{parameter.name}.grad", parameter.shape, "fp32", "gradient")

    def state(self, name: str, shape: tuple[int, ...], dtype: str = "fp32") -> Tensor:
        return self.store.get(name, shape, dtype, "state")

    def cache(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor that keeps its values from run to run, such as the keys and values of earlier positions."""
        return self.store.get(name, shape, dtype, "cache")

    def constant(self, name: str, value: "np.ndarray", dtype: str = "fp32") -> Tensor:
        """A tensor that holds `value` from the beginning, on every backend, and that no op writes."""
        have = self.store.get(name, value.shape, dtype, "constant", value=value)
        if have.value is None or (have.value != value).any():
            raise ValueError(f"the constant {name} is declared twice, with different values")
        return have

    def split(self, x: Tensor, widths: tuple[int, ...] | int) -> list[View]:
        """Split the columns of x (..., C) into views of the given widths, or `widths` equal ones. Nothing is copied."""
        C = int(x.shape[-1])
        if isinstance(widths, int):
            if C % widths:
                raise ValueError(f"split expects columns that {widths} divides: {describe(x=x)}")
            widths = (C // widths,) * widths
        if sum(widths) != C:
            raise ValueError(f"split expects widths that add up to {C} columns: {widths}, {describe(x=x)}")
        firsts = [sum(widths[:i]) for i in range(len(widths))]
        return [View(x, first, width) for first, width in zip(firsts, widths, strict=True)]

    @contextmanager
    def segment(self, name: str | None) -> Iterator[None]:
        """Ops appended inside belong to the segment `name`: a unit for recompute, profiling and sharding."""
        before, self._segment = self._segment, name
        try:
            yield
        finally:
            self._segment = before

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Ops appended inside are a residual branch, from the norm of the stream up to what is added to it, called "SEGMENT.name".
        With `Precision.branch_scales` its gradient has a scale of its own, which follows overflows in its parameters' gradients."""
        self._branch = f"{self._segment}.{name}" if self._segment else name
        try:
            yield
        finally:
            self._branch = None

    def apply(self, op_type: "type[Op]", *, into: Mapping[str, tuple[Tensor, str]] | None = None, **operands: Any) -> "Op":
        """Append one op and return it. `operands`: its input tensors (None: absent), and everything else as attributes. `into`:
        outputs that go to existing tensors, with mode "store", "add" or "start"; the others get new tensors."""
        into = into or {}
        inputs = {k: v for k, v in operands.items() if v is None or isinstance(v, Tensor)}
        op = op_type(inputs, {k: v for k, v in operands.items() if k not in inputs})
        op.segment, op.branch = self._segment, self._branch
        try:
            inferred = op.infer(**op.inputs)
        except ValueError as error:
            for operand, t in op.inputs.items():
                if t.role == "parameter":
                    error.add_note(f"{operand} is the parameter {t.base.name}")
            raise
        for name, (shape, dtype) in inferred.items():
            if name in into:
                target, mode = into[name]
                assert target.size == Tensor("", shape, dtype, "scratch").size, (op_type.name, name, target, shape)
            elif name in op.inplace:
                target, mode = op.inputs[op.inplace[name]], "store"
            else:
                target, mode = self.activation(f"{op.name}.{name}", shape, dtype), "store"
            op.outputs[name] = target
            op.modes[name] = mode
        # Parameters of which this op reads all bits, but for one that it updates: that read is the optimizer's own.
        changed = {t.base for t in op.outputs.values()}
        read = {t.base for name, t in op.inputs.items() if name not in op.rounded}
        self.store.exact |= {t for t in read - changed if t.role == "parameter"}
        self.ops.append(op)
        return op

    def activation(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of the workspace, called "segment.name", or "segment.name.2" and so on where that is taken."""
        own = f"{self._segment}." if self._segment else ""
        full = name if name.startswith(own) else own + name
        count = self._names[full] = self._names.get(full, 0) + 1
        return Tensor(full if count == 1 else f"{full}.{count}", shape, dtype, "activation")

    def eliminate_dead(self) -> None:
        """Drop ops whose outputs are never read, such as the last add of a recomputed segment."""
        live: set[Tensor] = set()
        kept: list[Op] = []
        for op in reversed(self.ops):
            outputs = [t.base for t in op.outputs.values()]
            if any(t in live or t.role in PERSISTENT or t.role == "output" for t in outputs):
                kept.append(op)
                live |= {t.base for t in op.inputs.values()}
        self.ops = kept[::-1]

    @property
    def flops(self) -> int:
        """Model FLOPs at the planned maximum sizes: matmuls with weights, causal attention, no recompute."""
        return sum(op.flops() for op in self.ops if op.counted and not op.recomputed)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the run-time scalars that a run is given, sorted."""
        names = {name for op in self.ops for name in op.scalars}
        names |= {"accumulate" for op in self.ops if "start" in op.modes.values()}
        tensors = {t for op in self.ops for t in (*op.inputs.values(), *op.outputs.values())}
        return tuple(sorted(names | {dim.name for t in tensors for dim in t.dims}))

    def random_stream(self, rate: float) -> int:
        """The number of the random stream of a dropout with this rate: each random op draws from its own."""
        self._streams += rate > 0
        return self._streams
