"""The reference backend: a NumPy interpreter of the ops' references. Slow; the oracle for every other backend.

Plain, it computes and keeps everything in one float dtype. With `storage` every tensor lies in a planned arena in the dtype
that its program gives it, so results are rounded where a real backend rounds them; with `poison` bytes become NaN when
their owner dies, so a wrong lifetime or a wrong address changes the results."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from barellm.program import dtypes, fusion, planner
from barellm.program.builder import Program
from barellm.program.ops.base import Op
from barellm.program.planner import Plan
from barellm.program.scalars import check_names, defaults
from barellm.program.tensor import PERSISTENT, Dim, Span, Tensor
from barellm.runtime.indices import check_indices, index_limits

POISON = 0xFF  # as a byte pattern NaN in every float dtype, -1 in integers


class Memory(Protocol):
    def read(self, t: Tensor, shape: tuple[int, ...], *, rounded: bool = False) -> np.ndarray: ...
    def write(self, t: Tensor, values: np.ndarray) -> None: ...

    def room(self, t: Tensor, shape: tuple[int, ...]) -> None:
        """Make sure that there is something to write columns into."""


class Values:
    """Every tensor as an array of one float dtype (or int32); nothing is rounded to its storage dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.of: dict[Tensor, np.ndarray] = {}

    def read(self, t: Tensor, shape: tuple[int, ...], *, rounded: bool = False) -> np.ndarray:
        if t not in self.of and t.role in PERSISTENT:
            kind = np.int32 if t.dtype == "i32" else self.dtype
            self.of[t] = np.zeros(shape, kind) if t.value is None else t.value.astype(kind)
        return self.of[t].reshape(shape)

    def write(self, t: Tensor, values: np.ndarray) -> None:
        self.of[t] = np.array(values, dtype=np.int32 if t.dtype == "i32" else self.dtype)

    def room(self, t: Tensor, shape: tuple[int, ...]) -> None:
        if t not in self.of or self.of[t].size != np.prod(shape, dtype=int):
            self.of[t] = np.full(shape, np.nan, self.dtype)


class Arena:
    """Every tensor at its planned address in its storage dtype; reads give `dtype`, in which the references compute."""

    def __init__(self, plan: Plan, dtype: str) -> None:
        self.plan = plan
        self.dtype = np.dtype(dtype)
        self.bytes = np.zeros(plan.arena_bytes, dtype=np.uint8)

    def read(self, t: Tensor, shape: tuple[int, ...], *, rounded: bool = False) -> np.ndarray:
        planes = self._planes(t, int(np.prod(shape)))
        values = planes[0] if rounded and dtypes.FORMATS[t.dtype].planes else dtypes.decode(planes, t.dtype)
        return values.reshape(shape).astype(np.int32 if t.dtype == "i32" else self.dtype)

    def write(self, t: Tensor, values: np.ndarray) -> None:
        values = np.asarray(values).reshape(-1)
        assert values.size <= t.size, (t, values.shape)
        for plane, half in zip(self._planes(t, values.size), dtypes.encode(values, t.dtype), strict=True):
            plane[:] = half

    def room(self, t: Tensor, shape: tuple[int, ...]) -> None:
        """It has its bytes already."""

    def poison(self, t: Tensor) -> None:
        self._at(t, 0, t.nbytes, np.dtype(np.uint8))[:] = POISON

    def _planes(self, t: Tensor, size: int) -> list[np.ndarray]:
        """The first `size` elements as they lie in memory, an array for each plane."""
        f = dtypes.FORMATS[t.dtype]
        names = enumerate(f.planes or (t.dtype,))
        return [self._at(t, f.start_of(i, t.size), dtypes.FORMATS[n].nbytes(size), dtypes.numpy_dtype(n)) for i, n in names]

    def _at(self, t: Tensor, skip: int, nbytes: int, dtype: np.dtype) -> np.ndarray:
        start = self.plan.offsets[t] + skip
        return self.bytes[start : start + nbytes].view(dtype)


class ReferenceSession:
    """A `runtime.session.Session`. `dtype`: what the references compute in; `table`: fusions to apply first;
    `plan`: instead of the planner's own (tests of the planner)."""

    piece = 0

    def __init__(
        self, programs: Mapping[str, Program], *, dtype: str = "float64", storage: bool = False, poison: bool = False,
        table: Iterable[fusion.Fusion] = (), plan: Plan | None = None,
    ) -> None:  # fmt: skip
        """Parameters as in the class's docstring; `storage` and `poison` as in the module's."""
        self.programs = dict(programs)
        self.store = next(iter(self.programs.values())).store
        table = list(table)
        self.ops: dict[str, list[Op]] = {name: fusion.fuse(p.ops, table) for name, p in self.programs.items()}
        self.tensors = dict(self.store.tensors)
        self.storage = storage or poison
        self.memory: Memory = Values(dtype)
        if self.storage:
            self.memory = Arena(plan or planner.plan(self.ops, self.store), dtype)
        for t in self.store.of_role("constant"):
            self.memory.write(t, t.value)  # pyright: ignore[reportArgumentType]
        self.poison = poison
        self.default_scalars: dict[str, Any] = {}
        self._inputs: dict[str, np.ndarray] = {}
        self._indices = index_limits(programs.values())
        self._last: dict[str, tuple[Tensor, tuple[int, ...]]] = {}

    def run(self, program: str, **scalars: Any) -> None:
        """One run of a program. `batch` and `seq` default to the planned sizes, pos, accumulate, seed and sample to 0."""
        scalars = self.default_scalars | scalars
        check_names(program, self.programs, scalars)
        p, ops = self.programs[program], self.ops[program]
        tensors = dict.fromkeys(t for op in ops for t in (*op.inputs.values(), *op.outputs.values()))
        tensors |= dict.fromkeys(t.base for t in tensors)
        scalars = defaults() | {dim.name: int(dim) for t in tensors for dim in t.dims} | scalars
        if missing := set(p.scalars) - set(scalars):
            raise ValueError(f"run of {program!r} lacks the scalars {sorted(missing)}")
        shapes = {t: _actual(t, scalars) for t in tensors}
        memory = self.memory
        deaths: dict[int, list[Tensor]] = {}
        if self.poison:
            assert isinstance(memory, Arena)
            memory.bytes[memory.plan.persistent_bytes :] = POISON
            for t, (_, last) in memory.plan.lifetimes[program].items():
                deaths.setdefault(last, []).append(t)
        for name, t in p.named.items():
            if t.role == "input" and t in shapes:
                if name not in self._inputs:
                    raise ValueError(f"{program} reads the input {name!r}, which was never written")
                memory.write(t, self._inputs[name].reshape(shapes[t]))
        for i, op in enumerate(ops):
            arrays = {k: self._read(t, shapes, rounded=k in op.rounded) for k, t in op.inputs.items()}
            current = {k: self._read(t, shapes) for k, t in op.outputs.items() if op.adds(k, scalars)}
            for k, result in op.run(arrays, scalars, current).items():
                self._write(op.outputs[k], result, shapes)
            for t in deaths.get(i, ()):
                if t.role != "output" or i + 1 < len(ops):
                    memory.poison(t)  # pyright: ignore[reportAttributeAccessIssue]
        self._last |= {name: (t, shapes[t]) for name, t in p.named.items() if t in shapes}

    def _read(self, t: Tensor, shapes: Mapping[Tensor, tuple[int, ...]], *, rounded: bool = False) -> np.ndarray:
        whole = self.memory.read(t.base, shapes[t.base], rounded=rounded)
        if isinstance(t, Span):
            return whole.reshape(-1)[t.first_element : t.first_element + t.size].copy()
        return whole if t.base is t else whole[..., t.first_column : t.first_column + shapes[t][-1]].copy()

    def _write(self, t: Tensor, values: np.ndarray, shapes: Mapping[Tensor, tuple[int, ...]]) -> None:
        """Write an op's result; a view goes into its base's columns."""
        if t.base is not t:
            self.memory.room(t.base, shapes[t.base])
            whole = self.memory.read(t.base, shapes[t.base]).copy()
            if isinstance(t, Span):
                whole.reshape(-1)[t.first_element : t.first_element + t.size] = values.reshape(-1)
            else:
                whole[..., t.first_column : t.first_column + shapes[t][-1]] = values.reshape(shapes[t])
            values = whole
        self.memory.write(t.base, values)

    def write(self, name: str, values: np.ndarray) -> None:
        """Any input, which takes effect in the next runs, or persistent tensor."""
        if name in self.tensors:
            t = self.tensors[name]
            shape = tuple(int(n) for n in t.shape)
            if np.shape(values) != shape:
                raise ValueError(f"{t.name} has shape {shape}, given {np.shape(values)}")
            self.memory.write(t, values)
        elif any(name in p.named and p.named[name].role == "input" for p in self.programs.values()):
            if name in self._indices:
                check_indices(name, np.asarray(values), self._indices[name])
            self._inputs[name] = np.array(values)
        else:
            raise KeyError(f"no program has an input or persistent tensor {name!r}")

    def read(self, name: str) -> np.ndarray:
        """A persistent tensor, or an output of the latest run that made it."""
        t, shape = (self.tensors[name], self.tensors[name].shape) if name in self.tensors else self._last[name]
        values = self.memory.read(t, tuple(int(n) for n in shape))
        return values.astype(np.float32) if self.storage and t.dtype != "i32" else values.copy()

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        return self.read(name)[lo:hi]

    def write_rows(self, name: str, lo: int, values: np.ndarray) -> None:
        whole = self.read(name)
        whole[lo : lo + len(values)] = values
        self.write(name, whole)


def open(programs: Mapping[str, Program], **options: Any) -> ReferenceSession:
    """A session of `programs`."""
    return ReferenceSession(programs, **options)


def _actual(t: Tensor, scalars: Mapping[str, Any]) -> tuple[int, ...]:
    for dim in t.dims:
        if not 1 <= scalars[dim.name] <= dim:
            raise ValueError(f"{dim.name} is {scalars[dim.name]}, planned for 1 to {int(dim)}")
    return tuple(int(scalars[n.name]) if isinstance(n, Dim) else int(n) for n in t.shape)
