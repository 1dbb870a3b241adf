"""Unit scaling beside the plain model, on one text: validation loss after so many steps, learning rates searched for both with the
same effort; and what share of all numbers of a step lies outside of fp8's formats in each.

    python benchmarks/unit_scaling.py --data tinyshakespeare.txt --steps 600 --out benchmarks/results/unit-scaling.json

Every rate of RATES with the first seed, then the best of them with all seeds. Losses are of the whole validation part. The runs
with the best rate and the first seed also look at their first and last step, and write what they see into FOLDER/plain.jsonl and
FOLDER/unit.jsonl. A run that the file has already is not made again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from barellm.assembly.build import open_model
from barellm.config import Config, overrides
from barellm.data.loader import Batches, Validation
from barellm.data.sources import Dataset, prepare
from barellm.evaluation.validation import Evaluator
from barellm.models import preset
from barellm.training import exponent_stats
from barellm.training.exponent_stats_chart import numbers
from barellm.training.inputs import with_vocabulary
from barellm.training.training_schedule import training_schedule

# Weights of the second are 1 / 0.02 times as large. Both lists reach beyond the best rate.
RATES = {"plain": (0.001, 0.002, 0.004, 0.008, 0.016), "unit": (0.0125, 0.025, 0.05, 0.1, 0.2)}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unit": {"model.unit_scaling": True, "optim.clip": 0.0, "optim.weight_decay": 0.002},
}
FORMATS = ("e4m3", "e5m2")


def loss_of(config: Config, data: Dataset, seed: int, rows: Path | None) -> float:
    """Nats per token of the whole validation part after a run, which looks at its first and its last step where `rows` is given."""
    t = config.train
    with open_model(replace(config, train=replace(t, exponent_stats=t.steps if rows else 0)), device="cpu") as compiled:
        session, steps = compiled.session, training_schedule(config)
        compiled.initialize(seed)
        batches = Batches(data.train, seq=t.seq, seed=seed, order=config.data.order)
        watch = rows and exponent_stats.ExponentStats(rows, compiled, every=t.steps)
        for index in range(t.steps):
            plan = steps.step(index, t.steps)
            for name, array in zip(
                ("tokens", "targets"), batches.batch(index * t.micro_batch_size, t.micro_batch_size), strict=True
            ):
                session.write(name, array)
            due = watch is not None and watch.due(index + 1)
            scalars = {"seed": seed, "step": index + 1, "sample": index * t.micro_batch_size, "inv_targets": plan.inv_targets}
            session.run(
                "forward_backward_stats" if due else "forward_backward",
                batch=t.micro_batch_size,
                seq=t.seq,
                accumulate=0,
                **scalars,
            )
            if watch and due:
                watch.record(index + 1)
            for program, values in plan.updates:
                session.run(program, **{**values, "seed": seed})
        if watch:
            watch.close()
        evaluator = Evaluator(Validation(data.val, seq=t.seq), batch=t.micro_batch_size, byte_lengths=data.byte_lengths)
        found = evaluator.run(session)
        assert found is not None
        return found.nats


def shares(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each kind of tensor and each format: the mean share of the numbers of a matrix that saturate or become zero, and that of
    the worst one."""
    made: dict[str, dict[str, float]] = {}
    tensors = [t for t in numbers(row)["tensors"] if len(t["shape"]) > 1]
    for kind in dict.fromkeys(t["what"] for t in tensors):
        outside = {f: [t["saturated"][f] + t["flushed"][f] for t in tensors if t["what"] == kind] for f in FORMATS}
        made[kind] = {f: round(mean(values), 4) for f, values in outside.items()}
        made[kind] |= {f"{f} worst": round(max(values), 4) for f, values in outside.items()}
        sizes = [t["rms"] for t in tensors if t["what"] == kind]
        made[kind] |= {"least rms": min(sizes), "largest rms": max(sizes)}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the rows of the runs that are looked at")
    args = parser.parse_args()
    base = overrides.changed(preset("shakespeare-char"), {"data.source": args.data, "train.steps": args.steps})
    data = prepare(base.data, report=print)
    base = with_vocabulary(base, data.tokenizer)
    made = json.loads(args.out.read_text()) if args.out.exists() else {"runs": [], "shares": {}}

    def run(model: str, lr: float, seed: int) -> float:
        watched = args.folder / f"{model}.jsonl" if lr == best.get(model) and seed == args.seeds[0] else None
        key = {"model": model, "steps": args.steps, "lr": lr, "seed": seed}
        known = [r["nats"] for r in made["runs"] if key.items() <= r.items()]
        if known and (watched is None or model in made["shares"]):
            return known[0]
        config = overrides.changed(base, {**MODELS[model], "optim.lr": lr, "optim.min_lr": lr / 10})
        if watched:
            watched.unlink(missing_ok=True)
        nats = loss_of(config, data, seed, watched)
        if known:
            assert round(nats, 4) == known[0], "a run that is looked at is another one"
        else:
            made["runs"].append({**key, "nats": round(nats, 4)})
        if watched:
            made["shares"][model] = {str(row["step"]): shares(row) for row in exponent_stats.steps(watched)}
        print(model, lr, seed, round(nats, 4), flush=True)
        args.out.write_text(json.dumps(made, indent=1) + "\n")
        return round(nats, 4)

    best: dict[str, float] = {}
    for model, rates in RATES.items():
        chosen = min((run(model, lr, args.seeds[0]), lr) for lr in rates)[1]
        best[model] = chosen
        losses = [run(model, chosen, seed) for seed in args.seeds]
        print(f"{model}: {mean(losses):.4f} nats at rate {chosen}, {losses}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
