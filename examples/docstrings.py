"""Prompts and answers out of Python's own library: the head of a function, and the first line of its docstring.

    python examples/docstrings.py docstrings.jsonl

docs/finetuning.md trains a model on them.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def examples(source: str) -> Iterator[dict[str, str]]:
    """The functions of a module that have a docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
            line = said.splitlines()[0].strip()
            if 10 <= len(line) <= 100:
                yield {"prompt": f"def {node.name}({ast.unparse(node.args)}):\n", "answer": f'    """{line}"""\n'}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python examples/docstrings.py FILE.jsonl")
    root, found = Path(sysconfig.get_path("stdlib")), {}
    warnings.simplefilter("ignore", SyntaxWarning)
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(root).parts):
            try:
                found |= {one["prompt"]: one for one in examples(path.read_text(encoding="utf-8"))}
            except (SyntaxError, UnicodeDecodeError):
                continue  # files that are wrong on purpose
    with open(sys.argv[1], "w") as file:
        file.writelines(json.dumps(one) + "\n" for one in found.values())
    print(f"{sys.argv[1]}: {len(found)} examples")


if __name__ == "__main__":
    main()
