"""The README's chart: the step of every variant relative to ours, and the bound, from benchmarks/results/*.json.
`python benchmarks/table.py --write` draws it."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "img" / "bench.svg"
INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
OURS, INSTALLED, TUNED, OTHER = "#2f855a", "#cbd5e0", "#90aac6", "#b7a6d6"
COLUMNS = 2
MOST = 4.0  # times our step: longer bars are cut, and say how long they are
STYLE = {"svg.hashsalt": "barellm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 8.5}


def panels(results: list[dict]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """(what, bound, [(variant, seconds)]) of each measured shape; ours is 1."""
    return [
        (
            f"{r['preset']} {r['batch']} x {r['seq']} {r['dtype']}, {r['ours_s'] * 1e3:,.1f} ms",
            r["bound_s"] / r["ours_s"],
            [("barellm", 1.0), *r["ratios"].items()],
        )
        for r in results
    ]


def words(results: list[dict]) -> str:
    """The chart as text. It is in the file, which shows what the picture was drawn from."""
    parts = [
        f"{what}: {', '.join(f'{name} {times:.2f}' for name, times in bars)}; roofline {bound:.2f}"
        for what, bound, bars in panels(results)
    ]
    return " | ".join(parts)


def write(results: list[dict], path: Path = FILE) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    made = panels(results)
    with matplotlib.rc_context(STYLE):
        heights = [len(bars) + 1.6 for _, _, bars in made]
        rows = [max(heights[i : i + COLUMNS]) for i in range(0, len(made), COLUMNS)]
        figure, grid = plt.subplots(
            len(rows), COLUMNS, figsize=(840 / 72, 0.19 * sum(rows) + 0.5), squeeze=False, height_ratios=rows
        )
        for axes, panel in zip(grid.flat, made, strict=False):
            draw(axes, *panel)
        for axes in list(grid.flat)[len(made) :]:
            axes.axis("off")
        note = "time of a training step, barellm = 1; dashed: the roofline (model FLOPs at the peak, one pass of AdamW)"
        figure.text(0.01, 0.012, note, color=SOFT)
        figure.tight_layout(rect=(0, 0.035, 1, 1), w_pad=2.5)
        metadata = {"Date": None, "Title": "Steps relative to ours", "Description": words(results)}
        figure.savefig(path, facecolor="white", metadata=metadata)
        plt.close(figure)


def draw(axes, what: str, bound: float, bars: list[tuple[str, float]]) -> None:
    for i, (name, times) in enumerate(bars):
        axes.barh(i, min(times, MOST), height=0.72, color=colour(name))
        cut = " (cut)" if times > MOST else ""
        inside = {"ha": "right", "x": min(times, MOST) - 0.04} if cut else {"ha": "left", "x": times + 0.03}
        axes.text(y=i, s=f"{times:.2f}x{cut}", va="center", color=INK, **inside)
    axes.axvline(bound, color=INK, linewidth=1, linestyle=(0, (3, 2)))
    axes.text(bound - 0.02, len(bars) - 0.2, f"roofline {bound:.2f}", ha="right", va="center", color=SOFT, fontsize=7.5)
    axes.set_title(what, loc="left", fontsize=9.5, color=INK)
    axes.set(xlim=(0, MOST + 0.02), ylim=(len(bars) + 0.2, -0.6), xticks=[])
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(LINE)


def colour(name: str) -> str:
    if name == "barellm":
        return OURS
    return TUNED if name.endswith("tuned") else INSTALLED if name.endswith("installed") else OTHER
