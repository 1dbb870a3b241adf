"""AdamW and Muon on one model and one text: validation loss after so many steps, rates searched for both with the same effort.

    python benchmarks/optimizers.py shakespeare-char --data tinyshakespeare.txt --steps 400 --steps 1000 --out FILE

For each number of steps and each recipe: every rate of RATES with the first seed, then the best of them with the others. Losses
are of the whole validation part, and do not depend on how busy the machine is; seconds are not taken here (`bench step`,
benchmarks/whole_run.py). A run that the file has already is not made again, so a long search may be stopped and started.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from barellm.assembly.programs import build
from barellm.config import Config
from barellm.cpu.backend import default_dtype, describe, open_session
from barellm.data.loader import Batches, Validation
from barellm.data.sources import Dataset, prepare
from barellm.evaluation.validation import Evaluator
from barellm.models import hidden, preset
from barellm.models.training_schedule import momentum
from barellm.optim.recipes import optimize
from barellm.training.inputs import with_vocabulary
from barellm.training.schedule import rates

STRAIGHT = {"schedule": "linear", "min_lr": 0.0}
MUON = {"name": "muon", "warmup": 0, "momentum": 0.85, "ns_steps": 3, "normuon": 0.95}
RECIPES: dict[str, dict[str, Any]] = {
    "the preset's own": {},
    "adamw": STRAIGHT | {"name": "adamw", "warmup": 0.1},  # of all steps
    "muon": STRAIGHT | MUON,
}
# What is searched: the key, and its values.
RATES: dict[str, dict[str, tuple[str, tuple[float, ...]]]] = {
    "shakespeare-char": {"adamw": ("lr", (0.002, 0.004, 0.008, 0.012)), "muon": ("muon_lr", (0.02, 0.03, 0.045, 0.06))},
    "default": {"adamw": ("lr", (0.004, 0.006, 0.009)), "muon": ("muon_lr", (0.02, 0.03, 0.045))},
}
REST = {"shakespeare-char": 0.015, "default": 0.008}  # AdamW's rate of what Muon leaves to it


def loss_of(config: Config, data: Dataset, seed: int) -> float:
    """Nats per token of the whole validation part after a run."""
    t = config.train
    optimizer = partial(optimize, config=config.optim, hidden=hidden(config.model))
    _, programs = build(config.model, batch=t.micro_batch_size, seq=t.seq, compute=default_dtype(), optimizer=optimizer)
    session = open_session(programs)
    session.run("init", seed=seed)
    batches = Batches(data.train, seq=t.seq, seed=seed, order=config.data.order)
    shape = {"batch": t.micro_batch_size, "seq": t.seq, "inv_targets": 1 / (t.micro_batch_size * t.seq), "accumulate": 0, "pos": 0}
    for step in range(t.steps):
        inputs, targets = batches.batch(step * t.micro_batch_size, t.micro_batch_size)
        session.write("tokens", inputs)
        session.write("targets", targets)
        session.run("forward_backward", **shape, step=step + 1, seed=seed, sample=step * t.micro_batch_size)
        scalars = {**rates(step, total=t.steps, optim=config.optim), "step": step + 1, "seed": seed}
        session.run("optimizer_step", **scalars, momentum=momentum(step, total=t.steps, optim=config.optim))
    result = Evaluator(Validation(data.val, seq=t.seq), batch=t.micro_batch_size, byte_lengths=None).run(session)
    session.close()
    assert result is not None
    return result.nats


class Runs:
    """Losses by options, steps and seed, kept in a file."""

    def __init__(self, base: Config, data: Dataset, path: Path | None) -> None:
        self.base, self.data, self.path = base, data, path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path and path.exists() else []

    def loss(self, recipe: str, steps: int, seed: int, options: dict[str, Any]) -> float:
        key = {"recipe": recipe, "steps": steps, "seed": seed, "options": options}
        for row in self.rows:
            if {k: row[k] for k in key} == key:
                return row["loss"]
        own = {k: round(v * steps) if k == "warmup" and v < 1 else v for k, v in options.items()}
        train = replace(self.base.train, steps=steps)
        config = replace(self.base, optim=replace(self.base.optim, **own), train=train)
        self.rows.append(key | {"loss": loss_of(config, self.data, seed)})
        print(json.dumps(self.rows[-1]), flush=True)
        self.save()
        return self.rows[-1]["loss"]

    def save(self, best: list[dict[str, Any]] | None = None) -> None:
        facts = {"kind": "optimizers", "preset": self.base.preset, "dtype": default_dtype(), "machine": describe()}
        if self.path:
            self.path.write_text(json.dumps(facts | {"best": best or [], "runs": self.rows}, indent=1) + "\n")


def searched(runs: Runs, recipe: str, steps: int, seeds: int) -> dict[str, Any]:
    """The best rate with the first seed, and the mean loss of all seeds with it."""
    options, name = RECIPES[recipe], runs.base.preset
    found = [options]
    if recipe in RATES[name]:
        key, values = RATES[name][recipe]
        rest = {"lr": REST[name]} if recipe == "muon" else {}
        found = [options | rest | {key: value} for value in values]
    best = min(found, key=lambda each: runs.loss(recipe, steps, 1, each))
    losses = [runs.loss(recipe, steps, seed, best) for seed in range(1, seeds + 1)]
    return {"recipe": recipe, "steps": steps, "options": best, "losses": losses, "mean": mean(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", choices=RATES)
    parser.add_argument("--data", help="the text; default: the preset's own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, action="append", required=True)
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all")
    args = parser.parse_args()
    base = preset(args.preset)
    if args.data:
        base = replace(base, data=replace(base.data, source=args.data))
    data = prepare(base.data)
    runs = Runs(with_vocabulary(base, data.tokenizer), data, args.out)
    best = [searched(runs, recipe, steps, args.seeds) for steps in args.steps for recipe in args.recipe or RECIPES]
    runs.save(best)
    for row in best:
        print(f"{row['steps']:>6} steps  {row['recipe']:<18} {row['mean']:.4f} nats  {row['options']}")


if __name__ == "__main__":
    main()
