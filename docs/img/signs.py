"""Draws docs/img/binary.svg, how signs are multiplied and what that is worth: `python docs/img/signs.py` from the repository's
root. Times come from benchmarks/results/zen4/binary.json."""

from __future__ import annotations

import json
from typing import Any

from make import HERE, LINE, MINT, ROSE, SAND, SKY, SOFT, STYLE, box, canvas, plt, text

A = (0.7, -1.2, 0.1, 2.0, -0.3, 0.0, -0.9, 1.4)
B = (-0.4, -0.8, 1.1, 0.6, 0.2, -0.5, -1.0, 0.9)
CELL = 44


def row(axes: Any, y: float, label: str, values: list[str], colours: list[str]) -> None:
    text(axes, 92, y + 13, label, size=9.5, colour=SOFT, va="center", ha="right")
    for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
        box(axes, 104 + i * CELL, y, CELL - 5, 26, colour)
        text(axes, 104 + i * CELL + (CELL - 5) / 2, y + 13, value, size=9.5, va="center", ha="center")


def picture() -> Any:
    figure, axes = canvas(860, 262)
    text(axes, 16, 12, "XNOR-popcount: one word for 32 products (here 8)", size=11, weight="bold")
    one, zero = SKY, SAND
    for y, label, values in ((42, "a", A), (112, "b", B)):
        bits = [int(v >= 0) for v in values]
        row(axes, y, label, [f"{v:g}" for v in values], ["white"] * 8)
        row(axes, y + 30, f"signs of {label}", [str(bit) for bit in bits], [one if bit else zero for bit in bits])
    differ = [int((a >= 0) != (b >= 0)) for a, b in zip(A, B, strict=True)]
    row(axes, 184, "xor", [str(bit) for bit in differ], [ROSE if bit else MINT for bit in differ])
    ones = sum(differ)
    text(axes, 104, 222, f"{ones} signs differ: product = 8 - 2 x {ones} = {8 - 2 * ones}", size=10)
    found = json.loads((HERE.parents[1] / "benchmarks/results/zen4/binary.json").read_text())
    text(axes, 520, 12, "binary GEMM: times as fast as fp32 GEMM", size=11, weight="bold")
    text(axes, 520, 30, "AVX-512 (Zen 4), one thread; blue: packed already, green: with packing", size=8.5, colour=SOFT)
    for i, size in enumerate(found["rows"]):
        y, unit = 52 + 40 * i, 12
        name = " x ".join(str(n) for n in size["size"])
        text(axes, 620, y + 13, name, size=8.5, colour=SOFT, va="center", ha="right")
        for j, (key, colour) in enumerate((("signs_times_faster", SKY), ("both_times_faster", MINT))):
            axes.barh(y + 6 + 14 * j, size[key] * unit * 0.8, height=12, left=628, color=colour, edgecolor=LINE)
            text(axes, 632 + size[key] * unit * 0.8, y + 6 + 14 * j, f"{size[key]:.1f}", size=8.5, va="center")
    return figure


if __name__ == "__main__":
    plt.rcParams |= STYLE
    picture().savefig(HERE / "binary.svg", facecolor="white", metadata={"Date": None})
