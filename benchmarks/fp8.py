"""What products in 8 bits cost in loss: a small model of the speedrun, its classifier multiplied in 8 bits in each way, from the
same seeds and on the same text.

    python benchmarks/fp8.py            the runs that the file has not yet
    python benchmarks/fp8.py --write    docs/img/fp8.svg and the table of docs/fp8.md
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ablation import p_value

from barellm.assembly.build import open_model
from barellm.config import Config
from barellm.config.overrides import changed
from barellm.data.loader import Batches, Validation
from barellm.data.sources import Dataset, prepare
from barellm.evaluation.validation import Evaluator
from barellm.models import preset
from barellm.models.stages import Stage, table
from barellm.models.training_schedule import model_schedule
from barellm.training.inputs import with_vocabulary

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "fp8.md", ROOT / "docs" / "img" / "fp8.svg"
FILE = ROOT / "benchmarks" / "results" / "fp8-speedrun-small.json"
WAYS = ("off", "static", "delayed", "floating")
WINDOW = 25  # steps whose losses are one point of the curve
STAGES = (
    Stage(192, (1, 2), Fraction(1, 3), lr=1.0, mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)),
    Stage(256, (2, 4), Fraction(1, 3), lr=1.52, mtp=(1.0, 0.5), mtp_end=(1.0, 0.0)),
    Stage(320, (3, 6), Fraction(1, 3), lr=1.73),
    Stage(320, (4, 8)),
)
# Four layers, of which the classifier is a third: what it loses must show.
MODEL = {
    "layers": 4, "heads": 4, "d_model": 128, "d_ff": 512, "stages": table(STAGES), "max_seq": 320, "long": "1,3", "paired": "0",
    "values": "1,2", "skipped": "", "lanes_from": 2, "backout": 2, "final_window": 8,
}  # fmt: skip


def base() -> Config:
    run = {"train.seq": 320, "train.dtype": "auto", "data.bpe_vocab": 2048}
    run |= {"model.bigram_first": "token", "model.adam_weights": "fp32"}  # what the file was measured with
    return changed(preset("speedrun-small"), run | {f"model.{key}": value for key, value in MODEL.items()})


def trained(config: Config, data: Dataset, *, steps: int, seed: int) -> dict[str, Any]:
    """The losses of all steps, in nats per token of a step (of several targets, with their weights), and that of validation."""
    train = replace(config.train, steps=steps, seed=seed)
    optim = replace(config.optim, momentum_warmup=round(0.2 * steps), momentum_cooldown=round(0.04 * steps))
    model = replace(config.model, extension=round(0.03 * steps))
    config, losses = replace(config, model=model, optim=optim, train=train), []
    with open_model(config, device="cpu") as compiled:
        session, training_schedule = compiled.session, model_schedule(compiled.config)
        assert training_schedule is not None
        compiled.initialize(seed)
        batches = Batches(data.train, seq=train.seq, seed=seed)
        for index in range(steps):
            step = training_schedule.step(index, steps)
            inputs, targets = batches.batch(index, 1, seq=step.seq)
            session.write("tokens", inputs)
            session.write("targets", targets)
            session.run("forward_backward", batch=1, seq=step.seq, inv_targets=step.inv_targets, accumulate=int(step.adds))
            losses.append(round(float(session.read("loss")[0]) * step.shown, 5))
            for program, scalars in step.updates:
                session.run(program, **scalars)
            training_schedule.on_step(session, index + 1, steps)
        part = Validation(data.val, seq=train.seq, max_tokens=1 << 17)
        result = Evaluator(part, batch=1, byte_lengths=None).run(session)
    assert result is not None
    return {"loss": result.nats, "losses": losses}


def run(path: Path, steps: int, seeds: int) -> None:
    from barellm.cpu.backend import default_dtype, describe

    config = base()
    data = prepare(config.data)
    config = with_vocabulary(config, data.tokenizer)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    facts = {"kind": "fp8", "preset": "speedrun-small", "model": MODEL, "dtype": default_dtype(), "machine": describe()}
    for seed in range(1, seeds + 1):
        for way in WAYS:
            key = {"way": way, "steps": steps, "seed": seed}
            if any({k: row[k] for k in key} == key for row in rows):
                continue
            found = trained(changed(config, {"model.fp8": way}), data, steps=steps, seed=seed)
            rows.append(key | found)
            print(json.dumps(key | {"loss": found["loss"]}), flush=True)
            path.write_text(json.dumps(facts | {"runs": rows}) + "\n")


# --- what the losses say ---


def markdown(rows: list[dict[str, Any]]) -> str:
    of = {way: [r["loss"] for r in sorted(rows, key=lambda r: r["seed"]) if r["way"] == way] for way in WAYS}
    lines = ["| classifier | loss, mean of the seeds | deviation | beside `off`, same seeds | p |", "|---|---|---|---|---|"]
    for way, losses in of.items():
        gaps = [one - other for one, other in zip(losses, of["off"], strict=True)]
        beside = f"{mean(gaps):+.4f} ({', '.join(f'{g:+.4f}' for g in gaps)})" if way != "off" else ""
        p = f"{p_value(losses, of['off']):.2f}" if way != "off" else ""
        lines.append(f"| `{way}` | {mean(losses):.4f} | {stdev(losses):.4f} | {beside} | {p} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> None:
    """The gap of the training loss to the same seed's without 8 bits, a point for WINDOW steps, the mean of the seeds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    of = {(r["way"], r["seed"]): r["losses"] for r in rows}
    seeds = sorted({seed for _, seed in of})
    style: Any = {"svg.hashsalt": "barellm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=(9, 3.2))
        for way, color in zip(WAYS[1:], ("#2f855a", "#b7791f", "#4a6fa5"), strict=True):
            gaps = [[a - b for a, b in zip(of[way, s], of["off", s], strict=True)] for s in seeds]
            points = range(0, len(gaps[0]), WINDOW)
            means = [mean(mean(g[i : i + WINDOW]) for g in gaps) for i in points]
            axes.plot([i + WINDOW for i in points], means, color=color, label=way)
        axes.axhline(0, color="#1f2933", linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel("difference in loss, nats per token")
        axes.set_title("speedrun-small: training loss with an FP8 classifier less that without", loc="left", fontsize=11)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(PICTURE, facecolor="white", metadata={"Date": None, "Title": "What products in 8 bits cost"})


def write() -> None:
    rows = json.loads(FILE.read_text())["runs"]
    found = re.sub(
        r"(<!-- fp8 -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{markdown(rows)}\n{m[2]}", PAGE.read_text(), flags=re.DOTALL
    )
    PAGE.write_text(found)
    draw(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help="the table and the picture from the file, nothing else")
    args = parser.parse_args()
    if args.write:
        return write()
    run(args.out, args.steps, args.seeds)


if __name__ == "__main__":
    main()
