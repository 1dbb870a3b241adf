"""The README's picture and lines about the default run, from what it printed:

barellm train --json --out runs/default > benchmarks/results/train-default.jsonl
barellm sample runs/default --prompt "def main(" --samples 5 --json > benchmarks/results/sample-default.jsonl
python docs/img/run.py --write README.md        # between <!-- train --> and <!-- /train -->

`--compare RUN` says how a run of somebody's compares with it: `make train` ends with that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import make
import matplotlib.pyplot as plt

RUN, SAMPLE = "benchmarks/results/train-default.jsonl", "benchmarks/results/sample-default.jsonl"
SHOWN_LINES, SHOWN_COLUMNS = 24, 88
BEGIN, END = "<!-- train -->", "<!-- /train -->"
ORANGE, GREEN = "#c2410c", "#2f855a"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What the run printed: steps, evaluations and samples, the result last."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def picture(rows: list[dict[str, Any]], sample: dict[str, Any]) -> Any:
    """The loss beside what `gzip -9` makes of the same text, and what the model makes of a prompt."""
    result = rows[-1]
    figure, axes = make.canvas(840, 330)
    curve(figure.add_axes((0.055, 0.14, 0.36, 0.74)), rows)
    make.box(axes, 378, 16, 446, 298, "#1c2128", edge="#1c2128")
    heading = f'after step {result["steps"]:,}: barellm sample runs/default --prompt "{sample["prompt"]}" --seed {sample["seed"]}'
    make.text(axes, 392, 26, heading, size=8.5, colour="#8b98a5")
    text = (sample["prompt"] + sample["text"]).strip("\n")
    lines = [line.expandtabs(4)[:SHOWN_COLUMNS] for line in text.splitlines()[:SHOWN_LINES]]
    style = {"size": 7.6, "family": "monospace", "linespacing": 1.42, "parse_math": False}
    make.text(axes, 392, 46, "\n".join(lines), colour="#d5dde6", **style)
    make.text(axes, 392, 46, sample["prompt"], colour="#f6d4a8", **style)  # what was given
    return figure


def curve(chart: Any, rows: list[dict[str, Any]]) -> None:
    result = rows[-1]
    losses = [(r["step"], r["loss"]) for r in rows if r["kind"] == "train" and r["loss"] is not None]
    judged = [(r["step"], r["val_nats"]) for r in rows if r["kind"] == "eval"]
    bits = result["val_bits_per_byte"] / result["val_nats"]  # bits per byte of text for a nat per token
    gzip = result["gzip_bits_per_byte"]
    chart.plot(*zip(*losses, strict=True), color=make.LINE, linewidth=0.7, label="training")
    chart.plot(*zip(*judged, strict=True), "o-", color=ORANGE, markersize=3, linewidth=1.2, label="validation")
    chart.axhline(gzip / bits, color=GREEN, linewidth=1, linestyle="--", label=f"gzip -9: {gzip:.2f} bits per byte")
    words = f"{result['val_bits_per_byte']:.2f} bits per byte"
    place = {"xytext": (2, -34), "textcoords": "offset points", "ha": "right"}
    chart.annotate(words, judged[-1], fontsize=8.5, color=ORANGE, **place)
    low, high = chart.get_ylim()
    chart.set_ylim(low - 0.06 * (high - low), high)
    chart.tick_params(labelsize=8.5, colors=make.INK)
    chart.set_xlabel("step", fontsize=8.5, color=make.INK)
    chart.spines[["top", "right"]].set_visible(False)
    chart.set_title("loss, nats per token", fontsize=9.5, color=make.INK, loc="left")
    chart.legend(fontsize=8.5, frameon=False)


def lines(r: dict[str, Any]) -> str:
    """`r`: the result, the last line of a run."""
    machine = f"{r['threads']} threads, {r['isa']}, {r['dtype']}"
    return (
        "![The loss of the default run beside gzip -9, and a sample](docs/img/train.svg)\n\n"
        f"{r['steps']:,} steps of a model with {r['parameters'] / 1e6:.1f} million parameters took {r['seconds']:.0f} s "
        f"({machine}; the median is {r['tokens_per_s']:,.0f} tokens/s). It needs **{r['val_bits_per_byte']:.2f} bits per byte** "
        f"for text that it has not seen; `gzip -9` needs {r['gzip_bits_per_byte']:.2f} for the same {r['val_bytes']:,} bytes. "
        f"Of {r['tokenize_lines']} sampled lines {r['tokenize_share']:.0%} are, each by itself, Python to the `tokenize` module; "
        f"of the library's own lines {r['tokenize_share_of_validation']:.0%}. ([Every step of the run]({RUN}).)"
    )


def comparison(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How the result of a run compares with the README's, and why. Both end by the clock, so a faster machine does more steps."""

    def words(r: dict[str, Any]) -> str:
        where = f"{r['dtype']} ({r['isa']}, {r['threads']} threads)"
        return f"{r['val_bits_per_byte']:.3f} bits per byte after {r['steps']:,} steps in {where}"

    why = f"{ours['steps']:,} steps fitted, {theirs['steps']:,} there"
    if ours["dtype"] != theirs["dtype"]:
        why += f", {ours['dtype']} for {theirs['dtype']}"
    gap = ours["val_bits_per_byte"] - theirs["val_bits_per_byte"]
    return f"\nREADME   {words(theirs)}\nhere     {words(ours)}\n         {gap:+.3f} bits per byte: {why}"


def result_of(folder: Path) -> dict[str, Any]:
    """The result of a run, or of the newest one of the default preset in a folder of runs."""
    found = [folder / "metrics.jsonl", *folder.glob("default-*/metrics.jsonl")]
    newest = max((path for path in found if path.exists()), key=lambda path: path.stat().st_mtime)
    return rows_of(newest)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="where the lines go; without it they are printed")
    parser.add_argument("--compare", type=Path, metavar="RUN", help="a run, or a folder of runs whose newest is meant")
    args = parser.parse_args()
    root = make.HERE.parents[1]
    rows = rows_of(root / RUN)
    if args.compare is not None:
        print(comparison(result_of(args.compare), rows[-1]))
        return
    plt.rcParams |= make.STYLE
    picture(rows, rows_of(root / SAMPLE)[0]).savefig(make.HERE / "train.svg", facecolor="white", metadata={"Date": None})
    if args.write is None:
        print(lines(rows[-1]))
        return
    before, _, rest = args.write.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    args.write.write_text(f"{before}{BEGIN}\n\n{lines(rows[-1])}\n\n{END}{after}")


if __name__ == "__main__":
    main()
