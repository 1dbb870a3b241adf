"""Where a training step's time goes, op by op and thread by thread; as a table, a timeline and a picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from barellm.config import Config
from barellm.profiling import chart, timeline
from barellm.profiling.roofline import measured_ceiling
from barellm.profiling.step import opened
from barellm.profiling.trace import LIMIT, Traces, account, by_kernel, by_kind, mixes, op_seconds, pairs_for, record

FILES = {"profile": "profile.json", "timeline": "timeline.json", "picture": "profile.svg"}


def measure(config: Config, *, steps: int | None, folder: Path) -> dict[str, Any]:
    """One JSON object about the traced step of median duration, of `steps` or as many as a few seconds allow; the files of FILES
    go to `folder`, which exists. `config` has its dtype resolved."""
    with opened(config) as (bench, _):
        session = bench.machine.session
        ceiling = measured_ceiling()
        ceiling.measure(mixes(session))
        traces = record(bench, steps or pairs_for(bench))
        ceiling.measure(mixes(session))  # the machine's speed may have changed meanwhile
        step = traces.middle()
        rows = by_kind(session, op_seconds(session, step), ceiling)
        kernels = by_kernel(session, step)
        for row in rows:
            row["percent_of_step"] = 100 * row["s"] / step.seconds
            row["kernels"] = kernels.get((row["program"], row["op"], row["shape"]), {})
        threads = account(step)
        train = bench.train
        result: dict[str, Any] = {
            "kind": "profile",
            "preset": bench.machine.config.preset,
            **{name: getattr(train, name) for name in ("batch", "seq", "dtype", "recompute")},
            "isa": session.isa.name,
            "threads": session.threads,
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "step_s": step.seconds,
            "bound_s": sum(row["bound_s"] for row in rows),
            **{name: sum(t[name] for t in threads) / len(threads) for name in ("work_s", "barrier_s", "idle_s")},
            "by_thread": threads,
            "adds_up": adds_up(threads),
            **tracing(traces),
            "ceiling": ceiling.to_json(),
            "ops": rows,
        }
        title = "{preset} {batch}x{seq} {dtype} {isa}".format(**result)
        events = timeline.events(session, step, title=title)
    (folder / FILES["profile"]).write_text(json.dumps(result, indent=1) + "\n")
    (folder / FILES["timeline"]).write_text(json.dumps(events))
    chart.draw(result, folder / FILES["picture"])
    return result


def adds_up(threads: list[dict[str, Any]]) -> bool:
    """Whether no thread's parts miss more than LIMIT percent of the step."""
    return all(abs(t["residual_percent"]) <= LIMIT for t in threads)


def tracing(traces: Traces) -> dict[str, Any]:
    """What tracing costs: the median of the pairs, in percent, and the quarters that half of them lie between."""
    costs = traces.overheads
    return {
        "traced_s": [step.seconds for step in traces.traced],
        "untraced_s": traces.untraced_s,
        "tracing_percent": median(costs),
        "tracing_quartiles_percent": quantiles(costs, n=4)[::2] if len(costs) > 1 else costs * 2,
    }
