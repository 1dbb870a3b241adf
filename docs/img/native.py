"""Draws docs/img/native.svg, what a library holds: `barellm build gpt2-124m -o DIR`, then `python docs/img/native.py DIR`.

The sizes are those of the library's sections and symbols, as nm and readelf list them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
INK, SOFT = "#1f2933", "#52606d"
CODE, TABLES, BYTES, LINKER = "#5b8def", "#2f855a", "#c05621", "#9aa5b1"


def symbols(library: Path) -> dict[str, tuple[int, int]]:
    """{name: (address, size)}"""
    out = subprocess.run(["nm", "-S", library], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in out.splitlines()]
    return {row[-1]: (int(row[0], 16), int(row[1], 16) if len(row) == 4 else 0) for row in rows if len(row) > 2}


def sections(library: Path) -> dict[str, int]:
    """{name: size in the file}"""
    out = subprocess.run(["readelf", "-SW", library], check=True, capture_output=True, text=True).stdout
    rows = [line.split("]", 1)[1].split() for line in out.splitlines() if line.lstrip().startswith("[") and "]" in line]
    return {row[0]: int(row[4], 16) for row in rows if row[0].startswith(".") and row[1] != "NOBITS"}


def parts(library: Path) -> list[tuple[str, str, int]]:
    """(name, colour, bytes) of everything in the file."""
    found, of_sections = symbols(library), sections(library)

    def size(*names: str) -> int:
        return sum(n for name, (_, n) in found.items() if name.startswith(names))

    def blob(*names: str) -> int:
        return sum(found[f"{name}_end"][0] - found[f"{name}_begin"][0] for name in names)

    files = sorted(name.removesuffix("_begin") for name in found if name.startswith("tokenizer_") and name.endswith("_begin"))
    kernels = of_sections.get(".ltext", 0)
    rows = [
        ("kernels: machine code of each op", CODE, kernels),
        ("runtime, checkpoints, sampling: C", CODE, of_sections[".text"]),
        ("calls: kernel, first argument, barrier", TABLES, size("calls_")),
        ("arguments: numbers, offsets in the arena", TABLES, size("arguments")),
        ("relocations: which of them are offsets", TABLES, size("relocations")),
        ("tensors: name, format, offset, size", TABLES, size("tensors", "by_name")),
        ("bytes of the tokens", BYTES, blob("token_table")),
        ("the tokenizer's files, for checkpoints", BYTES, blob(*files)),
        ("headers and texts of checkpoints", BYTES, blob("weights_header", "optimizer_header", "meta_text")),
    ]
    rest = library.stat().st_size - sum(n for *_, n in rows)
    return [*rows, ("constants of kernels, symbols, ELF's own", LINKER, rest)]


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "barellm", "font.size": 9, "text.color": INK})
    library = Path(sys.argv[1]) / "libbarellm.so"
    rows = parts(library)
    figure, axes = plt.subplots(figsize=(8.2, 3.3))
    for i, (name, colour, n) in enumerate(rows):
        axes.barh(i, n / 1e3, color=colour, height=0.68)
        axes.text(n / 1e3 + 8, i, f"{n / 1e3:,.1f} kB", va="center", fontsize=8, color=SOFT)
        axes.text(-10, i, name, va="center", ha="right", fontsize=8)
    axes.invert_yaxis()
    axes.set(yticks=[], xlim=(0, 1.15 * max(n for *_, n in rows) / 1e3), xlabel="kB in the file")
    axes.set_title(f"libbarellm.so of gpt2-124m: {library.stat().st_size / 1e6:.2f} MB", loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(HERE / "native.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
