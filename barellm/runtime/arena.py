"""A session over one arena, wherever its bytes lie: names, inputs, sizes, reads and writes."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from barellm import environment
from barellm.program import dtypes, planner, scalars
from barellm.program.builder import Program
from barellm.program.tensor import Dim, Tensor
from barellm.runtime import indices, poison


class ArenaSession(ABC):
    """Base of sessions that keep all tensors at their planned addresses; a `runtime.session.Session`.

    A backend sets `_starts`, what begins a run of each program that has anything to do, and `_inputs` by `_input_rooms`; and it
    says how bytes of the arena are read and set."""

    piece = 0

    def __init__(self, programs: Mapping[str, Program], plan: planner.Plan) -> None:
        """Tables by program: scalars it needs, limits of sizes, inputs. Memory, `_starts` and `_inputs` are the backend's."""
        self.programs, self.plan = programs, plan
        self.tensors: dict[str, Tensor] = dict(next(iter(programs.values())).store.tensors)
        self.guards: poison.Guards | None = None  # in debug mode
        self._block = ScalarBlock()
        environment.check()
        self._defaults = scalars.defaults()
        self.default_scalars: dict[str, Any] = {}
        self._needed = {name: needed_scalars(p) for name, p in programs.items()}
        self._indices = indices.index_limits(programs.values())
        self._limits = {name: limits_of(p) for name, p in programs.items()}
        self._staged: dict[str, np.ndarray] = {}
        self._starts: dict[str, Callable[[], None]] = {}
        self._inputs: dict[str, dict[str, tuple[np.ndarray, int, list[int]]]] = {}
        inputs = sorted((pair for p in programs for pair in self._inputs_of(p).items()), key=lambda pair: pair[1].size)
        self._input_form = {name: (dtypes.numpy_dtype(t.dtype), t.size) for name, t in inputs}  # of the largest with that name
        self._last = ""

    @abstractmethod
    def _get(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the arena, uint8: the memory itself, or a copy."""

    @abstractmethod
    def _set(self, start: int, data: np.ndarray) -> None:
        """Set bytes of the arena from `start`; `data` is contiguous, of any dtype."""

    @abstractmethod
    def _fill(self, start: int, stop: int, byte: int) -> None:
        """Set bytes [start, stop) of the arena to one value."""

    def _inputs_of(self, program: str) -> dict[str, Tensor]:
        return {name: t for name, t in self.programs[program].named.items() if t.role == "input" and t in self.plan.offsets}

    def _input_rooms(self, room: Callable[[Tensor], np.ndarray]) -> dict[str, dict[str, tuple[np.ndarray, int, list[int]]]]:
        """For each program and input: (flat destination array from `room(t)`, elements per unit of the dynamic sizes, indices of
        these sizes' scalars). Precomputed, so that a warm step makes few Python calls."""
        return {
            program: {
                name: (room(t), t.width, [scalars.SCALARS[d.name].index for d in t.dims])
                for name, t in self._inputs_of(program).items()
            }
            for program in self.programs
        }

    def run(self, program: str, **values: Any) -> None:
        """Run a program once with these run-time scalars. Of the others, pos, accumulate, seed and sample are 0, sizes keep their
        values, and every other one that the program reads must be given. Inputs are those written last. ValueError for unknown or
        missing names, for sizes beyond the plan or other than the inputs', and for an input never written."""
        block = self._block
        values = {**self.default_scalars, **values} if self.default_scalars else values
        scalars.check_names(program, self.programs, values)
        if not self._needed[program] <= values.keys():
            lacks = ", ".join(sorted(self._needed[program] - values.keys()))
            raise ValueError(f"run of {program!r} lacks the scalars {lacks}")
        for name, value in (self._defaults | values).items():
            row = scalars.SCALARS[name]
            (block.ints if row.kind == "i64" else block.floats)[row.index] = value
        for name, largest in self._limits[program].items():
            if not 1 <= (size := block.ints[scalars.SCALARS[name].index]) <= largest:
                raise ValueError(f"{name} is {size}, planned for 1 to {largest}")
        if self.guards:
            self.guards.prepare(program)
        for name, (view, size, dims) in self._inputs[program].items():
            array = self._staged.get(name)
            if array is None:
                raise ValueError(f"{program} reads the input {name!r}, which was never written")
            for index in dims:
                size *= block.ints[index]
            if array.size != size:
                raise ValueError(f"{name} has shape {array.shape}, a run of these sizes takes {size} elements")
            view[:size] = array.reshape(-1)
        self._last = program
        if start := self._starts.get(program):
            start()
        if self.guards:
            self.guards.check(program)

    def synchronize(self) -> None:
        """Wait until every run has ended: at once where runs return when they have."""
        return

    def _find(self, name: str) -> Tensor:
        """A persistent tensor, or an input or output of the program that ran last, or of any."""
        if name in self.tensors:
            return self.tensors[name]
        for program in (self._last, *self.programs):
            if program and name in self.programs[program].named:
                return self.programs[program].named[name]
        raise KeyError(f"no tensor is named {name!r}")

    def stored(self, t: Tensor, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """The tensor as it lies in memory, dense for `shape` (as planned), a copy or the memory itself. Of a format with planes,
        which only persistent tensors have, the bytes."""
        shape = tuple(int(n) for n in t.shape) if shape is None else shape
        if dtypes.FORMATS[t.dtype].planes:
            return self._get(self.plan.offsets[t], self.plan.offsets[t] + t.nbytes)
        dtype, start = dtypes.numpy_dtype(t.dtype), self.plan.offsets[t]
        return self._get(start, start + prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def _rows(self, t: Tensor, lo: int, hi: int, plane: int = 0) -> np.ndarray:
        """Leading rows of a persistent tensor as they lie in memory, flat, of one plane where it has two."""
        start, dtype = self._row(t, lo, plane)
        stop, _ = self._row(t, hi, plane)
        return self._get(start, stop).view(dtype)

    def _row(self, t: Tensor, row: int, plane: int) -> tuple[int, np.dtype]:
        """The place at which a leading row of a persistent tensor begins, and the dtype of what lies there."""
        if not 0 <= row <= t.shape[0]:
            raise IndexError(f"{t.name} has {t.shape[0]} rows, row {row} was asked for")
        f = dtypes.FORMATS[t.dtype]
        name = f.planes[plane] if f.planes else t.dtype
        skipped = dtypes.FORMATS[name].nbytes(row * (t.size // t.shape[0]))
        return self.plan.offsets[t] + f.start_of(plane, t.size) + skipped, dtypes.numpy_dtype(name)

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor by name. Inputs are dense for their actual batch and length, which may be below the planned; they are staged
        until a program that reads them runs."""
        if name in self.tensors:
            self.write_rows(name, 0, array)
            return
        if name not in self._input_form:
            raise KeyError(f"no input is named {name!r}")
        dtype, size = self._input_form[name]
        if name in self._indices:
            indices.check_indices(name, np.asarray(array), self._indices[name])  # before a large id wraps around
        array = np.array(array, dtype)  # a copy: the caller may go on to fill the same buffer
        if array.size > size:
            raise ValueError(f"{name} holds {size} elements, got shape {array.shape}")
        self._staged[name] = array

    def read(self, name: str) -> np.ndarray:
        """A copy; parameters and moments as fp32, activations at the last run's sizes."""
        t = self._find(name)
        if name in self.tensors:
            return self.read_rows(name, 0, int(t.shape[0]))
        sizes = (int(self._block.ints[scalars.SCALARS[n.name].index]) if isinstance(n, Dim) else n for n in t.shape)
        return dtypes.decode([self.stored(t, tuple(sizes))], t.dtype)

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Leading rows [lo, hi) of a persistent tensor; parameters and moments as fp32."""
        t = self.tensors[name]
        planes = [self._rows(t, lo, hi, plane) for plane in range(len(dtypes.FORMATS[t.dtype].planes) or 1)]
        return dtypes.decode(planes, t.dtype).reshape(-1, *t.shape[1:])

    def write_rows(self, name: str, lo: int, array: np.ndarray) -> None:
        """Set leading rows from `lo`."""
        t = self.tensors[name]
        if np.shape(array)[1:] != tuple(t.shape[1:]) or lo + len(array) > t.shape[0]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, given {np.shape(array)} from row {lo}")
        planes = dtypes.FORMATS[t.dtype].planes or (t.dtype,)
        # A bf16 weight has the bits of the plane that GEMMs read of one of 32 bits, ties too.
        same = "bf16_i16" if (t.role, t.dtype) == ("parameter", "bf16") else t.dtype
        for plane, values in zip(range(len(planes)), dtypes.encode(array, same), strict=False):
            self._set(self._row(t, lo, plane)[0], np.ascontiguousarray(values))

    def write_constants(self) -> None:
        """Set the tensors that hold a value from the beginning. A backend calls it once the arena is there."""
        for t in self.tensors.values():
            if t.value is not None:
                self.write_rows(t.name, 0, t.value)

    def digest(self) -> str:
        """Hash of every parameter's and state's bytes: equal for any number of threads."""
        import xxhash

        h = xxhash.xxh3_64()
        for t in sorted((t for t in self.tensors.values() if t.role in ("parameter", "state")), key=lambda t: t.name):
            h.update(self._get(self.plan.offsets[t], self.plan.offsets[t] + t.nbytes).data)
        return h.hexdigest()


class ScalarBlock:
    """The run-time scalars, seen as integers and as floats."""

    def __init__(self) -> None:
        self.ints = np.zeros(scalars.MOST, np.int64)
        self.floats = self.ints.view(np.float64)
        self.address = self.ints.ctypes.data


def needed_scalars(program: Program) -> frozenset[str]:
    """Scalars that each run must name. Of an earlier run's learning rate nothing should be left; sizes are those of its inputs."""
    sizes = limits_of(program)
    return frozenset(s for s in program.scalars if s not in sizes and scalars.SCALARS[s].default is None)


def limits_of(program: Program) -> dict[str, int]:
    tensors = {t for op in program.ops for t in (*op.inputs.values(), *op.outputs.values())}
    dims = [dim for t in tensors for dim in t.dims]
    return {name: min(int(d) for d in dims if d.name == name) for name in dict.fromkeys(d.name for d in dims)}


def sizes_of(programs: Mapping[str, Program]) -> str:
    """The sizes that the user chose, for a message: batch and length of the first program that has them (training, if any)."""
    for p in sorted(programs.values(), key=lambda p: p is not programs.get("forward_backward")):
        for t in p.named.values():
            if t.dims:
                return " x ".join(f"{d.name} {int(d)}" for d in t.dims)
    return "the model"


def laps() -> Callable[[], float]:
    """A stopwatch: a function that returns the seconds since its last call."""
    last = time.perf_counter()

    def lap() -> float:
        nonlocal last
        before, last = last, time.perf_counter()
        return last - before

    return lap
