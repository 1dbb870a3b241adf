"""Shows where the time of a step goes on every thread. Traced steps are interleaved with others, and their stamps summed.

A thread's step is work (inside kernels), barrier (behind a kernel, until the last thread has come) and idle (before, between and
after the programs: Python, and waking up). The three are measured apart, so their sum may miss the step that Python's clock
has seen. What it misses is reported, not spread."""

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
    """A cycle of `steps` steps, traced. `seconds`: by Python's clock; `begin` and `end`: the processor's counter at the same
    moments, of which a tick is `tick_s` seconds. `runs`: (program, stamps) in order; stamps (threads, calls, 3) are that counter at
    BEGIN, DONE and LEFT of each call."""

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

    def median_step(self) -> TracedStep:
        return sorted(self.traced, key=lambda step: step.seconds)[len(self.traced) // 2]


def record(bench: StepBench, steps: int) -> Traces:
    """Run `steps` pairs of a traced and an untraced step, alternating which comes first."""
    session: CpuSession = bench.compiled.session
    buffers: list[dict[str, np.ndarray]] = []  # of stamps by program, for each run of a cycle; reused by the next step
    order: list[str] = []  # programs of the current step
    marks: list[tuple[float, int]] = []  # both clocks, at the begin and at the end of a step

    def mark() -> None:
        marks.append((time.perf_counter(), session.pool.now()))

    @contextmanager
    def marking() -> Iterator[None]:
        mark()
        yield
        mark()

    def run(program: str, **values: Any) -> None:
        """Run a program that leaves its stamps in a buffer of its own."""
        if len(order) == len(buffers):
            buffers.append(session.new_stamps())
        session.trace(buffers[len(order)])
        order.append(program)
        session.run(program, **values)

    raw: list[tuple[float, int, int, list[tuple[str, np.ndarray]]]] = []  # fields of TracedStep: its tick is known at the end
    untraced_s: list[float] = []
    for i in range(steps):
        for traced in (True, False) if i % 2 == 0 else (False, True):
            order.clear()
            session.trace(None)
            bench.step(marking, run if traced else None)
            (start, begin), (stop, end) = marks[-2:]
            if traced:
                runs = [(name, buffer[name].copy()) for name, buffer in zip(order, buffers, strict=False)]
                raw.append((stop - start, begin, end, runs))
            else:
                untraced_s.append((stop - start) / bench.training_schedule.cycle)
    session.trace(None)
    # Seconds per tick, from the longest interval that both clocks measured.
    tick_s = (marks[-1][0] - marks[0][0]) / (marks[-1][1] - marks[0][1])
    traced_steps = [TracedStep(*fields, tick_s, bench.training_schedule.cycle) for fields in raw]
    for step in traced_steps:
        check_order(step)
    return Traces(traced_steps, untraced_s)


def pairs_for(bench: StepBench) -> int:
    """Pairs of steps that take about SECONDS: many for a small model, whose steps are disturbed more easily."""
    return round(min(max(SECONDS / (2 * bench.step().seconds), FEWEST), MOST))


def check_order(step: TracedStep) -> None:
    """Raise a UserError if the counters of the cores disagree, so that a thread seems to go back in time."""
    for thread in range(step.threads):
        line = [step.begin, *(int(x) for _, stamps in step.runs for x in stamps[thread].reshape(-1)), step.end]
        if any(after < before for before, after in pairwise(line)):
            raise UserError(f"the counter of thread {thread} runs backwards: this machine's cores cannot be traced together")


def account(step: TracedStep) -> list[dict[str, Any]]:
    """A row per thread: seconds of work, barriers and idling of an average step, and what they miss of it (`residual_percent`)."""
    rows = []
    for thread in range(step.threads):
        runs = [stamps[thread] for _, stamps in step.runs if len(stamps[thread])]
        # Idle from the step's begin to the first program's, from its end to the next one's, ..., to the step's end.
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
    """{program: (calls, 2)}: seconds of work and of waiting at the barrier behind it, the mean of the threads, of an average step
    of the cycle. With idling they add up to the step."""

    def seconds(stamps: np.ndarray) -> np.ndarray:
        """(calls, 2) of one run, of stamps (threads, calls, 3)."""
        work, wait = stamps[:, :, DONE] - stamps[:, :, BEGIN], stamps[:, :, LEFT] - stamps[:, :, DONE]
        return np.stack([work.mean(axis=0), wait.mean(axis=0)], axis=-1) * step.tick_s

    sums: dict[str, Any] = {}
    for program, stamps in step.runs:
        sums[program] = sums.get(program, 0.0) + seconds(stamps) / step.steps
    return sums
