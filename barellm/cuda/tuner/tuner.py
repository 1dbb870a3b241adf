"""Autotuning on a GPU: candidate configurations, the child process, the database; and the self-test."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from barellm.cuda import step, tuning
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.tuner.candidates import candidates, refined, rivals, specs_of
from barellm.cuda.tuner.faults import FAULTS
from barellm.cuda.tuning import GemmProblem, Problem
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.problem import Candidate
from barellm.runtime.tuner.worker import Worker

HARNESS = "barellm.cuda.tuner.harness"
SMALL = GemmProblem("nt", "fp32", 61, 83, 75)


class CudaTuner(decision.Tuner):
    """Compiles the candidates of `problems` before the child asks for them, of as many at once as keep every core busy."""

    def __init__(self, target: Target, problems: Iterable[Problem] = ()) -> None:
        self.target, self.ahead = target, list(problems)
        self.compiled: set[Problem] = set()
        self.machine, self.database = tuning.machine(target), tuning.database()

    def worker(self, limit: float = 2 * decision.LIMIT) -> Worker:
        """Its child compiles what could not be compiled ahead, so a request may take twice as long."""
        return Worker(HARNESS, limit=limit)

    def candidates(self, problem: Problem) -> list[Candidate]:
        if problem not in self.compiled:
            self._compile_until(problem)
        return candidates(problem, self.target)

    def refined(self, problem: Problem, best: Candidate) -> list[Candidate]:
        return refined(best)

    def rivals(self, problem: Problem) -> list[Candidate]:
        return rivals(problem, self.target)

    def key(self, problem: Problem) -> str:
        return tuning.key(self.target, problem)

    def entry(self, config: Any) -> dict[str, Any]:
        return tuning.to_entry(config)

    def _compile_until(self, problem: Problem) -> None:
        """Compile the candidates of queued problems, until `problem` is among them and there is work for every process. Errors are
        left to the child process, which meets them again and names the candidate."""
        specs: dict[Specialisation, str] = {}
        processes = step.processes()
        while self.ahead and (len(specs) < 2 * processes or problem not in self.compiled):
            following = self.ahead.pop(0)
            self.compiled.add(following)
            with suppress(Exception):  # the child meets it again, and says with which candidate
                tried = candidates(following, self.target) + rivals(following, self.target)
                specs |= specs_of(following, tried, self.target)
        with suppress(Exception):
            step.compiled(specs, self.target.arch, processes=processes)


def self_test(target: Target, *, limit: float = decision.LIMIT) -> list[decision.Trial]:
    default, right, *_ = candidates(SMALL, target)
    return decision.self_test(CudaTuner(target).worker(limit), SMALL, default, right, FAULTS)
