"""Loss curves: in the terminal as text, and as a picture, of one run or of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from barellm.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (place on the axis, loss in nats per token)

AXES = ("steps", "tokens", "seconds")  # what a curve may run over
SMOOTH = 100  # the smoothed loss is the mean of each of so many parts of the axis
GLYPHS = "⣿│└─"  # what a chart is made of, where the terminal has them
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: a cell is 2 dots wide and 4 high


@dataclass(frozen=True)
class Curve:
    name: str
    train: Points
    val: Points


def series(rows: Iterable[dict[str, Any]], *, axis: str = "steps", step_tokens: int = 1) -> tuple[Points, Points]:
    """(training, validation) points of the rows of metrics.jsonl, over one of AXES. A step has `step_tokens` tokens; an
    evaluation knows no time and has that of the step before it."""
    train, val = [], []
    seconds = 0.0
    for row in rows:
        if row["kind"] not in ("train", "eval"):  # samples, and the result of `train --json`
            continue
        seconds = row.get("seconds", seconds)
        place = {"steps": int(row["step"]), "tokens": int(row["step"]) * step_tokens, "seconds": float(seconds)}[axis]
        if row["kind"] == "train" and row["loss"] is not None:
            train.append((place, float(row["loss"])))
        if row["kind"] == "eval":
            val.append((place, float(row["val_nats"])))
    return train, val


def _last(curves: Iterable[Curve]) -> float:
    return max((place for curve in curves for place, _ in [*curve.train, *curve.val]), default=0)


def _place(place: float, axis: str) -> str:
    return f"step {place:,.0f}" if axis == "steps" else f"{place:,.0f} {axis}"


def _columns(points: Points, *, last: float, width: int) -> dict[int, tuple[float, float]]:
    """Mean place and mean loss of the finite points that fall into each of `width` columns of an axis that ends at `last`."""
    found: dict[int, list[tuple[float, float]]] = {}
    for place, loss in points:
        if loss == loss and abs(loss) != float("inf"):
            found.setdefault(min(width - 1, int(place * width / (last or 1))), []).append((place, loss))
    return {
        column: (sum(x for x, _ in inside) / len(inside), sum(y for _, y in inside) / len(inside))
        for column, inside in found.items()
    }


def summary(curve: Curve, *, axis: str = "steps") -> str:
    """How far the run is and how good, in words. The training loss is the mean of its last part."""
    last = _last([curve])
    words = [_place(last, axis)]
    if parts := list(_columns(curve.train, last=last, width=SMOOTH).values()):
        words.append(f"training loss {parts[-1][1]:.4f}")
    if curve.val:
        place, loss = curve.val[-1]
        words.append(f"validation loss {loss:.4f} at {_place(place, axis)}")
    return ", ".join(words)


def terminal(curve: Curve, *, axis: str = "steps", width: int = 72, height: int = 14, ascii_only: bool = False) -> str:
    """A chart of `width` x `height` characters, training loss as a line, validation loss as `o`; "" without points."""
    columns = max(8, width - 8)
    across, per_row = (1, 1) if ascii_only else (2, 4)
    last = _last([curve])
    line = {x: loss for x, (_, loss) in _columns(curve.train, last=last, width=columns * across).items()}
    marks = {x: loss for x, (_, loss) in _columns(curve.val, last=last, width=columns).items()}
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
    bottom = ("+" + "-" * columns) if ascii_only else ("└" + "─" * columns)
    legend = "loss in nats per token; line: training, o: validation"
    ends = f"{0:<{columns // 2}}{_place(last, axis):>{columns - columns // 2}}"
    return "\n".join([*lines, " " * 7 + bottom, " " * 8 + ends, " " * 8 + legend])


def picture(curves: Sequence[Curve], *, title: str = "", axis: str = "steps") -> Figure:
    """The picture of a run has each step's loss, the smoothed loss and the validation. That of several runs has a colour for each,
    the smoothed loss as a line and validation as dots."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    last = _last(curves)
    for i, curve in enumerate(curves):
        smooth = list(_columns(curve.train, last=last, width=SMOOTH).values())
        if len(curves) == 1:
            _draw(axes, curve.train, "-", label="training", color="#c3cad2", linewidth=0.6)
            _draw(axes, smooth, "-", label="training, smoothed", color="#475569", linewidth=1.2)
            _draw(axes, curve.val, "o-", label="validation", color="#c2410c", linewidth=1.2, markersize=4)
        else:
            hidden = curve.name.startswith("_")  # by matplotlib, from its legend
            _draw(axes, smooth, "-", label=f"./{curve.name}" if hidden else curve.name, color=f"C{i}", linewidth=1.2)
            _draw(axes, curve.val, "o", label="", color=f"C{i}", markersize=4)
    axes.set(xlabel=axis, ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)
    if axis == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if axes.lines:
        for text in axes.legend().get_texts():
            text.set_parse_math(False)
    return figure


def _draw(axes: Axes, points: Points, line: str, **style: Any) -> None:
    if points:
        axes.plot([place for place, _ in points], [loss for _, loss in points], line, **style)


def image(path: Path, curves: Sequence[Curve], *, title: str = "", axis: str = "steps") -> None:
    """The picture as a file, by the name's ending."""
    save(picture(curves, title=title, axis=axis), path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure: .png, .svg, .pdf or whatever else matplotlib writes, by the name's ending."""
    import warnings

    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UserError(f"{path} ends in {path.suffix!r}, expected one of {', '.join(f'.{end}' for end in known)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name in letters that the font lacks: boxes
        figure.savefig(path)
