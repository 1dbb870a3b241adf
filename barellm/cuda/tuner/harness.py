"""Runs candidates: a session for each, operands that all share, and what the result must be. This happens only in the child
process of the tuner.

Whole arenas are compared on the GPU: a candidate must leave the same bytes as the default, everywhere. The results of the default
itself are compared with float64, and every byte beside them with what was there before.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np

from barellm.cuda import driver, tuning
from barellm.cuda.bench import MemoryComparison, replay_seconds
from barellm.cuda.kernel import Launch, Sizes, Target
from barellm.cuda.kernels.gemm.matmul import gemm
from barellm.cuda.step import CudaSession, LoweredPrograms, lower_and_plan
from barellm.cuda.tuner.cases import Case, case_of
from barellm.cuda.tuner.problem import Candidate, Problem
from barellm.program.builder import Program
from barellm.program.dtypes import numpy_dtype
from barellm.runtime.tuner.child import Wrong

TURN_SECONDS = 2e-3
MOST_CALLS = 200


def built(case: Case, work: Problem, candidate: Candidate, target: Target) -> tuple[Program, LoweredPrograms]:
    """The case's program, and what it becomes with the work done in the candidate's way."""
    p = case.program()
    with tuning.forced(work.subject, candidate.choice), tuning.watching() as asked:
        made = lower_and_plan({"op": p}, target)
    assert asked[work.subject] == 1, f"{p.ops} asked for {list(asked)}, not for {work.subject}"
    if function := candidate.function():
        for launch in made.lowered["op"].launches:
            if isinstance(launch, Launch) and launch.spec.function is gemm:
                launch.spec = replace(launch.spec, function=function)
    return p, made


class Harness:
    """One piece of work on this machine's GPU. `calls` is the most calls that a turn has; `sms`: multiprocessors that persistent
    grids fill, all of the card's unless given."""

    def __init__(self, work: Problem, calls: int = MOST_CALLS, sms: int = 0) -> None:
        self.work, self.device, self.calls, self.seconds = work, driver.device(), calls, 0.0
        self.target, self.case = work.target(Target.of(self.device)), case_of(work)
        self.target = replace(self.target, sms=sms or self.target.sms)
        self.default = self._open(Candidate(work.default(self.target.arch)))
        self.open = [self.default]
        session = self.default
        session._fill(0, session.plan.arena_bytes, 0xFF)
        for name, a in self.case.given.items():
            session.write(name, a)
        self.same = MemoryComparison(self.device)
        self.before = self._copy(session)
        self.expected: dict[Sizes, driver.DeviceMemory] = {}
        for sizes in self.case.runs:
            self._run(session, sizes)
            self._check_results(session, sizes)
            self.expected[sizes] = self._copy(session)
        self.timed = {session: self._captured(session)}

    def _open(self, candidate: Candidate) -> CudaSession:
        p, made = built(self.case, self.work, candidate, self.target)
        return CudaSession({"op": p}, device=self.device, built=made)

    def _copy(self, session: CudaSession) -> driver.DeviceMemory:
        """A copy of its arena as it is now."""
        memory = driver.DeviceMemory(session.plan.arena_bytes)
        memory.copy(0, session.base, memory.nbytes, session.stream)
        session.synchronize()
        return memory

    def _run(self, session: CudaSession, sizes: Sizes) -> None:
        """Run the program once, from the given operands."""
        session.memory.copy(
            session.base - session.memory.address, self.before.address, self.before.nbytes, session.stream
        )
        session.run("op", batch=sizes.batch, seq=sizes.seq, **self.case.scalars)
        session.synchronize()

    def check(self, candidate: Candidate) -> CudaSession:
        session = self._open(candidate)
        try:
            assert _addresses(session) == _addresses(self.default), f"{candidate} needs other memory than the default"
            for sizes in self.case.runs:
                self._run(session, sizes)
                at = None if candidate.other_bits else self._first_difference(session, self.expected[sizes])
                if at is not None or candidate.other_bits:
                    self._check_results(session, sizes)
                if at is not None:
                    raise Wrong(
                        f"other bits than the default's ({sizes.batch} x {sizes.seq}): first at {self._where(at)}"
                    )
            self.timed[session] = self._captured(session)
        except BaseException:
            session.close()
            raise
        self.open.append(session)
        return session

    def _first_difference(
        self, session: CudaSession, to: driver.DeviceMemory, start: int = 0, stop: int = -1
    ) -> int | None:
        """The first byte of the arena, of [start, stop), that is not as in a copy of one."""
        skipped = session.base - session.memory.address
        return self.same.first(session.memory, to, start, stop if stop >= 0 else to.nbytes, skipped, session.stream)

    def _where(self, at: int) -> str:
        """A byte of the arena in words."""
        for t, start in self.default.plan.offsets.items():
            if start <= at < start + t.nbytes:
                return f"byte {at - start} of {t.name}"
        return f"byte {at} of the arena"

    def _check_results(self, session: CudaSession, sizes: Sizes) -> None:
        """Wrong where a value is off or another byte than the result's changed."""
        low, case = session.lowered["op"], self.case
        results = {
            name: t for name, t in {**session.programs["op"].named, **session.tensors}.items() if name in case.outputs
        }

        def read(name: str, rows: np.ndarray) -> np.ndarray:
            t, columns = results[name], case.outputs[name]
            dtype = numpy_dtype(t.dtype)
            nbytes, start = columns * dtype.itemsize, session.plan.offsets[t]
            return np.stack([session._get(start + r * nbytes, start + (r + 1) * nbytes).view(dtype) for r in rows])

        case.hold(read, sizes)
        written = []
        for name, t in results.items():
            nbytes = case.rows(name, sizes) * case.outputs[name] * numpy_dtype(t.dtype).itemsize
            written.append((session.plan.offsets[t], nbytes))
        written += [(session.plan.offsets[t], t.nbytes) for op in low.ops for t in low.of[op].scratch_tensors]
        at = 0
        for start, nbytes in [*sorted(written), (session.plan.arena_bytes, 0)]:
            if start > at and (stray := self._first_difference(session, self.before, at, start)) is not None:
                raise Wrong(f"it wrote outside its result, first at {self._where(stray)}")
            at = max(at, start + nbytes)

    def _captured(self, session: CudaSession) -> driver.Graph:
        sizes = self.case.runs[-1]
        return session.captured("op", self.work.times, batch=sizes.batch, seq=sizes.seq)

    def time(self, candidates: list[CudaSession], rounds: int) -> list[list[float]]:
        sessions = [self.default, *candidates]
        calls = max(1, min(self.calls, round(TURN_SECONDS / max(self._seconds(self.default, 1), 1e-9))))
        samples = np.zeros((rounds, len(sessions)))
        for r in range(rounds):
            order = list(range(len(sessions)))
            for at in order if r % 2 == 0 else reversed(order):
                samples[r, at] = self._seconds(sessions[at], calls)
        self.seconds = float(median(samples[:, 0]))
        return [(samples[:, i + 1] / samples[:, 0]).tolist() for i in range(len(candidates))]

    def _seconds(self, session: CudaSession, calls: int) -> float:
        return replay_seconds(session.context, lambda: self.timed[session].launch(session.stream), calls)

    def close(self) -> None:
        for session in self.open:
            session.synchronize()
        for graph in self.timed.values():
            graph.free()
        for session in self.open:
            session.close()
        for memory in (self.before, *self.expected.values()):
            memory.free()
        self.same.close()


def _addresses(session: CudaSession) -> dict[str, int]:
    return {t.name: at for t, at in session.plan.offsets.items()}
