"""Runs the stages, each in a process of its own with a time limit, and holds what they measured against the bars.

    make gpu-check STAGES=first                     at most four minutes: whether anything works, and how fast a step is
    make gpu-check                                  all stages: at most 36 minutes of one GPU (beside compiling and starting)
    make gpu-check STAGES=correct OUT=results       a part of them; each part fits into a call of ten minutes
    make gpu-check STAGES=versions,kernels
    python -m benchmarks.gpu_check --summary FILE.json FILE.json
    python -m benchmarks.gpu_check --fill FOLDER    compiles beforehand, on a machine without a GPU

A stage that fails, hangs or finds its peer missing does not stop the others, and what it had found by then is kept. Everything goes
to gpu-check.json of the folder OUT after each stage, what they printed to log.txt, and each result that benchmarks/table.py reads
to a file of its own. Status 0 if every stage ran and every bar that was looked at is met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import bars, clocks, processes
from benchmarks.gpu_check.stages import COMPILE, EVERY, GROUPS, PROBE, STAGES, Clock, Scale, Stage, run_stage

FILE, LOG, BEGUN = "gpu-check.json", "log.txt", "begun"
LATE = "ran past its limit"  # the status of a stage
MOCK_TIMES = 5  # as long as on a GPU a stage may take where Python does its work
LOG_TAIL = 12_000  # characters of a failed stage's output that gpu-check.json has
SHOWN = 800  # that are printed: the whole output, with the table at its end, should be short


def main() -> int:
    os.environ["BARELLM_SELF_CHECK"] = "0"  # the stages judge kernels themselves
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", default="all", help=f"all, {', '.join(GROUPS)}, or names of stages with commas")
    parser.add_argument("--out", default=str(processes.ROOT / "benchmarks" / "results" / "gpu"), help="folder of the result")
    parser.add_argument("--small", action="store_true", help="tiny models and few repeats: a rehearsal")
    parser.add_argument("--mock", action="store_true", help="the driver in Python that the tests have: no GPU, no timings")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="only the table of the bars, of these results together")
    parser.add_argument("--ship", metavar="FILE", help="only put the winners of a tuned.json among those that the package has")
    parser.add_argument("--fill", metavar="FOLDER", help="only compile what the stages launch, for a card of --arch, without a GPU")
    parser.add_argument("--arch", type=int, default=90, help="with --fill: compute capability times ten (default 90)")
    parser.add_argument("--list", action="store_true", help="only the stages, with their limits")
    parser.add_argument("--run", metavar="STAGE", help=argparse.SUPPRESS)  # the child process
    args = parser.parse_args()
    if args.run:
        keep = lambda found: write(Path(args.out), json.dumps(found))  # noqa: E731
        stage = next(s for s in EVERY if s.name == args.run)
        clock, stages = Clock(Path(args.out).with_name(BEGUN)), tuple(args.stages.split(","))
        limit_s = stage.limit_s * (MOCK_TIMES if args.mock else 1)
        keep(run_stage(stage, Scale(args.small, args.mock, keep, limit_s, stages, clock)))
        return 0
    if args.list:
        for stage in STAGES:
            print(f"{stage.group:<9}{stage.name:<13}{stage.limit_s:>5} s  {stage.what}")
        return 0
    if args.fill:
        from benchmarks.gpu_check.fill import fill

        count, nbytes = fill(Path(args.fill), args.arch)
        print(f"{count} kernels, {nbytes / 1e6:.1f} MB; on the other machine: BARELLM_CACHE={args.fill} make gpu-check")
        return 0
    if args.ship:
        from barellm.cuda import tuning
        from benchmarks.gpu_check.ship import ship

        count = ship(json.loads(Path(args.ship).read_text())["entries"])
        print(f"{count} entries new or other in {tuning.SHIPPED.name}")
        return 0
    if args.summary:
        found = [json.loads(Path(path).read_text()) for path in args.summary]
        print("\n".join(bars.table({name: r for result in found for name, r in result["stages"].items()})))
        return 0
    return run_all(compiled_first(chosen(args.stages)), Path(args.out), small=args.small, mock=args.mock)


def chosen(requested: str) -> list[Stage]:
    """The stages that a list names, in their order."""
    names: set[str] = set()
    for word in requested.split(","):
        found = [s.name for s in STAGES if word in ("all", s.group, s.name)]
        if not found:
            raise SystemExit(f"no stage or group is named {word!r} (known: all, {', '.join([*GROUPS, *(s.name for s in STAGES)])})")
        names.update(found)
    return [s for s in STAGES if s.name in names]


def compiled_first(stages: list[Stage]) -> list[Stage]:
    """The same, with `compile` before the first that may launch anything."""
    at = 1 if stages[0].name == "versions" else 0
    return [*stages[:at], COMPILE, *stages[at:]] if stages[at:] else stages


def run_all(stages: list[Stage], out: Path, *, small: bool, mock: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"kind": "gpu-check", "small": small, "mock": mock, "stages": {}}
    (out / LOG).write_text("")
    for stage in stages:
        if why := left_out(stage, result["stages"]):
            result["stages"][stage.name] = {"status": "left out", "seconds": 0.0, "skipped": why}
            print(f"== {stage.name}: left out: {why}", flush=True)
            write(out / FILE, json.dumps(result, indent=1) + "\n")
            continue
        print(f"== {stage.name}: {stage.what} (at most {stage.limit_s} s)", flush=True)
        with clocks.watched() as seen:
            found, text = run_child(stage, small=small, mock=mock, stages=stages)
        found |= {"clocks": seen} if seen else {}
        if found["status"] != "done":
            found["gpu_answers"] = answers(run_child(PROBE, small=small, mock=mock)[0])
        for name, single in found.pop("files", {}).items():
            write(out / name, json.dumps(single, indent=1) + "\n")
        result["stages"][stage.name] = found
        print(f"== {stage.name}: {found['status']} in {found['seconds']:.1f} s", flush=True)
        with open(out / LOG, "a") as log:
            log.write(f"== {stage.name}: {found['status']} in {found['seconds']:.1f} s\n{text}\n")
        write(out / FILE, json.dumps(result, indent=1) + "\n")
    print("\n" + "\n".join(bars.table(result["stages"])))
    print(f"\nwritten: {out / FILE}")
    return 0 if bars.passed(result["stages"]) else 1


def left_out(stage: Stage, done: dict[str, Any]) -> str:
    """Why a stage is not worth its time: what it stands on did not go well, or the GPU does not answer any more."""
    lost = [name for name, r in done.items() if r.get("gpu_answers") is False]
    if lost:
        return f"since {lost[0]} the GPU does not answer"
    bad = [name for name in stage.after if name in done and not bars.passed({name: done[name]})]
    return f"{', '.join(bad)} did not go well" if bad else ""


def answers(probed: dict[str, Any]) -> bool | None:
    """Whether the GPU still answers, by what the probe found: not where a context is lost to the first process that asks for one,
    or where it waits for ever. None: the probe failed in another way, which says nothing about the GPU."""
    if probed["status"] == LATE and probed["begun"]:
        return False
    return probed.get("answers")


def run_child(stage: Stage, *, small: bool, mock: bool, stages: Sequence[Stage] = ()) -> tuple[dict[str, Any], str]:
    """What the stage found, and what it printed. Its status is "done", "failed" or "ran past its limit", and then what it found is
    what it had kept by then, and `log` has the end of its output. `begun`: whether it had launched something. `stages`: all that
    were asked for."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-u", "-m", "benchmarks.gpu_check", "--run", stage.name, "--out", str(answer)]
        command += ["--small"] * small + ["--mock"] * mock + ["--stages", ",".join(s.name for s in stages)]
        begun, limit_s = answer.with_name(BEGUN), stage.limit_s * (MOCK_TIMES if mock else 1)
        done = processes.run(command, limit_s=limit_s, together=True, begun=begun, start_s=stage.start_s)
        found = json.loads(answer.read_text()) if answer.exists() else {}
        found["begun"] = begun.exists()
    words = "done" if done.status == 0 else LATE if done.status is None else "failed"
    found = {"status": words, "seconds": time.perf_counter() - start, **found}
    if done.status != 0:
        found |= {"exit_status": done.status, "log": done.out[-LOG_TAIL:]}
        print(done.out[-SHOWN:], flush=True)
    return found, done.out


def write(path: Path, text: str) -> None:
    """As a whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
