"""What Nsight Compute counts in each kernel of a step."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from typing import Any

from benchmarks.gpu_check import processes
from benchmarks.gpu_check.bars import bar
from benchmarks.gpu_check.stages import Scale

# Of tensor cores: how long they are busy, with whatever instruction; warps' own (mma.sync is HMMA in machine code), and those that
# warpgroups issue (wgmma is HGMMA, which Nsight Compute calls gmma).
METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "launch__occupancy_limit_registers",
)
LAUNCH = "launch__"  # metrics of this kind are no counters, and --query-metrics need not list them
QUERY_S, END_S = 15.0, 10.0  # for the list of metrics; that ncu may take when the steps are done


def counters(scale: Scale) -> dict[str, Any]:
    """Each kernel of a step at least once, with those of METRICS that this ncu has for this card. It is a bar missed where a kernel
    of the step has no counters."""
    program = shutil.which("ncu")
    if program is None:
        return {"skipped": "ncu is not on the PATH"}
    metrics = known(program)
    left_out = [name for name in METRICS if name not in metrics]
    done = counted(program, metrics, scale.left_s)
    if done.status != 0 or not rows_of(done.out):  # with no counter at all it still tells how long each kernel takes
        print(f"without counters, since with them {done.why}")
        left_out = list(METRICS[1:])
        done = counted(program, METRICS[:1], scale.left_s)
    if done.status != 0:
        raise RuntimeError(done.why)
    rows, launched = rows_of(done.out), launched_by(done.out)
    missing = sorted(launched - {row["kernel"] for row in rows})
    print(f"{len(rows)} launches counted; not counted: {missing}; metrics that are not known: {left_out}")
    return {
        "kernels": len(rows),
        "missing": missing,
        "metrics_left_out": left_out,
        "files": {"counters.json": {"kind": "counters", "rows": rows}},
        "bars": [bar("kernels of a step without counters", len(missing), 0, at_most=True)],
    }


def known(program: str) -> list[str]:
    """Those of METRICS that `ncu` lists, or all of them where it gives no list."""
    done = processes.run([program, "--query-metrics"], limit_s=QUERY_S)
    listed = {line.split()[0] for line in done.out.splitlines() if line.strip()}
    if done.status != 0 or METRICS[0].partition(".")[0] not in listed:
        return list(METRICS)
    return [name for name in METRICS if name.startswith(LAUNCH) or name.partition(".")[0] in listed]


def counted(program: str, metrics: tuple[str, ...] | list[str], seconds: float) -> processes.Done:
    step = [sys.executable, "-m", "benchmarks.gpu_check.one_step", str(max(1.0, seconds - END_S))]
    options = ["--csv", "--profile-from-start", "off", "--metrics", ",".join(metrics)]
    return processes.run([program, *options, *step], limit_s=seconds)


def rows_of(text: str) -> list[dict[str, Any]]:
    """A row for each launch in ncu's CSV, which has a line for each of its metrics: {"kernel", "grid", metric: number and unit}."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(lines[start:]):
        if not line["Metric Name"]:  # something that is said behind the table
            continue
        name = line["Kernel Name"].partition("(")[0]
        row = rows.setdefault(line["ID"], {"kernel": name, "grid": line.get("Grid Size")})
        row[line["Metric Name"]] = f"{line['Metric Value']} {line['Metric Unit']}".strip()
    return list(rows.values())


def launched_by(text: str) -> set[str]:
    """What one_step.py says that it launched."""
    (line,) = (line for line in text.splitlines() if line.startswith('{"launched"'))
    return set(json.loads(line)["launched"])
