"""Draws docs/img/cuda.svg, the way of a step to a GPU and what stands for the GPU in tests: `python docs/img/cuda.py`."""

from __future__ import annotations

from typing import Any

from make import HERE, LILAC, MINT, ROSE, SKY, SOFT, STYLE, arrow, box, canvas, plt, text

# title, code or words, where it happens, what checks it without a GPU
PANELS = (
    (
        "1  ops become launches",
        'c.launch(cast,\n  {"y": op.y, "x": op.x,\n   "n": c.elements(op.x)},\n  {"BLOCK": 1024},\n  grid=..., writes="y")',
        "cuda/kernels, cuda/fuse.py",
        "Triton's interpreter runs every\nlaunch, each access held against\nits operand, beside float64",
    ),
    (
        "2  Triton compiles, once",
        "device function\n  ->  PTX  ->  cubin\n\nkept on disk, with the\nlayout of its parameters",
        "cuda/compile.py",
        "compiled for four architectures;\na table of registers, spills (0),\nshared memory, HGMMA, UTMALDG",
    ),
    (
        "3  the driver loads",
        "pointers, sizes, tensor maps\npacked where the kernel\nreads them, once for each\nbatch and length",
        "cuda/launch.py, cuda/driver.py",
        "a driver in Python looks at every\nparameter byte, grid, pointer and\ntensor map of what it is given",
    ),
    (
        "4  a run",
        "pinned buffers, in turn:\n  scalars, tokens, targets\n  ->  the arena\none graph launch a program",
        "cuda/step.py",
        "the same driver copies as late as\nit may, replays captured launches,\nand the interpreter does them",
    ),
)


def way() -> Any:
    figure, axes = canvas(1000, 268)
    width, step = 222, 246
    for i, (title, code, where, check) in enumerate(PANELS):
        x = 16 + step * i
        box(axes, x, 16, width, 148, (SKY, LILAC, LILAC, MINT)[i])
        text(axes, x + 12, 25, title, size=10.5, weight="bold")
        text(axes, x + 12, 50, code, size=8.2, family="monospace", linespacing=1.4)
        text(axes, x + 12, 144, where, size=8.5, colour=SOFT)
        box(axes, x, 188, width, 66, ROSE)
        text(axes, x + 12, 197, check, size=8.8, linespacing=1.4)
        axes.plot([x + width / 2] * 2, [165, 187], color=SOFT, linewidth=1, linestyle=":")
        if i:
            arrow(axes, (x - step + width + 1, 90), (x - 1, 90), linewidth=1.6)
    text(axes, 16, 174, "in tests, without a GPU", size=8.5, colour=SOFT, va="center", style="italic")
    return figure


if __name__ == "__main__":
    plt.rcParams |= STYLE
    figure = way()
    figure.savefig(HERE / "cuda.svg", facecolor="white", metadata={"Date": None})
