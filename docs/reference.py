"""Writes docs/reference.md: the public API, from its docstrings. `python docs/reference.py`; tests/test_docs.py compares."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import barellm
from barellm import kernels
from barellm.program.builder import Program
from barellm.program.graph import Graph

FILE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

The public API, made of the docstrings by `python docs/reference.py`. [From Python](python.md) leads through it with examples;
[functions on arrays](arrays.md) are explained on a page of their own.

- [barellm](#barellm): `load`, `train` and what they give back
- [barellm.kernels](#barellmkernels): functions on NumPy arrays
- [Program](#program): the calls that a model is made of
"""
WIDTH = 72  # characters of a signature on one line
LEADING = ("input", "output", "parameter", "cache", "constant", "split", "segment", "apply", "backward")  # of Program


class Bare:
    """An annotation that is shown as it was written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(function: Callable[..., Any]) -> str:
    """As it is called: without `self`, annotations without quotes."""
    found = inspect.signature(function)

    def bare(annotation: Any) -> Any:
        return Bare(annotation) if isinstance(annotation, str) else annotation

    given = [p.replace(annotation=bare(p.annotation)) for p in found.parameters.values() if p.name != "self"]
    text = str(found.replace(parameters=given, return_annotation=bare(found.return_annotation)))
    text = re.sub(r"\b(?:barellm|numpy|collections|typing)\.(?:\w+\.)*", "", text)  # names alone, as in the source
    return text if len(text) <= WIDTH else _broken(text)


def _broken(text: str) -> str:
    """The same with a line for each argument, as it is too long for the pages' boxes."""
    depth, lines = 0, [""]
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == ")" and depth == 0:
            lines.append("")
        lines[-1] += letter
        if letter in "(," and depth == 1:
            lines.append("")
    return "\n".join("    " * (0 < i < len(lines) - 1) + line.strip() for i, line in enumerate(lines))


def entry(name: str, function: Callable[..., Any]) -> str:
    """Heading, signature and docstring of one function. Whoever adds one without a docstring learns it here."""
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"{name} has no docstring, expected one: it is part of docs/reference.md")
    return f"### {name}\n\n```text\n{name}{signature(function)}\n```\n\n{text}\n"


def members(kind: type) -> Iterator[str]:
    """A class: its docstring, its fields and properties as a list, its methods."""
    yield f"### {kind.__name__}\n\n{inspect.getdoc(kind)}\n"
    public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    fields = {name: str(kind.__annotations__[name]) for name in kind.__annotations__ if not name.startswith("_")}
    rows = [f"- `{name}`: `{annotation}`" for name, annotation in fields.items()]
    for name, value in public.items():
        if isinstance(value, property):
            rows.append(f"- `{name}`: {' '.join((inspect.getdoc(value) or '').split())}")
    if rows:
        yield "\n".join(rows) + "\n"
    for name, value in public.items():
        if inspect.isfunction(value):
            yield entry(f"{kind.__name__}.{name}", value)


def calls() -> Iterator[str]:
    """The calls of Program: those that every model makes first, then each family of ops."""
    for name in LEADING:
        yield entry(f"Program.{name}", getattr(Program, name))
    for family in Program.__bases__:
        if family is not Graph:
            for name, value in vars(family).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    yield entry(f"Program.{name}", value)


def page() -> str:
    """The whole text."""
    parts = [HEAD, "## barellm\n", entry("load", barellm.load), entry("train", barellm.train)]
    for kind in (barellm.Model, barellm.Run, barellm.Step):
        parts += members(kind)
    parts.append("## barellm.kernels\n")
    parts += [entry(f"kernels.{name}", getattr(kernels, name)) for name in kernels.__all__]
    parts += ["## Program\n", f"{inspect.getdoc(Program)}\n", *calls()]
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(page())
