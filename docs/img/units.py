"""Draws docs/img/units.svg from benchmarks/results: `python docs/img/units.py` from the repository's root."""

from __future__ import annotations

import json

from make import HERE, LINE, SOFT, STYLE, plt

RESULTS = HERE.parents[1] / "benchmarks" / "results"
OURS, PEER = "#5b8def", "#e0884a"


def main() -> None:
    plt.rcParams |= STYLE | {"font.size": 9, "axes.edgecolor": LINE}
    rows = [json.loads(line) for line in (RESULTS / "finetune-units.jsonl").read_text().splitlines()]
    peft = json.loads((RESULTS / "finetune-units-peft.json").read_text())
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 2.9), width_ratios=(1.7, 1), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, color=OURS, linewidth=0.7, label="barellm, each step")
    left.plot(*zip(*peft["losses"], strict=True), "o", color=PEER, markersize=4, label="PEFT, one step of 50, same batch")
    left.set(title="training loss of the adapter", xlabel="step", ylabel="nats per token", yscale="log", yticks=(0.1, 0.3, 1, 3))
    left.set_yticklabels(["0.1", "0.3", "1", "3"])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8.5)
    bars = {"base": "base", "barellm": "barellm's adapter", "peft": "PEFT's adapter"}
    for i, key in enumerate(bars):
        share = 100 * peft["accuracy"][key]
        right.barh([i], [share], color=PEER if key == "peft" else OURS)
        right.text(share + 1.5, i, f"{share:.1f} %", va="center", color=SOFT, fontsize=8.5)
    right.set(title=f"right to the letter, of {peft['asked']} unseen", xlabel="%", xlim=(0, 118), yticks=range(3))
    right.set_yticklabels(bars.values())
    right.set_xticks([0, 50, 100])
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=SOFT)
    figure.savefig(HERE / "units.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
