"""Writes what docs/anatomy.md and docs/book take from measurements, files and compilers, and draws their pictures:
`python -m anatomy.page`, or only the figures that are named: `python -m anatomy.page swizzle banks`.

Parts of a page stand between lines <!-- name --> and <!-- /name -->. Measurements are those of benchmarks/results/anatomy-*.json.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from anatomy import cpu, draw, exercises, gpu, listings
from anatomy.figures import FIGURES
from anatomy.gpu_rung import GPU_RUNGS
from anatomy.rung import RUNGS
from barellm.errors import UserError

assert cpu and gpu
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "anatomy.md"
PICTURES = ROOT / "docs" / "img"
BOOK = ROOT / "docs" / "book"
FIGURES_OF_BOOK = BOOK / "img"
RESULTS = ROOT / "benchmarks" / "results"
PART = re.compile(r"<!-- ([a-z]+(?: \w+)*) -->\n(.*?)<!-- /\1 -->", re.S)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(head: str, lines: list[list[str]]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|" + "---|" * columns, *("| " + " | ".join(cells) + " |" for cells in lines)])


def cpu_table(name: str) -> str:
    """The staircase of one file of results."""
    lines = []
    for row in result(name)["rungs"]:
        code = row["code"]
        rate = [f"compiled for {code['isa']}, not run", "", ""]
        if "flops" in row:
            rate = [f"{row['flops'] / 1e9:.1f}", f"{row['percent']:.0f} %", f"{row['flops_per_byte']:.2f}"]
        sums = ", ".join(f"{n} {mnemonic}" for mnemonic, n in code["multiply_adds"].items())
        inner = f"{sums}; {code['loads']} loads, {code['stores']} stores"
        lines.append([str(row["number"]), row["name"], str(row["threads"]), *rate, inner])
    return rows("| rung | | threads | GFLOP/s | of the peak | operations for a byte | inner loop |", lines)


def machine_line(name: str) -> str:
    found = result(name)
    m, peaks = (found["machine"], {p["threads"]: draw.peak(found, p["threads"]) for p in found["peaks"] if p["dtype"] == "fp32"})
    words = ", ".join(f"{rate:.0f} GFLOP/s on {n} thread{'s' * (n > 1)}" for n, rate in sorted(peaks.items()))
    where = f"{m['processor']}, {m['isa']}, {m['threads']} threads"
    what = f"fp32, {found['size']} rows, columns and depth, medians of {found['rounds']} rounds"
    return f"Measured on {where}: {what}. The peak is {words}. ([every sample]({{up}}../benchmarks/results/{name}.json))"


def levels_table(name: str) -> str:
    found = result(name)
    lines = []
    for level, row in found["levels"].items():
        size = f"{found['caches'][level] >> 10:,} KiB" if level in found["caches"] else ""
        buffer = f"{row['bytes'] >> 10:,} KiB"
        lines.append([level, size, buffer, f"{row['latency_ns']:.1f}", f"{row['bytes_per_s'] / 1e9:.0f}"])
    return rows("| | size | measured with a buffer of | ns until a load is there | GB/s of one thread |", lines)


def gpu_table(name: str) -> str:
    lines = []
    for row in result(name)["rungs"]:
        counts = ", ".join(f"{n} {mnemonic}" for mnemonic, n in row["counts"].items())
        rate = f"{row['flops'] / 1e12:.0f}" if "flops" in row else "not yet run"
        numbers = (row[key] for key in ("threads", "registers", "spills", "shared", "resident"))
        lines.append([str(row["number"]), row["name"], row["dtype"], *(f"{n:,}" for n in numbers), counts, rate])
    names = ("rung", "", "dtype", "threads", "registers", "spills", "shared bytes", "blocks at a time", "instructions", "TFLOP/s")
    return rows(f"| {' | '.join(names)} |", lines)


def rung_text(kind: str, number: str) -> str:
    """The words of a rung's file, and its code from the first function or constant on."""
    rung = (RUNGS if kind == "cpu" else GPU_RUNGS)[int(number) - 1]
    text = (ROOT / rung.file).read_text()
    tree = ast.parse(text)
    words = " ".join((ast.get_docstring(tree) or "").split()).partition(": ")[2]
    body = [n for n in tree.body[1:] if not isinstance(n, ast.Import | ast.ImportFrom)]
    first = body[0]
    start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    code = "\n".join(text.splitlines()[start - 1 :])
    link = f"[{rung.file}](../{rung.file})"
    return f"{words[0].upper()}{words[1:]}\n\n```py\n{code}\n```\n\n{link}"


def part(name: str) -> str:
    """What stands between the lines of this name."""
    word, *more = name.split()
    if word in ("cpu", "gpu") and more:
        return rung_text(word, more[0])
    if word == "evidence":
        return listings.evidence_table()
    if word in ("listing", "exercises"):
        return (listings.table if word == "listing" else exercises.part)(more[0])
    made = {"table": cpu_table, "machine": machine_line, "levels": levels_table, "compiled": gpu_table}
    return made[word]("-".join(["anatomy", *more]))


def filled(page: Path) -> str:
    """The page with its parts as they should be. `{up}` in a link: from the page's folder to docs/."""
    up = "../" * (len(page.relative_to(ROOT / "docs").parts) - 1)

    def made(m: re.Match[str]) -> str:
        return f"<!-- {m[1]} -->\n{part(m[1]).replace('{up}', up)}\n<!-- /{m[1]} -->"

    return PART.sub(made, page.read_text())


def pages() -> list[Path]:
    return [PAGE, *sorted(BOOK.glob("*.md"))]


def main(words: list[str]) -> int:
    try:
        for name in words:
            if name not in FIGURES:
                raise UserError(f"{name!r} is no figure, expected some of {', '.join(FIGURES)}")
        for name in words or FIGURES:
            (FIGURES_OF_BOOK / f"{name}.svg").write_text(FIGURES[name].svg())
        if not words:
            draw.staircase(result("anatomy-1000"), PICTURES / "anatomy-staircase.svg")
            for page in pages():
                page.write_text(filled(page))
    except FileNotFoundError as error:
        print(f"anatomy.page: error: {error.filename} is not there: python -m anatomy writes results", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"anatomy.page: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
