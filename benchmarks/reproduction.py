"""What each chapter of docs/reproduction.md gives on this machine, and PyTorch's curve beside ours.

    python -m benchmarks.reproduction steps                          steps of all variants, in turns
    python -m benchmarks.reproduction curve --run runs/reproduction  PyTorch from the run's first weights, on its batches
    python -m benchmarks.reproduction write                          tables and pictures of the page from both files

The run is `barellm train --config examples/reproduction.toml --data shards/ --out runs/reproduction`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

from barellm.checkpoint.checkpoint import read_json
from barellm.config import Config, overrides
from benchmarks import baselines
from benchmarks.interleaved import Variant, interleave

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMG = ROOT / "benchmarks" / "results", ROOT / "docs" / "reproduction.md", ROOT / "docs" / "img"
STEPS, CURVE = RESULTS / "reproduction-steps.json", RESULTS / "reproduction-curve.json"
VOCAB = 50257
OURS, THEIRS, INK = "#2f855a", "#4a6fa5", "#1f2933"

# What each rung has beyond the one before it: name, and the peer's options. The video's order.
CHAPTERS: list[tuple[str, dict[str, str | int]]] = [
    ("fp32", {"dtype": "fp32", "mode": "eager", "squares": 1, "vocab": VOCAB, "fused": 0}),
    ("bf16", {"dtype": "bf16"}),
    ("torch.compile", {"mode": "compile"}),
    ("attention without T x T", {"squares": 0}),
    ("50,304 ids", {"vocab": 50304}),
    ("fused AdamW", {"fused": 1}),
]
# Ours: name, whether fusions are left out, and what differs from the recipe.
RUNGS: list[tuple[str, bool, dict[str, Any]]] = [
    ("fp32, no op fused", True, {"train.dtype": "fp32", "model.padded_vocab": VOCAB}),
    ("bf16", True, {"model.padded_vocab": VOCAB}),
    ("fused ops", False, {"model.padded_vocab": VOCAB}),
    ("50,304 ids", False, {}),
    ("fp16 with a scaled loss", False, {"train.dtype": "fp16"}),
]


def recipe() -> Config:
    """The page's configuration with one micro-batch a step: 2048 tokens."""
    config = overrides.of_file(overrides.read_file(ROOT / "examples" / "reproduction.toml"))
    return overrides.changed(config, {"train.gradient_accumulation_steps": 1, "train.dtype": "bf16"})


def variants(config: Config) -> list[Variant]:
    made, options = [], {}
    for name, more in CHAPTERS:
        options |= more
        words = [f"--{key}={value}" for key, value in options.items()]
        for key in ("layers", "heads", "d_model"):
            words.append(f"--{key}={getattr(config.model, key)}")
        words += [f"--batch={config.train.micro_batch_size}", f"--seq={config.train.seq}"]
        script = [sys.executable, str(baselines.baseline_script("torch_chapters.py")), *words]
        made.append(Variant(f"PyTorch: {name}", script, baselines.environments()["tuned"]["set"], "memory kept, huge pages"))
    for name, unfused, changes in RUNGS:
        variant = baselines.ours(overrides.changed(config, changes), name=f"barellm: {name}")
        if unfused:
            variant.command[2] = "benchmarks.unfused"
        made.append(variant)
    return made


def steps(rounds: int) -> None:
    config, load = recipe(), os.getloadavg()
    made = variants(config)
    count = interleave(made, rounds=rounds, report=print)
    facts = baselines.description("reproduction", config) | {"rounds": rounds, "steps_per_turn": count}
    rows = [v.to_json(ROOT) for v in made]
    STEPS.write_text(json.dumps(facts | {"load_before": load, "load_after": os.getloadavg(), "variants": rows}) + "\n")
    for v in made:
        print(f"{1e3 * median(v.samples):8.1f} ms  {v.name}")


def curve(run: Path) -> None:
    """PyTorch's losses on the run's own batches, from the weights that its seed gives, and its last validation loss."""
    import torch

    from barellm.assembly.build import open_model
    from barellm.data.loader import Batches, Validation
    from barellm.data.sources import prepare
    from barellm.training.schedule import learning_rate
    from tests.oracle.torch_gpt2 import TorchGPT2

    config = overrides.from_json(read_json(run / "config.json"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    t, data = config.train, prepare(config.data)
    with open_model(config, device="cpu") as compiled:
        compiled.initialize(t.seed)
        held = compiled.session.tensors
        weights = {name: compiled.session.read(name) for name, x in held.items() if x.role == "parameter"}
    model: Any = TorchGPT2(config.model, weights, autocast=t.dtype == "bf16")
    optimizer = model.adamw(config.optim)
    batches = Batches(data.train, seq=t.seq, seed=t.seed, order=config.data.order)
    theirs = []
    for step in range(t.steps):
        for leaf in model.weights.values():
            leaf.grad = None
        loss = 0.0
        for micro in range(t.gradient_accumulation_steps):
            inputs, targets = batches.batch((step * t.gradient_accumulation_steps + micro) * t.micro_batch_size, t.micro_batch_size)
            part = model.loss(inputs, targets, 1 / (targets.size * t.gradient_accumulation_steps))
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.weights.values(), config.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total=t.steps, optim=config.optim)
        optimizer.step()
        theirs.append(loss)
        print(f"step {step + 1:>4}  PyTorch {loss:.4f}  barellm {ours[step + 1]:.4f}", flush=True)
    final = [row for row in rows if row["kind"] == "eval"][-1]
    part = Validation(data.val, seq=t.seq, max_tokens=final["targets"])
    with torch.no_grad():
        sums = [(model.loss(x, y, 1.0).item(), int((y >= 0).sum())) for x, y in part.batches(t.micro_batch_size)]
    found = {
        **baselines.description("reproduction-curve", config),
        "tokens_evaluated": sum(count for _, count in sums),
        "ours": [ours[step + 1] for step in range(t.steps)],
        "theirs": theirs,
        "ours_val": final["val_nats"],
        "theirs_val": sum(loss for loss, _ in sums) / sum(count for _, count in sums),
        "torch": torch.__version__,
    }
    CURVE.write_text(json.dumps(found) + "\n")
    print(f"validation: PyTorch {found['theirs_val']:.4f}, barellm {found['ours_val']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("steps", "curve", "write"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", type=Path, default=Path("runs/reproduction"))
    args = parser.parse_args()
    if args.what == "steps":
        steps(args.rounds)
    elif args.what == "curve":
        curve(args.run)
    else:
        write()


# --- the page ---


def table(found: dict[str, Any]) -> str:
    lines = ["| | ms a step | times the first | gained |", "|---|---|---|---|"]
    for side in ("PyTorch", "barellm"):
        rows = [v for v in found["variants"] if v["name"].startswith(side)]
        for i, row in enumerate(rows):
            before = f"{rows[i - 1]['median_s'] / row['median_s']:.2f}x" if i else ""
            times = f"{rows[0]['median_s'] / row['median_s']:.2f}x"
            lines.append(f"| {row['name']} | {1e3 * row['median_s']:,.0f} | {times} | {before} |")
    return "\n".join(lines)


def draw_steps(axes: Any, found: dict[str, Any]) -> None:
    rows = found["variants"]
    for i, row in enumerate(rows):
        mine = row["name"].startswith("barellm")
        axes.barh(i + 0.5 * mine, 1e3 * row["median_s"], color=OURS if mine else THEIRS, height=0.75)
        axes.text(1e3 * row["median_s"], i + 0.5 * mine, f" {1e3 * row['median_s']:,.0f}", va="center", color=INK)
    axes.set_yticks([i + 0.5 * row["name"].startswith("barellm") for i, row in enumerate(rows)], [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step of 2,048 tokens")
    axes.set_title("time of a training step, change by change", loc="left", fontsize=11)


def draw_curve(axes: Any, found: dict[str, Any]) -> None:
    steps = range(1, len(found["ours"]) + 1)
    axes.plot(steps, found["theirs"], color=THEIRS, linewidth=2.5, alpha=0.6, label="PyTorch")
    axes.plot(steps, found["ours"], color=OURS, linewidth=1, label="barellm")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per token")
    axes.set_title("training loss from the same weights and batches", loc="left", fontsize=11)
    axes.legend(frameon=False)


def write() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    text = PAGE.read_text()
    style: Any = {"svg.hashsalt": "barellm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    for path, name, draw, size in (
        (STEPS, "reproduction-steps", draw_steps, (9, 4)),
        (CURVE, "reproduction-curve", draw_curve, (9, 3)),
    ):
        found = json.loads(path.read_text())
        with matplotlib.rc_context(style):
            figure, axes = plt.subplots(figsize=size)
            draw(axes, found)
            axes.spines[["top", "right"]].set_visible(False)
            figure.tight_layout()
            figure.savefig(IMG / f"{name}.svg", facecolor="white", metadata={"Date": None, "Title": name})
            plt.close(figure)
    rows = table(json.loads(STEPS.read_text()))
    PAGE.write_text(re.sub(r"(<!-- steps -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{rows}\n{m[2]}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
