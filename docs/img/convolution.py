"""Draws docs/img/convolution.svg from benchmarks/results/xeon-amx/convolution-fp32.json: `python docs/img/convolution.py`, in the
root folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "xeon-amx" / "convolution-fp32.json"
COLOURS = {
    "direct": "#9aa5b1",
    "winograd2": "#7fb4e0",
    "winograd4": "#3572b0",
    "torch": "#f0c9a0",
    "torch channels last": "#e08a4f",
}
INK = "#1f2933"


def draw(result: dict[str, Any]) -> Any:
    """Bars for each layer, at each batch: direct operations a second over the peak, of each algorithm and of PyTorch."""
    batches = sorted({row["batch"] for row in result["rows"]})
    plt.rcParams.update({"svg.hashsalt": "convolution", "font.size": 9, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(len(batches) + 1, 1, figsize=(11, 3.2 * len(batches) + 2.4), height_ratios=[3] * len(batches) + [2])
    for ax, batch in zip(axes, batches, strict=False):
        of = {"batch": batch, "pass": "forward"}
        rows = [row for row in result["rows"] if COLOURS.keys() <= row["samples_s"].keys() and of.items() <= row.items()]
        for i, (variant, colour) in enumerate(COLOURS.items()):
            heights = [row["flops"] / median(row["samples_s"][variant]) / row["peak_flops"] for row in rows]
            ax.bar([x + 0.16 * (i - 2) for x in range(len(rows))], heights, 0.15, color=colour, label=variant)
        ax.axhline(1, color=INK, linewidth=0.8)
        names = [re.sub(", | (?=->)|(?<=depthwise) |(?<=ResNet) ", "\n", row["layer"]) for row in rows]
        ax.set_xticks(range(len(rows)), names, fontsize=8)
        ax.set_ylabel("direct FLOP/s / peak")
        ax.set_title(
            f"convolution forward in fp32, batch {batch}: share of the peak that a direct algorithm would need",
            loc="left",
            fontsize=10,
        )
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(ncols=5, frameon=False, loc="upper left", bbox_to_anchor=(0, 1.02))
    axes[0].set_ylim(0, 1.5)
    ax = axes[-1]
    algorithms = list(next(iter(result["errors"].values())))
    for i, (channels, found) in enumerate(result["errors"].items()):
        bars = [found[a] for a in algorithms]
        ax.barh(
            [y + 0.35 * (i - 0.5) for y in range(len(bars))],
            bars,
            0.32,
            label=f"{channels} channels",
            color=["#3572b0", "#9aa5b1"][i],
        )
    ax.set_yticks(range(len(algorithms)), algorithms)
    ax.set_title("error of each algorithm in fp32", loc="left", fontsize=10)
    ax.set_xlabel("largest error / RMS of the result")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    draw(json.loads(RESULT.read_text())).savefig(ROOT / "docs" / "img" / "convolution.svg", metadata={"Date": None})
