"""From programs to a running session: lower, plan, compile, link into tables, run.

A program becomes a table of records {function, arguments, barrier after, counters}. All threads walk the table; a barrier stands
only where a call touches bytes that a call since the last barrier has written, or writes bytes that one has read.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from barellm.cpu import compilers, jit, poison
from barellm.cpu.fuse import FUSIONS
from barellm.cpu.isa import ISA, host
from barellm.cpu.kernel import REGISTRY, Call, Lowering, Region, Spec
from barellm.cpu.lang.sync import RECORD_NBYTES, STAMPS
from barellm.cpu.threads import Pool, allowed_cpus, thread_count
from barellm.program.builder import Program
from barellm.program.fusion import fuse
from barellm.program.ops.base import Op
from barellm.program.planner import Plan, plan
from barellm.program.tensor import Dim, Tensor
from barellm.runtime import scalars
from barellm.runtime.memory import check_fits
from barellm.runtime.storage import dtype_of, from_memory, join_split, split_fp32, to_memory

HUGE = 2 << 20


class Lowered:
    """A program's ops after fusion, each with its calls and scratch."""

    def __init__(self, program: Program, isa: ISA, threads: int) -> None:
        import barellm.cpu.kernels  # noqa: F401  (fills the registry)

        self.ops = fuse(program.ops, FUSIONS)
        self.of: dict[Op, Lowering] = {}
        for op in self.ops:
            if op.name not in REGISTRY:
                raise ValueError(f"the cpu backend has no kernel for {op.name}")
            self.of[op] = c = Lowering(op, isa, threads)
            REGISTRY[op.name](c)

    @property
    def calls(self) -> list[Call]:
        return [call for op in self.ops for call in self.of[op].calls]

    @property
    def private_bytes(self) -> int:
        return max((c.private_bytes for c in self.of.values()), default=0)


def barriers(calls: list[Call], address: Any) -> list[bool]:
    """For each call, whether all threads must meet after it. `address(region) -> (start, stop)` in the arena."""
    after = [False] * len(calls)
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []

    def touches(spans: Iterable[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
        return any(a < d and c < b for a, b in spans for c, d in others)

    for i, call in enumerate(calls):
        r, w = [address(x) for x in call.reads], [address(x) for x in call.writes]
        if touches(r, writes) or touches(w, writes) or touches(w, reads):
            after[i - 1] = True
            reads, writes = [], []
        reads += r
        writes += w
    if after:
        after[-1] = True
    return after


@dataclass(frozen=True)
class LoweredPrograms:
    """Programs as calls, with an address for every byte; nothing is allocated. `private`: each thread's own scratch."""

    isa: ISA
    threads: int
    lowered: dict[str, Lowered]
    plan: Plan
    calls: dict[str, list[Call]]
    private: Tensor

    @property
    def specs(self) -> dict[Spec, str]:
        """Every specialisation that must be compiled, with the op that needs it first."""
        found: dict[Spec, str] = {}
        for calls in self.calls.values():
            for call in calls:
                found.setdefault(call.spec, call.op.name)
        return found


def lower_and_plan(
    programs: dict[str, Program], *, threads: int | None = None, isa: ISA | None = None
) -> LoweredPrograms:
    """What a session of `programs` allocates, to the byte, and what it runs."""
    isa, threads = isa or host(), threads or thread_count()
    lowered = {name: Lowered(p, isa, threads) for name, p in programs.items()}
    scratch = {op: c.scratch_tensors for low in lowered.values() for op, c in low.of.items()}
    store = next(iter(programs.values())).store
    # Each thread's own scratch is on the map like everything else.
    private_bytes = -(-max(max(low.private_bytes for low in lowered.values()), 64) // 4096) * 4096
    private = store.get("threads.private", (threads, private_bytes // 2), "bf16", "cache")
    made = plan(
        {name: low.ops for name, low in lowered.items()},
        store,
        scratch=lambda op: scratch[op],
        guard=poison.GUARD if poison.requested() else 0,
    )
    calls = {name: low.calls for name, low in lowered.items()}
    if poison.requested():
        calls = {
            name: poison.with_poison(low.ops, {op: low.of[op].calls for op in low.ops}, made, name)
            for name, low in lowered.items()
        }
    return LoweredPrograms(isa, threads, lowered, made, calls, private)


class CpuSession:
    """Programs over one arena, compiled and ready. A `runtime.session.Session`."""

    def __init__(self, programs: dict[str, Program], *, threads: int | None = None, isa: ISA | None = None) -> None:
        lap = _laps()
        built = lower_and_plan(programs, threads=threads, isa=isa)
        check_fits(built.plan, what=_sizes(programs))
        self.programs, self.isa, self.threads = programs, built.isa, built.threads
        self.lowered, self.plan, self.calls, self.specs = built.lowered, built.plan, built.calls, built.specs
        store, private = next(iter(programs.values())).store, built.private
        self.private_bytes = private.nbytes // self.threads
        self.tensors: dict[str, Tensor] = dict(store.tensors)
        self.seconds = {"plan": lap()}  # of opening, by stage
        self._map_arena()
        self.seconds["map"] = lap()
        self._compile()
        self.seconds["compile"] = lap()
        self._link()
        self._block = _Block()
        self._staged: dict[str, np.ndarray] = {}
        # Where a run puts its inputs, and the sizes it may have; made once, so that a warm step makes few Python calls.
        self._inputs = {
            name: {
                n: (self._flat(t), t.width, [scalars.OFFSET[d.name] // 8 for d in t.dims])
                for n, t in p.named.items()
                if t.role == "input" and t in self.plan.offsets
            }
            for name, p in programs.items()
        }
        self._limits = {name: _limits(p) for name, p in programs.items()}
        largest = sorted(
            ((n, view[0]) for views in self._inputs.values() for n, view in views.items()),
            key=lambda item: item[1].size,
        )
        self._input_form = {n: (v.dtype, v.size) for n, v in largest}
        self._last = ""
        self._stamps: dict[str, int] = {}
        self.pool = Pool(self.threads, self.isa)
        memory = (self.arena, self.code, self._keep, self._block)
        self.pool.bind(self._block.address, self.base + self.plan.offsets[private], self.private_bytes, memory=memory)
        # A session that is dropped without close() must not leave threads behind; at exit nobody waits for a step.
        weakref.finalize(self, self.pool.release).atexit = False

    # --- building ---

    def _map_arena(self) -> None:
        # Private: shared anonymous memory gets no huge pages, and its first touch took 0.4 million page faults instead of 1000.
        self._mmap = mmap.mmap(-1, self.plan.arena_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(self._mmap, np.uint8)
        skip = -raw.ctypes.data % HUGE
        self.arena = raw[skip : skip + self.plan.arena_bytes]
        self.base = self.arena.ctypes.data
        self.guards = poison.Guards(self.arena, self.plan) if poison.requested() else None

    def _compile(self) -> None:
        emitters = {spec.key: partial(spec.ir, self.isa) for spec in self.specs}
        objects = compilers.cached_objects(emitters, self.isa, processes=min(self.threads, len(allowed_cpus())))
        self.code = jit.Library(objects, self.isa)

    def _address(self, region: Region) -> tuple[int, int]:
        start = self.plan.offsets[region.tensor]
        return start + region.start, start + region.stop

    def _link(self) -> None:
        self._tables: dict[str, tuple[int, int]] = {}
        self.records: dict[str, np.ndarray] = {}  # program -> its table, (calls, 8) int64
        self._keep: list[Any] = []
        for name, calls in self.calls.items():
            after = barriers(calls, self._address)
            table = np.zeros((len(calls) + 1) * RECORD_NBYTES // 8, np.int64)
            skip = -table.ctypes.data % RECORD_NBYTES // 8
            records = table[skip : skip + len(calls) * RECORD_NBYTES // 8].reshape(len(calls), -1)
            args = np.zeros(sum(len(c.args) for c in calls) + 1, np.int64)
            at = 0
            for i, call in enumerate(calls):
                records[i, :3] = (self.code.address(call.spec.symbol()), args.ctypes.data + 8 * at, after[i])
                for a in call.args:
                    args[at] = a if isinstance(a, int) else self.base + self._address(a)[0]
                    at += 1
            self._tables[name], self.records[name] = (records.ctypes.data, len(calls)), records
            self._keep += [table, args]

    # --- running ---

    def run(self, program: str, **values: float) -> None:
        """One pass over a program with these run-time scalars. Of the others pos, accumulate, seed and sample are 0, the rest keep
        their values. Inputs are those written last. ValueError for sizes beyond the plan's, or not those of the inputs."""
        block = self._block
        for name, value in (scalars.DEFAULTS | values).items():
            (block.ints if scalars.SCALARS[name] == "i64" else block.floats)[scalars.OFFSET[name] // 8] = value
        for name, most in self._limits[program].items():
            if not 1 <= block.ints[scalars.OFFSET[name] // 8] <= most:
                raise ValueError(f"{name} is {block.ints[scalars.OFFSET[name] // 8]}, planned for 1 to {most}")
        if self.guards:
            self.guards.prepare(program)
        for name, (view, size, dims) in self._inputs[program].items():
            array = self._staged[name]
            for at in dims:
                size *= block.ints[at]
            if array.size != size:
                raise ValueError(f"{name} has shape {array.shape}, a run of these sizes takes {size} elements")
            view[:size] = array.reshape(-1)
        table, entries = self._tables[program]
        self._last = program
        if entries:
            self.pool.run(table, entries, self._stamps.get(program, 0))
        if self.guards:
            self.guards.check(program)

    def new_stamps(self) -> dict[str, np.ndarray]:
        """Room for a trace: program -> (threads, calls, 3) int64, `pool.now()` before a call, after it, and after its barrier."""
        made = {name: np.full((self.threads, len(c), STAMPS), -1, np.int64) for name, c in self.calls.items()}
        self._keep += made.values()
        return made

    def trace(self, stamps: dict[str, np.ndarray] | None) -> None:
        """From now on every run writes its stamps there, over those of the program's run before. None: no more tracing."""
        self._stamps = {name: room.ctypes.data for name, room in (stamps or {}).items()}

    def close(self) -> None:
        """Stop the threads. The arena stays readable."""
        self.pool.close()

    def digest(self) -> str:
        """Hash of every parameter's and state's bytes: equal for any number of threads."""
        import xxhash

        h = xxhash.xxh3_64()
        for t in sorted((t for t in self.tensors.values() if t.role in ("parameter", "state")), key=lambda t: t.name):
            h.update(self._view(t).data)
        return h.hexdigest()

    # --- data ---

    def _find(self, name: str) -> Tensor:
        """A persistent tensor, or an input or output of the program that ran last, or of any."""
        if name in self.tensors:
            return self.tensors[name]
        for program in (self._last, *self.programs):
            if program and name in self.programs[program].named:
                return self.programs[program].named[name]
        raise KeyError(f"no tensor is named {name!r}")

    def _view(self, t: Tensor) -> np.ndarray:
        """The tensor's memory at its planned shape; a split parameter as its two planes of 16 bits, (2, *shape)."""
        start = self.plan.offsets[t]
        raw = self.arena[start : start + t.nbytes]
        if t.dtype == "split":
            return raw.view(np.int16).reshape(2, *(int(n) for n in t.shape))
        return raw.view(dtype_of(t.dtype)).reshape([int(n) for n in t.shape])

    def _flat(self, t: Tensor) -> np.ndarray:
        return self._view(t).reshape(-1)

    def write(self, name: str, array: np.ndarray) -> None:
        """Set a tensor by name. An input is dense for its own batch and length, which may be below the planned ones; it is
        kept here until a program that reads it runs."""
        if name in self.tensors:
            self.write_rows(name, 0, array)
            return
        if name not in self._input_form:
            raise KeyError(f"no input is named {name!r}")
        dtype, size = self._input_form[name]
        array = np.array(array, dtype)  # a copy: the caller may go on to fill the same buffer
        if array.size > size:
            raise ValueError(f"{name} holds {size} elements, got shape {array.shape}")
        self._staged[name] = array

    def read(self, name: str) -> np.ndarray:
        """A copy; parameters and moments as fp32, activations at the last run's sizes."""
        t = self._find(name)
        if t.dtype == "split":
            return self.read_rows(name, 0, int(t.shape[0]))
        shape = [int(self._block.ints[scalars.OFFSET[n.name] // 8]) if isinstance(n, Dim) else n for n in t.shape]
        return from_memory(self._flat(t)[: prod(shape)].reshape(shape), t.dtype)

    def read_rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Leading rows [lo, hi) of a persistent tensor; parameters and moments as fp32."""
        t = self.tensors[name]
        view = self._view(t)
        return join_split(view[0, lo:hi], view[1, lo:hi]) if t.dtype == "split" else from_memory(view[lo:hi], t.dtype)

    def write_rows(self, name: str, lo: int, array: np.ndarray) -> None:
        """Set leading rows from `lo`."""
        t = self.tensors[name]
        view = self._view(t)
        if t.dtype == "split":
            view[0, lo : lo + len(array)], view[1, lo : lo + len(array)] = split_fp32(np.asarray(array, np.float32))
        else:
            view[lo : lo + len(array)] = to_memory(array, t.dtype)


def _laps() -> Callable[[], float]:
    """A function that returns the seconds since it was last called."""
    last = time.perf_counter()

    def lap() -> float:
        nonlocal last
        before, last = last, time.perf_counter()
        return last - before

    return lap


def _limits(program: Program) -> dict[str, int]:
    """The most that the plan has room for, by scalar."""
    tensors = {t for op in program.ops for t in (*op.inputs.values(), *op.outputs.values())}
    dims = [dim for t in tensors for dim in t.dims]
    return {name: min(int(d) for d in dims if d.name == name) for name in dict.fromkeys(d.name for d in dims)}


def _sizes(programs: dict[str, Program]) -> str:
    """What the user chose, for a message: batch and length of the first program that has them (training, if any)."""
    for p in sorted(programs.values(), key=lambda p: p is not programs.get("micro")):
        for t in p.named.values():
            if t.dims:
                return " x ".join(f"{d.name} {int(d)}" for d in t.dims)
    return "the model"


class _Block:
    """The run-time scalars, seen as integers and as floats."""

    def __init__(self) -> None:
        self.ints = np.zeros(scalars.NBYTES // 8, np.int64)
        self.floats = self.ints.view(np.float64)
        self.address = self.ints.ctypes.data
