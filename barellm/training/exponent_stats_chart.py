"""The exponents of a run's tensors: as a table with strips of shades in the terminal, as a picture, and as numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from barellm.program.dynamic_range import BIAS, FORMAT_RANGES, TensorStats
from barellm.program.exponent_stats import KINDS
from barellm.program.ops.optim.exponent_stats import NOT_FINITE
from barellm.training.curve import save
from barellm.training.exponent_stats import tensor_stats_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES, PLAIN = " ░▒▓█", " .:*#"
FULL = 0.25  # the share of a tensor's elements at which an exponent has the darkest shade
STRIP, PER_CELL = (-48, 20), 2  # exponents of a strip, and those of one of its characters
LINES = {"e4m3": "#c2410c", "e5m2": "#1d4ed8", "fp16": "#15803d"}
MOST_LABELS = 24  # names beside a panel; of more rows, every second or third is named


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A step with the shares of each tensor that saturate and that become zero in each format, not scaled."""
    tensors = []
    for t in row["tensors"]:
        found = tensor_stats_of(t)
        shares = {"saturated": found.saturated, "flushed": found.flushed}
        tensors.append({**t, **{what: {f: round(share(f), 6) for f in FORMAT_RANGES} for what, share in shares.items()}})
    return {"step": row["step"], "tensors": tensors}


def matrices(row: dict[str, Any], what: str) -> list[tuple[str, TensorStats]]:
    """The tensors of a kind that are no vectors, in the order of the network."""
    return [(t["name"], tensor_stats_of(t)) for t in row["tensors"] if t["what"] == what and len(t["shape"]) > 1]


def terminal(row: dict[str, Any], *, ascii_only: bool = False) -> str:
    """A table with a line per matrix: rms, largest, shares of zeros (its sparsity) and outside e4m3 and e5m2, a strip of shades."""
    shades = PLAIN if ascii_only else SHADES
    low, high = STRIP
    width = (high - low) // PER_CELL
    ends = f"2^{low}".ljust(width - len(f"2^{high}")) + f"2^{high}"
    lines = []
    for what in KINDS:
        if not (found := matrices(row, what)):
            continue
        name_width = max(len(name) for name, _ in found)
        title = f"{what}, step {row['step']}"
        lines.append(f"{title:<{name_width}} {'rms':>9} {'max':>9} {'zeros':>6} {'e4m3':>6} {'e5m2':>6}  {ends}")
        for name, m in found:
            share = m.counts / max(1, m.size)
            shares = [f"{s:6.1%}" for s in (m.zeros / max(1, m.size), *(m.saturated(f) + m.flushed(f) for f in ("e4m3", "e5m2")))]
            cells = [share[e + BIAS : e + BIAS + PER_CELL].sum() for e in range(low, high, PER_CELL)]
            # An exponent that is there at all shows.
            marks = [min(len(shades) - 1, int(np.ceil(c / (PER_CELL * FULL) * (len(shades) - 1)))) for c in cells]
            strip = "".join(shades[i] for i in marks)
            lines.append(f"{name:<{name_width}} {m.rms:>9.3g} {m.largest:>9.3g} {' '.join(shares)}  {strip}")
        lines.append("")
    lines.append("zeros: share that is zero (sparsity); of gradients in fp16: what underflowed")
    lines.append("e4m3, e5m2: share that saturates or becomes zero there, not scaled; vectors are left out")
    return "\n".join(lines)


def chosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last step."""
    return [rows[0], rows[-1]] if len(rows) > 1 else [rows[0]]


def picture(rows: Sequence[dict[str, Any]], *, title: str = "") -> "Figure":
    """A figure with a row of panels per logged step and a panel per kind of tensor. In a panel each row is a tensor in network
    order, and shades are the shares of its elements with each exponent."""
    from matplotlib.figure import Figure

    panels_of_rows = [[matrices(row, what) for what in KINDS] for row in rows]
    all_stats = [m for panels in panels_of_rows for panel in panels for _, m in panel]
    total = np.sum([m.counts[1:NOT_FINITE] / max(1, m.size) for m in all_stats], axis=0)
    used_exponents = np.flatnonzero(total > 1e-4 * len(all_stats)) + 1 - BIAS
    low, high = (int(used_exponents[0]), int(used_exponents[-1]) + 1) if used_exponents.size else (-1, 1)
    low, high = min(low, -20), max(high, 18)  # the lines of the formats are in the picture
    most_rows = max(len(panel) for panels in panels_of_rows for panel in panels)
    height = max(2.6, 0.15 * min(most_rows, MOST_LABELS) + 1.0)
    figure = Figure(figsize=(15, height * len(rows) + 0.6), dpi=110, layout="constrained")
    axes = figure.subplots(len(rows), len(KINDS), squeeze=False)
    for row, panels, line in zip(rows, panels_of_rows, axes, strict=True):
        for what, panel, panel_axes in zip(KINDS, panels, line, strict=True):
            _panel(panel_axes, panel, low=low, high=high)
            panel_axes.set_title(f"{what}, step {row['step']}", fontsize=8.5)
    handles = [axes[0, 0].plot([], [], color=color, label=name)[0] for name, color in LINES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=10, frameon=False)
    figure.suptitle(f"{title}: exponents of each tensor's elements".removeprefix(": "), fontsize=12, parse_math=False)
    return figure


def _panel(axes: "Axes", panel: list[tuple[str, TensorStats]], *, low: int, high: int) -> None:
    """Draw one panel: exponents along x, tensors along y, and the ranges of the formats as vertical lines."""
    axes.tick_params(labelsize=8.5)
    for name, color in LINES.items():
        for edge in FORMAT_RANGES[name].exponents:
            axes.axvline(edge, color=color, linewidth=0.8, alpha=0.8)
    axes.set_xlim(low, high)
    axes.set_xlabel("exponent of two", fontsize=8.5)
    if not panel:
        return
    share = np.stack([m.counts[low + BIAS : high + BIAS] / max(1, m.size) for _, m in panel])
    extent = (low, high, len(panel) - 0.5, -0.5)
    axes.imshow(np.sqrt(share), cmap="Greys", vmin=0, vmax=FULL**0.5, aspect="auto", extent=extent, interpolation="none")
    label_step = -(-len(panel) // MOST_LABELS)
    axes.set_yticks(range(0, len(panel), label_step), [name for name, _ in panel[::label_step]], fontsize=7.5, parse_math=False)


def image(path: Path, rows: Sequence[dict[str, Any]], *, title: str = "") -> None:
    """The picture as a file, by the name's ending."""
    save(picture(rows, title=title), path)
