"""The decision: every candidate is verified, then timed against the default in interleaved rounds; only a clear winner is kept."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from barellm.runtime.tuner.database import Database, Entry
from barellm.runtime.tuner.problem import Candidate
from barellm.runtime.tuner.worker import Lost, Worker

LIMIT = 20.0  # seconds for one request
SCREEN, FINAL = 3, 11  # rounds for all; for the best few
FINALISTS = 3
GAIN = 0.98  # a winner needs at most this much of the default's time,
AGREE = 0.8  # less than the default's time in this share of the rounds, in two contests


@dataclass
class Verdict:
    """The result for one problem: `best` (the default unless another config is clearly faster), its time `ratio` to the default.
    `timed`: the ratio of every correct candidate from the screening rounds, an estimate that decides nothing. `rival`: the best
    config that changes the bits, reported only."""

    problem: Any  # `operation`, `dtype`, `sizes` by name, `flops`
    default: Any
    best: Any
    ratio: float  # the best one's time over the default's
    default_s: float
    tried: int
    rejected: list[tuple[str, str]] = field(default_factory=list)
    timed: list[tuple[str, float]] = field(default_factory=list)
    rival: tuple[str, float] | None = None  # faster than the best, but has other bits; its time over the default's

    def to_json(self) -> dict[str, Any]:
        """The verdict as an object for `tune --json`; `rejected` and `timed` list candidates by name."""
        w = self.problem
        return {
            "operation": w.operation, "dtype": w.dtype, **w.sizes,
            "default": str(self.default), "best": str(self.best), "ratio": self.ratio, "default_s": self.default_s,
            "gflops": self.gflops, "tried": self.tried,
            "rejected": [{"candidate": name, "reason": reason} for name, reason in self.rejected],
            "timed": [{"candidate": name, "ratio": round(ratio, 4)} for name, ratio in self.timed],
            **({"rival": self.rival} if self.rival else {}),
        }  # fmt: skip

    @property
    def gflops(self) -> float:
        """Gigaflops a second of the best candidate; 0 where nothing was timed."""
        return self.problem.flops / self.default_s / self.ratio / 1e9 if self.default_s else 0.0


class Tuner:
    """A backend's part of the tuner: its candidates, the child process that runs them, and where winners are kept."""

    database: Database
    machine: str  # where its timings hold: a part of every key

    def worker(self) -> Worker: ...
    def candidates(self, problem: Any) -> list[Candidate]: ...  # the default first; all have its bits
    def refined(self, problem: Any, best: Candidate) -> list[Candidate]: ...  # what else to try when the best is known
    def key(self, problem: Any) -> str: ...  # in the database
    def entry(self, config: Any) -> Entry: ...  # as the database has it

    def rivals(self, problem: Any) -> list[Candidate]:
        """With other bits: timed and reported, never kept."""
        return []

    def keep(self, verdict: Verdict) -> Entry | None:
        """Write the winner into the database, or nothing if the default is as good; and return what was written."""
        better = verdict.best != verdict.default
        entry = self.entry(verdict.best) | {"ratio": round(verdict.ratio, 4)} if better else None
        self.database.change({self.key(verdict.problem): entry})
        return entry

    def tune(self, problems: Iterable[Any], *, seconds: float, each: Callable[[Verdict], None]) -> list[Verdict]:
        """Tune problems one by one, saving each verdict at once, so an interrupt loses only the one in progress. After `seconds`
        none is begun (but for the first), and the one in progress tries no further candidates. `each`: called with each verdict."""
        end, worker, verdicts = time.monotonic() + seconds, self.worker(), []
        try:
            for problem in problems:
                if verdicts and time.monotonic() > end:
                    break
                default, *others = self.candidates(problem)
                try:
                    verdict = decide(
                        worker, problem, others, default,
                        refined=lambda best, at=problem: self.refined(at, best), rivals=self.rivals(problem), end=end,
                    )  # fmt: skip
                # The default itself crashed or hung: keep it, go on (`open` starts a new child)
                except Lost as why:
                    worker.close()
                    verdict = Verdict(problem, default.config, default.config, 1.0, 0.0, 0, [(str(default), str(why))])
                self.keep(verdict)
                verdicts.append(verdict)
                each(verdict)
        finally:
            worker.close()
        return verdicts


def decide(
    worker: Worker, problem: Any, candidates: Sequence[Candidate], default: Candidate, *,
    refined: Callable[[Candidate], list[Candidate]] = lambda best: [], rivals: Sequence[Candidate] = (), end: float = math.inf,
) -> Verdict:  # fmt: skip
    """Choose the fastest configuration for a problem. Every candidate is checked for correctness and screened in SCREEN rounds
    against `default`; then `refined(best)` gives variants of the fastest one, screened too. The FINALISTS fastest are timed in
    FINAL rounds, and the winner must win such a contest twice. `rivals` change the bits: they are timed, never kept. No candidate
    is begun after `end` (monotonic clock)."""
    worker.open(problem)
    rejected: dict[Candidate, str] = {}
    default_s: list[float] = []
    timed: dict[Candidate, float] = {}
    tried = 0

    def contest(contestants: list[Any], rounds: int) -> dict[Any, list[float]]:
        """Time ratios to the default, one per round, by contestant. If the child is lost, all contestants count as rejected."""
        try:
            ratios, seconds = worker.time(contestants, rounds)
        except Lost as why:
            rejected.update(dict.fromkeys(contestants, f"while it was timed: {why}"))
            return {}
        default_s.append(seconds)
        return dict(zip(contestants, ratios, strict=True))

    def screen(candidates: Iterable[Candidate]) -> dict[Any, float]:
        """Check and briefly time candidates: {candidate: median ratio} of those faster than the default."""
        nonlocal tried
        ratios_of: dict[Any, float] = {}
        for candidate in candidates:
            if time.monotonic() > end:
                break
            tried += 1
            reason = worker.check(candidate)
            if reason:
                rejected[candidate] = reason
            else:
                ratios_of |= {c: median(ratios) for c, ratios in contest([candidate], SCREEN).items()}
        timed.update(ratios_of)
        return {c: r for c, r in ratios_of.items() if r < 1.0}

    def fastest_of(faster: dict[Any, float], than: float) -> tuple[Any, float] | None:
        """The candidate that is clearly faster than `than` times the default, with its ratio; None if there is none."""
        first = contest(best, FINAL) if (best := sorted(faster, key=lambda c: faster[c])[:FINALISTS]) else {}
        if not first:
            return None
        fastest = min(first, key=lambda c: median(first[c]))
        # The fastest of many was also lucky: it is believed only what it does once more.
        again = contest([fastest], FINAL) if _wins(first[fastest], than) else {}
        return (fastest, median(again[fastest])) if again and _wins(again[fastest], than) else None

    screened = screen(candidates)
    # Variants of the fastest so far; of the default where nothing was faster.
    screened |= screen(refined(min(screened, key=lambda c: screened[c], default=default)))
    winner, ratio = fastest_of(screened, 1.0) or (default, 1.0)
    rival = fastest_of(screen(rivals), ratio)  # must be clearly faster than the winner, not than the default
    if not default_s:  # nothing was timed: the verdict still needs the default's seconds
        contest([], SCREEN)
    reasons = [(str(c), reason) for c, reason in rejected.items()]
    default_time = median(default_s) if default_s else 0.0
    estimates = sorted(((str(c), ratio) for c, ratio in timed.items()), key=lambda pair: pair[1])
    other = (str(rival[0]), rival[1]) if rival else None
    return Verdict(problem, default.config, winner.config, ratio, default_time, tried, reasons, estimates, other)


def _wins(ratios: list[float], than: float) -> bool:
    return median(ratios) <= GAIN * than and sum(r < than for r in ratios) >= AGREE * len(ratios)


@dataclass(frozen=True)
class Trial:
    """The result of one candidate: why it was rejected ("" if it was not), and whether that is as it should be."""

    candidate: str
    reason: str
    expected: str
    passed: bool


def self_test(worker: Worker, problem: Any, default: Candidate, right: Candidate, faults: Iterable[tuple[str, str]]) -> list[Trial]:
    """Check the tuner itself: faulty kernels go through the same child, checks and decision as real candidates. `faults`: (name,
    words that the reason of its rejection must have); `right`: a correct candidate, which must not be rejected."""
    faulty = {Candidate(default.config, name): words for name, words in faults}
    try:
        verdict = decide(worker, problem, [*faulty, right], default)
    except Lost as lost:  # the default is wrong itself
        return [Trial("the default", str(lost).removeprefix("the default: "), "not rejected", False)]
    finally:
        worker.close()
    reasons = dict(verdict.rejected)
    why = {candidate: reasons.get(str(candidate), "") for candidate in faulty}
    trials = [Trial(c.fault, why[c], f"rejected: {words}", words in why[c]) for c, words in faulty.items()]
    reason = reasons.get(str(right), "")
    chosen = verdict.best in (default.config, right.config)
    return [*trials, Trial("another tile", reason, "not rejected", not reason and chosen)]
