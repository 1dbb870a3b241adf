"""Draws the pictures of docs/: `python docs/img/make.py [--png FOLDER]` from the repository's root.

What they show is read from the code and from `barellm plan`, so a picture that no longer holds fails instead of lying.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "barellm"
PLAN = ["plan", "gpt2-124m", "--batch", "4", "--seq", "64", "--train.accumulate", "1", "--json", "--map"]

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
SAND, SKY, MINT, ROSE, LILAC, STONE = "#fdf3e1", "#e3effa", "#e3f5ea", "#fbe7e4", "#eee8f8", "#eef1f4"
MIB = 1 << 20


@cache
def plan() -> dict[str, Any]:
    """What `barellm plan gpt2-124m` says, with its memory map."""
    done = subprocess.run([sys.executable, "-m", "barellm", *PLAN], capture_output=True, check=True, cwd=PACKAGE.parent)
    return json.loads(done.stdout)


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure of that many points, and axes whose unit is a point with y downwards."""
    figure = plt.figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def box(axes: Any, x: float, y: float, w: float, h: float, colour: str, *, edge: str = LINE) -> None:
    shape = FancyBboxPatch(
        (x, y), w, h, boxstyle="round,pad=0,rounding_size=6", facecolor=colour, edgecolor=edge, linewidth=1
    )
    axes.add_patch(shape)


def text(axes: Any, x: float, y: float, words: str, *, size: float = 9.5, colour: str = INK, **more: Any) -> None:
    axes.text(x, y, words, fontsize=size, color=colour, va=more.pop("va", "top"), **more)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], *, bend: float = 0.0, **more: Any) -> None:
    style = {
        "arrowstyle": "-|>",
        "mutation_scale": 10,
        "linewidth": 1.2,
        "color": SOFT,
        "shrinkA": 0,
        "shrinkB": 1,
    } | more
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))


# --- the house ---

# folder -> (x, y, width, height, colour, what it holds)
ROOMS: dict[str, tuple[float, float, float, float, str, str]] = {
    "cli": (20, 16, 800, 48, SAND, "one module per command, imported only when that command runs"),
    "profiling": (20, 104, 125, 76, SKY, "plan, roofline,\nsteps, machine code"),
    "interop": (160, 104, 75, 58, SKY, "Hugging\nFace, llm.c"),
    "training": (250, 104, 300, 76, SKY, "run, loop, schedule, checkpoints,\nmetrics, curve, stopping"),
    "generation": (600, 104, 95, 54, SKY, "decoding,\nsamplers"),
    "evaluation": (715, 104, 105, 76, SKY, "validation loss,\nbits per byte"),
    "cpu": (20, 214, 80, 98, ROSE, "LLVM kernels,\nthreads"),
    "cuda": (110, 214, 80, 60, ROSE, "Triton kernels,\ndriver"),
    "runtime": (250, 226, 120, 86, LILAC, "what a session is,\nbackends by name,\nmemory limit"),
    "models": (400, 226, 100, 86, MINT, "gpt2: a flat\nforward; the\nprograms"),
    "optim": (530, 226, 80, 86, MINT, "adamw"),
    "data": (650, 226, 170, 86, MINT, "tokenizers, shards,\nloader"),
    "program": (20, 358, 590, 56, STONE, "tensors, ops with their references and gradient rules, reverse walk, fusion, planner"),
}  # fmt: skip
# Arrows by where they are drawn: at this x, at this y, from one x to another.
DOWN = {
    ("cli", "profiling"): 82, ("cli", "interop"): 197, ("cli", "training"): 400, ("cli", "generation"): 647,
    ("cli", "evaluation"): 767,
    ("profiling", "cpu"): 60, ("profiling", "cuda"): 127, ("training", "runtime"): 310, ("training", "models"): 450,
    ("evaluation", "data"): 767,
    ("cpu", "program"): 60, ("cuda", "program"): 150,
    ("runtime", "program"): 310, ("models", "program"): 450, ("optim", "program"): 570,
}  # fmt: skip
ACROSS = {
    ("profiling", "training"): 171, ("interop", "training"): 131, ("training", "generation"): 131,
    ("training", "evaluation"): 170, ("cpu", "runtime"): 302, ("cuda", "runtime"): 228,
}  # fmt: skip
SLANTED = {("training", "optim"): (515, 560), ("training", "data"): (540, 680)}
SESSIONS = {("generation", "runtime"): 622, ("evaluation", "runtime"): 735}  # on one line below training
ARROWS = {*DOWN, *ACROSS, *SLANTED, *SESSIONS}


def imports() -> set[tuple[str, str]]:
    """(folder, folder that it imports) of the whole package."""
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = {m.split(".")[1] for m in modules if m.startswith("barellm.")}
            found |= {(folder, name) for name in names if name != folder}
    return {(a, b) for a, b in found if (PACKAGE / a).is_dir() and (PACKAGE / b).is_dir()}


def reached(arrows: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that a path of arrows joins."""
    pairs = set(arrows)
    while more := {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs:
        pairs |= more
    return pairs


def check_arrows() -> None:
    """Every folder has a room, every drawn arrow is an import, and every import follows drawn arrows."""
    real = imports()
    folders = {name for pair in real for name in pair}
    assert folders <= set(ROOMS), f"no room for {sorted(folders - set(ROOMS))}"
    assert not ARROWS - real, f"nobody imports {sorted(ARROWS - real)}"
    assert not real - reached(ARROWS), f"not drawn: {sorted(real - reached(ARROWS))}"


def house() -> Any:
    check_arrows()
    figure, axes = canvas(840, 446)
    for name, (x, y, w, h, colour, holds) in ROOMS.items():
        box(axes, x, y, w, h, colour)
        text(axes, x + 10, y + 7, name, size=11.5, weight="bold")
        text(axes, x + 10, y + 25, holds, size=9, colour=SOFT, linespacing=1.35)
    box(axes, 650, 358, 170, 56, "#ffffff")
    text(axes, 660, 364, "config, overrides, errors", size=9.5, weight="bold")
    text(axes, 660, 381, "plain values that everybody\nmay import", size=9, colour=SOFT, linespacing=1.35)
    for (a, b), at in DOWN.items():
        arrow(axes, (at, bottom(a)), (at, ROOMS[b][1]))
    for (a, b), at in ACROSS.items():
        arrow(axes, (right(a), at), (ROOMS[b][0], at))
    for (a, b), (start, end) in SLANTED.items():
        arrow(axes, (start, bottom(a)), (end, ROOMS[b][1]))
    for (a, _), at in SESSIONS.items():
        axes.plot([at, at, 345], [bottom(a), 203, 203], color=LINE, linewidth=1.2, solid_joinstyle="round", zorder=0)
    arrow(axes, (345, 203), (345, ROOMS["runtime"][1]), color=LINE)
    for backend, y in (("cuda", 252), ("cpu", 286)):
        arrow(axes, (250, y), (right(backend) + 2, y), linestyle="--", color=LINE)
    text(axes, 221, 263, "by name", size=8, colour=SOFT, ha="center")
    rule = "An arrow means: imports. What follows from other arrows is left out. tests/test_house.py holds the rule;"
    text(axes, 20, 425, f"{rule} this picture is checked against the code when it is drawn.", size=8, colour=SOFT)
    return figure


def bottom(room: str) -> float:
    return ROOMS[room][1] + ROOMS[room][3]


def right(room: str) -> float:
    return ROOMS[room][0] + ROOMS[room][2]


# --- the life of a step ---

TITLES = ["1  a model calls", "2  the program is a list of ops", "3  the backend's table fuses", "4  the planner gives addresses",
          "5  ops become calls of kernels", "6  all threads walk one table"]  # fmt: skip
MODEL = """with p.segment("h.0"):
    ...
    h = p.layernorm(x, *ln_2)
    h = p.gelu(p.linear(h, *fc))
    x = p.add(x, p.linear(h, *proj))
...
p.backward(loss)"""
OPS = """n = layernorm(x, w, b)
u = matmul(n, fc.weight)
v = bias(u, fc.bias)
h = gelu(v)
...
dv = gelu_backward(dh, v)
dfc.weight = matmul_dw(dv, n)"""
FUSED = """n = layernorm(x, w, b)

v, h = linear_gelu(
    n, fc.weight, fc.bias)
...
dv = matmul_dx_gelu(...)
dfc.weight = matmul_dw(dv, n)"""
KERNEL = """product(out=h, second=v, a=n,
  weight=fc.weight, bias=fc.bias,
  cols=3072, depth=768,
  epilogue="gelu")

Python  ->  LLVM IR  ->  object,
kept on disk, shared by layers"""


def life() -> Any:
    micro = plan()["programs"]["micro"]
    notes = ["Nothing runs: each call appends ops.", f"{micro['ops']} ops after the reverse walk.",
             f"{micro['fused_ops']} ops. No model knows of it.", "What is never alive together shares bytes.",
             f"{micro['calls']} calls; {plan()['kernels']} kernels for all programs.",
             "Tiles are claimed from a counter; bars are barriers."]  # fmt: skip
    figure, axes = canvas(840, 420)
    panels = []
    for i, (title, note) in enumerate(zip(TITLES, notes, strict=True)):
        x, y = 20 + 276 * (i % 3), 16 + 202 * (i // 3)
        box(axes, x, y, 248, 176, (SKY, STONE, STONE, MINT, ROSE, ROSE)[i])
        text(axes, x + 12, y + 9, title, size=10.5, weight="bold")
        text(axes, x + 12, y + 157, note, size=8.5, colour=SOFT)
        panels.append((x, y))
    for (x, y), code in zip([*panels[:3], panels[4]], (MODEL, OPS, FUSED, KERNEL), strict=True):
        text(axes, x + 12, y + 34, code, size=8.2, family="monospace", linespacing=1.4)
    for a, b in [(0, 1), (1, 2), (3, 4), (4, 5)]:
        y = panels[a][1] + 88
        arrow(axes, (panels[a][0] + 249, y), (panels[b][0] - 1, y), linewidth=1.6)
    (x3, y3), (x4, y4) = panels[2], panels[3]
    bend = y3 + 189
    axes.plot([x3 + 124, x3 + 124, x4 + 124], [y3 + 177, bend, bend], color=SOFT, linewidth=1.6)
    arrow(axes, (x4 + 124, bend), (x4 + 124, y4 - 1), linewidth=1.6)
    _small_plan(axes, *panels[3])
    _small_table(axes, *panels[5])
    return figure


def _small_plan(axes: Any, x: float, y: float) -> None:
    lives = [(0, 8, 0, 1, "n"), (1, 7, 1, 1.6, "v"), (1, 6, 2.6, 1.6, "h"), (2, 3, 4.2, 1, "x"), (4, 7, 4.2, 1.3, "dv")]
    left, floor = x + 40, y + 142
    for first, last, at, size, name in lives:
        where = left + first * 23, floor - (at + size) * 17
        style = {"facecolor": "#bfe3cc", "edgecolor": "#2f855a", "linewidth": 0.8}
        axes.add_patch(Rectangle(where, (last - first) * 23, size * 17, **style))
        text(axes, where[0] + 5, where[1] + size * 8.5, name, size=8.5, va="center")
    arrow(axes, (left - 6, floor + 4), (left - 6, y + 34), linewidth=0.9, mutation_scale=8)
    arrow(axes, (left - 6, floor + 4), (x + 238, floor + 4), linewidth=0.9, mutation_scale=8)
    text(axes, left - 12, y + 88, "address", size=8, colour=SOFT, rotation=90, ha="right", va="center")
    text(axes, x + 236, floor - 20, "ops", size=8, colour=SOFT, ha="right", va="bottom")


def _small_table(axes: Any, x: float, y: float) -> None:
    colours = ["#f3b8ad", "#f6d4a8", "#c9b8ea", "#a9cdee"]
    # Entry of the table -> (thread, first, last) of the tiles that were claimed; a barrier stands after the entry or not.
    work = [(0, 0, 20), (1, 0, 17), (0, 20, 43), (1, 17, 46)], [(0, 48, 70), (1, 48, 74), (0, 70, 95), (1, 74, 90)], \
        [(1, 90, 108), (0, 95, 113)], [(0, 116, 136), (1, 116, 131), (1, 131, 154), (0, 136, 152)]  # fmt: skip
    left, top = x + 62, y + 38
    for tiles, colour in zip(work, colours, strict=True):
        for thread, first, last in tiles:
            where = left + first * 1.1, top + thread * 30
            axes.add_patch(Rectangle(where, (last - first) * 1.1, 22, facecolor=colour, edgecolor="white", linewidth=1))
    for thread in range(2):
        text(axes, x + 12, top + 11 + 30 * thread, f"thread {thread}", size=8.5, va="center")
    for at in (47, 115, 155):
        axes.plot([left + at * 1.1] * 2, [top - 5, top + 57], color=INK, linewidth=1.4)
    rows = ["function  arguments  counter  barrier", *(f"f{i:<9}a{i:<10}{0:<9}{b}" for i, b in enumerate((1, 0, 1, 1)))]
    text(axes, x + 12, top + 60, "\n".join(rows), size=7.4, family="monospace", linespacing=1.25)


# --- the memory map ---

# What a tensor is by the end of its name: the first kind with a match.
KINDS: list[tuple[str, str, tuple[str, ...]]] = [
    ("logits of one chunk of tokens", "#ef9a80", ("classifier.logits",)),
    ("MLP: before and after GELU", "#86c79b", (".bias.y.3", ".gelu.y", ".gelu_backward.dx")),
    ("attention: q k v, output", "#b79bd3", (".bias.y", ".attention.out", ".attention_backward.dqkv")),
    ("residual stream and its gradient", "#74a3d4", ("embedding.y", ".add.y", ".add.y.2", "layernorm_dx.dx")),
    ("output of LayerNorm", "#e6c36a", ("layernorm.y", "layernorm.y.2")),
    ("other: casts, products, sums", "#b8c2cc", ("",)),
]
SEGMENTS = {
    "parameter": ("parameters", "#d9e2ec"),
    "gradient": ("gradients", "#c4cfda"),
    "state": ("first and second moments", "#a9b7c6"),
    "cache": ("KV cache, threads' own scratch", "#8294a6"),
}


def kind_of(name: str) -> tuple[str, str]:
    return next((label, colour) for label, colour, ends in KINDS if name.endswith(ends))


def memory() -> Any:
    """gpt2-124m at 4 x 64: the whole arena to scale, and the workspace of "micro" over its ops."""
    p = plan()
    figure, axes = canvas(840, 470)
    top, floor, left, width, chart_left = 44, 420, 20, 150, 273
    text(axes, left, 14, f"the arena: {p['arena_bytes']:,} bytes", size=10, weight="bold")
    y, small = floor, []
    for role, (label, colour) in SEGMENTS.items():
        nbytes = sum(r["bytes"] for r in p["map"] if r["role"] == role)
        height = (floor - top) * nbytes / p["arena_bytes"]
        y -= height
        axes.add_patch(Rectangle((left, y), width, height, facecolor=colour, edgecolor="white", linewidth=1))
        words = f"{label}\n{nbytes / MIB:,.1f} MiB"
        if height > 20:
            text(axes, left + 8, y + height / 2, words, size=8.5, va="center", linespacing=1.4)
        else:
            small.append(words.replace("\n", " "))
    axes.add_patch(Rectangle((left, top), width, y - top, facecolor="#f6d4a8", edgecolor="white", linewidth=1))
    above = "\n".join([*small, f"on top: workspace {p['workspace_bytes'] / MIB:.1f} MiB"])
    text(axes, left, 428, above, size=8.5, colour=SOFT, linespacing=1.4)
    for start, end in ((top, top), (y, floor)):
        axes.plot([left + width, chart_left], [start, end], color=LINE, linewidth=0.8, linestyle=":")
    shape = f"{p['batch']} x {p['seq']} tokens, {p['dtype']}, {p['isa']}"
    text(axes, chart_left, 14, f"the workspace while micro runs ({shape})", size=10, weight="bold")
    _workspace(figure.add_axes((chart_left / 840, (470 - floor) / 470, 550 / 840, (floor - top) / 470)), p)
    return figure


def _workspace(chart: Any, p: dict[str, Any]) -> None:
    """Ops across, addresses up; a tensor is as wide as its life and as high as its bytes."""
    rows = [r for r in p["map"] if r.get("program") == "micro"]
    edge = {"edgecolor": "white", "linewidth": 0.25}
    for r in rows:
        where = r["first"], (r["offset"] - p["persistent_bytes"]) / MIB
        life_of = r["last"] - r["first"] + 1
        chart.add_patch(Rectangle(where, life_of, r["bytes"] / MIB, facecolor=kind_of(r["name"])[1], **edge))
    logits = next(r for r in rows if r["name"] == "classifier.logits")
    ops, at = p["programs"]["micro"]["fused_ops"], logits["first"]
    chart.set(xlim=(0, ops), ylim=(0, p["workspace_bytes"] / MIB))
    chart.set_xticks([0, at, ops], ["0\nforward", f"{at}\nclassifier", f"{ops} ops\nbackward"])
    chart.tick_params(labelsize=8.5, colors=INK)
    chart.get_xticklabels()[-1].set_ha("right")
    chart.set_ylabel("MiB", fontsize=8.5, color=INK)
    chart.spines[["top", "right"]].set_visible(False)
    words = f"logits: {logits['bytes'] / MIB:.1f} MiB,\nalive for one op"
    chart.text(at - 3, 12, words, fontsize=8.5, color=SOFT, ha="right", va="center")
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for _, colour, _ in KINDS]
    labels = [label for label, _, _ in KINDS]
    place = {"loc": "upper left", "bbox_to_anchor": (0.3, 0.215), "ncols": 2}
    chart.legend(handles, labels, fontsize=8.5, frameon=False, **place)


# Letters as curves: the same everywhere. Fixed ids and no date: the same file for the same picture.
STYLE = {
    "font.family": "DejaVu Sans",
    "font.monospace": ["DejaVu Sans Mono"],
    "svg.fonttype": "path",
    "svg.hashsalt": "barellm",
}
PICTURES = {"house": house, "step": life, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="also as PNG, to look at")
    args = parser.parse_args()
    # Letters as curves: the same everywhere. No date, fixed ids: the same file for the same picture.
    plt.rcParams |= {
        "font.family": "DejaVu Sans",
        "font.monospace": ["DejaVu Sans Mono"],
        "svg.fonttype": "path",
        "svg.hashsalt": "barellm",
    }
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(HERE / f"{name}.svg", facecolor="white", metadata={"Date": None})
        if args.png:
            figure.savefig(args.png / f"{name}.png", facecolor="white", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
