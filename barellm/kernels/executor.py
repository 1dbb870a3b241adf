"""The executor of array functions: a thread pool and scratch memory per process, and compiled ops that run there."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from barellm import environment
from barellm.cpu import compilers, jit, step
from barellm.cpu.isa import host
from barellm.cpu.kernel import Call
from barellm.cpu.threads import Pool, record_table, thread_count
from barellm.kernels.arrays import ALIGN, address
from barellm.program import scalars
from barellm.program.builder import Program, Store
from barellm.program.ops.base import Op, Tensor
from barellm.program.planner import lifetimes, place
from barellm.runtime import arena, lowering

# Work below about 60 us runs inline on the calling thread: dispatching it to the pool takes half of that.
INLINE_FLOPS, INLINE_BYTES = 2_000_000, 600_000

_executor: Executor | None = None
_create_lock = threading.Lock()


def executor() -> Executor:
    """This process's executor, created on first use; a forked child gets its own."""
    global _executor
    found = _executor
    if found is not None and found.pid == os.getpid():
        return found
    with _create_lock:
        if _executor is None or _executor.pid != os.getpid():
            _executor = Executor()
        return _executor


def _reset_lock() -> None:
    """A lock that another thread held at the fork would stay locked in the child."""
    global _create_lock
    _create_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


class Executor:
    """A thread pool as a session has it, a pool of one thread for inline work, and scratch memory that grows."""

    def __init__(self) -> None:
        environment.check()
        self.pid, self.isa, self.threads = os.getpid(), host(), thread_count()
        self.pool, self.here = Pool(self.threads, self.isa), Pool(1, self.isa)
        self.lock = threading.Lock()
        self.block = arena.ScalarBlock()
        self.workspace = _aligned(0)
        self._private = 0
        self.reserve(0, ALIGN)

    def reserve(self, workspace: int, private: int) -> None:
        """Grow the scratch memory to at least so many bytes: shared workspace, and per thread."""
        if workspace > self.workspace.nbytes:
            self.workspace = _aligned(workspace)
        if private > self._private:
            self._private = -(-private // 4096) * 4096
            own = _aligned(self.threads * self._private)
            for pool in (self.pool, self.here):
                pool.bind(self.block.address, address(own), self._private, memory=(own, self.block))


class CompiledOps:
    """Ops compiled to a table of kernel calls. `bound` are the tensors that the caller owns; each run passes their addresses."""

    def __init__(self, ops: Sequence[Op], bound: Sequence[Tensor]) -> None:
        """Lower and compile the ops, plan the workspace, and build the call table with slots for the bound tensors' addresses."""
        m = executor()
        part = Program(Store())
        part.ops = list(ops)
        lowered = step.Lowered(part, m.isa, m.threads, skinny_gemm=True)
        lives = lifetimes(lowered.ops, lambda op: lowered.of[op].scratch_tensors)
        plan = place({"": {t: span for t, span in lives.items() if t not in bound}}, Store())
        self.workspace_bytes, self.thread_scratch_bytes = plan.workspace_bytes, lowered.thread_scratch_bytes
        # Addresses as barriers see them: the bound tensors lie behind the workspace, one after the other.
        address_of, end = dict(plan.offsets), plan.workspace_bytes
        for t in bound:
            address_of[t], end = end, end + t.nbytes
        owner_of = {t: i + 1 for i, t in enumerate(bound)}  # 0 is the workspace
        calls = lowered.calls
        self._compile(calls, m)
        self._fill_table(calls, lambda r: (address_of[r.tensor] + r.start, address_of[r.tensor] + r.stop))
        slots: list[tuple[int, int, int]] = []  # argument, whose address, bytes behind it
        at = 0
        for call in calls:
            for a in call.args:
                if isinstance(a, lowering.Region):
                    owner = owner_of.get(a.tensor, 0)
                    slots.append((at, owner, a.start + (0 if owner else address_of[a.tensor])))
                else:
                    self.args[at] = a
                at += 1
        self._slots, self._owner, self._behind = np.array(slots, np.int64).reshape(-1, 3).T.copy()
        dims = {d.name: int(d) for op in lowered.ops for t in (op.inputs | op.outputs).values() for d in t.dims}
        self._sizes = [(scalars.SCALARS[name].index, size) for name, size in dims.items()]
        self.short = sum(op.flops() for op in ops) < INLINE_FLOPS and sum(op.bytes() for op in ops) < INLINE_BYTES

    def _compile(self, calls: list[Call], m: Executor) -> None:
        emitters = {call.spec.key: partial(call.spec.ir, m.isa) for call in calls}
        self.code = jit.Library(compilers.cached_objects(emitters, m.isa, processes=1), m.isa)

    def _fill_table(self, calls: list[Call], place_of: Any) -> None:
        """Write the records of the call table: function, arguments, barrier."""
        after = step.barriers(calls, place_of)
        self._records = records = record_table(len(calls))
        self.args = np.zeros(sum(len(c.args) for c in calls) + 1, np.int64)
        at = address(self.args)
        for i, call in enumerate(calls):
            records[i, :3] = (self.code.address(call.spec.symbol()), at, after[i])
            at += 8 * len(call.args)
        self._table = (address(records), len(calls))

    def run(self, addresses: list[int]) -> None:
        """Execute with the bound tensors at these addresses. Concurrent Python threads are serialized."""
        m = executor()
        with m.lock:
            m.reserve(self.workspace_bytes, self.thread_scratch_bytes)
            for index, size in self._sizes:
                m.block.ints[index] = size
            bases = np.array([address(m.workspace), *addresses])
            self.args[self._slots] = bases[self._owner] + self._behind
            if self.short:
                m.here.run_here(*self._table)
                return
            try:
                m.pool.run(*self._table)
            except BaseException:  # Ctrl-C: what the threads still read and write must outlive them
                m.pool.run(self._table[0], 0)
                raise


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + ALIGN, np.uint8)
    skip = -address(raw) % ALIGN
    return raw[skip : skip + nbytes]
