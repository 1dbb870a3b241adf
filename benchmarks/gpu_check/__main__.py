"""Runs the stages, each in a process of its own with a time limit, and holds what they measured against the bars.

    make gpu-check                                  all stages: about 25 minutes of one GPU
    make gpu-check STAGES=correct OUT=results       a part of them; each part fits into ten minutes
    make gpu-check STAGES=versions,kernels
    python -m benchmarks.gpu_check --summary FILE.json FILE.json

A stage that fails, hangs or finds its peer missing does not stop the others. What they found goes to gpu-check.json of the folder
OUT after each of them, with the end of what they printed. Status 0 if every stage ran and every bar that was looked at is met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import bars
from benchmarks.gpu_check.stages import GROUPS, STAGES, Stage, run_stage

ROOT = Path(__file__).parents[2]
FILE = "gpu-check.json"
MOCK_TIMES = 5  # as long as on a GPU a stage may take where Python does its work
LOG_TAIL = 12_000  # characters of a stage's output that are kept


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", default="all", help=f"all, {', '.join(GROUPS)}, or names of stages with commas")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "gpu"), help="folder of the result")
    parser.add_argument("--small", action="store_true", help="tiny models and few repeats: a rehearsal")
    parser.add_argument(
        "--mock", action="store_true", help="the driver in Python that the tests have: no GPU, no timings"
    )
    parser.add_argument(
        "--summary", nargs="+", metavar="FILE", help="only the table of the bars, of these results together"
    )
    parser.add_argument("--list", action="store_true", help="only the stages, with their limits")
    parser.add_argument("--run", metavar="STAGE", help=argparse.SUPPRESS)  # the child process
    args = parser.parse_args()
    if args.run:
        result = run_stage(args.run, small=args.small, mock=args.mock)
        Path(args.out).write_text(json.dumps(result))
        return 0
    if args.list:
        for stage in STAGES:
            print(f"{stage.group:<9}{stage.name:<13}{stage.limit_s:>5} s  {stage.what}")
        return 0
    if args.summary:
        found = [json.loads(Path(path).read_text()) for path in args.summary]
        print("\n".join(bars.table({name: r for result in found for name, r in result["stages"].items()})))
        return 0
    return run_all(chosen(args.stages), Path(args.out), small=args.small, mock=args.mock)


def chosen(asked: str) -> list[Stage]:
    """The stages that a list names, in their order."""
    names: set[str] = set()
    for word in asked.split(","):
        found = [s.name for s in STAGES if word in ("all", s.group, s.name)]
        if not found:
            raise SystemExit(
                f"no stage or group is named {word!r} (known: all, {', '.join([*GROUPS, *(s.name for s in STAGES)])})"
            )
        names.update(found)
    return [s for s in STAGES if s.name in names]


def run_all(stages: list[Stage], out: Path, *, small: bool, mock: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"kind": "gpu-check", "small": small, "mock": mock, "stages": {}}
    for stage in stages:
        print(f"\n== {stage.name}: {stage.what} (at most {stage.limit_s} s)", flush=True)
        found = run_child(stage, small=small, mock=mock)
        result["stages"][stage.name] = found
        print(f"== {stage.name}: {found['status']} in {found['seconds']:.1f} s", flush=True)
        temporary = out / f".{FILE}.tmp"
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(temporary, out / FILE)
    print("\n" + "\n".join(bars.table(result["stages"])))
    print(f"\nwritten: {out / FILE}")
    return 0 if bars.passed(result["stages"]) else 1


def run_child(stage: Stage, *, small: bool, mock: bool) -> dict[str, Any]:
    """What the stage found; its status is "done", "failed" or "ran past its limit", and then `log` has the end of its output."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-u", "-m", "benchmarks.gpu_check", "--run", stage.name, "--out", str(answer)]
        command += ["--small"] * small + ["--mock"] * mock
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, process_group=0)
            try:
                status = process.wait(timeout=stage.limit_s * (MOCK_TIMES if mock else 1))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
            log.seek(0)
            text = log.read()
        print(text, end="", flush=True)
        found = json.loads(answer.read_text()) if status == 0 and answer.exists() else {}
    words = "done" if status == 0 else "ran past its limit" if status is None else "failed"
    found = {"status": words, "seconds": time.perf_counter() - start, **found}
    return found if status == 0 else found | {"exit_status": status, "log": text[-LOG_TAIL:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The stage and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
