"""Draws docs/img/random.svg and rounding.svg, what random bits are made of and what stochastic rounding does with them:
`python docs/img/bits.py` from the repository's root. Numbers come from benchmarks/results/."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from make import HERE, INK, LINE, SOFT, STYLE, plt

ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from barellm.program.ops.pointwise.tausworthe import GENERATORS, Component  # noqa: E402
from benchmarks.generators import PUBLISHED, SEEDS, linear_complexity, top_bits  # noqa: E402

BLUE, RED, GREEN = "#2f6fb3", "#c0452f", "#3c8d5a"


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def panel(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel(x, fontsize=9, color=SOFT)
    axes.set_ylabel(y, fontsize=9, color=SOFT)
    axes.tick_params(labelsize=8, colors=SOFT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(LINE)


def states(component: Component, seed: int, count: int) -> np.ndarray:
    """The bits of a component's word over its steps, the upper bit first: (count, 32)."""
    s, rows = np.uint32(seed), []
    for _ in range(count):
        rows.append(int(s) >> np.arange(31, -1, -1) & 1)
        s = component.advance(s)
    return np.array(rows)


def generators() -> Any:
    """Linear complexity over the length of the sequence, and the third component's states with either constant."""
    figure, axes = plt.subplots(1, 3, figsize=(10.4, 3.1), width_ratios=(1.5, 1, 1), layout="constrained")
    lengths = list(range(4, 260, 4))
    for generator, colour, label in (
        (GENERATORS["lfsr113"], GREEN, "LFSR113: 113"),
        (GENERATORS["taus88"], BLUE, "taus88: 88"),
        (PUBLISHED, RED, "with c = 11: 60"),
    ):
        bits = top_bits(generator, lengths[-1])
        axes[0].plot(lengths, [linear_complexity(bits[:n]) for n in lengths], color=colour, label=label)
    axes[0].legend(fontsize=8.5, frameon=False, loc="lower right")
    panel(axes[0], "linear complexity: bits that tell all others", "upper bits seen", "linear complexity")
    for axis, component, what in ((axes[1], GENERATORS["taus88"][2], 17), (axes[2], PUBLISHED[2], 11)):
        axis.imshow(states(component, SEEDS[2], 24), cmap="Blues", vmin=0, vmax=1.6, aspect="auto", interpolation="nearest")
        panel(axis, f"third component, c = {what}", "bit of the word", "step")
        axis.set_xticks([0, 31], ["31", "0"])
    return figure


def rounding() -> Any:
    found = result("rounding")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.1), layout="constrained")
    mean = found["mean"]["ue6m10"]
    n = np.array(mean["n"])
    left.loglog(n, mean["stochastic"], "o-", color=BLUE, markersize=4, label="stochastic")
    left.loglog(n, np.full(len(n), mean["nearest"]), color=RED, label="to nearest")
    left.loglog(n, mean["stochastic"][0] / np.sqrt(n), ":", color=SOFT, label="1 / sqrt(n)")
    left.legend(fontsize=8.5, frameon=False)
    panel(left, "error of the mean of n roundings", "n", "error, units in the last place")
    decay = found["decay"]
    for kind, colour, style in (("exact", SOFT, ":"), ("nearest", RED, "-"), ("stochastic", BLUE, "-")):
        label = {"nearest": "to nearest", "exact": "not rounded"}.get(kind, "stochastic, mean of 256")
        right.semilogy(decay["step"], decay[kind], style, color=colour, label=label)
    right.legend(fontsize=8.5, frameon=False, loc="lower left")
    right.tick_params(which="minor", labelsize=8, labelcolor=SOFT)
    panel(right, "AdamW's second moment in 16 bits, decay 0.9999 a step", "step", "second moment")
    return figure


if __name__ == "__main__":
    plt.rcParams |= STYLE
    for name, draw in {"random": generators, "rounding": rounding}.items():
        draw().savefig(HERE / f"{name}.svg", facecolor="white", metadata={"Date": None})
