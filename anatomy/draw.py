"""Pictures of what was measured: the staircase beside the roofline, and the memory hierarchy."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
BLUE, RED, GREEN, SAND = "#3d7ab8", "#c2553f", "#3f9167", "#e6c36a"
LEVELS = {"L1": GREEN, "L2": BLUE, "L3": SAND, "memory": RED}
plt.rcParams["svg.hashsalt"] = "anatomy"  # the same picture for the same numbers


def axes_of(figure: Any, place: tuple[int, int, int], title: str) -> Any:
    axes = figure.add_subplot(*place)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5, colors=INK)
    return axes


def save(figure: Any, path: Path) -> None:
    figure.tight_layout(pad=1.2)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def peak(found: dict[str, Any], threads: int, dtype: str = "fp32") -> float:
    (rates,) = [p["flops"] for p in found["peaks"] if (p["threads"], p["dtype"]) == (threads, dtype)][:1]
    return median(rates) / 1e9


def staircase(found: dict[str, Any], path: Path) -> None:
    rows = [row for row in found["rungs"] if "flops" in row]
    figure = plt.figure(figsize=(11.6, 4.6))
    left = axes_of(figure, (1, 2, 1), f"GFLOP/s of each rung, M = N = K = {found['size']}")
    rates = [row["flops"] / 1e9 for row in rows]
    colours = [BLUE if row["threads"] == 1 else RED for row in rows]
    left.bar(range(len(rows)), rates, color=colours, width=0.82)
    for x, rate in enumerate(rates):
        left.text(x, rate * 0.94, f"{rate:.3g}", ha="center", va="top", fontsize=8.5, color="white", weight="bold")
    for threads in sorted({p["threads"] for p in found["peaks"]}):
        level = peak(found, threads)
        left.axhline(level, color=SOFT, linewidth=1, linestyle="--")
        words = f"peak of {threads} thread{'s' * (threads > 1)}: {level:.0f}"
        left.text(-0.45, level * 1.05, words, fontsize=8, color=SOFT)
    left.set_yscale("log")
    left.set_ylim(min(rates) / 2, max(*rates, level) * 1.6)
    left.set_xticks(range(len(rows)), [f"{row['number']} {row['name']}" for row in rows], rotation=38, ha="right")

    right = axes_of(figure, (1, 2, 2), "roofline of one thread, with the rungs' numbers")
    top = peak(found, 1)
    for name, level in found["levels"].items():
        slope = level["bytes_per_s"] / 1e9
        ridge = top / slope
        right.plot(
            [0.05, ridge, 20], [0.05 * slope, top, top], color=LEVELS[name], linewidth=1.2, label=f"{name}: {slope:.0f} GB/s"
        )
    groups: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["threads"] == 1 and row["dtype"] == "fp32":
            groups.setdefault(row["flops_per_byte"], []).append(row)
    for x, same in groups.items():
        for row in same:
            right.plot(x, row["flops"] / 1e9, "o", color=INK, markersize=4)
        close: list[list[dict[str, Any]]] = []  # rungs whose points touch share a label
        for row in sorted(same, key=lambda row: -row["flops"]):
            if close and close[-1][-1]["flops"] < 1.3 * row["flops"]:
                close[-1].append(row)
            else:
                close.append([row])
        for near in close:
            words = ", ".join(str(row["number"]) for row in near)
            right.annotate(words, (x, near[0]["flops"] / 1e9), (7, -3), textcoords="offset points", fontsize=8.5)
    right.set(xscale="log", yscale="log", xlim=(0.08, 20), ylim=(min(rates) / 2, top * 2.5))
    right.set_xlabel("arithmetic intensity: FLOP for each byte that the inner loop loads or stores", fontsize=8.5, color=INK)
    right.set_ylabel("GFLOP/s", fontsize=8.5, color=INK)
    right.legend(fontsize=8, frameon=False, loc="lower right", title="reading from", title_fontsize=8)
    save(figure, path)


def hierarchy(found: dict[str, Any], path: Path) -> None:
    figure = plt.figure(figsize=(11.6, 3.6))
    sizes = [row["bytes"] for row in found["memory"]]
    for place, key, scale, title in (
        (1, "latency_ns", 1, "latency of a load, ns"),
        (2, "bytes_per_s", 1e9, "read bandwidth of one thread, GB/s"),
    ):
        axes = axes_of(figure, (1, 2, place), title)
        axes.plot(sizes, [row[key] / scale for row in found["memory"]], color=BLUE, marker="o", markersize=3, linewidth=1.4)
        axes.set(xscale="log", ylim=(0, None))
        if key == "latency_ns":
            axes.set(yscale="log", ylim=(0.8, 400))
        for name, size in found["caches"].items():
            axes.axvline(size, color=LINE, linewidth=1, linestyle="--")
            axes.text(size, 1.0, f" {name}", transform=axes.get_xaxis_transform(), fontsize=8, color=SOFT, va="top")
        ticks = [1 << n for n in range(13, 31, 3) if sizes[0] <= 1 << n <= sizes[-1]]
        axes.set_xticks(ticks, [f"{t >> 10} KiB" if t < 1 << 20 else f"{t >> 20} MiB" for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel("size of the buffer", fontsize=8.5, color=INK)
    save(figure, path)
