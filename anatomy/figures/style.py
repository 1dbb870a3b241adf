"""One style for all figures of the booklet: a sheet 800 points wide, y downwards, whose unit is a point; and the list of figures.

A browser shows a point as about a pixel, so letters of 10.5 points can be read on a page 800 pixels wide. `collisions` names labels
that touch each other or leave the sheet; a test asks it of every figure.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
BLUE, RED, GREEN, GOLD, LILAC, TEAL = "#3d7ab8", "#c2553f", "#3f9167", "#c58b1b", "#7d5fb2", "#2b8c96"
SKY, ROSE, MINT, SAND, VIOLET, STONE = "#cfe0f1", "#f3b8ad", "#bfe3cc", "#f6d4a8", "#d9cdf0", "#eef1f4"
HUES = [BLUE, RED, GREEN, GOLD, LILAC, TEAL]
PALE = [SKY, ROSE, MINT, SAND, VIOLET, "#c3e6ea", "#f5c6dc", "#dfe3a5"]
WIDTH, MARGIN, TOP = 800, 20, 44  # points; TOP is where a drawing may begin, below the title
STYLE: Any = {"font.family": "DejaVu Sans", "font.monospace": ["DejaVu Sans Mono"], "svg.fonttype": "path", "svg.hashsalt": "book"}

FIGURES: dict[str, Drawing] = {}


class Drawing:
    """A registered figure: `title`, `height` in points, and the function that draws it."""

    def __init__(self, title: str, height: float, draw: Callable[[Sheet], None]) -> None:
        self.title, self.height, self.draw = title, height, draw

    def sheet(self) -> Sheet:
        with styled():
            made = Sheet(self.title, self.height)
            self.draw(made)
        return made

    def svg(self) -> str:
        """The same text for the same drawing and the same version of matplotlib."""
        file = io.StringIO()
        with styled():
            self.sheet().figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
        return shrunk(file.getvalue())


PATCH = r' *<g id="patch_\d+">\n *<path d="([^"]*)"( clip-path="[^"]*")?( style="[^"]*")/>\n *</g>\n'


def rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), text)


def shrunk(svg: str) -> str:
    """Less text for the same picture: rectangles of one style that follow each other become one path, places have two digits."""

    def joined(run: re.Match[str]) -> str:
        made, last = [], None
        for d, clip, style in re.findall(PATCH, run[0]):
            d = re.sub(r"\s*\n\s*", " ", d.strip())
            if (clip, style) == last:
                made[-1][0].append(d)
            else:
                made.append(([d], clip, style))
            last = clip, style
        return "".join(f'<path d="{" ".join(d)}"{clip}{style}/>\n' for d, clip, style in made)

    svg = re.sub(f"(?:{PATCH})+", joined, svg)
    svg = re.sub(r'\bd="[^"]*"|translate\([^)]*\)', lambda m: rounded(m[0]), svg)  # and not what scales letters
    return "\n".join(line.strip() for line in svg.splitlines()) + "\n"


def figure(title: str, *, height: float) -> Callable[[Callable[[Sheet], None]], Callable[[Sheet], None]]:
    """Register a function as the figure of its name."""

    def add(draw: Callable[[Sheet], None]) -> Callable[[Sheet], None]:
        FIGURES[draw.__name__] = Drawing(title, height, draw)
        return draw

    return add


@contextmanager
def styled() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


class Sheet:
    """What a figure draws on."""

    def __init__(self, title: str, height: float) -> None:
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 72, height / 72))
        FigureCanvasAgg(self.figure)
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.text(MARGIN, 20, title, size=13, weight="bold")

    def text(self, x: float, y: float, words: str, *, size: float = 10.5, colour: str = INK, ha: str = "left", **more: Any) -> None:
        self.axes.text(x, y, words, fontsize=size, color=colour, ha=ha, va=more.pop("va", "center"), **more)

    def note(self, y: float, words: str) -> None:
        """A sentence below the drawing."""
        self.text(MARGIN, y, words, colour=SOFT, linespacing=1.35, va="top")

    def rect(
        self, x: float, y: float, w: float, h: float, colour: str, words: str = "", *, edge: str = "white", **more: Any
    ) -> None:
        """A rectangle, with words in its middle."""
        self.axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor=edge, linewidth=more.pop("line", 1)))
        if words:
            self.text(x + w / 2, y + h / 2, words, **{"ha": "center", "linespacing": 1.3} | more)

    def box(
        self, x: float, y: float, w: float, h: float, colour: str, words: str = "", *, at_top: bool = False, **more: Any
    ) -> None:
        """A box with round corners; words in its middle or at its top left."""
        style = "round,pad=0,rounding_size=5"
        self.axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=colour, edgecolor=LINE, linewidth=1))
        if at_top:
            self.text(x + 9, y + 8, words, **{"va": "top", "linespacing": 1.3} | more)
        elif words:
            self.text(x + w / 2, y + h / 2, words, **{"ha": "center", "linespacing": 1.3} | more)

    def grid(
        self,
        x: float,
        y: float,
        rows: int,
        cols: int,
        w: float,
        h: float,
        colour: Callable[[int, int], str],
        label: Callable[[int, int], str] | None = None,
        size: float = 9,
    ) -> None:
        """rows x cols cells of w x h points, colour by colour, then the labels."""
        cells = [(r, c, colour(r, c)) for r in range(rows) for c in range(cols)]
        for shade in dict.fromkeys(shade for *_, shade in cells):
            for r, c, own in cells:
                if own == shade:
                    self.rect(x + c * w, y + r * h, w, h, shade, line=0.8)
        for r, c, _ in cells:
            if label and (words := label(r, c)):
                self.text(x + (c + 0.5) * w, y + (r + 0.5) * h, words, ha="center", size=size, linespacing=1.2)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, colour: str = SOFT, bend: float = 0) -> None:
        style = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.3, "color": colour, "shrinkA": 0, "shrinkB": 1}
        self.axes.add_patch(FancyArrowPatch((x0, y0), (x1, y1), connectionstyle=f"arc3,rad={bend}", **style))

    def line(self, xs: list[float], ys: list[float], *, colour: str = SOFT, width: float = 1.2, **more: Any) -> None:
        self.axes.plot(xs, ys, color=colour, linewidth=width, **more)

    def legend(self, x: float, y: float, entries: list[tuple[str, str]], *, step: float = 150) -> None:
        """Coloured squares with words, in a row."""
        for i, (colour, words) in enumerate(entries):
            self.rect(x + i * step, y - 6, 12, 12, colour, edge=LINE)
            self.text(x + i * step + 18, y, words, colour=SOFT)

    def chart(self, x: float, y: float, w: float, h: float, *, title: str, xlabel: str, ylabel: str, **more: Any) -> Any:
        """Axes with both quantities and their units named."""
        axes = self.figure.add_axes((x / WIDTH, 1 - (y + h) / self.height, w / WIDTH, h / self.height))
        axes.set_title(title, fontsize=11, color=INK, loc="left", pad=8)
        axes.set_xlabel(xlabel, fontsize=10.5, color=INK)
        axes.set_ylabel(ylabel, fontsize=10.5, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=10, colors=INK)
        axes.set(**more)
        return axes

    def bars(self, axes: Any, names: list[str], values: list[float], colours: list[str] | str = BLUE, form: str = "{:.1f}") -> None:
        """Bars with their values above them."""
        made = axes.bar(range(len(values)), values, color=colours, width=0.7)
        axes.set_xticks(range(len(values)), names, fontsize=10)
        axes.bar_label(made, [form.format(v) for v in values], fontsize=10, color=INK, padding=2)
        axes.set_ylim(0, max(values) * 1.15)


def texts(sheet: Sheet) -> list[tuple[str, Any]]:
    """(words, box in pixels) of every label that is drawn."""
    canvas: Any = sheet.figure.canvas
    sheet.figure.draw_without_rendering()
    renderer, found = canvas.get_renderer(), []
    ticks = set()  # labels of ticks beyond an axis's ends are not drawn
    for axes in sheet.figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low * (1 - 1e-9) - 1e-12 <= tick.get_loc() <= high * (1 + 1e-9) + 1e-12:
                    ticks |= {tick.label1, tick.label2}
    off = [axes for axes in sheet.figure.axes if not axes.axison]
    hidden = {t for axes in off for t in [*axes.get_xticklabels(), *axes.get_yticklabels()]} | ticks
    for artist in sheet.figure.findobj(Text):
        if artist in hidden or not artist.get_visible() or not artist.get_text().strip():
            continue
        found.append((artist.get_text(), artist.get_window_extent(renderer)))
    return found


def collisions(sheet: Sheet) -> list[str]:
    """Labels that overlap by more than a pixel both ways, or that leave the sheet."""
    found, bounds = [], sheet.figure.bbox
    labels = texts(sheet)
    for words, box in labels:
        if box.x0 < 2 or box.y0 < 1 or box.x1 > bounds.width - 2 or box.y1 > bounds.height - 1:
            found.append(f"{words!r} leaves the sheet")
    for (a, first), (b, second) in combinations(labels, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        if wide > 1 and high > 2:
            found.append(f"{a!r} and {b!r} overlap")
    return found
