"""Curves of a run's numbers: in the terminal as text, and as a picture, of one run or of several."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from barellm.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (place on the axis, number)

AXES = ("steps", "tokens", "seconds")  # what a curve may run over
FEW = 20  # points of a line that are marked each
SMOOTH = 100  # the smoothed loss is the mean of each of so many parts of the axis
GLYPHS = "⣿│└─"  # what a chart is made of, where the terminal has them
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: a cell is 2 dots wide and 4 high


@dataclass(frozen=True)
class Quantity:
    """A number of a run over time: its key in the rows of steps, and in those of evaluations; "" where they have none. `kind`: of
    the rows of evaluations. `muon`: the key of the same number for the matrices that Muon updates, in the runs that have it."""

    train: str
    val: str
    label: str
    unit: str = ""
    kind: str = "eval"
    muon: str = ""

    @property
    def marks(self) -> str:
        """What the marks of the evaluations are."""
        return "validation" if self.kind == "eval" else self.label


QUANTITIES = {
    "loss": Quantity("loss", "val_nats", "loss", "nats per token"),
    "bits": Quantity("", "val_bits_per_byte", "bits per byte"),
    "lr": Quantity("lr", "", "learning rate", muon="muon_lr"),
    "norm": Quantity("grad_norm", "", "gradient's norm"),
    "speed": Quantity("tokens_per_s", "", "tokens per second"),
    "hellaswag": Quantity("", "acc_norm", "accuracy on HellaSwag", kind="hellaswag"),
}


@dataclass(frozen=True)
class Curve:
    """`y` is one of QUANTITIES. `gzip` is what gzip -9 reaches in the same unit on the text of the evaluations."""

    name: str
    train: Points
    val: Points
    y: str = "loss"
    gzip: float | None = None


def series(
    rows: Iterable[dict[str, Any]], *, axis: str = "steps", before: Callable[[int], int] = int, y: str = "loss", muon: bool = False
) -> tuple[Points, Points]:
    """(training points, validation points) of a run from its metrics.jsonl rows, over one of AXES. Evaluations have no time or
    tokens of their own and take those of the last step. `before(step)`: tokens up to a step, for old rows without them. `muon`:
    plot the quantity for the matrices that Muon updates."""
    quantity = QUANTITIES[y]
    keys = {"eval": "", "train": quantity.muon if muon else quantity.train} | {quantity.kind: quantity.val}
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in keys}
    seconds, tokens = 0.0, None  # at the last step
    for row in rows:
        kind = row["kind"]
        if kind not in points:  # samples, and the result of `train --json`
            continue
        step, seconds = int(row["step"]), float(row.get("seconds", seconds))
        if axis == "tokens" and (kind == "train" or tokens is None):
            tokens = int(row["tokens"]) if "tokens" in row else before(step)
        position = {"steps": step, "tokens": tokens or 0, "seconds": seconds}[axis]
        key = keys[kind]
        if key and (value := row.get(key) if muon else row[key]) is not None:
            points[kind].append((position, float(value)))
    return points["train"], points[quantity.kind]


def gzip_line(rows: Iterable[dict[str, Any]], *, y: str) -> float | None:
    """The number that gzip -9 reaches, from the result of a run that is finished; None for others, and for other quantities."""
    for row in rows:
        bits, gzip = row.get("val_bits_per_byte"), row.get("gzip_bits_per_byte")
        if row["kind"] == "result" and bits and gzip and y in ("bits", "loss"):
            return gzip if y == "bits" else gzip * row["val_nats"] / bits
    return None


@dataclass(frozen=True)
class Scale:
    """An axis, straight or logarithmic. Numbers that a logarithm does not have are not drawn."""

    logarithmic: bool = False

    def shown(self, value: float) -> bool:
        return isfinite(value) and (value > 0 or not self.logarithmic)

    def of(self, value: float) -> float:
        return log10(value) if self.logarithmic else value

    def back(self, value: float) -> float:
        return 10**value if self.logarithmic else value


def scales(log: str) -> tuple[Scale, Scale]:
    """Of x and of y; `log` names those that are logarithmic: "", "x", "y" or "xy"."""
    return Scale("x" in log), Scale("y" in log)


def _ends(curves: Iterable[Curve], x: Scale) -> tuple[float, float]:
    """The ends of the axis of some curves, scaled. A straight one begins at 0."""
    places = [x.of(place) for curve in curves for place, _ in [*curve.train, *curve.val] if x.shown(place)]
    first = min(places, default=0.0) if x.logarithmic else 0.0
    return first, max(places, default=0.0)


def _place(place: float, axis: str) -> str:
    return f"step {place:,.0f}" if axis == "steps" else f"{place:,.0f} {axis}"


def _columns(points: Points, *, ends: tuple[float, float], width: int, log: str = "") -> dict[int, tuple[float, float]]:
    """Mean position and value (both on the axes' scales) of the points in each of `width` columns between `ends`."""
    (x, y), (first, last) = scales(log), ends
    found: dict[int, list[tuple[float, float]]] = {}
    for place, value in points:
        if x.shown(place) and y.shown(value):
            scaled = x.of(place)
            column = min(width - 1, int((scaled - first) * width / ((last - first) or 1)))
            found.setdefault(column, []).append((scaled, y.of(value)))
    return {
        column: (sum(x for x, _ in members) / len(members), sum(y for _, y in members) / len(members))
        for column, members in found.items()
    }


def summary(curve: Curve, *, axis: str = "steps") -> str:
    """The state of a run in words: progress, training loss (mean of its last part), last validation and gzip baseline."""
    ends, label = _ends([curve], Scale()), QUANTITIES[curve.y].label
    words = [_place(ends[1], axis)]
    training, number_format = ("training loss", ".4f") if curve.y == "loss" else (label, ",.4g")
    if parts := list(_columns(curve.train, ends=ends, width=SMOOTH).values()):
        words.append(f"{training} {parts[-1][1]:{number_format}}")
    if curve.val:
        place, value = curve.val[-1]
        unseen = "validation " * (QUANTITIES[curve.y].kind == "eval")
        words.append(f"{unseen}{label} {value:.4f} at {_place(place, axis)}")
    if curve.gzip is not None:
        words.append(f"gzip -9 {curve.gzip:.4f}")
    return ", ".join(words)


def terminal(
    curve: Curve, *, axis: str = "steps", log: str = "", width: int = 72, height: int = 14, ascii_only: bool = False
) -> str:
    """A text chart of `width` x `height` characters: training as a line, validation as `o`, gzip as dashes; "" if empty. `axis`:
    the name of x, `log`: as `scales`. The line is of braille dots, 2 x 4 to a character, or of full stops with `ascii_only`."""
    columns = max(8, width - 8)  # 7 for the labels of y, 1 for the axis
    dots_across = 1 if ascii_only else 2
    x_scale, y_scale = scales(log)
    ends = _ends([curve], x_scale)
    line = {x: y for x, (_, y) in _columns(curve.train, ends=ends, width=columns * dots_across, log=log).items()}
    marks = {x: y for x, (_, y) in _columns(curve.val, ends=ends, width=columns, log=log).items()}
    values = [*line.values(), *marks.values()]
    if not values:
        return ""
    level = None if curve.gzip is None else y_scale.of(curve.gzip)
    if level is not None:
        values.append(level)
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def row_of(value: float, rows: int) -> int:
        return min(rows - 1, int((high - value) / span * rows))

    # The characters: first the line, then dashes where it left room, then the marks over both.
    dot_rows = height * (1 if ascii_only else 4)
    text = _line_text({x: row_of(y, dot_rows) for x, y in line.items()}, columns, height, ascii_only)
    if level is not None:
        row = text[row_of(level, height)]
        row[:] = ["-" if cell == " " and i % 2 else cell for i, cell in enumerate(row)]
    for x, y in marks.items():
        text[row_of(y, height)][x] = "o"
    # The axes and their labels.
    number_format = "7.3f" if curve.y in ("loss", "bits") else "7.3g"
    labels = {0: f"{y_scale.back(high):{number_format}}", height - 1: f"{y_scale.back(low):{number_format}}"}
    edge = "|" if ascii_only else "│"
    lines = [f"{labels.get(i, ''):>7}{edge}{''.join(row).rstrip()}" for i, row in enumerate(text)]
    bottom = ("+" + "-" * columns) if ascii_only else ("└" + "─" * columns)
    first, last = (x_scale.back(end) for end in ends)
    axis_line = f"{first if x_scale.logarithmic else 0:<{columns // 2},.6g}{_place(last, axis):>{columns - columns // 2}}"
    # The legend names what is drawn.
    what = QUANTITIES[curve.y]
    parts = ["line: training"] if line else []
    if marks or curve.y == "loss":
        parts.append(f"o: {what.marks}")
    if level is not None:
        parts.append("dashes: gzip -9")
    unit = f" in {what.unit}" if what.unit else ""
    return "\n".join([*lines, " " * 7 + bottom, " " * 8 + axis_line, " " * 8 + f"{what.label}{unit}; {', '.join(parts)}"])


def _line_text(line: dict[int, int], columns: int, height: int, ascii_only: bool) -> list[list[str]]:
    """The characters [row][column] of a line {x: y} in dots from the top left, each joined to the one before it by dots above or
    below. A character is 2 x 4 dots in braille, one with `ascii_only`."""
    across, down = (1, 1) if ascii_only else (2, 4)
    cells = [[0] * columns for _ in range(height)]  # of each character the bits of its dots
    before: int | None = None
    for x, y in sorted(line.items()):
        start = y if before is None else before
        for filled in range(min(y, start), max(y, start) + 1):
            dot = 1 if ascii_only else DOTS[filled % 4][x % 2]
            cells[filled // down][x // across] |= dot
        before = y
    base = ord(".") - 1 if ascii_only else 0x2800  # the braille character without dots
    return [[chr(base + cell) if cell else " " for cell in row] for row in cells]


def picture(curves: Sequence[Curve], *, title: str = "", axis: str = "steps", log: str = "") -> "Figure":
    """A matplotlib figure: for one run each step's value, the smoothed value and validation; for several runs a colour each, with a
    smoothed line and dotted validation."""
    import logging

    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of its caches and fonts nobody asked
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    x, y = scales(log)
    ends = _ends(curves, x)
    quantity = QUANTITIES[curves[0].y]
    for i, curve in enumerate(curves):
        means = _columns(curve.train, ends=ends, width=SMOOTH, log=log).values()
        smooth = [(x.back(place), y.back(value)) for place, value in means]
        if len(curves) == 1:
            _draw(axes, curve.train, "-", label="training", color="#c3cad2", linewidth=0.6)
            _draw(axes, smooth, "-", label="training, smoothed", color="#475569", linewidth=1.2)
            _draw(axes, curve.val, "o-", label=quantity.marks, color="#c2410c", linewidth=1.2, markersize=4)
        else:
            name = f"./{curve.name}" if curve.name.startswith("_") else curve.name  # which matplotlib hides from its legend
            _draw(axes, smooth, "-", label=name, color=f"C{i}", linewidth=1.2)
            _draw(axes, curve.val, "o:", label="" if smooth else name, color=f"C{i}", linewidth=1.0, markersize=4)
        if curve.gzip is not None and curve.gzip not in [before.gzip for before in curves[:i]]:
            colour, text = (f"C{i}", f"gzip -9, {curve.name}") if len({one.gzip for one in curves}) > 1 else ("#7c8797", "gzip -9")
            axes.axhline(curve.gzip, color=colour, linewidth=1.0, linestyle="--", label=text)
    axes.set(xlabel=axis, ylabel=f"{quantity.label} ({quantity.unit})" if quantity.unit else quantity.label)
    axes.set(xscale="log" if x.logarithmic else "linear", yscale="log" if y.logarithmic else "linear")
    axes.set_title(title, parse_math=False)
    if axis == "tokens" and not x.logarithmic:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if axes.lines:
        for text in axes.legend().get_texts():
            text.set_parse_math(False)
    return figure


def _draw(axes: "Axes", points: Points, line: str, **style: Any) -> None:
    if points:
        if len(points) < FEW and "marker" not in style and "o" not in line:
            style["marker"] = "."  # a line of one point is none
        axes.plot([place for place, _ in points], [loss for _, loss in points], line, **style)


def image(path: Path, curves: Sequence[Curve], *, title: str = "", axis: str = "steps", log: str = "") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's, of axes and fonts
        save(picture(curves, title=title, axis=axis, log=log), path)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure: .png, .svg, .pdf or whatever else matplotlib writes, by the name's ending."""
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UserError(f"{path} ends in {path.suffix!r}, expected one of {', '.join(f'.{end}' for end in known)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name in letters that the font lacks: boxes
        figure.savefig(path)
