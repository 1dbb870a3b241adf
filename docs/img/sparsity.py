"""Draws docs/img/sparsity.svg, `python docs/img/sparsity.py`: layouts of attention as grids of blocks, and the time of attention
over their density, from benchmarks/results/zen4/sparsity-fp32.json."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from barellm.program import layouts

ROOT = Path(__file__).parents[2]
SHOWN = (
    "local:96", "banded:2", "strided:128", "fixed:128:32", "watts-strogatz:6:0.2:1", "barabasi-albert:3:1",
)  # fmt: skip
INK, SOFT = "#1f2933", "#52606d"


def main() -> None:
    plt.rcParams |= {"svg.hashsalt": "barellm", "font.size": 8.5, "text.color": INK, "axes.labelcolor": SOFT}
    figure = plt.figure(figsize=(10, 4.3), constrained_layout=True)
    grid = figure.add_gridspec(2, 5)
    for i, text in enumerate(SHOWN):
        axes = figure.add_subplot(grid[i // 3, i % 3])
        layout = layouts.parse(text, length=768, block=32, heads=1)
        shade = np.zeros((layout.rows, layout.rows))
        shade[layout.row_of_entries(), layout.keys] = np.where(layout.kinds > 0, 0.55, 1.0)
        axes.imshow(shade, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
        axes.set(
            title=f"{text}\n{len(layout.masks)} mask{'s' * (len(layout.masks) > 1)}, density {layout.density:.2f}",
            xticks=[],
            yticks=[],
        )
        axes.title.set_fontsize(8)
    axes = figure.add_subplot(grid[:, 3:])
    rows = [r for r in json.loads((ROOT / "benchmarks/results/zen4/sparsity-fp32.json").read_text())["rows"] if r["density"]]
    for what, mark, label in (("forward", "o", "forward"), ("both", "s", "forward and backward")):
        axes.plot([r["density"] for r in rows], [r[f"{what}_to_dense"] for r in rows], mark, label=label, ms=5)
    axes.plot([0, 1], [0, 1], color=SOFT, lw=0.8, label="density")
    axes.plot([0, 1], [0.08, 1.08], color=SOFT, lw=0.8, ls=":", label="density + 0.08")
    axes.set(
        xlabel="density: blocks listed / blocks of dense causal attention", ylabel="time / that of dense attention", xlim=0, ylim=0
    )
    axes.set_title("block-sparse attention, fp32, Zen 4", fontsize=9, loc="left")
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs/img/sparsity.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
