"""Autotuning on the CPU: candidate configs, the child process, the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from barellm.cpu import tuning
from barellm.cpu.isa import ISA
from barellm.cpu.tuner.candidates import candidates, refined
from barellm.cpu.tuner.problem import Candidate, Problem
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.decision import LIMIT, Verdict
from barellm.runtime.tuner.worker import Worker


def open_worker(*, threads: int, footprint: int, limit: float) -> Worker:
    """Start a child process that can run candidates. `footprint` is the number of bytes that a step touches."""
    environment = {"BARELLM_THREADS": str(threads)}
    return Worker("barellm.cpu.tuner.child", threads, footprint, limit=limit, environment=environment)


def tune(
    works: Iterable[Problem], isa: ISA, *, threads: int, footprint: int, seconds: float, each: Callable[[Verdict], None]
) -> list[Verdict]:
    """Tunes as `decision.tune` does."""
    return decision.tune(
        works,
        open_worker(threads=threads, footprint=footprint, limit=LIMIT),
        candidates=lambda work: [Candidate(c) for c in candidates(work, isa, threads)],
        refined=lambda work, best: [Candidate(c) for c in refined(work, best.choice, isa)],
        keep=lambda verdict: keep(verdict, isa, threads),
        seconds=seconds,
        each=each,
    )


def keep(verdict: Verdict, isa: ISA, threads: int) -> None:
    """Write the winner into the database, or nothing if the default is as good."""
    entry = None
    if verdict.best != verdict.default:
        entry = {"choice": tuning.to_entry(verdict.best), "ratio": round(verdict.ratio, 4)}
    tuning.database().change({verdict.work.key(isa, threads): entry})
