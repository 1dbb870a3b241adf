"""One block of a Hopper kernel in every order that the hardware may choose. Its roles' steps come from gluon_stub.trace.

What is modelled: mbarriers (a phase ends when its arrivals have come and as many bytes as were expected; a wait for a parity passes
when the current phase has the other one); copies into shared memory that arrive at any later time, in any order; products and
copies out that read shared memory until their role waits for them. An error is a buffer that is written while something may still
read it; read before what was written has arrived or been fenced; read with other contents in one order than in another; an arrival
too many; a standstill; and anything under way at the end.
What is not: threads within a role (Gluon's compiler puts barriers between them), and several blocks (they share nothing).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cuda.kernel import Specialisation
from tests.simulators.gluon_stub import Fault, Map, Pointer, Shared, Step, Trace, materialised, trace

DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "i64": np.dtype(np.int64),
}

Buffer = tuple[int, int]
# Steps done by each role; (phase's parity, arrivals missing, bytes missing) of each barrier; copies under way as (role, step);
# by which step each buffer was filled.
State = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...], frozenset[tuple[int, int]], tuple[Any, ...]]


@dataclass(frozen=True)
class Move:
    """Role `role` does its step `step`, or its copy `step` arrives."""

    role: int
    step: int
    arrives: bool = False


class Machine:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.roles = trace, trace.roles
        self.barriers = {b: i for i, b in enumerate(sorted(trace.counts))}
        self.counts = [trace.counts[b] for b in sorted(trace.counts)]
        touched = {s.key for steps in self.roles for step in steps for s in (*step.reads, step.writes) if s is not None}
        self.buffers = {b: i for i, b in enumerate(sorted(touched))}
        self.busy = [[frozenset(self._key(r) for r in reads) for reads in _reading(steps)] for steps in self.roles]
        self.contents: dict[tuple[int, int, int], Any] = {}  # what (role, step) found in a buffer, in every order so far
        for steps in self.roles:
            _check_fences(steps)

    def _key(self, shared: Shared) -> int:
        return self.buffers[shared.key]

    @property
    def start(self) -> State:
        barriers = tuple((0, count, 0) for count in self.counts)
        filled = tuple("before the roles" if b in self.trace.held else None for b in self.buffers)
        return (0,) * len(self.roles), barriers, frozenset(), filled

    def moves(self, state: State) -> list[Move]:
        """What can happen next. Fault at a standstill, and at an end that leaves something under way."""
        done, barriers, coming, _ = state
        found = [Move(*copy, arrives=True) for copy in coming]
        for role, steps in enumerate(self.roles):
            if done[role] < len(steps):
                step = steps[done[role]]
                if step.kind != "wait" or barriers[self.barriers[step.barrier]][0] != step.number:
                    found.append(Move(role, done[role]))
        ended = all(n == len(steps) for n, steps in zip(done, self.roles, strict=True))
        if ended and (coming or any(self.busy[r][n] for r, n in enumerate(done))):
            raise Fault("the kernel ends while copies are under way")
        if not ended and not found:
            stuck = [f"{self.trace.names[r]} at step {n}" for r, n in enumerate(done) if n < len(self.roles[r])]
            raise Fault(f"standstill: {', '.join(stuck)}")
        return found

    def after(self, state: State, move: Move) -> State:
        """The state once `move` has happened. Fault where it must not."""
        done, barriers, coming, filled = state
        step = self.roles[move.role][move.step]
        if move.arrives:
            barriers = self._signal(barriers, step, 0, -step.number)
            return done, barriers, coming - {(move.role, move.step)}, filled
        for shared in step.reads:
            buffer = self._key(shared)
            if any(self._key(self.roles[r][s].writes) == buffer for r, s in coming):
                raise Fault(f"{step.kind} reads {shared.key} before it has arrived")
            before = self.contents.setdefault((move.role, move.step, buffer), filled[buffer])
            if filled[buffer] is None or before != filled[buffer]:
                raise Fault(f"{step.kind} reads {shared.key} as {filled[buffer]} left it, and in another order {before}")
        if step.writes is not None:
            buffer = self._key(step.writes)
            if any(buffer in self.busy[r][n] for r, n in enumerate(done)):
                raise Fault(f"{step.kind} overwrites {step.writes.key}, which is still being read")
            if any(self._key(self.roles[r][s].writes) == buffer for r, s in coming):
                raise Fault(f"{step.kind} overwrites {step.writes.key}, which is still arriving")
            filled = (*filled[:buffer], (move.role, move.step), *filled[buffer + 1 :])
        if step.kind == "load":
            coming = coming | {(move.role, move.step)}
        elif step.kind == "arrive":
            barriers = self._signal(barriers, step, step.number, 0)
        elif step.kind == "expect":
            barriers = self._signal(barriers, step, 1, step.number)
        return (*done[: move.role], done[move.role] + 1, *done[move.role + 1 :]), barriers, coming, filled

    def _signal(self, barriers, step: Step, arrivals: int, nbytes: int):
        i = self.barriers[step.barrier]
        parity, missing, left = barriers[i]
        missing, left = missing - arrivals, left + nbytes
        if missing < 0:
            raise Fault(f"{step.kind} is one arrival too many in a phase of {step.barrier}")
        if missing == 0 and left == 0:
            parity, missing = 1 - parity, self.counts[i]
        return (*barriers[:i], (parity, missing, left), *barriers[i + 1 :])


def explore(trace: Trace, limit: int = 2_000_000) -> int:
    """Go through every reachable state; how many there are. Fault in the first wrong one."""
    machine = Machine(trace)
    seen, stack = {machine.start}, [machine.start]
    while stack:
        state = stack.pop()
        for move in machine.moves(state):
            after = machine.after(state, move)
            if after not in seen:
                seen.add(after)
                stack.append(after)
                assert len(seen) <= limit, "too many states"
    return len(seen)


def run(trace: Trace, seed: int) -> None:
    """One order, drawn by `seed`, on the matrices of the trace's tensor maps. What is read asynchronously is read as late as it may
    be, or at once; some copies and roles are slow throughout."""
    machine, choose = Machine(trace), random.Random(seed)
    shared = {s.key: s for steps in trace.roles for step in steps for s in (*step.reads, step.writes) if s is not None}
    held = {key: np.full(s.stored, np.nan, s.dtype) for key, s in shared.items()}
    held |= trace.held
    known: list[dict[int, Any]] = [{} for _ in trace.roles]
    late: list[list[Step]] = [[] for _ in trace.roles]  # products and copies out, not yet done
    weights = [choose.choice([1, 1, 8]) for _ in trace.roles]
    patience = choose.choice([0.02, 0.3, 3])

    def finish(role: int, kind: str, pending: int) -> None:
        open_ = [s for s in late[role] if s.kind == kind]
        for step in open_[: len(open_) - pending]:
            late[role].remove(step)
            arrays = [r.of(held[r.key]) for r in step.reads]
            if kind == "mma":
                if step.registers is not None:
                    arrays.insert(0, step.registers.value(known[role]))
                product = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64)  # or BLAS's order would be in the bits
                known[role][id(step.result)] = (step.value.value(known[role]) + product).astype(np.float32)
            else:
                step.map.write(step.at, arrays[0])

    state = machine.start
    while moves := machine.moves(state):
        move = choose.choices(moves, [patience if m.arrives else weights[m.role] for m in moves])[0]
        state = machine.after(state, move)
        step = trace.roles[move.role][move.step]
        if step.kind == "load" and move.arrives:
            held[step.writes.key] = step.map.read(step.at)
        elif step.kind in ("mma", "store"):
            late[move.role].append(step)
            if choose.random() < 0.3:
                finish(move.role, step.kind, 0)
        elif step.kind in ("mma_wait", "store_wait"):
            finish(move.role, step.kind.removesuffix("_wait"), step.number)
        elif step.kind == "read":
            known[move.role][id(step.result)] = step.reads[0].of(held[step.reads[0].key]).copy()
        elif step.kind == "write":
            held[step.writes.key] = step.value.value(known[move.role]).copy()
        elif step.kind == "put":
            step.pointer.array[step.pointer.at[step.mask]] = step.value.value(known[move.role])[step.mask]


def execute(spec: Specialisation, values: Sequence[Any], grid: tuple[int, ...], backward: bool) -> None:
    """All blocks of a launch, each in an order of its own, as interpreter.execute has it."""
    args = {name: _argument(t, value) for (name, t), value in zip(spec.signature, values, strict=True)}
    kernel = materialised(spec.function)
    for program in reversed(range(grid[0])) if backward else range(grid[0]):
        run(trace(kernel, args | dict(spec.constants), program, grid[0]), seed=program + 1000 * backward)


def _argument(type_: str, value: Any) -> Any:
    """A tensor map as a matrix over host memory, held against the bytes that the lowering names and against what TMA can do."""
    if isinstance(value, int):
        return value
    if not type_.startswith("tensormap"):
        return Pointer(_memory(value.address, value.stop, DTYPES[type_.removeprefix("*")]))
    dtype = DTYPES[type_.removeprefix("tensormap<").split("[")[0]]
    elements = _memory(value.pointer.address, value.pointer.stop, dtype)
    needed = (value.rows - 1) * value.stride + value.columns
    assert needed <= elements.size, f"{type_} of {value.rows} x {value.columns} has {elements.size} of {needed} elements"
    assert value.pointer.address % 16 == 0 and value.stride * dtype.itemsize % 16 == 0, "rows are not multiples of 16 bytes"
    assert max(value.shape) <= 256, "a box has at most 256 elements a side"
    steps = (value.stride * dtype.itemsize, dtype.itemsize)
    matrix = np.lib.stride_tricks.as_strided(elements, (value.rows, value.columns), steps, writeable=value.pointer.writable)
    return Map(matrix, list(value.shape))


def _memory(start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * (stop - start)).from_address(start), dtype)


def _reading(steps: list[Step]) -> Iterator[list[Shared]]:
    """What a role's products and copies out may still be reading, after 0, 1, ... steps."""
    open_: dict[str, list[Step]] = {"mma": [], "store": []}
    yield []
    for step in steps:
        if step.kind in open_:
            open_[step.kind].append(step)
        elif step.kind in ("mma_wait", "store_wait"):
            kind = step.kind.removesuffix("_wait")
            open_[kind] = open_[kind][max(len(open_[kind]) - step.number, 0) :]
        yield [r for kind in open_.values() for s in kind for r in s.reads]


def _check_fences(steps: list[Step]) -> None:
    """What a role writes itself must be fenced before its copy out starts."""
    unfenced: set[Buffer] = set()
    for step in steps:
        if step.kind == "write":
            unfenced.add(step.writes.key)
        elif step.kind == "fence":
            unfenced.clear()
        elif step.kind == "store" and step.reads[0].key in unfenced:
            raise Fault(f"{step.reads[0].key} goes out without a fence after it was written")
