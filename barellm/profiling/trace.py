"""Where a step's time goes on every thread: steps that are traced in turn with steps that are not, and sums of their stamps.

A thread's step is work (inside kernels), barrier (behind a kernel, until the last thread has come) and idle (before, between and
after the two programs: Python, and waking up). The three are measured apart, so their sum may miss the step that Python's
clock has seen; what it misses is reported, not spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.profiling.plan import STEP
from barellm.profiling.roofline import Ceiling, Mix, mix_of, primitives
from barellm.profiling.step import StepBench
from barellm.program.ops.base import Op

Kind = tuple[str, str, str]  # program, name of the op, shape: what a row of a table is about

BEGIN, DONE, LEFT = 0, 1, 2  # a thread's stamps of a call: before it, after it, behind its barrier
SECONDS, FEWEST, MOST = 4.0, 7, 200  # of pairs of steps
LIMIT = 2.0  # percent of a step that the parts of a thread may miss


@dataclass(frozen=True)
class TracedStep:
    """`seconds`: by Python's clock. `begin` and `end`: the processor's counter at the same moments. `stamps`: program ->
    (threads, calls, 3) of that counter, one tick being `tick_s` seconds."""

    seconds: float
    begin: int
    end: int
    stamps: dict[str, np.ndarray]
    tick_s: float

    @property
    def threads(self) -> int:
        return len(next(iter(self.stamps.values())))


@dataclass(frozen=True)
class Traces:
    """Steps in pairs, one traced and one not. `overheads`: what the traced one of a pair took longer, in percent."""

    traced: list[TracedStep]
    untraced_s: list[float]

    @property
    def overheads(self) -> list[float]:
        return [100 * (t.seconds / u - 1) for t, u in zip(self.traced, self.untraced_s, strict=True)]

    def middle(self) -> TracedStep:
        """The traced step of median duration."""
        return sorted(self.traced, key=lambda step: step.seconds)[len(self.traced) // 2]


def record(bench: StepBench, steps: int) -> Traces:
    """`steps` pairs of steps; which of a pair is traced first changes from pair to pair."""
    session: CpuSession = bench.machine.session
    room = session.new_stamps()
    marks: list[tuple[float, int]] = []  # both clocks, at the begin and at the end of a step

    def mark() -> None:
        marks.append((time.perf_counter(), session.pool.now()))

    @contextmanager
    def marking() -> Iterator[None]:
        mark()
        yield
        mark()

    raw: list[tuple[float, int, int, dict[str, np.ndarray]]] = []
    plain: list[float] = []
    for i in range(steps):
        for traced in (True, False) if i % 2 == 0 else (False, True):
            session.trace(room if traced else None)
            bench.step(marking)
            (start, begin), (stop, end) = marks[-2:]
            if traced:
                raw.append((stop - start, begin, end, {name: room[name].copy() for name in STEP}))
            else:
                plain.append(stop - start)
    session.trace(None)
    tick_s = (marks[-1][0] - marks[0][0]) / (marks[-1][1] - marks[0][1])
    made = [TracedStep(seconds, begin, end, stamps, tick_s) for seconds, begin, end, stamps in raw]
    for step in made:
        check_order(step)
    return Traces(made, plain)


def pairs_for(bench: StepBench) -> int:
    """Pairs of steps that take about SECONDS: many for a small model, whose steps are disturbed more easily."""
    return round(min(max(SECONDS / (2 * bench.step().seconds), FEWEST), MOST))


def check_order(step: TracedStep) -> None:
    """UserError where the counters of the cores disagree, so that a thread seems to go back in time."""
    for thread in range(step.threads):
        line = [step.begin, *(int(x) for name in STEP for x in step.stamps[name][thread].reshape(-1)), step.end]
        if any(after < before for before, after in pairwise(line)):
            raise UserError(
                f"the counter of thread {thread} runs backwards: this machine's cores cannot be traced together"
            )


def account(step: TracedStep) -> list[dict[str, Any]]:
    """A row for each thread: seconds of work, barriers and idling, and the percentage of the step that they miss."""
    rows = []
    for thread in range(step.threads):
        runs = [step.stamps[name][thread] for name in STEP if len(step.stamps[name][thread])]
        edges = [step.begin, *(int(x) for run in runs for x in (run[0, BEGIN], run[-1, LEFT])), step.end]
        parts = {
            "work_s": sum(int((run[:, DONE] - run[:, BEGIN]).sum()) for run in runs) * step.tick_s,
            "barrier_s": sum(int((run[:, LEFT] - run[:, DONE]).sum()) for run in runs) * step.tick_s,
            "idle_s": sum(b - a for a, b in zip(edges[::2], edges[1::2], strict=True)) * step.tick_s,
        }
        missed = step.seconds - sum(parts.values())
        rows.append({"thread": thread, **parts, "residual_percent": 100 * missed / step.seconds})
    return rows


def spans(session: CpuSession, program: str) -> list[tuple[Op, int, int]]:
    """Each op with its calls: [first, stop) of the program's table. They cover it."""
    calls, found, at = session.calls[program], [], 0
    for op in session.lowered[program].ops:
        first = at
        while at < len(calls) and calls[at].op is op:
            at += 1
        found.append((op, first, at))
    assert at == len(calls), "calls out of their op's order"
    return found


def call_seconds(step: TracedStep, program: str) -> np.ndarray:
    """(calls, 2): seconds of work and of waiting behind it, the mean of the threads. They and idling are the step."""
    stamps = step.stamps[program]
    work, wait = stamps[:, :, DONE] - stamps[:, :, BEGIN], stamps[:, :, LEFT] - stamps[:, :, DONE]
    return np.stack([work.mean(axis=0), wait.mean(axis=0)], axis=-1) * step.tick_s


def op_seconds(session: CpuSession, step: TracedStep) -> dict[str, np.ndarray]:
    """program -> (ops, 2): the sums of each op's calls."""
    found = {}
    for program in STEP:
        calls = call_seconds(step, program)
        found[program] = np.array([calls[first:stop].sum(axis=0) for _, first, stop in spans(session, program)])
    return found


def by_kind(
    session: CpuSession, seconds: dict[str, np.ndarray], ceiling: Ceiling, more: Callable[[str, Op], Any] | None = None
) -> list[dict[str, Any]]:
    """A row for each kind of op (program, name, shape), which holds the sums of its ops: `s`, of which `wait_s` in barriers,
    operations, bytes, the bound. `more(program, op)`: further keys for the row of which `op` is the first."""
    rows: dict[Kind, dict[str, Any]] = {}
    for program, values in seconds.items():
        for op, (work, wait) in zip(session.lowered[program].ops, values, strict=True):
            key = kind(program, op)
            if key not in rows:
                rows[key] = {"program": program, "op": op.name, "shape": key[2], "family": family(op), "count": 0}
                rows[key] |= dict.fromkeys(("s", "wait_s", "bound_s", "flops", "bytes"), 0.0)
                rows[key] |= more(program, op) if more else {}
            row = rows[key]
            row["count"] += 1
            row["s"] += float(work + wait)
            row["wait_s"] += float(wait)
            row["bound_s"] += ceiling.seconds(op)
            row["flops"] += op.flops()
            row["bytes"] += op.bytes()
    for row in rows.values():
        row["percent_of_bound"] = 100 * row["bound_s"] / row["s"]
    return list(rows.values())


def by_kernel(session: CpuSession, step: TracedStep) -> dict[Kind, dict[str, dict[str, Any]]]:
    """For kinds of ops that take more than one kernel: symbol of the kernel -> `calls`, `s`, `wait_s`."""
    found: dict[Kind, dict[str, dict[str, Any]]] = {}
    for program in STEP:
        seconds, calls = call_seconds(step, program), session.calls[program]
        for op, first, stop in spans(session, program):
            for at in range(first, stop):
                rows = found.setdefault(kind(program, op), {})
                row = rows.setdefault(calls[at].spec.symbol(), {"calls": 0, "s": 0.0, "wait_s": 0.0})
                row["calls"] += 1
                row["s"] += float(seconds[at].sum())
                row["wait_s"] += float(seconds[at, 1])
    return {key: rows for key, rows in found.items() if len(rows) > 1}


def kind(program: str, op: Op) -> Kind:
    return program, op.name, shape(op)


def mixes(session: CpuSession) -> set[Mix]:
    """The mixes of traffic that a step's ops have: what their bounds take a bandwidth of."""
    return {mix_of(op) for program in STEP for op in session.lowered[program].ops}


def shape(op: Op) -> str:
    """The tensor that says most about an op's size: a product's weight, else the largest operand."""
    operands = [*op.inputs.items(), *op.outputs.items()]
    weights = [t for name, t in operands if name in ("weight", "dweight")]
    t = weights[0] if weights else max((t for _, t in operands), key=lambda t: t.size)
    return "x".join(str(int(n)) for n in t.shape)


def place(op: Op) -> str:
    """Where in the model an op stands: the parameter that it belongs to, else the layer, else nothing."""
    tensors = [*op.inputs.values(), *op.outputs.values()]
    owners = [t.name for t in tensors if t.role == "parameter"]
    owners += [t.name.removesuffix(".grad") for t in tensors if t.role == "gradient"]
    return owners[0] if owners else op.segment or ""


def family(op: Op) -> str:
    """The file of program/ops/ that the op's main part is from: "matmul", "attention", ..."""
    parts = primitives(op)
    main = next((p for p in parts if p.counted), parts[0])
    return type(main).__module__.rpartition(".")[2]
