"""Times a kernel by itself, in turns with PyTorch's: what the stages of the group "ops" are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from barellm.cuda import driver
from barellm.cuda.bench import Bench, bandwidth_kernel
from barellm.cuda.kernel import Specialisation, Target
from barellm.cuda.step import CudaSession, lower_and_plan
from barellm.program.builder import Program
from barellm.tools.bench import interleaved
from barellm.tools.plan import devices
from barellm.tools.plan.roofline import NAMED
from benchmarks import baseline_process
from benchmarks.baselines import baseline_script
from benchmarks.gpu_check.bars import bar
from benchmarks.gpu_check.stages import Scale

ROUNDS, TURN_S, LONG_S, PAUSE_S = 3, 0.04, 0.1, 0.02
GIVEN = ("input", "parameter", "state")  # roles of tensors that hold numbers before the op runs
NOISE = 1 << 20  # random numbers, again and again
SCALARS = {"seed": 1, "step": 1, "sample": 0}


@dataclass(frozen=True)
class Case:
    """An op by itself. `program` makes it; `sizes` are those of a run. `peer`: what peers/torch_kernels.py is asked for;
    `against`: of its ways how many times as fast ours should be (0: it is only told). `nbytes`: what must be read and written, and
    `of_copy` the share of a copy's rate that it should reach (0: it is only told). Of the cases of one `group` the fastest is held
    against the baseline."""

    name: str
    program: Callable[[], Program]
    sizes: dict[str, int] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    against: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    of_copy: float = 0.0
    group: str = ""


def kernels(cases: Iterable[Case], target: Target) -> Iterator[Specialisation]:
    """What `measured` launches."""
    yield bandwidth_kernel(NAMED["copy"])
    for case in cases:
        yield from lower_and_plan({"op": case.program()}, target).specs


def measured(scale: Scale, cases: list[Case], file: str) -> dict[str, Any]:
    """A row for each case, and the bars."""
    meter, device = Bench(), driver.device()
    copy = meter.bandwidth(NAMED["copy"])
    meter.close()
    rows: list[dict[str, Any]] = []
    script = baseline_script("torch_kernels.py") if not scale.mock and find_spec("torch") else None
    asked = [case.baseline for case in cases]
    pytorch = baseline_process.opened(script, asked, device="cuda", environment={}) if script else nullcontext()
    with pytorch as baseline:
        for i, case in enumerate(cases):
            if scale.left_s <= 1.0:
                rows.append({"case": case.name, "left out": "no time"})
                continue
            rows.append(_row(case, _turns(scale, case, i, baseline, device)))
            print({k: v for k, v in rows[-1].items() if k != "turns_s"}, flush=True)
            scale.keep({"cases": rows})
    result = {"kind": "ops apart", "copy_bytes_s": copy, "cases": rows}
    return {"cases": rows, "bars": _bars(cases, rows, copy, mock=scale.mock), "files": {file: result}}


def _turns(
    scale: Scale, case: Case, at: int, baseline: baseline_process.Baseline | None, device: driver.Device
) -> dict[str, list[list[float]]]:
    """Seconds by side and round."""
    programs = {"op": case.program()}
    session = CudaSession(programs, device=device, built=lower_and_plan(programs, Target.of(device)))
    try:
        requested = {name for op in programs["op"].ops for name in op.scalars}
        for name, t in programs["op"].named.items():
            if t.role == "input":
                session.write(name, np.zeros([int(n) for n in t.shape], np.float32))
        session.run("op", **case.sizes, **{name: n for name, n in SCALARS.items() if name in requested})
        session.synchronize()
        _fill(session)
        return interleaved.samples(
            lambda what, calls: devices.replay_seconds(session, "op", calls, **case.sizes),
            baseline if case.baseline else None,
            at,
            what="run",
            rounds=1 if scale.mock else ROUNDS,
            turn_s=0.0 if scale.mock else TURN_S,
            long_s=LONG_S,
            pause=partial(time.sleep, 0.0 if scale.mock else PAUSE_S),
            backends=tuple(name for name in case.against if name != "peer"),
        )
    finally:
        session.close()


def _fill(session: CudaSession) -> None:
    """Random normal bf16 in every operand, also in inputs: as pairs they are fp32 numbers as normal, and fp16 or codes too."""
    block = np.random.default_rng(1).standard_normal(NOISE).astype(ml_dtypes.bfloat16).view(np.uint8)
    for t, start in session.plan.offsets.items():
        if t.role in GIVEN:
            for at in range(0, t.nbytes, block.size):
                session._set(start + at, block[: t.nbytes - at])


def _row(case: Case, turns: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians of turns; `ratios`: over the rounds the median of the baseline's over ours."""
    by_turn = {name: [median(seconds) for seconds in found] for name, found in turns.items()}
    ours = by_turn.pop("ours")
    row: dict[str, Any] = {"case": case.name, "ours_s": median(ours), "turns_s": turns}
    row |= {"gb_per_s": case.nbytes / median(ours) / 1e9} if case.nbytes else {}
    row["peers_s"] = {name: median(found) for name, found in by_turn.items()}
    row["ratios"] = {n: median(p / o for o, p in zip(ours, found, strict=True)) for n, found in by_turn.items()}
    return row


def _bars(cases: list[Case], rows: list[dict[str, Any]], copy: float, *, mock: bool) -> list[dict[str, Any]]:
    bars: list[dict[str, Any]] = []
    groups: dict[tuple[str, str], tuple[float, list[float]]] = {}
    for case, row in zip(cases, rows, strict=True):
        for name, wanted in case.against.items():
            _, found = groups.setdefault((case.group or case.name, name), (wanted, []))
            found += [row["ratios"][name]] if name in row.get("ratios", {}) else []
        if case.of_copy:
            told = None if mock or "ours_s" not in row else case.nbytes / row["ours_s"] / copy
            bars.append(bar(f"{case.name}: of copy bandwidth", told, case.of_copy))
    for (group, name), (wanted, found) in groups.items():
        if wanted:
            who = "PyTorch" if name == "peer" else f"PyTorch's {name}"
            bars.append(bar(f"{group}: times as fast as {who}", max(found, default=None), wanted, "x"))
    return bars
