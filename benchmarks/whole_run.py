"""A whole training run, from the start of its command to its end: nanoGPT's 2000 iterations by default.

    python benchmarks/whole_run.py --data tinyshakespeare.txt --out benchmarks/results/run-shakespeare-char.json

The command runs as a user types it, with whatever else stands on this command line: `--turns` times from an empty cache of
compiled code, and once from the cache that the last of them left. Where the time went comes from the run's own metrics: until the
first step was done, steps, evaluations between them, and what follows the last step (evaluation of the whole validation part,
checkpoint, samples, curve).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median


def one(command: list[str], out: Path, cache: Path, start: str) -> dict:
    """Seconds of one run, in all and by part; the interpreter's start and end count to its first step."""
    # Its lines go to a file: reading a pipe as they come would take time from the run's own threads.
    said = out.with_suffix(".jsonl")
    with said.open("w") as file:
        before = time.perf_counter()
        environment = os.environ | {"BARELLM_CACHE": str(cache)}
        subprocess.run([*command, "--out", str(out), "--json"], stdout=file, check=True, env=environment)
        wall = time.perf_counter() - before
    rows = [json.loads(line) for line in said.read_text().splitlines()]
    result, ends = rows[-1], [row["seconds"] for row in rows if row["kind"] == "train"]
    laps = [b - a for a, b in pairwise(ends)]
    middle = median(laps)
    evaluated = {row["step"] for row in rows if row["kind"] == "eval"}
    paused = [lap for step, lap in enumerate(laps, 1) if step in evaluated]
    return {
        "cache": start,
        "wall_s": wall,
        "to_first_step_s": wall - (result["seconds"] - ends[0]),
        "steps_s": sum(laps) - sum(paused) + middle * len(paused),
        "evaluations_s": sum(paused) - middle * len(paused),
        "after_last_step_s": result["seconds"] - ends[-1],
        "step_s": middle,
        "val_nats": result["val_nats"],
        "steps": result["steps"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", default="shakespeare-char")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args, more = parser.parse_known_args()
    command = [sys.executable, "-m", "barellm", "train", args.preset, "--data", args.data, *more]
    load, runs = os.getloadavg(), []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(args.turns + 1):
            warm = turn == args.turns
            cache = Path(name, f"cache-{turn - warm}")
            runs.append(one(command, Path(name, f"run-{turn}"), cache, "warm" if warm else "cold"))
    facts = {"kind": "run", "preset": args.preset, "options": more, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    text = json.dumps(facts | {"load_before": load, "load_after": os.getloadavg(), "runs": runs})
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
