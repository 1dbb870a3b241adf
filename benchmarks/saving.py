"""What a checkpoint costs the training: saved while it waits, and saved while steps go on.

    python benchmarks/saving.py --accumulate 1 --out benchmarks/results/saving-gpt2-124m.json
    python benchmarks/saving.py --accumulate 6 --rounds 1 --out benchmarks/results/saving-gpt2-124m.json

For each number of micro-batches in a step: some steps alone, a save that the training waits for, and a save in the background with
as many steps as it lasts. `waited_s` is the time in which the training stood still for it, `longer_s` the time by which those steps
together were longer than as many steps alone: it includes the writer's share of the cores. The rows of a file that is there stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from barellm.assembly.build import CompiledModel, open_model
from barellm.checkpoint import checkpoint, storage
from barellm.models import preset
from barellm.training.console import Console
from barellm.training.saving import Point, Saving
from barellm.training.stopping import Stopping


class Steps:
    """Steps on random tokens."""

    def __init__(self, compiled: CompiledModel, saving: Saving, accumulate: int) -> None:
        self.compiled, self.saving, self.accumulate, self.count = compiled, saving, accumulate, 0
        train = compiled.config.train
        self.shape = {"batch": train.micro_batch_size, "seq": train.seq}
        tokens = np.random.default_rng(7).integers(0, 50257, (train.micro_batch_size, train.seq))
        compiled.session.write("tokens", tokens)
        compiled.session.write("targets", tokens)

    def one(self) -> float:
        """The seconds of one step."""
        begin, run = time.perf_counter(), self.compiled.session.run
        self.count += 1
        for micro in range(self.accumulate):
            self.saving.before("forward_backward")
            run("forward_backward", **self.shape, accumulate=int(micro > 0), inv_targets=1e-3, step=self.count, sample=0, seed=1)
        self.saving.before("optimizer_step")
        run("optimizer_step", lr=1e-4, step=self.count, seed=1)
        return time.perf_counter() - begin


def measured(compiled: CompiledModel, folder: Path, accumulate: int, *, alone: int, rounds: int) -> dict[str, Any]:
    class Heard(Console):
        def line(self, text: str = "") -> None:
            print(text, flush=True)

    saving = Saving(
        folder,
        compiled.session,
        written=compiled.written,
        shared=compiled.shared,
        threads=compiled.session.threads,
        tokenizer={},
        console=Heard(),
        stop=Stopping(),
    )
    steps, found = Steps(compiled, saving, accumulate), []
    steps.one()
    quiet = [steps.one() for _ in range(alone)]
    for _ in range(rounds):
        begin = time.perf_counter()
        saving.now(Point(steps.count, {"config": {}}, 1, False))
        blocking = time.perf_counter() - begin
        quiet.append(steps.one())
        begin = time.perf_counter()
        saving.begin(Point(steps.count, {"config": {}}, 1, False))
        writer = saving.writer
        began = time.perf_counter() - begin
        assert writer is not None
        during = []
        while writer.is_alive():
            during.append(steps.one())
        longer = sum(during) + began - len(during) * median(quiet)
        found.append(
            {
                "blocking_s": blocking,
                "background_s": writer.seconds,
                "waited_s": writer.stalled,
                "copied_bytes": writer.snapshot.copied,
                "steps": len(during),
                "longer_s": longer,
            }
        )
        saving.report()
        quiet.append(steps.one())
    shutil.rmtree(folder)
    blocking = median(row["blocking_s"] for row in found)
    shares = {f"{name}_share": median(row[f"{name}_s"] for row in found) / blocking for name in ("waited", "longer")}
    return {"accumulate": accumulate, "step_s": median(quiet), "steps_s": quiet, **shares, "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--alone", type=int, default=3, help="steps without a save at first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cached", action="store_true", help="through the system's cache of files, as small files go")
    parser.add_argument("--folder", type=Path, default=Path("runs/saving"), help="where checkpoints are written")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = preset(args.preset)
    config = replace(config, train=replace(config.train, micro_batch_size=args.batch, seq=args.seq, dtype=args.dtype))
    if args.cached:
        storage.DIRECT_FROM = 1 << 62
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with open_model(config, device="cpu", positions=0) as compiled:
        compiled.session.run("init", seed=1)
        rows = [
            {"cached": args.cached} | measured(compiled, args.folder, n, alone=args.alone, rounds=args.rounds)
            for n in args.accumulate
        ]
        found = {
            "preset": args.preset,
            "batch": args.batch,
            "seq": args.seq,
            "bytes": checkpoint.checkpoint_bytes(compiled.session),
            "cores": len(os.sched_getaffinity(0)),
            **compiled.meta(),
            "rows": rows,
        }
    print(json.dumps({**found, "rows": [{k: v for k, v in row.items() if k != "steps_s"} for row in rows]}, indent=1))
    if args.out:
        before = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
        args.out.write_text(json.dumps({**found, "rows": [*before, *rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
