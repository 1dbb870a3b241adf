"""Shows where the time of a training step goes, op by op, and on a CPU thread by thread: as a table, a timeline and a picture."""

import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from barellm.config import Config
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE, first
from barellm.tools.plan.roofline import measured_ceiling
from barellm.tools.plan.rows import by_kernel, by_kind, mixes, op_seconds
from barellm.tools.profile import chart, communication, device_trace, timeline
from barellm.tools.profile.step import StepBench, opened, where_it_ran
from barellm.tools.profile.trace import LIMIT, Traces, account, call_seconds, pairs_for, record

FILES = {"profile": "profile.json", "timeline": "timeline.json", "picture": "profile.svg"}


def measure(config: Config, *, steps: int | None, folder: Path, device: str = "cpu", ranks: Ranks = ALONE) -> dict[str, Any]:
    """Profile `steps` steps (None: a few seconds) and return JSON about the one of median duration. The FILES are written to
    `folder`, which exists. `config` has its dtype resolved. With several `ranks` each returns its own, and rank 0 writes."""
    with opened(config, device=device, ranks=ranks) as (bench, _):
        session, train = bench.compiled.session, bench.train
        ceiling = measured_ceiling(device=device)
        ceiling.measure(mixes(session, bench.shares))
        profile = _profile_gpu if device == "cuda" else _profile_cpu
        facts, calls_s, timeline_of = profile(bench, steps, ranks)
        of_ops, kernels = op_seconds(session, calls_s), by_kernel(session, calls_s)
        rows = by_kind(session, of_ops, ceiling, bench.shares)
        for row in rows:
            row["percent_of_step"] = 100 * row["s"] / facts["step_s"]
            row["kernels"] = kernels.get((row["program"], row["op"], row["shape"]), {})
        result: dict[str, Any] = {
            "kind": "profile", "preset": bench.compiled.config.preset, "batch": train.micro_batch_size,
            **{name: getattr(train, name) for name in ("seq", "dtype", "recompute")}, **where_it_ran(bench.compiled),
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), **facts, "bound_s": sum(row["bound_s"] for row in rows),
            "ceiling": ceiling.to_json(), "ops": rows,
        }  # fmt: skip
        if ranks.count > 1:
            result |= {"ranks": ranks.count, "between_ranks": communication.exposed_seconds(session, of_ops, ranks)}
        events = timeline_of("{preset} {batch}x{seq} {dtype} {isa}".format(**result))
    if ranks.rank:
        return result
    (folder / FILES["profile"]).write_text(json.dumps(result, indent=1) + "\n")
    (folder / FILES["timeline"]).write_text(json.dumps(events))
    chart.draw(result, folder / FILES["picture"])
    return result


def _profile_cpu(bench: StepBench, steps: int | None, ranks: Ranks) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """(facts for the result, seconds of each call as from `call_seconds`, a function title -> timeline) of the traced step of
    median duration. Rank 0 decides the number of steps and which one is the median (`first` broadcasts), for all ranks."""
    num_steps = first(ranks, steps or pairs_for(bench))
    traces, session = record(bench, num_steps), bench.compiled.session
    step = traces.traced[first(ranks, traces.traced.index(traces.median_step()))]
    threads = account(step)
    facts = {
        "step_s": step.seconds / step.steps, "by_thread": threads, "adds_up": adds_up(threads), **tracing_overhead(traces),
        **{name: sum(t[name] for t in threads) / len(threads) for name in ("work_s", "barrier_s", "idle_s")},
    }  # fmt: skip
    return facts, call_seconds(step), lambda title: timeline.events(session, step, title=title)


def _profile_gpu(bench: StepBench, steps: int | None, ranks: Ranks) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """As `_profile_cpu`, from timed launches. An untimed step's time beyond their sum is idle: the GPU waits for the host."""
    count = first(ranks, steps or device_trace.pairs_for(bench))
    traces, session = device_trace.record(bench, count), bench.compiled.session
    step, usual = traces.median_step(), median(traces.usual_s)
    facts = {
        "step_s": max(usual, step.seconds / step.steps), "work_s": step.seconds / step.steps, "barrier_s": 0.0,
        "idle_s": max(usual - step.seconds / step.steps, 0.0), "usual_s": traces.usual_s,
        "timed_s": [s.seconds / s.steps for s in traces.timed], "by_thread": [], "adds_up": True,
    }  # fmt: skip
    return facts, step.calls_s, lambda title: timeline.device_events(session, step, title=title)


def adds_up(threads: list[dict[str, Any]]) -> bool:
    """Whether work, barriers and idling of every thread add up to the step, but for LIMIT percent."""
    return all(abs(t["residual_percent"]) <= LIMIT for t in threads)


def tracing_overhead(traces: Traces) -> dict[str, Any]:
    """What tracing costs: of the overheads of all pairs of steps the median and the first and third quartile, in percent."""
    overheads = traces.overheads
    return {
        "traced_s": [step.seconds / step.steps for step in traces.traced],
        "untraced_s": traces.untraced_s,
        "tracing_percent": median(overheads),
        "tracing_quartiles_percent": quantiles(overheads, n=4)[::2] if len(overheads) > 1 else overheads * 2,
    }
