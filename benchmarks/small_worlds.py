"""MLPs by a graph beside dense ones of as many parameters: validation loss after so many steps, from several seeds.

    BARELLM_THREADS=1 python benchmarks/small_worlds.py        five minutes of one core
    python benchmarks/small_worlds.py --write                  the table of docs/sparsity.md

Bytes of Python's library, two layers of 128 channels, dense attention. A graph has a quarter of the blocks and four times the
hidden columns, so each matrix has as many numbers as the dense one, and a step as many multiply-adds in products. A seed draws
the weights and the order of the text, which is the same for all sides; it does not change the graphs. What the file has is not
made again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from barellm.assembly.build import open_model
from barellm.config import Config
from barellm.config.overrides import changed
from barellm.data.loader import Batches, Validation
from barellm.data.sources import Dataset, prepare
from barellm.evaluation.validation import Evaluator
from barellm.models import preset
from barellm.training.inputs import with_vocabulary
from barellm.training.training_schedule import training_schedule

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "sparsity.md", ROOT / "benchmarks" / "results" / "small-worlds.json"
SIDES = {"dense": "", "small world": "watts-strogatz:4:0.2:1"}
SEEDS = (1, 2, 3)


def base(steps: int) -> Config:
    return changed(
        preset("sparse-char"),
        {
            "model.layout": "", "model.layers": 2, "model.max_seq": 128, "model.bias": False, "model.mlp_block": 8,
            "model.mlp_width": 16, "train.micro_batch_size": 16, "train.seq": 128, "train.steps": steps, "optim.name": "adamw",
            "optim.lr": 4e-3, "optim.warmup": 20,
        },
    )  # fmt: skip


def trained(config: Config, data: Dataset, seed: int) -> dict[str, float]:
    """Nats per byte of a part of the validation text, processor seconds of a step, and parameters."""
    t = config.train
    with open_model(config, device="cpu") as compiled:
        session, steps = compiled.session, training_schedule(config)
        compiled.initialize(seed)
        batches = Batches(data.train, seq=t.seq, seed=seed, order=config.data.order)
        begin = 0.0
        for index in range(t.steps):
            begin = time.process_time() if index == 2 else begin
            plan = steps.step(index, t.steps)
            for name, array in zip(
                ("tokens", "targets"), batches.batch(index * t.micro_batch_size, t.micro_batch_size), strict=True
            ):
                session.write(name, array)
            scalars = {"seed": seed, "step": index + 1, "sample": index * t.micro_batch_size, "inv_targets": plan.inv_targets}
            session.run("forward_backward", batch=t.micro_batch_size, seq=t.seq, accumulate=0, **scalars)
            for program, values in plan.updates:
                session.run(program, **{**values, "seed": seed})
        seconds = (time.process_time() - begin) / (t.steps - 2)
        validation = Validation(data.val, seq=t.seq, max_tokens=1 << 17)
        found = Evaluator(validation, batch=t.micro_batch_size, byte_lengths=data.byte_lengths).run(session)
        assert found is not None
        size = sum(p.size for p in session.tensors.values() if p.role == "parameter")
        return {"loss": found.nats, "step_s": round(seconds, 5), "parameters": size}


def measure(path: Path, steps: int) -> None:
    from barellm.cpu.backend import describe

    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    config = base(steps)
    data = prepare(config.data)
    config = with_vocabulary(replace(config, train=replace(config.train, dtype="fp32")), data.tokenizer)
    for seed in SEEDS:
        for side, graph in SIDES.items():
            key = {"side": side, "seed": seed, "steps": steps}
            if any({k: row[k] for k in key} == key for row in rows):
                continue
            rows.append(key | trained(changed(config, {"model.mlp_layout": graph}), data, seed))
            print(json.dumps(rows[-1]), flush=True)
            about = {"machine": describe(), "graphs": SIDES, "dtype": "fp32"}
            path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table: losses, and their differences to the dense model of the same seed."""
    of = {(row["side"], row["seed"]): row for row in rows}
    found = ["| MLPs | graph | loss, nats | less than dense | least and most | step, s |", "|---|---|---|---|---|---|"]
    for side, graph in SIDES.items():
        mine = [of[side, seed] for seed in SEEDS]
        less = [of["dense", seed]["loss"] - row["loss"] for seed, row in zip(SEEDS, mine, strict=True)]
        losses = [row["loss"] for row in mine]
        apart = f"{min(less):+.3f}, {max(less):+.3f}" if graph else ""
        difference = f"{mean(less):+.3f}" if graph else ""
        words = (side, f"`{graph}`" if graph else "", f"{mean(losses):.3f} ± {stdev(losses):.3f}", difference, apart)
        found.append(f"| {' | '.join(words)} | {mean(row['step_s'] for row in mine):.3f} |")
    return found


def write() -> None:
    """Replace the table between the page's marks."""
    text, mark = PAGE.read_text(), ("<!-- small worlds -->\n", "<!-- /small worlds -->")
    before, rest = text.split(mark[0])
    after = rest.split(mark[1])[1]
    table = "\n".join(lines(json.loads(FILE.read_text())["rows"]))
    PAGE.write_text(f"{before}{mark[0]}{table}\n{mark[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=FILE)
    a = parser.parse_args()
    write() if a.write else measure(a.out, a.steps)


if __name__ == "__main__":
    main()
