"""Tuning on a GPU: which candidates, by which child, kept where; and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from barellm.cuda import step, tuning
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.tuner.cases import case_of
from barellm.cuda.tuner.faults import FAULTS
from barellm.cuda.tuner.harness import built
from barellm.cuda.tuner.problem import Candidate, GemmProblem, Problem, candidates, refined, rivals
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.decision import LIMIT, Trial, Verdict
from barellm.runtime.tuner.worker import Worker

CHILD = "barellm.cuda.tuner.child"
SMALL = GemmProblem("nt", "fp32", 61, 83, 75)


def tune(works: Iterable[Problem], target: Target, *, seconds: float, each: Callable[[Verdict], None]) -> list[Verdict]:
    """Tunes as `decision.tune` does. A session compiles what could not be compiled ahead, so a request may take that long."""
    works = list(works)
    ahead = Ahead(works, target)

    def compiled_candidates(work: Problem) -> list[Candidate]:
        ahead.reach(work)
        return candidates(work, target)

    return decision.tune(
        works,
        Worker(CHILD, limit=2 * LIMIT),
        candidates=compiled_candidates,
        keep=lambda verdict: keep(verdict, target),
        seconds=seconds,
        each=each,
        refined=lambda _, best: refined(best),
        rivals=lambda work: rivals(work, target),
    )


class Ahead:
    """Compiles candidates before the child asks for them, of as many problems at once as keep every core busy."""

    def __init__(self, works: list[Problem], target: Target) -> None:
        self.left, self.target = list(works), target
        self.compiled: set[Problem] = set()

    def reach(self, work: Problem) -> None:
        if work in self.compiled:
            return
        specs: dict[Specialisation, str] = {}
        processes = step.processes()
        while self.left and (len(specs) < 2 * processes or work not in self.compiled):
            following = self.left.pop(0)
            self.compiled.add(following)
            with suppress(Exception):  # the child meets it again, and says with which candidate
                specs |= self._specs(following)
        with suppress(Exception):
            step.compiled(specs, self.target.arch, processes=processes)

    def _specs(self, work: Problem) -> dict[Specialisation, str]:
        found: dict[Specialisation, str] = {}
        target, case = work.target(self.target), case_of(work)
        for candidate in (*candidates(work, target), *rivals(work, target)):
            found |= built(case, work, candidate, target)[1].specs
        return found


def keep(verdict: Verdict, target: Target) -> None:
    """Write the winner into the database, or nothing if the default is as good."""
    tuning.database().change({tuning.entry_name(target, verdict.work.tuning_key): entry_of(verdict)})


def entry_of(verdict: Verdict) -> dict[str, Any] | None:
    """The entry of the winner; None where the default is as good."""
    if verdict.best == verdict.default:
        return None
    return tuning.to_entry(verdict.best) | {"ratio": round(verdict.ratio, 4)}


def self_test(target: Target, *, child: str = CHILD, limit: float = LIMIT) -> list[Trial]:
    """Faulty kernels go through the same child, checks and decision as real candidates."""
    default, honest, *_ = candidates(SMALL, target)
    injected = [Candidate(default.choice, name) for name, _ in FAULTS]
    worker = Worker(child, limit=limit)
    try:
        verdict = decision.decide(worker, SMALL, [*injected, honest], default)
    finally:
        worker.close()
    return decision.trials(verdict, dict(zip(injected, FAULTS, strict=True)), honest, default)
