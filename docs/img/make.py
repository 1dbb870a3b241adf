"""Draws the pictures of docs/: `python docs/img/make.py [NAME ...] [--png FOLDER]` from the repository's root.

What they show is read from the code and from `barellm plan`, so a picture that no longer holds fails instead of lying.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "barellm"
PLAN = [
    "plan",
    "gpt2-124m",
    "--batch",
    "4",
    "--seq",
    "64",
    "--train.gradient_accumulation_steps",
    "1",
    "--dtype",
    "bf16",
    "--json",
    "--map",
]

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
    shape = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=6", facecolor=colour, edgecolor=edge, linewidth=1)
    axes.add_patch(shape)


def text(axes: Any, x: float, y: float, words: str, *, size: float = 9.5, colour: str = INK, **more: Any) -> None:
    axes.text(x, y, words, fontsize=size, color=colour, va=more.pop("va", "top"), **more)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], *, bend: float = 0.0, **more: Any) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.2, "color": SOFT, "shrinkA": 0, "shrinkB": 1} | more
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))


# --- the house ---

# Folder -> its colour and what it holds, in two lines.
ROOMS: dict[str, tuple[str, str]] = {
    "cli": (SAND, "one module per command,\nimported when it runs"),
    "tools": (SKY, "plan, inspect,\nprofile, bench"),
    "interop": (SKY, "Hugging Face,\nllm.c"),
    "native": (SKY, "a run as a program\nwithout Python"),
    "training": (SKY, "run, loop, schedule,\nmetrics, stopping"),
    "generation": (SKY, "decoding,\nsamplers"),
    "serving": (SKY, "texts of many\nclients"),
    "evaluation": (SKY, "validation loss,\nbits per byte"),
    "checkpoint": (SKY, "folders, tensor\nfiles, weights"),
    "assembly": (MINT, "configuration to\nsession"),
    "kernels": (SKY, "functions\non arrays"),
    "cpu": (ROSE, "LLVM kernels,\nthreads"),
    "cuda": (ROSE, "Triton kernels,\ndriver"),
    "distributed": (SKY, "several processes:\nlaunchers, MPI"),
    "runtime": (LILAC, "what a session is,\nbackends by name"),
    "models": (MINT, "each a flat\nforward"),
    "optim": (MINT, "what updates\nparameters"),
    "data": (MINT, "tokenizers, shards,\nloader"),
    "chat": (STONE, "ends of texts,\nchat templates"),
    "program": (STONE, "tensors, ops, reverse walk,\nfusion, planner"),
}
HOUSE = HERE / "house.svg"
SAYS = "imports: "  # what the picture's description begins with; its arrows follow


def imports() -> set[tuple[str, str]]:
    """(folder, folder that it imports) of the whole package."""
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0]
        if folder == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = {m.split(".")[1] for m in modules if m.startswith("barellm.")} - {"config"}  # values: for all
            found |= {(folder, name) for name in names if name != folder}
    return {(a, b) for a, b in found if (PACKAGE / a).is_dir() and (PACKAGE / b).is_dir()}


def reached(arrows: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that a path of arrows joins."""
    pairs = set(arrows)
    while more := {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs:
        pairs |= more
    return pairs


def arrows() -> list[tuple[str, str]]:
    """The imports that do not follow from others: the fewest arrows whose paths are all imports."""
    pairs = reached(imports())
    between = {(a, c) for a, b in pairs for d, c in pairs if b == d}
    return sorted(pairs - between)


def check_arrows() -> None:
    """Every folder has a room, and the picture that lies in docs/img shows today's arrows."""
    folders = {name for pair in imports() for name in pair}
    assert folders == set(ROOMS), f"ROOMS in docs/img/make.py and the folders differ: {sorted(folders ^ set(ROOMS))}"
    drawn = re.findall(rf"{SAYS}([^<]*)", HOUSE.read_text())
    assert drawn == [described()], "the house has other arrows than its picture: run `python docs/img/make.py house`"


def described() -> str:
    return ", ".join(f"{a} {b}" for a, b in arrows())


def levels(pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Folder -> its floor: 0 for one that imports nobody, else one above the highest that it imports."""
    below: dict[str, set[str]] = {}
    for a, b in pairs:
        below.setdefault(a, set()).add(b)

    @cache
    def level(name: str) -> int:
        return 1 + max(map(level, below.get(name, ())), default=-1)

    return {name: level(name) for pair in pairs for name in pair}


def floors(pairs: list[tuple[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """(the names on each floor from left to right, the path of each arrow). An arrow that passes a floor has a place there
    too, named `from>to@floor`, so that no arrow runs behind a room. Names stand near the mean of their neighbours'."""
    level = levels(pairs)
    rows: list[list[str]] = [[] for _ in range(1 + max(level.values()))]
    for name in ROOMS:
        rows[level[name]].append(name)
    paths = []
    for a, b in pairs:
        passed = [f"{a}>{b}@{at}" for at in range(level[a] - 1, level[b], -1)]
        for at, name in zip(range(level[a] - 1, level[b], -1), passed, strict=True):
            rows[at].append(name)
        paths.append([a, *passed, b])
    links = [pair for path in paths for pair in pairwise(path)]
    best = rows
    for _ in range(40):
        for order in (range(len(rows)), reversed(range(len(rows)))):
            for at in order:
                place = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
                near = {name: [place[b if a == name else a] for a, b in links if name in (a, b)] for name in rows[at]}
                rows[at] = sorted(rows[at], key=lambda name, near=near: fmean(near[name]))
        if crossings(rows, links) < crossings(best, links):
            best = [list(row) for row in rows]
    return best, paths


def crossings(rows: list[list[str]], links: list[tuple[str, str]]) -> int:
    """How often lines between neighbouring floors cross."""
    place = {name: (at, i) for at, row in enumerate(rows) for i, name in enumerate(row)}
    lines = [(*place[a], place[b][1]) for a, b in links]
    return sum(f == g and (a - c) * (b - d) < 0 for (f, a, b), (g, c, d) in combinations(lines, 2))


def house() -> Any:
    rows, paths = floors(arrows())
    width, pitch, high, top = 900, 84, 52, 14
    figure, axes = canvas(width, top + pitch * len(rows) + 22)
    at: dict[str, tuple[float, float, float]] = {}  # name -> middle, top, width
    for floor, row in enumerate(reversed(rows)):
        wide = {name: 8.0 if ">" in name else _wide(name) for name in row}
        gap = (width - sum(wide.values())) / (len(row) + 1)
        x = gap
        for name in row:
            at[name] = x + wide[name] / 2, top + pitch * floor, wide[name]
            x += wide[name] + gap
    for name, (colour, holds) in ROOMS.items():
        middle, y, wide = at[name]
        box(axes, middle - wide / 2, y, wide, high, colour)
        text(axes, middle - wide / 2 + 9, y + 6, name, size=10.5, weight="bold")
        text(axes, middle - wide / 2 + 9, y + 22, holds, size=8.5, colour=SOFT, linespacing=1.25)
    leaving = {name: sorted((p[1] for p in paths if p[0] == name), key=lambda n: at[n][0]) for name in ROOMS}
    coming = {name: sorted((p[-2] for p in paths if p[-1] == name), key=lambda n: at[n][0]) for name in ROOMS}
    for path in paths:
        points = [(_port(at[path[0]], leaving[path[0]], path[1]), at[path[0]][1] + high)]
        for name in path[1:-1]:
            points += [(at[name][0], at[name][1]), (at[name][0], at[name][1] + high)]
        end = _port(at[path[-1]], coming[path[-1]], path[-2]), at[path[-1]][1]
        axes.plot(*zip(*points, strict=True), color=SOFT, linewidth=1.1, solid_joinstyle="round")
        arrow(axes, points[-1], end, linewidth=1.1)
    rule = "An arrow means: imports. What follows from other arrows is left out."
    words = f"{rule} config, overrides, errors and caches are plain values that everybody may import."
    text(axes, width / 2, top + pitch * len(rows) - 8, words, size=8, colour=SOFT, ha="center")
    return figure


def _wide(name: str) -> float:
    return 18 + max(7.0 * len(name), 5.4 * max(map(len, ROOMS[name][1].split("\n"))))


def _port(room: tuple[float, float, float], names: list[str], name: str) -> float:
    """Where on a room's edge the arrow of `name` begins or ends: arrows share it evenly."""
    middle, _, wide = room
    return middle - wide / 2 + wide * (names.index(name) + 1) / (len(names) + 1)


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
    micro = plan()["programs"]["forward_backward"]
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
    """gpt2-124m at 4 x 64: the whole arena to scale, and the workspace of "forward_backward" over its ops."""
    p = plan()
    high = 500
    figure, axes = canvas(840, high)
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
    text(axes, chart_left, 14, f"the workspace while forward_backward runs ({shape})", size=10, weight="bold")
    _workspace(figure.add_axes((chart_left / 840, (high - floor) / high, 550 / 840, (floor - top) / high)), p)
    return figure


def _workspace(chart: Any, p: dict[str, Any]) -> None:
    """Ops across, addresses up; a tensor is as wide as its life and as high as its bytes."""
    rows = [r for r in p["map"] if r.get("program") == "forward_backward"]
    edge = {"edgecolor": "white", "linewidth": 0.25}
    for r in rows:
        where = r["first"], (r["offset"] - p["persistent_bytes"]) / MIB
        life_of = r["last"] - r["first"] + 1
        chart.add_patch(Rectangle(where, life_of, r["bytes"] / MIB, facecolor=kind_of(r["name"])[1], **edge))
    logits = next(r for r in rows if r["name"] == "classifier.logits")
    ops, at = p["programs"]["forward_backward"]["fused_ops"], logits["first"]
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
    place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.09), "ncols": 3}  # below the axis: nothing lies there
    chart.legend(handles, labels, fontsize=8.5, frameon=False, **place)


# Letters as curves: the same everywhere. No date, fixed ids: the same file for the same picture.
STYLE = {"font.family": "DejaVu Sans", "font.monospace": ["DejaVu Sans Mono"], "svg.fonttype": "path", "svg.hashsalt": "barellm"}
PICTURES = {"house": house, "step": life, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)} (default: all)")
    parser.add_argument("--png", type=Path, help="also as PNG, to look at")
    args = parser.parse_args()
    plt.rcParams |= STYLE
    for name in args.names or PICTURES:
        figure = PICTURES[name]()
        said = {"Description": SAYS + described()} if name == "house" else {}
        figure.savefig(HERE / f"{name}.svg", facecolor="white", metadata={"Date": None, **said})
        if args.png:
            figure.savefig(args.png / f"{name}.png", facecolor="white", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
