"""Timelines of real steps for the chapter on traces, some with a planted slow-down, and what finds it: `python -m
anatomy.timelines` records them.

A file of docs/book/traces is what `barellm profile` writes (Chrome's trace format; https://ui.perfetto.dev opens it) of one step:
the fastest traced one, which others on the machine disturbed least. `diagnosis` finds the cause of a slow step from its file and
that of a healthy one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm.assembly.build import resolved
from barellm.config.overrides import changed
from barellm.cpu import gemm_config, tuning
from barellm.cpu.kernels.gemm import gemm_mainloop
from barellm.distributed import launch, launchers
from barellm.distributed.cores import settle, usable
from barellm.distributed.mpi import MpiRanks
from barellm.models import preset
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE, first
from barellm.tools.profile import timeline, trace
from barellm.tools.profile.step import Sample, StepBench, opened

FOLDER = Path(__file__).parents[1] / "docs" / "book" / "traces"
MODEL = {
    "model.layers": 2,
    "model.d_model": 192,
    "model.heads": 6,
    "train.seq": 64,
    "train.micro_batch_size": 4,
    "train.dtype": "fp32",
}
STEPS = 400  # pairs: others on the machine leave few of them alone
WHOLE = 1 << 13  # columns: more than any GEMM of the model has
PAUSE = 0.4  # of a healthy step, that a planted pause takes
EXCHANGES = ("start_all_to_all", "wait_all_to_all", "sum_over_ranks", "all_gather", "all_to_all", "reduce_scatter")
CAUSES = {
    "data": "the step waits before its first program: the data loader is late",
    "python": "nothing runs between two programs: Python is busy there",
    "rank": "an exchange takes long: the other rank is late",
    "imbalance": "one thread works and the others wait behind one op",
    "kernel": "one op is slow on all threads",
}


# --- recording ---

Plant = Callable[[StepBench, float], None]  # gets the bench and the seconds of a healthy step


def pausing(program: str) -> Plant:
    """The main thread sleeps before it runs a program."""

    def plant(bench: StepBench, step_s: float) -> None:
        session, run = bench.compiled.session, bench.compiled.session.run

        def slower(name: str, **values: Any) -> None:
            if name == program:
                time.sleep(PAUSE * step_s)
            run(name, **values)

        session.run = slower

    return plant


def together(bench: StepBench, ranks: Ranks) -> None:
    """Ranks begin each step at the same time, so that what one waits for happens in the step that is drawn."""
    step = bench.step

    def begun(wrap: Callable[[], Any] | None = None, run: Callable[..., Any] | None = None) -> Sample:
        ranks.barrier()
        return step(wrap, run)

    if ranks.count > 1:
        bench.step = begun


@contextmanager
def configured(change: Callable[[Any, int, int], Any]) -> Iterator[None]:
    """Kernels are compiled with `change(config, columns, depth)` in place of the default blocking of a forward GEMM."""
    default, groups = tuning.default, gemm_mainloop.panel_groups

    def group(k: Any, panels: Any, most: Any, blocks: Any, least: Any) -> Any:
        return k.int(1) if most > WHOLE // 64 else groups(k, panels, most, blocks, least)

    def other(isa: Any, kind: str, dtype: str, cols: int, depth: int, rows: int) -> Any:
        config = default(isa, kind, dtype, cols, depth, rows)
        return change(config, cols, depth) if kind.startswith("forward") else config

    tuning.default, gemm_mainloop.panel_groups = other, group
    try:
        yield
    finally:
        tuning.default, gemm_mainloop.panel_groups = default, groups


def one_item(config: Any, cols: int, depth: int) -> Any:
    """The first GEMM of an MLP is a single work item."""
    return replace(config, mc=1 << 13, long_mc=1 << 13, nc=WHOLE) if cols == 4 * depth else config


def tiny_tile(config: Any, cols: int, depth: int) -> Any:
    """The second GEMM of an MLP in tiles of one row and one vector: a single chain of multiply-adds."""
    return replace(config, tile=gemm_config.Tile(1, 1)) if depth == 4 * cols else config


def recorded(ranks: Ranks = ALONE, plant: Plant | None = None) -> dict[str, Any]:
    """Chrome's trace of the least disturbed step of a small model, the fastest; times in microseconds since its begin."""
    config = resolved(changed(preset("shakespeare-char"), MODEL), "cpu")
    with opened(config, ranks=ranks) as (bench, _):
        healthy = min(bench.step().seconds for _ in range(30))
        if plant:
            plant(bench, healthy)
        together(bench, ranks)
        traces = trace.record(bench, STEPS)
        seconds = ranks.gather([step.seconds for step in traces.traced])  # of rank 0; the others' are none
        fastest = min(range(STEPS), key=lambda i: max(times[i] for times in seconds)) if ranks.rank == 0 else 0
        step = traces.traced[first(ranks, fastest)]
        begin = first(ranks, step.begin)
        made = timeline.events(bench.compiled.session, step, title=f"rank {ranks.rank}")
        shift = (step.begin - begin) * step.tick_s * 1e6
    for event in made["traceEvents"]:
        event["pid"] = ranks.rank + 1
        if event["ph"] == "X":
            event["ts"], event["dur"] = round(event["ts"] + shift, 1), round(event["dur"], 1)
            event["args"] = {}
    return made


def rank_of_two(out: Path, late: str) -> None:
    """One of two processes; rank 0 writes the timelines of both. `late`: the program before which rank 1 sleeps, or ""."""
    ranks = MpiRanks()
    settle(ranks.gather(usable()), ranks.rank, usable())  # else both would pin their thread to the first core
    mine = recorded(ranks, pausing(late) if late and ranks.rank else None)
    both = ranks.gather(mine)
    if ranks.rank == 0:
        events = [event for one in both for event in one["traceEvents"]]
        begin = min(event["ts"] for event in events if event["ph"] == "X")  # ranks need not begin a step at the same time
        for event in events:
            if event["ph"] == "X":
                event["ts"] = round(event["ts"] - begin, 1)
        out.write_text(packed({"traceEvents": events, "displayTimeUnit": "ms"}))
    ranks.close()


def packed(made: dict[str, Any]) -> str:
    """JSON with an event in each line."""
    lines = ",\n".join(json.dumps(event) for event in made["traceEvents"])
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def two_ranks(out: Path, *, late: str = "") -> None:
    command = launchers.known(launch.mpiexec()).command(
        2, sys.executable, "-m", "anatomy.timelines", "--rank", str(out), *["--late", late]
    )
    subprocess.run(command, check=True, env=os.environ | {"BARELLM_RANKS": "1", "BARELLM_THREADS": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anatomy.timelines", description="Record the timelines of docs/book/traces.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the files (%(default)s)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--late", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_of_two(options.rank, options.late)
        return
    os.environ.setdefault("BARELLM_THREADS", "2")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step.json").write_text(packed(recorded()))
    two_ranks(options.out / "ranks.json")
    two_ranks(options.out / "gap.json", late="forward_backward")
    (options.out / "slow-1.json").write_text(packed(recorded(plant=pausing("optimizer_step"))))
    with configured(one_item):
        (options.out / "slow-2.json").write_text(packed(recorded()))
    two_ranks(options.out / "slow-3.json", late="optimizer_step")
    (options.out / "slow-4.json").write_text(packed(recorded(plant=pausing("forward_backward"))))
    with configured(tiny_tile):
        (options.out / "slow-5.json").write_text(packed(recorded()))


# --- reading ---


def slices(name: str) -> list[dict[str, Any]]:
    """The slices of a recorded timeline."""
    return [e for e in json.loads((FOLDER / f"{name}.json").read_text())["traceEvents"] if e["ph"] == "X"]


def step_us(events: list[dict[str, Any]]) -> float:
    return next(e["dur"] for e in events if e["name"] == "step" and e["pid"] == 1)


def by_op(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Label of an op, of all layers -> microseconds of the first rank's threads in it: of the one that has least of each layer, and
    how much more the one has that has most. (The threads may change their parts from layer to layer.)"""
    found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for e in events:
        if e["pid"] == 1 and e["tid"] and e["cat"] != "barrier":
            found[e["name"]][e["tid"]] += e["dur"]
    threads = {e["tid"] for e in events if e["pid"] == 1 and e["tid"]}
    sums: dict[str, tuple[float, float]] = {}
    for name, us in found.items():
        label, each = re.sub(r"\bh\.\d+", "h", name), [us.get(t, 0.0) for t in threads]
        least, more = sums.get(label, (0.0, 0.0))
        sums[label] = least + min(each), more + max(each) - min(each)
    return sums


def waits(events: list[dict[str, Any]], rank: int) -> list[tuple[float, float, str]]:
    """(begin, end, program) of the waits of a rank's main thread before each of its programs."""
    own = [e for e in events if e["cat"] == "python" and e["pid"] == rank + 1]
    ends = [next(e["ts"] for e in own if e["name"] == "step")]
    found = []
    for e in sorted((e for e in own if e["name"] != "step"), key=lambda e: e["ts"]):
        found.append((ends[-1], e["ts"], e["name"]))
        ends.append(e["ts"] + e["dur"])
    return found


def evidence(events: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """For each of CAUSES the share of the first rank's step that it explains, and where. A wait for another rank, which has not
    come so far, is not the fault of the first rank's Python."""
    step, ranks = step_us(events), sorted({e["pid"] - 1 for e in events})
    others = [waits(events, rank) for rank in ranks[1:]]
    (begin, end, program), *between = waits(events, 0)
    gaps = []
    for i, (a, b, name) in enumerate(between, 1):
        late = max((min(b, other[i][0]) - a for other in others), default=0.0)
        gaps.append((b - a - max(late, 0.0), f"before {name}"))
    elsewhere = [(b - a, f"rank {r}, before {name}") for r, other in enumerate(others, 1) for a, b, name in other]
    ops, known = by_op(events), by_op(healthy)
    own = {label: t for label, t in ops.items() if not label.startswith(EXCHANGES)}
    found = {
        "data": (end - begin, f"before {program}"),
        "python": max(gaps, default=(0.0, "")),
        "rank": max(elsewhere, default=(0.0, "")),
        "imbalance": max((more, label) for label, (_, more) in own.items()),
        "kernel": max((least - known[label][0], label) for label, (least, _) in own.items() if label in known),
    }
    return {cause: (us / step, where) for cause, (us, where) in found.items()}


def diagnosis(name: str) -> tuple[str, str]:
    """(the cause that explains most of a slow step, where)."""
    events = slices(name)
    alone = max(e["pid"] for e in events) == 1
    shares = evidence(events, slices("step" if alone else "ranks"))
    cause = max(shares, key=lambda c: shares[c][0])
    return cause, shares[cause][1]


if __name__ == "__main__":
    main()
