"""The decision: every candidate is verified, then timed against the default in interleaved rounds; only a clear winner is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from barellm.runtime.tuner.worker import Lost, Worker

LIMIT = 20.0  # seconds for one request
SCREEN, FINAL = 3, 11  # rounds for all; for the best few
FINALISTS = 3
GAIN = 0.98  # a winner needs at most this much of the default's time,
AGREE = 0.8  # less than the default's time in this share of the rounds, in two contests


@dataclass
class Verdict:
    """The result for one piece of work. `best` is the default if nothing is clearly faster. `timed`: what each candidate that was
    right took in a few rounds, over the default's time: an estimate, from which no winner is made."""

    work: Any  # `role`, `dtype`, `sizes` by name, `flops`
    default: Any
    best: Any
    ratio: float  # the best one's time over the default's
    default_s: float
    tried: int
    rejected: list[tuple[str, str]] = field(default_factory=list)
    rival: tuple[str, float] | None = (
        None  # what would be faster than the best, but has other bits; its time over the default's
    )
    timed: list[tuple[str, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        w = self.work
        return {
            "role": w.role, "dtype": w.dtype, **w.sizes,
            "default": str(self.default), "best": str(self.best), "ratio": self.ratio, "default_s": self.default_s,
            "gflops": self.gflops, "tried": self.tried,
            "rejected": [{"candidate": name, "reason": reason} for name, reason in self.rejected],
            "timed": [{"candidate": name, "ratio": round(ratio, 4)} for name, ratio in self.timed],
            **({"rival": self.rival} if self.rival else {}),
        }  # fmt: skip

    @property
    def gflops(self) -> float:
        """Gigaflops a second of the best candidate; 0 where nothing was timed."""
        return self.work.flops / self.default_s / self.ratio / 1e9 if self.default_s else 0.0


Candidates = Callable[[Any], list[Any]]


def nothing(_: Any) -> list[Any]:
    return []


def tune(
    works: Iterable[Any], worker: Worker, *, candidates: Candidates, keep: Callable[[Verdict], None],
    seconds: float, each: Callable[[Verdict], None], refined: Callable[[Any, Any], list[Any]], rivals: Candidates = nothing,
) -> list[Verdict]:  # fmt: skip
    """Tune one piece of work after the other and `keep` each result at once: an interrupt loses only the one in progress. After
    `seconds` none is begun, and the one in progress tries nothing more. `candidates(work)`: the default first. `refined(work,
    best)`: what else to try when the best of them is known. `rivals(work)`: what has other bits: timed and told, never kept."""
    end = time.monotonic() + seconds
    verdicts = []
    try:
        for work in works:
            if verdicts and time.monotonic() > end:
                break
            default, *others = candidates(work)
            try:
                more = partial(refined, work)
                verdict = decide(worker, work, others, default, refined=more, rivals=rivals(work), end=end)
            except Lost as why:  # with the default: the work stays as it is
                worker.close()
                verdict = Verdict(work, default.choice, default.choice, 1.0, 0.0, 0, [(str(default), str(why))])
            keep(verdict)
            verdicts.append(verdict)
            each(verdict)
    finally:
        worker.close()
    return verdicts


def decide(
    worker: Worker, work: Any, choices: Sequence[Any], default: Any, *,
    refined: Candidates = nothing, rivals: Sequence[Any] = (), end: float = math.inf,
) -> Verdict:  # fmt: skip
    """Check every candidate, time those that are right, and choose. All have a `choice`; `default` is the one to beat. None is
    begun after `end`, a time of the monotonic clock."""
    worker.open(work)
    rejected: dict[Any, str] = {}
    default_s: list[float] = []
    timed: dict[Any, float] = {}
    tried = 0

    def contest(contestants: list[Any], rounds: int) -> dict[Any, list[float]]:
        """Ratios to the default's time by round. A child that is lost while it times takes the blame for all of them."""
        try:
            found, seconds = worker.time(contestants, rounds)
        except Lost as why:
            rejected.update(dict.fromkeys(contestants, f"while it was timed: {why}"))
            return {}
        default_s.append(seconds)
        return dict(zip(contestants, found, strict=True))

    def screen(candidates: Iterable[Any]) -> dict[Any, float]:
        nonlocal tried
        found: dict[Any, float] = {}
        for candidate in candidates:
            if time.monotonic() > end:
                break
            tried += 1
            reason = worker.check(candidate)
            if reason:
                rejected[candidate] = reason
            else:
                found |= {c: median(ratios) for c, ratios in contest([candidate], SCREEN).items()}
        timed.update(found)
        return {c: ratio for c, ratio in found.items() if ratio < 1.0}

    def fastest_of(faster: dict[Any, float], than: float) -> tuple[Any, float] | None:
        """The one that is clearly faster than this share of the default's time, with its own."""
        first = contest(best, FINAL) if (best := sorted(faster, key=lambda c: faster[c])[:FINALISTS]) else {}
        if not first:
            return None
        fastest = min(first, key=lambda c: median(first[c]))
        # The fastest of many was also lucky: it is believed only what it does once more.
        again = contest([fastest], FINAL) if _wins(first[fastest], than) else {}
        return (fastest, median(again[fastest])) if again and _wins(again[fastest], than) else None

    screened = screen(choices)
    screened |= screen(refined(min(screened, key=lambda c: screened[c], default=default)))
    winner, ratio = fastest_of(screened, 1.0) or (default, 1.0)
    rival = fastest_of(screen(rivals), ratio)
    if not default_s:
        contest([], SCREEN)
    reasons = [(str(c), reason) for c, reason in rejected.items()]
    default_time = median(default_s) if default_s else 0.0
    verdict = Verdict(work, default.choice, winner.choice, ratio, default_time, tried, reasons)
    verdict.timed = sorted(((str(c), ratio) for c, ratio in timed.items()), key=lambda pair: pair[1])
    verdict.rival = (str(rival[0]), rival[1]) if rival else None
    return verdict


def _wins(ratios: list[float], than: float) -> bool:
    return median(ratios) <= GAIN * than and sum(r < than for r in ratios) >= AGREE * len(ratios)


@dataclass(frozen=True)
class Trial:
    """The result of one candidate: why it was rejected ("" if it was not), and whether that is as it should be."""

    candidate: str
    reason: str
    expected: str
    passed: bool


def trials(verdict: Verdict, faults: dict[Any, tuple[str, str]], honest: Any, default: Any) -> list[Trial]:
    """The results of injected candidates. Each was made so that it must be rejected for a certain reason; one is right."""
    reasons = dict(verdict.rejected)
    found = []
    for candidate, (name, words) in faults.items():
        reason = reasons.get(str(candidate), "")
        found.append(Trial(name, reason, f"rejected: {words}", words in reason))
    reason = reasons.get(str(honest), "")
    chosen = verdict.best in (default.choice, honest.choice)
    return [*found, Trial("another tile", reason, "not rejected", not reason and chosen)]
