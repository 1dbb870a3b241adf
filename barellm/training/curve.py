"""The loss curve: in the terminal as text, and as an image file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[int, float]]  # (step, loss in nats per token)

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: a cell is 2 dots wide and 4 high


def series(rows: Iterable[dict[str, Any]]) -> tuple[Points, Points]:
    """(training, validation) points of the rows of metrics.jsonl."""
    rows = list(rows)
    train = [(r["step"], r["loss"]) for r in rows if r["kind"] == "train" and r["loss"] is not None]
    return train, [(r["step"], r["val_nats"]) for r in rows if r["kind"] == "eval"]


def _columns(points: Points, *, last: int, width: int) -> dict[int, float]:
    """Mean loss of the points that fall into each column."""
    sums: dict[int, list[float]] = {}
    for step, loss in points:
        if loss == loss and abs(loss) != float("inf"):
            sums.setdefault(min(width - 1, step * width // max(1, last)), []).append(loss)
    return {column: sum(values) / len(values) for column, values in sums.items()}


def terminal(train: Points, val: Points, *, width: int = 72, height: int = 14, ascii_only: bool = False) -> str:
    """A chart of `width` x `height` characters, training loss as a line, validation loss as `o`; "" without points."""
    columns = max(8, width - 8)
    across, per_row = (1, 1) if ascii_only else (2, 4)
    last = max((step for step, _ in [*train, *val]), default=0)
    line = _columns(train, last=last, width=columns * across)
    marks = _columns(val, last=last, width=columns)
    values = [*line.values(), *marks.values()]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def row_of(loss: float, rows: int) -> int:
        return min(rows - 1, int((high - loss) / span * rows))

    cells = [[0] * columns for _ in range(height)]
    before: int | None = None
    for x in sorted(line):
        y = row_of(line[x], height * per_row)
        for filled in range(min(y, y if before is None else before), max(y, y if before is None else before) + 1):
            dot = 1 if ascii_only else DOTS[filled % 4][x % 2]
            cells[filled // per_row][x // across] |= dot
        before = y
    text = [[(" " if not c else "." if ascii_only else chr(0x2800 + c)) for c in row] for row in cells]
    for x, loss in marks.items():
        text[row_of(loss, height)][x] = "o"
    labels = {0: f"{high:7.3f}", height - 1: f"{low:7.3f}"}
    edge = "|" if ascii_only else "│"
    lines = [f"{labels.get(i, ''):>7}{edge}{''.join(row).rstrip()}" for i, row in enumerate(text)]
    axis = ("+" + "-" * columns) if ascii_only else ("└" + "─" * columns)
    legend = "loss in nats per token; line: training, o: validation"
    steps = f"{0:<{columns // 2}}{f'step {last}':>{columns - columns // 2}}"
    return "\n".join([*lines, " " * 7 + axis, " " * 8 + steps, " " * 8 + legend])


def image(path: Path, train: Points, val: Points, *, title: str) -> None:
    """The same curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(*zip(*train, strict=True), color="#9aa5b1", linewidth=0.8, label="training") if train else None
    axes.plot(*zip(*val, strict=True), "o-", color="#c2410c", markersize=4, label="validation") if val else None
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
