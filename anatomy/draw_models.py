"""Pictures of what arithmetic decides: a register tile, bank conflicts, waste at edges and in waves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from anatomy import models
from anatomy.draw import BLUE, GREEN, INK, LINE, RED, SOFT, axes_of, save

BANKS = plt.get_cmap("Set2").colors  # pyright: ignore[reportAttributeAccessIssue]


def squares(axes: Any, at: tuple[float, float], shape: tuple[int, int], colours: Any, label: Any = None) -> None:
    """A grid of (rows, columns) squares; `colours(row, column)`, and what is written in each."""
    for r in range(shape[0]):
        for c in range(shape[1]):
            where = at[0] + c, at[1] + r
            axes.add_patch(Rectangle(where, 1, 1, facecolor=colours(r, c), edgecolor="white", linewidth=1))
            if label:
                axes.text(where[0] + 0.5, where[1] + 0.5, label(r, c), ha="center", va="center", fontsize=7.5, color=INK)


def blank(figure: Any, place: tuple[int, int, int], title: str, width: float, height: float) -> Any:
    axes = axes_of(figure, place, title)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return axes


def tiles(path: Path) -> None:
    """One step of a register tile, and operations for each number loaded over the size of the tile."""
    figure = plt.figure(figsize=(11.6, 4.0))
    axes = blank(figure, (1, 2, 1), "one step of a register tile of 6 rows x 2 vectors of 8", 21, 11)
    squares(axes, (3, 3), (6, 16), lambda r, c: "#cfe0f1" if c < 8 else "#e3effa")
    squares(axes, (3, 1), (1, 16), lambda r, c: "#f6d4a8")
    squares(axes, (1, 3), (6, 1), lambda r, c: "#f3b8ad")
    words = (
        ("16 numbers of B: 2 loads", (11, 0.75)),
        ("6 of A:\n6 loads", (0.0, 10.9)),
        ("96 sums of C in 12 registers", (11, 9.7)),
    )
    for text, (x, y) in words:
        axes.text(x, y, text, fontsize=8.5, color=SOFT, ha="left" if x == 0 else "center", va="bottom")
    chart = axes_of(figure, (1, 2, 2), "FLOP for each number loaded")
    shapes = [(1, 1), (1, 8), (2, 8), (4, 8), (4, 16), (6, 16), (12, 32), (32, 32)]
    names = ["scalar", "1 vector", "2 x 1", "4 x 1", "4 x 2", "6 x 2\n(AVX2)", "12 x 2\n(AVX-512)", "4 tiles\n(AMX)"]
    values = [models.reuse(*shape) for shape in shapes]
    bars = chart.bar(names, values, color=[BLUE] * 5 + [GREEN] * 3, width=0.7)
    chart.bar_label(bars, [f"{v:.1f}" for v in values], fontsize=8, color=INK)
    chart.tick_params(axis="x", labelsize=7.5)
    save(figure, path)


def swizzle(path: Path) -> None:
    """Eight rows of 128 bytes in shared memory, plain and swizzled, with what a read of one column of chunks asks of the banks."""
    figure = plt.figure(figsize=(11.6, 4.3))
    titles = "as in memory: chunk c of each row in banks 4 c to 4 c + 3", "swizzled: chunk c of row r where c xor r is"
    for place, title in enumerate(titles, 1):
        where = models.swizzled if place == 2 else lambda r, c: c
        axes = blank(figure, (1, 2, place), title, 12.5, 9.6)
        inverse = [[next(c for c in range(8) if where(r, c) == at) for at in range(8)] for r in range(8)]

        def colour(r: int, at: int, inverse: Any = inverse) -> Any:
            return BANKS[2] if inverse[r][at] == 3 else "#eef1f4"

        squares(axes, (2, 0.4), (8, 8), colour, lambda r, at, inverse=inverse: str(inverse[r][at]))
        for r in range(8):
            axes.text(1.8, r + 0.9, f"row {r}", fontsize=8, color=SOFT, ha="right", va="center")
        times = models.conflicts([where(r, 3) for r in range(8)])
        words = f"reading chunk 3 of all rows: {times} {'cycles, a bank conflict' if times > 1 else 'cycle'}"
        axes.text(6, 9.3, words, fontsize=9, color=RED if times > 1 else GREEN, ha="center", weight="bold")
    save(figure, path)


def quantisation(path: Path) -> None:
    """How much of a GPU's work is wasted, over the size of a square product."""
    figure = plt.figure(figsize=(11.6, 3.8))
    axes = axes_of(figure, (1, 2, 1), "wave quantization: tiles on 132 multiprocessors")
    counts = range(1, 133 * 5)
    axes.plot(counts, [models.wave_efficiency(n, 132) for n in counts], color=BLUE, linewidth=1.2)
    axes.annotate("133 tiles: 50 %", (133, models.wave_efficiency(133, 132)), (185, 0.42), fontsize=8.5, color=SOFT,
                  arrowprops={"arrowstyle": "-", "color": LINE})  # fmt: skip
    axes.set(ylim=(0, 1.05), xlabel="tiles", ylabel="share that is busy")
    axes = axes_of(figure, (1, 2, 2), "wave and tile quantization: M = N = K")
    sizes = range(256, 8193, 32)
    for tile, colour in (((128, 256), BLUE), ((64, 64), GREEN)):
        values = [models.efficiency(n, n, tile, 132) for n in sizes]
        axes.plot(sizes, values, color=colour, linewidth=1.0, label=f"tiles of {tile[0]} x {tile[1]}")
    axes.set(ylim=(0, 1.05), xlabel="M = N = K", ylabel="useful share")
    axes.legend(fontsize=8.5, frameon=False, loc="lower right")
    save(figure, path)
