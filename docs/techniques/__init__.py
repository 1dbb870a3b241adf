"""The rows of docs/techniques.md, and the page that is made of them.

A file of this folder with a `title` is a subject; its rows have

- name, what: the field's term, and a sentence; source: whence it is, with a link
- where: files of the project, `PATH` or `PATH:SYMBOL`, each of which is looked for; page: where the documentation explains it
- run, expect: a command, and what its output must have: regular expressions, or `{find, low, high}`, where the group of `find` is a
  number between two others
- cpu, gpu: a word of STATES, and what else is to be said
- gap: in the place of run and expect, why there is no command
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = FOLDER.with_suffix(".md")
SUBJECTS = ("llmc", "nanogpt", "craft", "anatomy", "record")  # files of this folder, in the order of the page
GIVEN = ("small.toml", "speedrun.toml", "uneven.py")  # what each command finds in its folder, beside TEXTS
TEXTS = {
    "text.txt": "".join(f"{i} squared is {i * i}.\n" for i in range(3000)),
    "lines.jsonl": "".join(f'{{"text": "{i} squared is {i * i}, and {i} cubed is {i**3}."}}\n' for i in range(1000)),
}
STATES = {
    "runs": "its command, or a test, runs it on processors of this kind",
    "emulated": "its instructions have been run by an emulator, or its Triton source by Triton's interpreter",
    "compiled": "its machine code has been made and read, not run",
    "not there": "there is none",
}
HEAD = """# Techniques, and a command that shows each

Made by `python -m docs.techniques --write` of the files in [docs/techniques](techniques). A row is a technique, a system or a
promise of a project that this one learns from: what it is, where it is said, where it lives here, and a command with what it must
print. {count}

```sh
make techniques                                          # runs every command: a table, and status 1 where one fails
python -m docs.techniques --check "Polar Express"        # one of them, by name
python -m docs.techniques --check --part 3/4             # a quarter, drawn by a checksum of the names
python -m docs.techniques --folder try                   # makes the folder in which the commands of this page run
```

Each command runs in a folder of its own with four files: `text.txt` (the squares of 0 to 2999), `lines.jsonl` (a thousand
documents), [small.toml](techniques/small.toml) and [speedrun.toml](techniques/speedrun.toml), two configurations that train for a
second or a few; `PYTHONPATH` is the checkout. A command may take {limit} seconds of processor time, all its processes together, so
a busy machine does not make it fail. What it must print holds on every processor: exact counts, bytes and bits, and losses in fp32.

The columns *CPU* and *GPU* say in which state the technique is there. GPU states are those of
[the CUDA pages](cuda.md#seen-on-a-gpu); "H200" stands where it was seen on that card.

{states}
"""


class Bad(ValueError):
    """A row that cannot be right, or a name that no row has."""


@dataclass(frozen=True)
class Expected:
    """What an output must have."""

    find: str
    low: float | None = None
    high: float | None = None

    def missing(self, output: str) -> str:
        """What is wrong with an output; "" if nothing is."""
        found = re.search(self.find, output, re.MULTILINE)
        if not found:
            return f"no {self.find!r}"
        if self.low is None or self.high is None:
            return ""
        value = float(found[1].replace(",", ""))
        return "" if self.low <= value <= self.high else f"{value:g} for {self.find!r}, expected {self.low:g} to {self.high:g}"

    def __str__(self) -> str:
        return f"`{self.find}`" + ("" if self.low is None else f" from {self.low:g} to {self.high:g}")


@dataclass(frozen=True)
class Row:
    subject: str
    name: str
    what: str
    source: str
    where: tuple[str, ...]
    cpu: str
    gpu: str
    page: str = ""
    run: str = ""
    expect: tuple[Expected, ...] = ()
    gap: str = ""


def row_of(subject: str, given: dict[str, Any]) -> Row:
    """A row of a file, whose expectations must be able to fail."""
    expect = tuple(Expected(e) if isinstance(e, str) else Expected(**e) for e in given.pop("expect", ()))
    row = Row(subject, where=tuple(given.pop("where")), expect=expect, **{k: str(v).strip() for k, v in given.items()})
    for state in (row.cpu, row.gpu):
        if state.partition(";")[0] not in STATES:
            raise Bad(f"{row.name}: state is {state!r}, expected one of {', '.join(STATES)}, and more behind a semicolon")
    if bool(row.gap) == bool(row.run) or bool(row.run) != bool(row.expect):
        raise Bad(f"{row.name}: expected either run with expect, or gap")
    for each in row.expect:
        if not each.missing(""):
            raise Bad(f"{row.name}: expect is {each.find!r}, which any output has")
    return row


@cache
def rows() -> dict[str, Row]:
    """All rows by name, in the order of the page."""
    found: dict[str, Row] = {}
    for subject in SUBJECTS:
        for given in tomllib.loads((FOLDER / f"{subject}.toml").read_text())["row"]:
            row = row_of(subject, given)
            if row.name in found:
                raise Bad(f"two rows are called {row.name!r}")
            found[row.name] = row
    return found


def has_symbol(path: Path, name: str) -> bool:
    """Whether a file defines a name: a function, a class, a method (CLASS.METHOD) or a constant; of files that are not Python,
    whether the word is in it."""
    if path.suffix != ".py":
        return re.search(rf"\b{re.escape(name)}\b", path.read_text()) is not None
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if getattr(node, "name", None) == part or any(isinstance(t, ast.Name) and t.id == part for t in targets):
                body = getattr(node, "body", [])
                break
        else:
            return False
    return True


def lost(row: Row) -> list[str]:
    """What a row names and the project does not have."""
    found = [f"{row.name}: no page {row.page}" for _ in [0] if row.page and not (PAGE.parent / row.page.partition("#")[0]).exists()]
    for where in row.where:
        path, _, symbol = where.partition(":")
        if not (ROOT / path).exists():
            found.append(f"{row.name}: no file {path}")
        elif symbol and not has_symbol(ROOT / path, symbol):
            found.append(f"{row.name}: no {symbol} in {path}")
    return found


def anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def line(row: Row) -> str:
    """A row of a subject's table."""
    files = [where.partition(":") for where in row.where]
    where = ", ".join(f"[{path.rpartition('/')[2]}{': ' * bool(symbol)}{symbol}](../{path})" for path, _, symbol in files)
    read = f"; [page]({row.page})" if row.page else ""
    cells = (f"[{row.name}](#{anchor(row.name)})", f"{row.what} {row.source}", where + read, row.cpu, row.gpu)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def command(row: Row) -> str:
    """What a row's heading stands over."""
    if row.gap:
        return f"### {row.name}\n\n*Gap.* {row.gap}\n"
    expect = "".join(f"\n- {each!s}" for each in row.expect)
    return f"### {row.name}\n\n```bash\n{row.run}\n```\n\nmust print\n{expect}\n"


def page() -> str:
    every = list(rows().values())
    gaps, tests = sum(bool(row.gap) for row in every), sum("pytest" in row.run for row in every)
    from docs.techniques.check import LIMIT

    count = f"There are {len(every)} rows; {gaps} are gaps, which no command shows, and {tests} have a test as their command."
    states = "\n".join(f"- **{state}**: {text}" for state, text in STATES.items())
    parts = [HEAD.format(count=count, limit=LIMIT, states=states)]
    for subject in SUBJECTS:
        given = tomllib.loads((FOLDER / f"{subject}.toml").read_text())
        some = [row for row in every if row.subject == subject]
        parts.append(f"## {given['title']}\n\n{given['intro'].strip()}\n")
        table = ["| technique | what it is | where | CPU | GPU |", "|---|---|---|---|---|", *map(line, some)]
        parts.append("\n".join(table) + "\n")
        parts += [command(row) for row in some]
    return "\n".join(parts)
