"""Draws docs/img/few_bits.svg from benchmarks/results: `python docs/img/few_bits.py` from the repository's root."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
INK, SOFT, OURS, PEER, MADE = "#1f2933", "#52606d", "#5b8def", "#9aa5b1", "#3fa66b"
BITS = {"int4": 4, "nf4": 4}


def main() -> None:
    speed = json.loads((RESULTS / "zen4" / "few-bits-gpt2-774m.json").read_text())
    loss = json.loads((RESULTS / "few-bits-loss-default.json").read_text())["nats"]
    matplotlib.rcParams.update({"svg.hashsalt": "barellm", "font.size": 9, "text.color": INK, "axes.edgecolor": PEER})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.1), gridspec_kw={"wspace": 0.35})
    rows = sorted(speed["rows"].items(), key=lambda row: row[1]["tokens_per_s"])
    names = [name for name, _ in rows]
    rates = [row["tokens_per_s"] for _, row in rows]
    left.barh(names, rates, color=[PEER if name.startswith("llama") else OURS for name in names])
    for i, (rate, (_, row)) in enumerate(zip(rates, rows, strict=True)):
        label = f" {rate:.1f}  ({row['bytes'] * rate / 1e9:.0f} GB/s)"
        left.text(rate, i, label, va="center", color=SOFT, fontsize=8)
    left.set(title=f"{speed['preset']}: decoding, Zen 4, 2 threads", xlabel="tokens/s", xlim=(0, max(rates) * 1.5))
    for name, nats in loss.items():
        kind, _, group = name.partition("/")
        if kind in BITS and group.isdigit():
            bits, more, below = BITS[kind] + 16 / int(group), 1000 * (nats - loss["numbers"]), kind == "nf4"
            right.scatter([bits], [more], marker="s" if below else "o", color=MADE if below else OURS)
            right.annotate(name, (bits, more), textcoords="offset points", xytext=(6, -11 if below else 4), fontsize=8, color=SOFT)
    right.set(
        title="default preset: loss beyond that of fp32", xlabel="bits a weight, scales included", ylabel="nats per token / 1000"
    )
    right.set(ylim=(0, 10.5), xlim=(4.08, 4.6))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "few_bits.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
