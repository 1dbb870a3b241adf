"""Tuning on a GPU: which candidates, by which child, kept where; and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from barellm.cuda import tuning
from barellm.cuda.kernel import Target
from barellm.cuda.tuner.faults import FAULTS
from barellm.cuda.tuner.work import Candidate, Work, candidates
from barellm.runtime.tuner import decision
from barellm.runtime.tuner.decision import LIMIT, Trial, Verdict
from barellm.runtime.tuner.worker import Worker

CHILD = "barellm.cuda.tuner.child"
SMALL = Work("nt", "fp32", 61, 83, 75)


def tune(works: Iterable[Work], target: Target, *, seconds: float, each: Callable[[Verdict], None]) -> list[Verdict]:
    """As `decision.tune`. A session compiles its candidate, so one request may take as long as that."""
    worker = Worker(CHILD, limit=2 * LIMIT)
    keep_here = lambda verdict: keep(verdict, target)  # noqa: E731
    return decision.tune(
        works, worker, candidates=lambda work: candidates(work, target), keep=keep_here, seconds=seconds, each=each
    )


def keep(verdict: Verdict, target: Target) -> None:
    """Into the database: the winner, or nothing where the default is as good."""
    tuning.database().change({tuning.key(target, verdict.work.product): entry_of(verdict)})


def entry_of(verdict: Verdict) -> dict[str, Any] | None:
    """Of the winner, None where the default is as good."""
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
