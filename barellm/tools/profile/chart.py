"""The picture of a profile: each kind of op with its share of the step and its percentage of roofline."""

from pathlib import Path
from typing import Any

from barellm.tools.plan.devices import where

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
COLOURS = {"matmul": "#3b82c4", "attention": "#c2410c", "optimizer": "#2f855a"}
OTHERS = "#b7791f"
IDLE = "#cbd2d9"
SMALLEST = 0.4  # percent of the step; what is below goes into one bar


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of the chart, from the top: kinds of ops, grouped by family and sorted by time; small ones in one bar; idle last.
    Each has family, label, seconds `s`, of them `wait_s` at barriers, and roofline `bound_s`; `s` adds up to the step."""
    ops = result["ops"]
    large = [r for r in ops if 100 * r["s"] / result["step_s"] >= SMALLEST]
    small = [r for r in ops if r not in large]
    sums: dict[str, float] = {}
    for r in large:
        sums[r["family"]] = sums.get(r["family"], 0.0) + r["s"]
    rows = [
        {k: r[k] for k in ("family", "s", "wait_s", "bound_s")} | {"label": f"{r['count']} x {r['op']} {r['shape']}"}
        for r in sorted(large, key=lambda r: (-sums[r["family"]], r["family"], -r["s"]))
    ]
    if small:
        rest = {k: sum(r[k] for r in small) for k in ("s", "wait_s", "bound_s")}
        rows.append({"family": "", "label": f"{sum(r['count'] for r in small)} small ops", **rest})
    return [*rows, {"family": "idle", "label": "idle", "s": result["idle_s"], "wait_s": 0.0, "bound_s": 0.0}]


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the chart of `profile.measure`'s result, in the format of the file's suffix: shares of the step, % of roofline."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = bars(result)
    step = result["step_s"]
    height = 1.4 + 0.2 * len(rows)
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "barellm", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(11, height))
        low, tall = 0.45 / height, 1 - 1.3 / height  # inches below both axes, and around them, as parts of the figure
        share = figure.add_axes((0.27, low, 0.42, tall))
        bound = figure.add_axes((0.72, low, 0.265, tall))
        # One row: left a bar of work and, behind it, of waiting; right the percentage of roofline, cut off at 125.
        for y, row in enumerate(rows):
            work, wait = (100 * x / step for x in (row["s"] - row["wait_s"], row["wait_s"]))  # percent of the step
            colour = IDLE if row["family"] == "idle" else COLOURS.get(row["family"], OTHERS)
            share.barh(y, work, color=colour, height=0.72)
            share.barh(y, wait, left=work, color=colour, alpha=0.35, height=0.72)
            words = f"{work + wait:.1f} %   {row['s'] * 1e3:.2f} ms"
            share.text(work + wait, y, f"  {words}", va="center", fontsize=7.5, color=SOFT)
            if row["bound_s"]:
                reached = 100 * row["bound_s"] / row["s"]
                bound.barh(y, min(reached, 125), color=colour, height=0.72)
                bound.text(2, y, f"{reached:.0f}", va="center", fontsize=7.5, color="white")
        share.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=8, color=INK)
        share.set_xlim(0, 1.35 * max(100 * row["s"] / step for row in rows))
        bound.set_yticks([])
        bound.set_xlim(0, 125)
        bound.axvline(100, color=INK, linewidth=0.8, linestyle="--")
        for axes, words in ((share, "% of the step (pale: threads wait at the barrier behind)"), (bound, "% of roofline")):
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8, colors=INK)
            axes.set_title(words, fontsize=8.5, color=SOFT, loc="left")
        what = "{preset}, {batch} x {seq}, {dtype}, ".format(**result) + where(result)
        figure.text(0.012, 1 - 0.3 / height, what, fontsize=11, color=INK, fontweight="bold")
        shares = (f"{100 * result[f'{name}_s'] / step:.1f} %" for name in ("work", "barrier", "idle", "bound"))
        words = "{} work, {} barriers, {} idle; the ops' roofline is {} of it".format(*shares)
        figure.text(0.012, 1 - 0.52 / height, f"{step * 1e3:.1f} ms a step: {words}", fontsize=8.5, color=SOFT)
        names = [f for f in COLOURS if any(row["family"] == f for row in rows)]
        keys = [Patch(color=COLOURS[name], label=name.replace("_", " ")) for name in names]
        keys += [Patch(color=OTHERS, label="others")]
        figure.legend(handles=keys, loc="upper right", ncols=len(keys), fontsize=8, frameon=False)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
