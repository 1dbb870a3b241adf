"""Faulty kernels that a tuner must reject. They go through the same child, checks and decision as real candidates."""

from __future__ import annotations

from barellm.cpu.isa import ISA, host
from barellm.cpu.step import lower_and_plan
from barellm.cpu.tuner.candidates import possible
from barellm.cpu.tuner.faults import FAULTS
from barellm.cpu.tuner.problem import Candidate, Problem, problems_of
from barellm.cpu.tuner.tuner import open_worker
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.runtime.tuner.decision import Trial, decide, trials

LIMIT = 5.0  # seconds after which a candidate hangs: the right ones take milliseconds


def small_problem(isa: ISA, threads: int) -> Problem:
    """An input gradient of 61 rows, 83 columns, contraction of 75, in fp32."""
    store = Store()
    p = Program(store)
    dy = p.input("dy", (Dim("batch", 1), Dim("seq", 61), 75), "fp32")
    op = p.apply(ops.MatmulDx, dy=dy, weight=store.get("weight", (75, 83), "fp32", "parameter"))
    p.output("dx", op.outputs["dx"])
    (work,) = problems_of(lower_and_plan({"op": p}, isa=isa, threads=threads).calls["op"])
    return work


def self_test(*, threads: int, limit: float = LIMIT) -> list[Trial]:
    isa = host()
    work = small_problem(isa, threads)
    default = work.default(isa)
    honest = Candidate(next(c for c in possible(work, isa) if c.tile != default.tile))
    injected = [Candidate(default, emit) for emit, _ in FAULTS]
    worker = open_worker(threads=threads, footprint=1 << 20, limit=limit)
    try:
        verdict = decide(worker, work, [*injected, honest], Candidate(default))
    finally:
        worker.close()
    faults = {c: (emit.__name__, words) for c, (emit, words) in zip(injected, FAULTS, strict=True)}
    return trials(verdict, faults, honest, Candidate(default))
