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
REPEATS = 10


class Stamped:
    """Ops of a program as a table of its own, with a stamp before the first and after each. `run()` gives every op's seconds."""

    def __init__(self, session: CpuSession, program: str, ops: list[Op]) -> None:
        arm = platform.machine().lower() in ("arm64", "aarch64")
        spec = Spec(machine.stamp, ("i64",), (("arm", arm),))
        code = jit.cached_object(spec.key, session.isa, lambda: spec.ir(session.isa))
        self._library = jit.Library([code], session.isa)
        self._address = self._library.address(spec.symbol())
        self.session = session
        self._ticks = np.zeros(len(ops) + 1, np.int64)
        self._args = self._ticks.ctypes.data + 8 * np.arange(len(ops) + 1)
        rows = [self._stamp(0)]
        calls = _records(session, program)
        for i, op in enumerate(ops):
            own = calls[op].copy()
            own[-1:, 2] = 1  # all threads meet before the stamp
            rows += [own, self._stamp(i + 1)]
        rows[-1][0, 2] = 1
        table = np.concatenate(rows)
        self._block = np.zeros(table.size + WORDS, np.int64)
        skip = -self._block.ctypes.data % RECORD_NBYTES // 8
        self._table = self._block[skip : skip + table.size].reshape(table.shape)
        self._table[:] = table
        self.seconds_per_tick = self._calibrate()

    def _stamp(self, index: int) -> np.ndarray:
        row = np.zeros((1, WORDS), np.int64)
        row[0, :2] = self._address, self._args.ctypes.data + 8 * index
        return row

    def _calibrate(self) -> float:
        """Seconds of one tick, from two stamps 20 ms apart."""
        marks = []
        for _ in range(2):
            before = time.perf_counter()
            self.session.pool.run(self._table.ctypes.data, 1)
            marks.append(((before + time.perf_counter()) / 2, int(self._ticks[0])))
            time.sleep(0.02)
        return (marks[1][0] - marks[0][0]) / (marks[1][1] - marks[0][1])

    def run(self) -> np.ndarray:
        self.session.pool.run(self._table.ctypes.data, len(self._table))
        return np.diff(self._ticks) * self.seconds_per_tick


def _records(session: CpuSession, program: str) -> dict[Op, np.ndarray]:
    """The rows of the program's table that each op has."""
    low, table, at = session.lowered[program], session.records[program], 0
    rows = {}
    for op in low.ops:
        count = len(low.of[op].calls)
        rows[op] = table[at : at + count]
        at += count
    assert at == len(table), "the table has calls that belong to no op (BARELLM_POISON is set)"
    return rows


def measure(config: Config, *, steps: int) -> dict[str, Any]:
    """One JSON object: a row per op and shape of micro and update. `config` has its dtype resolved."""
    with opened(config) as (bench, _):
        session = bench.machine.session
        whole = [bench.step().seconds for _ in range(steps)]
        stamped = {program: Stamped(session, program, session.lowered[program].ops) for program in ("micro", "update")}
        times = {program: [] for program in stamped}
        for _ in range(steps):
            for program, table in stamped.items():
                times[program].append(table.run())
        ceiling = measured_ceiling()
        rows = [row for program in stamped for row in _rows(session, program, np.array(times[program]), ceiling)]
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


def _rows(session: CpuSession, program: str, times: np.ndarray, ceiling: Ceiling) -> list[dict[str, Any]]:
    """`times` (steps, ops) in seconds. Ops of one kind and shape share a row, which holds their sums: `s` in the step, `alone_s`
    the same count of the first of them again and again, with whatever of its operands a cache can hold."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for op, seconds in zip(session.lowered[program].ops, np.median(times, axis=0), strict=True):
        key = (op.name, _shape(op))
        if key not in rows:
            rows[key] = {"program": program, "op": op.name, "shape": key[1], "count": 0}
            rows[key] |= dict.fromkeys(("s", "alone_s", "bound_s", "flops", "bytes"), 0.0)
            alone = Stamped(session, program, [op] * REPEATS)
            rows[key]["alone"] = float(np.median([alone.run()[1:] for _ in range(3)]))
        row = rows[key]
        row["count"] += 1
        row["s"] += float(seconds)
        row["alone_s"] += row["alone"]
        row["bound_s"] += ceiling.seconds(op)
        row["flops"] += op.flops()
        row["bytes"] += op.bytes()
    for row in rows.values():
        del row["alone"]
        row["percent_of_bound"] = 100 * row["bound_s"] / row["s"]
    return list(rows.values())


def _shape(op: Op) -> str:
    """The tensor that says most about an op's size: a product's weight, else the largest operand."""
    operands = [*op.inputs.items(), *op.outputs.items()]
    weights = [t for name, t in operands if name in ("weight", "dweight")]
    t = weights[0] if weights else max((t for _, t in operands), key=lambda t: t.size)
    return "x".join(str(int(n)) for n in t.shape)
