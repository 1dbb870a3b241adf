"""The field's words: private words that were replaced name nothing any more in identifiers, the help of commands and docs."""

from __future__ import annotations

import contextlib
import io
import re
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

from barellm.cli.main import COMMANDS, main
from barellm.config import aliases

ROOT = Path(__file__).parents[1]
# Identifiers, in parts between underscores and capitals, in all of barellm/. Words that are finished; the list grows.
IDENTIFIERS = {
    "asked", "course", "dealing", "dealt", "depart", "fellow", "left_out", "milestones", "ramp_from", "ramp_tokens", "standing",
    "told", "workplace",
}  # fmt: skip
HELP = (
    "products?", "matrix products?", "few bits", "how bold", "side by side", "held back", "go(es)? on", "anew", "at best", "turns?",
    "company", "rival", "whole one", "for ever",
)  # fmt: skip
PAGES = ("accumulate the gradients anew", "how bold", "times this text", "to learn from and", *map(re.escape, aliases.RENAMED))


def parts(name: str) -> set[str]:
    """An identifier's words, and pairs of them: _Asked -> asked, left_out -> left, out, left_out."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_").split("_")
    return {*words, *map("_".join, pairwise(words))}


def identifiers(path: Path) -> set[str]:
    with path.open("rb") as file:
        return {t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME}


def test_no_identifier_has_a_private_word():
    found = []
    for path in sorted((ROOT / "barellm").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        names = identifiers(path) | set(path.stem.split("."))
        found += [f"{where}: {name}" for name in sorted(names) for _ in parts(name) & IDENTIFIERS]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_has_a_private_word(name):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        main([name, "--help"])
    text = " ".join(shown.getvalue().split())
    found = [m[0] for word in HELP for m in re.finditer(rf".{{0,30}}\b{word}\b.{{0,20}}", text)]
    assert not found, "\n".join(found)


def test_no_page_has_an_old_key():
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if path.name != "log.md":
            text = path.read_text()
            found += [f"{path.name}: {m[0]}" for word in PAGES for m in re.finditer(rf"(?<![\w.]){word}(?!\w)", text)]
    assert not found, "\n".join(found)


def test_words_are_found():
    assert parts("_Asked") == {"asked"} and parts("left_out") >= {"left_out"} and parts("TrainingCourse") >= {"course"}
