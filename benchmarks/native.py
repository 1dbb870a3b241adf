"""Programs without Python beside llm.c's train_gpt2, in turns: seconds from the start to the first step, and a step's time.

    git clone https://github.com/karpathy/llm.c && make -C llm.c train_gpt2      # and its weights, tokenizer and shards
    barellm build gpt2-124m --batch 4 --seq 64 --train.accumulate 1 --train.eval_every 0 --dtype fp32 --data shards -o fp32
    python -m benchmarks.native --llmc llm.c --program fp32 --program bf16 --shards shards --out FILE

llm.c's program evaluates before its first step, five batches of the size of a step; its lines say when that was done, and the time
is given without. Every program is ended after --steps steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from barellm.cpu.processor import brand, name
from barellm.cpu.threads import thread_count


def run(command: list[str], folder: Path, steps: int) -> dict[str, Any]:
    """Seconds until the first step was done, those of evaluations before it, and each step's milliseconds."""
    env = os.environ | {"OMP_NUM_THREADS": str(thread_count())}
    started = time.perf_counter()
    evaluating, before, first, took = 0.0, started, 0.0, []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            if line.startswith("val loss"):
                evaluating += now - before
            found = re.search(r"took ([\d.]+) ms|\| ([\d.]+) ms", line) if line.startswith("step ") else None
            if found:
                first = first or now - started
                took.append(float(found[1] or found[2]))
            before = now
            if len(took) == steps:
                process.kill()
                break
    return {"first_step_s": first - evaluating, "step_ms": median(took[1:]), "steps_ms": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmc", type=Path, required=True)
    parser.add_argument("--program", type=Path, action="append", required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    shards = a.shards.resolve()
    sides = {"llm.c": (["stdbuf", "-oL", "./train_gpt2"], a.llmc, a.llmc / "train_gpt2")}
    for folder in a.program:
        train = folder.resolve() / "train"
        given = ["stdbuf", "-oL", str(train), "--train", f"{shards}/*train*.bin", "--val", f"{shards}/*val*.bin"]
        sides[folder.name] = (given, folder, folder / "libbarellm.so")
    rows: dict[str, Any] = {side: {"bytes": path.stat().st_size, "runs": []} for side, (_, _, path) in sides.items()}
    for _ in range(a.rounds):
        for side, (command, folder, _) in sides.items():
            rows[side]["runs"].append(run(command, folder, a.steps))
    for side, row in rows.items():
        row |= {key: median(r[key] for r in row["runs"]) for key in ("first_step_s", "step_ms")}
        print(f"{side:8}{row['first_step_s']:8.2f} s to the first step{row['step_ms']:10.1f} ms a step", flush=True)
    a.out.write_text(
        json.dumps({"processor": brand() or name(), "threads": thread_count(), "sides": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
