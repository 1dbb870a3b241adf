"""What each part of the speedrun's model is worth: the whole, and each time one part less, from several seeds.

    BARELLM_THREADS=1 python benchmarks/ablation.py --time 3    what a step of each model takes, in turns
    python benchmarks/ablation.py               the losses; a busy machine does not change them
    python benchmarks/ablation.py --write       docs/img/ablation.svg and the table of docs/speedrun.md

Every model trains for the same number of steps, on the same text in the same order. Where its step takes another time, it trains
again for as many steps as fit into the seconds of the whole, and the schedule is stretched with the steps. Seconds are processor
seconds of one thread: no neighbour adds to those. Losses are of the whole validation part. What the file has is not made again, so
a long table may be stopped and started.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import replace
from fractions import Fraction
from math import atan, cos, exp, lgamma, pi, sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

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
PAGE, PICTURE = ROOT / "docs" / "speedrun.md", ROOT / "docs" / "img" / "ablation.svg"
FILE = ROOT / "benchmarks" / "results" / "ablation-speedrun-small.json"
WHOLE = "the whole"
# Smaller than the preset, so that the whole table takes an hour and a half of two slow cores.
STAGES = (
    Stage(512, (1, 3), Fraction(1, 3), lr=1.0, mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)),
    Stage(1024, (3, 7), Fraction(1, 3), lr=1.52, mtp=(1.0, 0.5), mtp_end=(1.0, 0.0)),
    Stage(1536, (5, 11), Fraction(1, 3), lr=1.73),
    Stage(1536, (6, 13)),
)
APART = 0.03  # of a step's time: what is nearer to the whole counts as equal
WIDE = table([replace(stage, windows=(48, 48)) for stage in STAGES])
ALONE = table([replace(stage, mtp=(1.0,), mtp_end=(1.0,)) for stage in STAGES])
PARTS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "lanes": {"model.lanes_from": 11},
    "smear": {"model.smear": False},
    "bigrams": {"model.bigram": False},
    "value embeddings": {"model.values": ""},
    "paired heads": {"model.paired": ""},
    "softcap": {"model.softcap": False},
    "further tokens in the loss": {"model.stages": ALONE},
    "NorMuon's factors": {"optim.normuon": 0.0},
    "cautious decay": {"optim.cautious": False},
    "windows": {"model.stages": WIDE, "model.final_window": 48},
    "an embedding of its own": {"model.untie": 9},
    "backout": {"model.backout": 11},
}


def base() -> Config:
    config = preset("speedrun-small")
    model = {"d_model": 64, "heads": 2, "d_ff": 256, "stages": table(STAGES), "max_seq": 1536}
    model |= {"bigram_first": "token", "adam_weights": "fp32"}  # what the file was measured with
    run = {"train.seq": 1536, "train.dtype": "auto", "data.bpe_vocab": 2048}
    return changed(config, run | {f"model.{key}": value for key, value in model.items()})


def trained(config: Config, data: Dataset, *, steps: int, seed: int, max_tokens: int = 0) -> tuple[float, float]:
    """(nats per token of the validation part, or of `max_tokens` of it; processor seconds of all steps but the first two)."""
    train = replace(config.train, steps=steps, seed=seed)
    # All that counts steps goes with their number.
    optim = replace(config.optim, momentum_warmup=round(0.2 * steps), momentum_cooldown=round(0.04 * steps))
    config = replace(config, model=replace(config.model, extension=max(2, round(0.03 * steps))), optim=optim, train=train)
    with open_model(config, device="cpu") as compiled:
        session, training_schedule = compiled.session, model_schedule(compiled.config)
        assert training_schedule is not None
        compiled.initialize(seed)
        batches = Batches(data.train, seq=train.seq, seed=seed)
        begin = 0.0
        for index in range(steps):
            begin = time.process_time() if index == 2 else begin
            step = training_schedule.step(index, steps)
            inputs, targets = batches.batch(index, 1, seq=step.seq)
            session.write("tokens", inputs)
            session.write("targets", targets)
            session.run("forward_backward", batch=1, seq=step.seq, inv_targets=step.inv_targets, accumulate=int(step.adds))
            for program, scalars in step.updates:
                session.run(program, **scalars)
            training_schedule.on_step(session, index + 1, steps)
        seconds = time.process_time() - begin
        result = Evaluator(Validation(data.val, seq=train.seq, max_tokens=max_tokens), batch=1, byte_lengths=None).run(session)
    assert result is not None
    return result.nats, seconds


class Runs:
    """Losses by part, steps and seed, and seconds of a step by part, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {"runs": [], "step_s": {}}
        self.rows: list[dict[str, Any]] = found["runs"]
        self.step_s: dict[str, list[float]] = found["step_s"]
        self.base = base()
        self.data = prepare(self.base.data)
        self.base = with_vocabulary(self.base, self.data.tokenizer)

    def run(self, part: str, steps: int, seed: int) -> dict[str, Any]:
        key = {"part": part, "steps": steps, "seed": seed}
        for row in self.rows:
            if {k: row[k] for k in key} == key:
                return row
        loss, _ = trained(changed(self.base, PARTS[part]), self.data, steps=steps, seed=seed)
        self.rows.append(key | {"loss": loss})
        print(json.dumps(self.rows[-1]), flush=True)
        self.save()
        return self.rows[-1]

    def time(self, parts: list[str], *, rounds: int, steps: int) -> None:
        """The seconds of a step of each part, in turns; a short run has as much of each stage as a long one."""
        for _ in range(rounds):
            for part in parts:
                _, seconds = trained(changed(self.base, PARTS[part]), self.data, steps=steps, seed=1, max_tokens=1)
                self.step_s.setdefault(part, []).append(seconds / (steps - 2))
                print(f"{part}: {self.step_s[part][-1]:.4f} s", flush=True)
            self.save()

    def save(self) -> None:
        from barellm.cpu.backend import default_dtype, describe

        facts = {"kind": "ablation", "preset": "speedrun-small", "dtype": default_dtype(), "machine": describe()}
        self.path.write_text(json.dumps(facts | {"step_s": self.step_s, "runs": self.rows}, indent=1) + "\n")


# --- what the losses say ---


def p_value(one: list[float], other: list[float]) -> float:
    """Welch's test of equal means, two-sided."""
    variances = [stdev(x) ** 2 / len(x) for x in (one, other)]
    error = sum(variances)
    if error == 0:
        return 1.0 if mean(one) == mean(other) else 0.0
    freedom = error**2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (one, other), strict=True))
    return beyond(abs(mean(one) - mean(other)) / sqrt(error), freedom)


def beyond(t: float, freedom: float) -> float:
    """The probability that Student's t is farther from 0 than `t`: the rest of its density, summed after t = sqrt(f) tan(a)."""
    scale = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(pi)
    begin, parts = atan(t / sqrt(freedom)), 2000
    width = (pi / 2 - begin) / parts
    return 2 * scale * width * sum(max(cos(begin + (i + 0.5) * width), 0.0) ** (freedom - 1) for i in range(parts))


def summary(rows: list[dict[str, Any]], step_s: dict[str, list[float]], steps: int) -> list[dict[str, Any]]:
    """A row for each part: what is lost without it at equal steps and at equal seconds, and how sure that is."""

    def losses(part: str, equal: bool) -> list[float]:
        return [r["loss"] for r in rows if r["part"] == part and (r["steps"] == steps) == equal]

    whole = losses(WHOLE, True)
    found = []
    for part in PARTS:
        if part == WHOLE or not losses(part, True):
            continue
        row: dict[str, Any] = {"part": part, "time": ratio(step_s, part), "steps": mean(losses(part, True)) - mean(whole)}
        row["p_steps"] = p_value(losses(part, True), whole)
        again = losses(part, False) or losses(part, True)
        row |= {"seconds": mean(again) - mean(whole), "p_seconds": p_value(again, whole)}
        found.append(row)
    return sorted(found, key=lambda row: -row["steps"])


def ratio(step_s: dict[str, list[float]], part: str) -> float:
    """A step's time beside that of the whole, by the medians of the rounds."""
    return median(step_s[part]) / median(step_s[WHOLE])


def markdown(found: dict[str, Any]) -> str:
    rows, step_s, steps = found["runs"], found["step_s"], found["runs"][0]["steps"]
    whole = [r["loss"] for r in rows if r["part"] == WHOLE and r["steps"] == steps]
    lines = [
        f"The whole: {mean(whole):.3f} nats after {steps} steps of {1000 * median(step_s[WHOLE]):.0f} processor milliseconds "
        f"(deviation of {len(whole)} seeds {stdev(whole):.3f}).",
        "",
        "| without | time of a step | loss at equal steps | p | loss at equal seconds | p |",
        "|---|---|---|---|---|---|",
    ]
    for row in summary(rows, step_s, steps):
        lines.append(
            f"| {row['part']} | {row['time']:.2f} | {row['steps']:+.3f} | {_p(row['p_steps'])} | {row['seconds']:+.3f} | "
            f"{_p(row['p_seconds'])} |"
        )
    return "\n".join(lines)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def draw(found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    bars = summary(found["runs"], found["step_s"], found["runs"][0]["steps"])[::-1]
    style: Any = {"svg.hashsalt": "barellm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=(9, 0.34 * len(bars) + 1.1))
        places = range(len(bars))
        axes.barh([y + 0.18 for y in places], [r["steps"] for r in bars], 0.34, color="#2f855a", label="at equal steps")
        axes.barh([y - 0.18 for y in places], [r["seconds"] for r in bars], 0.34, color="#90aac6", label="at equal seconds")
        axes.axvline(0, color="#1f2933", linewidth=0.8)
        axes.set_yticks(list(places), [f"without {r['part']}" for r in bars])
        axes.set_xlabel("loss gained by leaving it out, in nats per token (to the right: the part helps)")
        axes.legend(frameon=False, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title("speedrun-small: what each part is worth", loc="left", fontsize=11)
        figure.tight_layout()
        figure.savefig(PICTURE, facecolor="white", metadata={"Date": None, "Title": "What each part is worth"})


def write() -> None:
    found = json.loads(FILE.read_text())
    page = re.sub(
        r"(<!-- ablation -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{markdown(found)}\n{m[2]}", PAGE.read_text(), flags=re.DOTALL
    )
    PAGE.write_text(page)
    draw(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--time", type=int, metavar="ROUNDS", help="measure the steps in so many rounds, nothing else")
    parser.add_argument("--write", action="store_true", help="the table and the picture from the file, nothing else")
    args = parser.parse_args()
    if args.write:
        return write()
    runs, parts = Runs(args.out), args.part or list(PARTS)
    if args.time:
        return runs.time(list(PARTS), rounds=args.time, steps=26)
    for seed in range(1, args.seeds + 1):
        for part in parts:
            runs.run(part, args.steps, seed)
    if not runs.step_s:
        return print("equal seconds need --time first")
    for seed in range(1, args.seeds + 1):
        for part in parts:
            steps = round(args.steps / ratio(runs.step_s, part) / 2) * 2
            if abs(steps / args.steps - 1) > APART:
                runs.run(part, steps, seed)


if __name__ == "__main__":
    main()
