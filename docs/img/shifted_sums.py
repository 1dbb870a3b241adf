"""Draws docs/img/shifted_sums.svg from benchmarks/results/shifted-sums.json: `python docs/img/shifted_sums.py`."""

from __future__ import annotations

import json

from make import HERE, SOFT, STYLE, plt

FILE = HERE.parents[1] / "benchmarks" / "results" / "shifted-sums.json"
LINES = {
    "plain": ("E[x²] − E[x]²", "#c0392b", "-"),
    "subtracted in double": ("the same, subtracted in double", "#e0a030", "--"),
    "shifted": ("shifted by the row's first element", "#2a7f4f", "-"),
    "layernorm": ("barellm's kernel", "#2b6cb0", ":"),
}


def main() -> None:
    plt.rcParams |= STYLE
    found = json.loads(FILE.read_text())["errors"]
    ratios = [ratio for ratio in found if ratio != "0"]
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    for name, (label, colour, line) in LINES.items():
        errors = [found[ratio][name] for ratio in ratios]
        axes.loglog([float(r) for r in ratios], errors, line, color=colour, linewidth=2, label=label)
    axes.axhline(1.0, color=SOFT, linewidth=0.8)
    axes.text(10, 1.3, "no digit is left", color=SOFT, fontsize=8.5)
    axes.set_title("variance of a row in fp32: cancellation", loc="left", fontsize=10.5)
    axes.set_xlabel("mean of the row / its standard deviation")
    axes.set_ylabel("relative error of the variance")
    axes.set_ylim(2e-7, 60)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(HERE / "shifted_sums.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
