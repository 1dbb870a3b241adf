"""Draws docs/img/scale.svg, a step on up to 16,384 ranks on paper: `python docs/img/scale.py` from the repository's root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from barellm import models
from barellm.config import Config
from barellm.tools.plan import devices, scale

HERE = Path(__file__).parent
INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
RANKS = [2**i for i in range(15)]
UTILISATION = 0.4


def config(**optim: Any) -> Config:
    """gpt2-1558m with rows for each rank: the batch grows with the ranks."""
    preset = models.preset("gpt2-1558m")
    train = replace(preset.train, dtype="bf16", gradient_accumulation_steps=1)
    return replace(preset, train=train, optim=replace(preset.optim, **optim))


def curves() -> dict[str, list[float]]:
    """The share of a step that is arithmetic, in percent, by what is drawn."""
    ceiling = devices.published("h100")
    found: dict[str, list[float]] = {}
    for name, made in (("", config()), (", factors of 64 columns", config(powersgd=64))):
        for ranks in RANKS:
            own = replace(made, train=replace(made.train, micro_batch_size=4 * ranks))
            ready = scale.work(scale.rows_of(own, ranks), ranks, ceiling, UTILISATION)
            for link in ("ib400", "100gbit"):
                ways = scale.prediction(own, ranks, link, ceiling=ceiling, utilisation=UTILISATION, ready=ready)["ways"]
                if name:
                    found.setdefault(f"{link}{name}", []).append(100 * ways["direct"]["efficiency"])
                    continue
                for way in scale.WAYS:
                    key = f"{link}, {way}"
                    found.setdefault(key, []).append(100 * ways[way]["efficiency"])
                    found.setdefault(f"{key}, overlapped", []).append(100 * ways[way]["overlapped_efficiency"])
    return found


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "barellm", "font.size": 9, "text.color": INK, "axes.edgecolor": LINE})
    found = curves()
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.4), gridspec_kw={"wspace": 0.12}, sharey=True)
    colours = {"direct": "#5b8def", "ring": "#c05621", "tree": "#2f855a"}
    for plot, link, title in zip(
        axes, ("ib400", "100gbit"), ("gpt2-1558m over InfiniBand, 400 Gbit/s", "over Ethernet, 100 Gbit/s"), strict=True
    ):
        for way, colour in colours.items():
            plot.plot(RANKS, found[f"{link}, {way}"], color=colour, linewidth=1.1, label=way)
            more = {"linestyle": "--", "linewidth": 1.1, "label": f"{way}, overlapped"}
            plot.plot(RANKS, found[f"{link}, {way}, overlapped"], color=colour, **more)
        compressed = found[f"{link}, factors of 64 columns"]
        plot.plot(RANKS, compressed, color="#6b46c1", linewidth=1.4, label="direct, factors of 64 columns")
        plot.set(title=title, xlabel="ranks", xscale="log", ylim=(0, 103))
        plot.set_xticks(RANKS[::2], [f"{n:,}" for n in RANKS[::2]])
        plot.minorticks_off()
        plot.spines[["top", "right"]].set_visible(False)
        plot.tick_params(colors=SOFT)
    axes[0].set_ylabel("scaling efficiency (predicted), %")
    axes[1].legend(frameon=False, fontsize=7.5, loc="center right")
    figure.savefig(HERE / "scale.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
