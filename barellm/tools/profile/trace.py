"""Shows where the time of a step goes on every thread. Steps that are traced take turns with steps that are not, and the time
stamps are summed.

A thread's step is work (inside kernels), barrier (behind a kernel, until the last thread has come) and idle (before, between and
after the programs: Python, and waking up). The three are measured apart, so their sum may miss the step that Python's clock
has seen. What it misses is reported, not spread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.tools.profile.step import StepBench

BEGIN, DONE, LEFT = 0, 1, 2  # a thread's stamps of a call: before it, after it, behind its barrier
SECONDS, FEWEST, MOST = 4.0, 7, 200  # of pairs of steps
LIMIT = 2.0  # percent of a step that the parts of a thread may miss


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A cycle of `steps` steps. `seconds`: by Python's clock. `begin` and `end`: the processor's counter at the same moments.
    `runs`: programs in their order, and (threads, calls, 3) of that counter for each, one tick being `tick_s` seconds."""

    seconds: float
    begin: int
    end: int
    runs: list[tuple[str, np.ndarray]]
    tick_s: float
    steps: int = 1

    @property
    def threads(self) -> int:
        return len(self.runs[0][1])


@dataclass(frozen=True)
class Traces:
    """Steps in pairs, one traced and one not. `overheads`: what the traced one of a pair took longer, in percent."""

    traced: list[TracedStep]
    untraced_s: list[float]

    @property
    def overheads(self) -> list[float]:
        return [100 * (t.seconds / t.steps / u - 1) for t, u in zip(self.traced, self.untraced_s, strict=True)]

    def middle(self) -> TracedStep:
        """The traced step of median duration."""
        return sorted(self.traced, key=lambda step: step.seconds)[len(self.traced) // 2]


def record(bench: StepBench, steps: int) -> Traces:
    """`steps` pairs of steps; which of a pair is traced first changes from pair to pair."""
    session: CpuSession = bench.compiled.session
    rooms: list[dict[str, np.ndarray]] = []  # of each run of a cycle
    order: list[str] = []
    marks: list[tuple[float, int]] = []  # both clocks, at the begin and at the end of a step

    def mark() -> None:
        marks.append((time.perf_counter(), session.pool.now()))

    @contextmanager
    def marking() -> Iterator[None]:
        mark()
        yield
        mark()

    def run(program: str, **values: Any) -> None:
        """A run that leaves its stamps in a room of its own."""
        if len(order) == len(rooms):
            rooms.append(session.new_stamps())
        session.trace(rooms[len(order)])
        order.append(program)
        session.run(program, **values)

    raw: list[tuple[float, int, int, list[tuple[str, np.ndarray]]]] = []
    plain: list[float] = []
    for i in range(steps):
        for traced in (True, False) if i % 2 == 0 else (False, True):
            order.clear()
            session.trace(None)
            bench.step(marking, run if traced else None)
            (start, begin), (stop, end) = marks[-2:]
            if traced:
                raw.append(
                    (
                        stop - start,
                        begin,
                        end,
                        [(name, room[name].copy()) for name, room in zip(order, rooms, strict=False)],
                    )
                )
            else:
                plain.append((stop - start) / bench.course.cycle)
    session.trace(None)
    tick_s = (marks[-1][0] - marks[0][0]) / (marks[-1][1] - marks[0][1])
    made = [TracedStep(seconds, begin, end, runs, tick_s, bench.course.cycle) for seconds, begin, end, runs in raw]
    for step in made:
        check_order(step)
    return Traces(made, plain)


def pairs_for(bench: StepBench) -> int:
    """Pairs of steps that take about SECONDS: many for a small model, whose steps are disturbed more easily."""
    return round(min(max(SECONDS / (2 * bench.step().seconds), FEWEST), MOST))


def check_order(step: TracedStep) -> None:
    """Raise a UserError if the counters of the cores disagree, so that a thread seems to go back in time."""
    for thread in range(step.threads):
        line = [step.begin, *(int(x) for _, stamps in step.runs for x in stamps[thread].reshape(-1)), step.end]
        if any(after < before for before, after in pairwise(line)):
            raise UserError(
                f"the counter of thread {thread} runs backwards: this machine's cores cannot be traced together"
            )


def account(step: TracedStep) -> list[dict[str, Any]]:
    """A row for each thread: seconds of work, barriers and idling, and the percentage of the step that they miss."""
    rows = []
    for thread in range(step.threads):
        runs = [stamps[thread] for _, stamps in step.runs if len(stamps[thread])]
        edges = [step.begin, *(int(x) for run in runs for x in (run[0, BEGIN], run[-1, LEFT])), step.end]
        parts = {
            "work_s": sum(int((run[:, DONE] - run[:, BEGIN]).sum()) for run in runs) * step.tick_s,
            "barrier_s": sum(int((run[:, LEFT] - run[:, DONE]).sum()) for run in runs) * step.tick_s,
            "idle_s": sum(b - a for a, b in zip(edges[::2], edges[1::2], strict=True)) * step.tick_s,
        }
        missed = step.seconds - sum(parts.values())
        parts = {name: s / step.steps for name, s in parts.items()}
        rows.append({"thread": thread, **parts, "residual_percent": 100 * missed / step.seconds})
    return rows


def call_seconds(step: TracedStep) -> dict[str, np.ndarray]:
    """program -> (calls, 2): seconds of work and of waiting behind it, the mean of the threads. They and idling are
    the step; where steps differ, they are the mean of a cycle."""

    def seconds(stamps: np.ndarray) -> np.ndarray:
        work, wait = stamps[:, :, DONE] - stamps[:, :, BEGIN], stamps[:, :, LEFT] - stamps[:, :, DONE]
        return np.stack([work.mean(axis=0), wait.mean(axis=0)], axis=-1) * step.tick_s

    found: dict[str, Any] = {}
    for program, stamps in step.runs:
        found[program] = found.get(program, 0.0) + seconds(stamps) / step.steps
    return found
