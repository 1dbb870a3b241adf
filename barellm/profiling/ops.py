"""Every op of a step against its bound, where it runs: in the step, with the caches as the ops before it left them.

The step's table is walked with a time stamp after every op: thread 0 notes the processor's counter once all threads have met.
"""

from __future__ import annotations

import platform
import time
from statistics import median
from typing import Any

import numpy as np

from barellm.config import Config
from barellm.cpu import jit
from barellm.cpu.kernel import Spec
from barellm.cpu.kernels import machine
from barellm.cpu.lang.sync import RECORD_NBYTES
from barellm.cpu.step import CpuSession
from barellm.profiling.roofline import Ceiling, measured_ceiling
from barellm.profiling.step import StepBench, opened
from barellm.program.ops.base import Op

WORDS = RECORD_NBYTES // 8


class Stamped:
    """A program's table with a stamp before the first op and after each. `run()` gives the seconds of every op."""

    def __init__(self, session: CpuSession, program: str) -> None:
        arm = platform.machine().lower() in ("arm64", "aarch64")
        spec = Spec(machine.stamp, ("i64",), (("arm", arm),))
        code = jit.cached_object(spec.key, session.isa, lambda: spec.ir(session.isa))
        self._library = jit.Library([code], session.isa)
        self.session = session
        low = session.lowered[program]
        self.ops: list[Op] = low.ops
        self._ticks = np.zeros(len(self.ops) + 1, np.int64)
        self._args = self._ticks.ctypes.data + 8 * np.arange(len(self.ops) + 1)
        source = session.records[program]
        rows = [self._stamp(spec, 0)]
        at = 0
        for i, op in enumerate(self.ops):
            count = len(low.of[op].calls)
            own = source[at : at + count].copy()
            own[-1:, 3] = 1  # all threads meet before the stamp
            rows += [own, self._stamp(spec, i + 1)]
            at += count
        assert at == len(source), "the table has calls that belong to no op (BARELLM_POISON is set)"
        rows[-1][0, 3] = 1
        table = np.concatenate(rows)
        block = np.zeros(table.size + WORDS, np.int64)
        skip = -block.ctypes.data % RECORD_NBYTES // 8
        self._block = block
        self._records = block[skip : skip + table.size].reshape(table.shape)
        self._records[:] = table
        self.seconds_per_tick = self._calibrate()

    def _stamp(self, spec: Spec, index: int) -> np.ndarray:
        row = np.zeros((1, WORDS), np.int64)
        row[0, :2] = self._library.address(spec.symbol()), self._args.ctypes.data + 8 * index
        return row

    def _calibrate(self) -> float:
        """Seconds of one tick, from two stamps 50 ms apart."""
        marks = []
        for _ in range(2):
            before = time.perf_counter()
            self.session.pool.run(self._records.ctypes.data, 1)
            marks.append(((before + time.perf_counter()) / 2, int(self._ticks[0])))
            time.sleep(0.05)
        return (marks[1][0] - marks[0][0]) / (marks[1][1] - marks[0][1])

    def run(self) -> np.ndarray:
        self.session.pool.run(self._records.ctypes.data, len(self._records))
        return np.diff(self._ticks) * self.seconds_per_tick


def measure(config: Config, *, steps: int) -> dict[str, Any]:
    """One JSON object: a row per op and shape of micro and update. `config` has its dtype resolved."""
    with opened(config) as (bench, _):
        session = bench.machine.session
        whole = [bench.step().seconds for _ in range(steps)]
        seconds = {
            program: (stamped.ops, np.array([stamped.run() for _ in range(steps)]))
            for program in ("micro", "update")
            for stamped in [Stamped(session, program)]
        }
        ceiling = measured_ceiling()
        rows = [row for program, (ops, times) in seconds.items() for row in _rows(program, ops, times, ceiling)]
        return {
            "kind": "ops",
            "preset": bench.machine.config.preset,
            **_sizes(bench),
            "isa": session.isa.name,
            "threads": session.threads,
            "step_s": median(whole),
            "ops_s": sum(row["s"] for row in rows),
            "bound_s": sum(row["bound_s"] for row in rows),
            "ceiling": ceiling.to_json(),
            "ops": rows,
        }


def _sizes(bench: StepBench) -> dict[str, Any]:
    return {name: getattr(bench.train, name) for name in ("batch", "seq", "dtype", "recompute")}


def _rows(program: str, ops: list[Op], times: np.ndarray, ceiling: Ceiling) -> list[dict[str, Any]]:
    """`times` (steps, ops) in seconds; ops of one kind and shape share a row, which holds their sum."""
    middle = np.median(times, axis=0)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for op, seconds in zip(ops, middle, strict=True):
        key = (op.name, _shape(op))
        row = rows.setdefault(
            key,
            {"program": program, "op": op.name, "shape": key[1], "count": 0}
            | dict.fromkeys(("s", "bound_s", "flops", "bytes"), 0.0),
        )
        row["count"] += 1
        row["s"] += float(seconds)
        row["bound_s"] += ceiling.seconds(op)
        row["flops"] += op.flops()
        row["bytes"] += op.bytes()
    for row in rows.values():
        row["percent_of_bound"] = 100 * row["bound_s"] / row["s"]
    return list(rows.values())


def _shape(op: Op) -> str:
    """The tensor that says most about an op's size: a product's weight, else the largest operand."""
    operands = [*op.inputs.items(), *op.outputs.items()]
    weights = [t for name, t in operands if name in ("weight", "dweight")]
    t = weights[0] if weights else max((t for _, t in operands), key=lambda t: t.size)
    return "x".join(str(int(n)) for n in t.shape)
