"""Draws docs/img/few_rows.svg from benchmarks/results/few-rows-*.json: `python docs/img/few_rows.py` from the repository's root."""

from __future__ import annotations

import json
import sys
from statistics import mean

from make import HERE, LINE, SOFT, STYLE, plt

sys.path.insert(0, str(HERE.parents[1]))
from benchmarks.few_rows import KINDS, MATRICES, RESULTS, ROWS, shares

COLOURS = {"few": "#2b6cb0", "packed": "#c05621", "torch": "#6b7280"}
AIM = 85


def main() -> None:
    plt.rcParams |= STYLE
    figure, both = plt.subplots(1, 2, figsize=(9.4, 3.3), sharey=True, gridspec_kw={"wspace": 0.08})
    for axes, dtype in zip(both, ("bf16", "fp32"), strict=True):
        found = shares(json.loads((RESULTS / f"few-rows-{dtype}.json").read_text()))
        for kind, colour in COLOURS.items():
            of_rows = [[100 * found[matrix, rows, kind] for matrix in MATRICES] for rows in ROWS]
            axes.fill_between(ROWS, list(map(min, of_rows)), list(map(max, of_rows)), color=colour, alpha=0.15, linewidth=0)
            axes.plot(ROWS, list(map(mean, of_rows)), marker="o", markersize=4, color=colour, label=KINDS[kind])
        axes.axhline(AIM, color=LINE, linewidth=0.9, linestyle="--")
        axes.set(title=f"skinny GEMM, {dtype}, Zen 4", xlabel="rows (M)", xscale="log", ylim=(0, 107))
        axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("% of roofline")
    both[0].text(64, 101, f"dashed: the aim, {AIM} %", color=SOFT, fontsize=8.5, ha="right")
    both[1].legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.savefig(HERE / "few_rows.svg", facecolor="white", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
