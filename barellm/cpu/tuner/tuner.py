"""Autotuning on the CPU: candidate configs, the child process, the database; and the self-test."""

from typing import Any

from barellm.cpu import step, tuning
from barellm.cpu.isa import ISA, host
from barellm.cpu.tuner import candidates, faults
from barellm.cpu.tuner.problem import GemmProblem, problems_of
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.problem import Candidate
from barellm.runtime.tuner.worker import Worker

HARNESS = "barellm.cpu.tuner.harness"
SELF_TEST_LIMIT = 5.0  # seconds after which a candidate hangs: the right ones take milliseconds


class CpuTuner(decision.Tuner):
    """`footprint`: the bytes that a training step touches."""

    def __init__(self, isa: ISA, threads: int, footprint: int) -> None:
        self.isa, self.threads, self.footprint = isa, threads, footprint
        self.machine, self.database = tuning.machine(isa, threads), tuning.database()

    def worker(self, limit: float = decision.LIMIT) -> Worker:
        environment = {"BARELLM_THREADS": str(self.threads)}
        options = {"threads": self.threads, "footprint": self.footprint}
        return Worker(HARNESS, limit=limit, environment=environment, **options)

    def candidates(self, problem: GemmProblem) -> list[Candidate]:
        return [Candidate(c) for c in candidates.candidates(problem, self.isa, self.threads)]

    def refined(self, problem: GemmProblem, best: Candidate) -> list[Candidate]:
        return [Candidate(c) for c in candidates.refined(problem, best.config, self.isa)]

    def key(self, problem: GemmProblem) -> str:
        return problem.key(self.isa, self.threads)

    def entry(self, config: Any) -> dict[str, Any]:
        return {"choice": tuning.to_entry(config)}


def small_problem(isa: ISA, threads: int) -> GemmProblem:
    """An input gradient of 61 rows, 83 columns, contraction of 75, in fp32."""
    p = Program(Store())
    dy = p.input("dy", (Dim("batch", 1), Dim("seq", 61), 75), "fp32")
    p.output("dx", p.apply(ops.MatmulDx, dy=dy, weight=p.parameter("weight", (75, 83))).dx)
    (problem,) = problems_of(step.lower_and_plan({"op": p}, isa=isa, threads=threads).calls["op"])
    return problem


def self_test(*, threads: int, limit: float = SELF_TEST_LIMIT) -> list[decision.Trial]:
    isa = host()
    problem = small_problem(isa, threads)
    default = problem.default(isa)
    right = next(c for c in candidates.possible(problem, isa) if c.tile != default.tile)
    worker = CpuTuner(isa, threads, footprint=1 << 20).worker(limit)
    return decision.self_test(worker, problem, Candidate(default), Candidate(right), faults.FAULTS)
