"""Programs without Python beside llm.c's train_gpt2, in turns: seconds from the start to the first step, and a step's time.

    git clone https://github.com/karpathy/llm.c && make -C llm.c train_gpt2      # and its weights, tokenizer and shards
    barellm build gpt2-124m --batch 4 --seq 64 --gradient_accumulation_steps 1 --eval_every 0 --dtype fp32 --data shards -o fp32
    python -m benchmarks.native --llmc llm.c --program fp32 --program bf16 --shards shards --out FILE

llm.c's program evaluates before its first step, five batches of the size of a step; its lines say when that was done, and the time
is given without. Every program is ended after --steps steps. Without --llmc our programs run alone.

Most of the time to a first step is the first touch of memory. With --touch a small library is loaded beside ours (LD_PRELOAD),
which needs a C compiler: it touches all memory at the moment at which the program asks for large pages, and takes the time. Then
`touch_s` is that, and `start_s` is what is left of the time to the first step's end without it and without a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from barellm.cpu.processor import brand, name
from barellm.cpu.threads import thread_count

TOUCH = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int madvise(void *at, size_t count, int advice) {
    int answer = (int)syscall(SYS_madvise, at, count, advice);
    if (advice == MADV_HUGEPAGE) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (size_t i = 0; i < count; i += 4096) ((volatile char *)at)[i] = 0;
        clock_gettime(CLOCK_MONOTONIC, &b);
        dprintf(1, "touched %zu %.6f\n", count, (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
    }
    return answer;
}
"""


def touching(folder: Path) -> dict[str, str]:
    """The environment of programs whose memory is touched as soon as it is there."""
    source, library = folder / "touch.c", folder / "touch.so"
    source.write_text(TOUCH)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return {"LD_PRELOAD": str(library)}


def run(command: list[str], folder: Path, steps: int, more: dict[str, str]) -> dict[str, Any]:
    """Seconds until the first step was done, without those of evaluations before it, and each step's milliseconds. `more`:
    variables of the environment."""
    env = os.environ | {"OMP_NUM_THREADS": str(thread_count())} | more
    started = time.perf_counter()
    evaluating, before, first, took, touch = 0.0, started, 0.0, [], None
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            if line.startswith("val loss"):
                evaluating += now - before
            if line.startswith("touched "):
                touch = float(line.split()[2])
            found = re.search(r"took ([\d.]+) ms|\| ([\d.]+) ms", line) if line.startswith("step ") else None
            if found:
                first = first or now - started
                took.append(float(found[1] or found[2]))
            before = now
            if len(took) == steps:
                process.kill()
                break
    found = {"first_step_s": first - evaluating, "step_ms": median(took[1:]), "steps_ms": took}
    if touch is not None:
        found |= {"touch_s": touch, "start_s": found["first_step_s"] - touch - found["step_ms"] / 1e3}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmc", type=Path)
    parser.add_argument("--program", type=Path, action="append", required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--touch", action="store_true", help="touch all memory before, and take its time")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    shards = a.shards.resolve()
    sides: dict[str, tuple[list[str], Path, Path]] = {}
    if a.llmc:
        sides["llm.c"] = (["stdbuf", "-oL", "./train_gpt2"], a.llmc, a.llmc / "train_gpt2")
    for folder in a.program:
        train = folder.resolve() / "train"
        given = ["stdbuf", "-oL", str(train), "--train", f"{shards}/*train*.bin", "--val", f"{shards}/*val*.bin"]
        sides[folder.name] = (given, folder, folder / "libbarellm.so")
    rows: dict[str, Any] = {side: {"bytes": path.stat().st_size, "runs": []} for side, (_, _, path) in sides.items()}
    with tempfile.TemporaryDirectory(prefix="barellm-native-") as temporary:
        more = touching(Path(temporary)) if a.touch else {}
        for _ in range(a.rounds):
            for side, (command, folder, _) in sides.items():
                rows[side]["runs"].append(run(command, folder, a.steps, more))
    for side, row in rows.items():
        keys = ("first_step_s", "step_ms", "touch_s", "start_s")
        row |= {key: median(r[key] for r in row["runs"]) for key in keys if key in row["runs"][0]}
        print(f"{side:8}{row['first_step_s']:8.2f} s to the first step{row['step_ms']:10.1f} ms a step", flush=True)
        if "touch_s" in row:
            print(f"{'':8}{row['touch_s']:8.2f} s of touching memory{row['start_s']:12.2f} s of all else", flush=True)
    a.out.write_text(
        json.dumps({"processor": brand() or name(), "threads": thread_count(), "touch": a.touch, "sides": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
