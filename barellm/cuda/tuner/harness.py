"""The tuner's benchmark harness on a GPU: a session for each candidate, and operands that all share.

Whole arenas are compared on the GPU: a candidate must leave the same bytes as the default, everywhere."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from barellm.cuda import driver
from barellm.cuda.bench import MemoryComparison, replay_seconds
from barellm.cuda.kernel import Sizes, Target
from barellm.cuda.step import CudaSession
from barellm.cuda.tuner.candidates import is_timed, lowered
from barellm.cuda.tuner.cases import case_of
from barellm.cuda.tuning import Problem
from barellm.program.dtypes import numpy_dtype
from barellm.runtime.tuner import harness
from barellm.runtime.tuner.problem import Candidate

MAX_CALLS = 200


class Harness(harness.Harness):
    """The harness of one tuning problem on this machine's GPU. `calls`: the most calls of a timed repetition; `sms`:
    multiprocessors that persistent grids fill, 0: all; `config`: the default configuration, None: the problem's."""

    def __init__(self, problem: Problem, calls: int = MAX_CALLS, sms: int = 0, config: Any = None) -> None:
        self.problem, self.device, self.max_calls = problem, driver.device(), calls
        self.target, self.case = Target.of(self.device), case_of(problem)
        self.target = replace(self.target, sms=sms or self.target.sms)
        self.runs = self.case.runs
        self.sessions: list[CudaSession] = []
        self.graphs: dict[CudaSession, driver.Graph] = {}
        self.same = MemoryComparison(self.device)
        self.open(config or problem.default(self.target.arch, self.target.sms))

    def load(self, candidate: Candidate) -> CudaSession:
        """Open a session for a candidate. The first one, the default, fills the arena and keeps a copy, `before`; the others must
        have the same addresses, so that whole arenas can be compared."""
        p, made = lowered(self.problem, self.case, candidate, self.target)
        session = CudaSession({"op": p}, device=self.device, built=made)
        self.sessions.append(session)
        if len(self.sessions) == 1:
            session._fill(0, session.plan.arena_bytes, 0xFF)
            for name, a in self.case.given.items():
                session.write(name, a)
            self.before = self.snapshot(session, None)
        elif _addresses(session) != _addresses(self.default):
            self.unload(session)
            raise AssertionError(f"{candidate} needs other memory than the default")
        return session

    def unload(self, loaded: CudaSession) -> None:
        self.sessions.remove(loaded)
        loaded.close()

    def snapshot(self, loaded: CudaSession, run: Sizes | None) -> driver.DeviceMemory:
        """A copy of its arena."""
        memory = driver.DeviceMemory(loaded.plan.arena_bytes)
        memory.copy(0, loaded.base, memory.nbytes, loaded.stream)
        loaded.synchronize()
        return memory

    def run(self, loaded: CudaSession, run: Sizes) -> None:
        loaded.memory.copy(loaded.base - loaded.memory.address, self.before.address, self.before.nbytes, loaded.stream)
        loaded.run("op", batch=run.batch, seq=run.seq, **self.case.scalars)
        loaded.synchronize()

    def differs(self, loaded: CudaSession, run: Sizes) -> bool:
        return self._first_difference(loaded, self.expected[run]) is not None

    def difference(self, loaded: CudaSession, run: Sizes) -> str:
        """Where the first byte that differs is."""
        return f"first at {self._where(self._first_difference(loaded, self.expected[run]) or 0)}"

    def _first_difference(self, loaded: CudaSession, to: driver.DeviceMemory, start: int = 0, stop: int = -1) -> int | None:
        """The first byte in [start, stop) (-1: the end) of the arena that differs from a copy of an arena; None if none does."""
        skipped = loaded.base - loaded.memory.address
        return self.same.first(loaded.memory, to, start, stop if stop >= 0 else to.nbytes, skipped, loaded.stream)

    def _where(self, at: int) -> str:
        """A byte of the arena in words."""
        for t, start in self.default.plan.offsets.items():
            if start <= at < start + t.nbytes:
                return f"byte {at - start} of {t.name}"
        return f"byte {at} of the arena"

    def verify(self, loaded: CudaSession, run: Sizes) -> None:
        """Compare the results with the case's reference, and all bytes outside results and scratch with those before the run."""
        low, case = loaded.lowered["op"], self.case
        results = {name: t for name, t in {**loaded.programs["op"].named, **loaded.tensors}.items() if name in case.outputs}

        def read(name: str, rows: np.ndarray) -> np.ndarray:
            t, columns = results[name], case.outputs[name]
            dtype = numpy_dtype(t.dtype)
            nbytes, start = columns * dtype.itemsize, loaded.plan.offsets[t]
            return np.stack([loaded._get(start + r * nbytes, start + (r + 1) * nbytes).view(dtype) for r in rows])

        case.hold(read, run)
        written = []
        for name, t in results.items():
            nbytes = case.rows(name, run) * case.outputs[name] * numpy_dtype(t.dtype).itemsize
            written.append((loaded.plan.offsets[t], nbytes))
        written += [(loaded.plan.offsets[t], t.nbytes) for op in low.ops for t in low.of[op].scratch_tensors]
        at = 0
        for start, nbytes in [*sorted(written), (loaded.plan.arena_bytes, 0)]:
            if start > at and (stray := self._first_difference(loaded, self.before, at, start)) is not None:
                raise harness.Wrong(f"it wrote outside its result, first at {self._where(stray)}")
            at = max(at, start + nbytes)

    def prepare(self, loaded: CudaSession, calls: int) -> None:
        if loaded not in self.graphs:
            timed, sizes = partial(is_timed, self.problem), self.runs[-1]
            self.graphs[loaded] = loaded.captured("op", timed, batch=sizes.batch, seq=sizes.seq)

    def repeat(self, loaded: CudaSession, calls: int) -> float:
        return replay_seconds(loaded.context, lambda: self.graphs[loaded].launch(loaded.stream), calls)

    def close(self) -> None:
        """Free graphs, sessions and the copies of arenas, after all launches have ended."""
        for session in self.sessions:
            session.synchronize()
        for graph in self.graphs.values():
            graph.free()
        for session in self.sessions:
            session.close()
        for memory in (self.before, *self.expected.values()):
            memory.free()
        self.same.close()


def _addresses(session: CudaSession) -> dict[str, int]:
    return {t.name: at for t, at in session.plan.offsets.items()}
