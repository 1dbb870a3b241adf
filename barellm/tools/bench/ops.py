"""Every op of a step against its roofline, where it runs: in the step, with the caches as the ops before it left them."""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from barellm.config import Config
from barellm.cpu.lang.sync import BARRIER, STAMPS
from barellm.cpu.step import CpuSession
from barellm.cpu.threads import record_table
from barellm.program.ops.base import Op
from barellm.tools.plan.roofline import measured_ceiling
from barellm.tools.plan.rows import by_kind, mixes, op_seconds, spans
from barellm.tools.profile import device_trace
from barellm.tools.profile.step import StepBench, opened, where_it_ran
from barellm.tools.profile.trace import BEGIN, LEFT, call_seconds, record

REPEATS = 10
SHORT = 0.05  # seconds of an op that is not worth so many repeats


def measure(config: Config, *, steps: int, device: str = "cpu") -> dict[str, Any]:
    """Benchmark all ops of a step; returns JSON with a row per kind of op: medians of `steps` traced steps. On the CPU rows also
    have `alone_s`, the op repeated by itself with warm caches. `config` has its dtype resolved."""
    with opened(config, device=device) as (bench, _):
        session, train = bench.compiled.session, bench.train
        ceiling = measured_ceiling(device=device)
        ceiling.measure(mixes(session, bench.shares))
        seconds, step_s, alone = (_on_gpu if device == "cuda" else _on_cpu)(bench, steps)
        ceiling.measure(mixes(session, bench.shares))  # the machine's speed may have changed meanwhile
        rows = by_kind(session, seconds, ceiling, bench.shares, alone and (lambda program, op: {"alone_s": alone(program, op)}))
        for row in rows if alone else ():
            row["alone_s"] *= row["count"] * bench.shares[row["program"]]
        return {
            "kind": "ops", "preset": bench.compiled.config.preset, "batch": train.micro_batch_size,
            **{name: getattr(train, name) for name in ("seq", "dtype", "recompute")}, **where_it_ran(bench.compiled),
            "step_s": step_s, "ops_s": sum(row["s"] for row in rows), "bound_s": sum(row["bound_s"] for row in rows),
            "ceiling": ceiling.to_json(), "ops": rows,
        }  # fmt: skip


Seconds = dict[str, np.ndarray]  # program -> (ops, 2), as `rows.op_seconds` has them


def _on_cpu(bench: StepBench, steps: int) -> tuple[Seconds, float, Callable[[str, Op], float] | None]:
    """(seconds of ops, of an untraced step, how to find those of one op alone)."""
    session, traces = bench.compiled.session, record(bench, steps)
    each = [op_seconds(session, call_seconds(step)) for step in traces.traced]
    seconds = {name: np.median([found[name] for found in each], axis=0) for name in each[0]}
    return seconds, median(traces.untraced_s), Alone(bench, session, traces.traced[0].tick_s).seconds


def _on_gpu(bench: StepBench, steps: int) -> tuple[Seconds, float, Callable[[str, Op], float] | None]:
    traces = device_trace.record(bench, steps)
    return op_seconds(bench.compiled.session, traces.median_calls_s()), median(traces.usual_s), None


class Alone:
    """Runs single ops of a session again and again, with a barrier behind each time."""

    def __init__(self, bench: StepBench, session: CpuSession, tick_s: float) -> None:
        self.bench, self.session, self.tick_s = bench, session, tick_s
        self.calls = {(program, op): (first, stop) for program in session.calls for op, first, stop in spans(session, program)}

    def seconds(self, program: str, op: Op) -> float:
        """The median time of one, the first not counted."""
        first, stop = self.calls[program, op]
        if any(t.dtype == "i32" for t in op.inputs.values()):
            # Later tensors lie where its ids were, and other bits are addresses anywhere: write them, and do what is before the op.
            for name, ids in zip(("tokens", "targets"), self.bench.inputs()[0], strict=True):
                if t := self.session.programs[program].named.get(name):
                    self.session.stored(t)[:] = ids
            if first:
                self.session.pool.run(self.session.records[program].ctypes.data, first)
        calls = self.session.records[program][first:stop].copy()
        calls[-1, BARRIER // 8] = 1
        once = self._run(calls, 2)  # a GEMM of seconds is not worth many repeats
        repeats = min(REPEATS, int(REPEATS * SHORT / max(once, 1e-9)))
        return float(np.median([self._run(calls, repeats) for _ in range(3)])) if repeats > 2 else once

    def _run(self, calls: np.ndarray, repeats: int) -> float:
        """The median of `repeats` times in a row, the first not counted."""
        table = record_table(len(calls) * repeats)
        table.reshape(repeats, *calls.shape)[:] = calls
        stamps = np.zeros((self.session.threads, repeats, len(calls), STAMPS), np.int64)
        self.session.pool.run(table.ctypes.data, len(table), stamps.ctypes.data)
        return float(np.median(stamps[0, 1:, -1, LEFT] - stamps[0, 1:, 0, BEGIN])) * self.tick_s
