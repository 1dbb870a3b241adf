"""Which tests run: every function, with the cases in which each two of its parameters meet; a few of each kind with `--quick`, a
part of all with `--part`.

A test of four parameters has hundreds of cases, and a fault shows where one value is, or where two come together. `pairs` keeps
as few cases as have every two values together that some case has. All cases of a test run where it, its file or its folder is
named on the command line, and with `--cases all`.

Where an instruction set makes the same code of an fp32 kernel as another one, the kernel is tested on one of them (`same_code`).
What is left of avx512 has the vectors of avx512_bf16 and multiplies and rounds bf16 as avx2 does. On a machine with both, a test
runs there with each dtype and each other word of its parameters, and not with each of its shapes (`_meetings`).
"""

from __future__ import annotations

import re
import zlib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from barellm.cpu import isa as isas

WIDE = ("avx512_bf16", "avx512")  # of which fp32 kernels have equal code, as those of amx_bf16
BETWEEN = {"avx512": {"avx512_bf16", "avx2"}}  # an instruction set, and those of which it has nothing but parts


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="this machine's instruction set, one case of each kernel's tests")
    parser.addoption("--part", metavar="K/N", help="of all tests the K-th of N parts, drawn by their names")
    parser.addoption("--cases", choices=("pairs", "all"), help="of a test's parameters (default: all where tests are named)")


def lacks_mark(path: Path, expression: str) -> bool:
    """Whether no test of a file can be meant by `-m "not this and that"`, as the file does not name one of the marks that it
    wants, or has one that it does not want for all its tests. Other kinds of expressions say nothing about files."""
    if path.suffix != ".py" or not re.fullmatch(r"(not )?\w+( and (not )?\w+)*", expression):
        return False
    text = path.read_text()
    terms = expression.split(" and ")
    unwanted = [term.removeprefix("not ") for term in terms if term.startswith("not ")]
    wanted = [term for term in terms if not term.startswith("not ")]
    return any(re.search(rf"^pytestmark = .*\bmark\.{mark}\b", text, re.M) for mark in unwanted) or any(
        f"mark.{mark}" not in text for mark in wanted
    )


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]


def isa_of(item: pytest.Item) -> str:
    """The name of the instruction set that a test is for, "" where it is for none."""
    isa = parameters(item).get("isa", "")
    return getattr(isa, "name", isa)


def same_code(item: pytest.Item, names: set[str]) -> bool:
    """A test of an fp32 kernel whose code another instruction set of this machine, among `names`, has as well."""
    given = parameters(item)
    if "fp32" not in (given.get("dtype"), given.get("compute")):
        return False
    isa = isa_of(item)
    return (isa in WIDE[1:] and WIDE[0] in names) or (isa.startswith("amx_bf16") and WIDE[0] in names)


def pairs(items: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of each test, so that every two values of its parameters that come together still do; the earlier one where two
    serve as well. A test with one parameter, or with two that meet once each, keeps all."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept: set[int] = set()
    for cases in tests.values():
        isas = {isa_of(item) for item in cases}
        between = {isa for isa, others in BETWEEN.items() if isas >= others}
        bits: dict[Any, int] = {}  # two values -> a bit of their own
        met = [sum(1 << bits.setdefault(two, len(bits)) for two in _meetings(item, between)) for item in cases]
        missing = (1 << len(bits)) - 1
        while missing:
            best = max(range(len(cases)), key=lambda i: (met[i] & missing).bit_count())
            kept.add(id(cases[best]))
            missing &= ~met[best]
    return [item for item in items if id(item) in kept]


def _meetings(item: pytest.Item, between: set[str]) -> list[tuple[Any, ...]]:
    """Which values of two parameters come together in a case. Names that are listed together are one parameter. An instruction set
    that is `between` others meets only words."""
    given = parameters(item)
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [names.replace(",", " ").split() if isinstance(names, str) else list(names) for names in lists]
    groups += [[name] for name in given.keys() - {name for group in groups for name in group}]
    values = {tuple(names): (*names, *(id(given[name]) for name in names)) for names in sorted(groups)}
    met = list(combinations(values, 2))
    if isa_of(item) not in between:
        return [(values[one], values[other]) for one, other in met] or [tuple(values.values())]
    words = {names for names in values if "isa" not in names and all(isinstance(given[name], str) for name in names)}
    some = [two for two in met if not any("isa" in names for names in two) or words & {*two}]
    return [("isa", isa_of(item)), *((values[one], values[other]) for one, other in some)]


def quick(items: list[pytest.Item], best: str) -> list[pytest.Item]:
    """One case of each test and dtype, on the instruction set `best`; nothing slow."""
    kept: list[pytest.Item] = []
    seen: set[tuple[str, Any]] = set()
    for item in items:
        left_out = any(item.get_closest_marker(name) for name in ("slow", "extended", "oracle", "alone"))
        if left_out or isa_of(item) not in ("", best):
            continue
        given = parameters(item)
        kind = (item.nodeid.split("[")[0], str(given.get("dtype", given.get("compute"))))
        if kind not in seen:
            seen.add(kind)
            kept.append(item)
    return kept


def part(items: list[pytest.Item], which: str) -> list[pytest.Item]:
    """The K-th of N parts, `which` being K/N: a test with all its cases is in one of them, by a checksum of its name."""
    k, n = map(int, which.split("/"))
    return [item for item in items if zlib.crc32(item.nodeid.split("[")[0].encode()) % n == k % n]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    best, *_ = names = isas.available()
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("--quick"):
        kept = quick(items, best)
    else:
        kept = [item for item in items if not same_code(item, set(names))]
    if (config.getoption("--cases") or ("all" if named else "pairs")) == "pairs":
        kept = pairs(kept)
    if config.getoption("--part"):
        kept = part(kept, config.getoption("--part"))
    if len(kept) < len(items):
        here = {id(item) for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in here])
        items[:] = kept
