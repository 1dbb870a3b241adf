"""The static import closure of a test file: every file of the project that may decide its outcome.

Followed are imports at any depth, inside functions too; `import_module` of a constant, and of an f-string, which takes all
modules that it may name; modules that a string names, as `monkeypatch` and services of compilers are given them, scripts in
strings, and `-m module`; files by their names (golden.json), and what else lies in the folder of a package. Of a package of which
only a submodule is imported, what runs at import counts. Too many files cost a run, too few hide a failure: so a docs page counts
whose name stands in a string.

A test of whose closure something cannot be followed by reading has no cached results.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("anatomy", "barellm", "benchmarks", "docs", "examples", "tests")
SCANS = {"glob", "rglob", "iterdir", "listdir", "scandir", "iter_modules", "walk_packages"}
# These import a module by a name that they are given, which stands as a constant where they are given it, or is that of an object
# whose module is imported already.
GIVEN = {
    "barellm/cpu/sources.py", "barellm/cuda/compile.py", "barellm/cuda/lang.py", "barellm/data/reading.py",
    "barellm/models/__init__.py", "barellm/runtime/compilers.py", "barellm/runtime/tuner/child.py", "barellm/training/run.py",
}  # fmt: skip
IN_TEXT = re.compile(r"\bfrom +([\w.]+) +import +\(?([\w, ]+)|\bimport +([\w.]+)")
DOTTED = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")
DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Uses(NamedTuple):
    """What some statements name: modules whole, files, and what cannot be followed."""

    modules: set[str]
    files: set[Path]
    unknown: set[str]


def closure(test: Path, extra: Iterable[str] = ()) -> tuple[set[Path], set[str]]:
    """The files that decide whether a test passes, and what of them cannot be followed; `extra`: paths that its mark names. Of each
    conftest.py count those fixtures whose names occur. What it imports to set up every test is left out: where that breaks, every
    test does."""
    files = _followed([test, *(file for path in extra for file in _below(path))])
    conftests = [path for folder in test.parents if (path := folder / "conftest.py").is_file() and ROOT in path.parents]
    takers = [test, *conftests, *_of_tests(_whole(test))]
    names = {name for file in takers for name in _names(file)}
    for file in conftests:
        wanted = [node for node in _tree(file).body if _is_fixture(node) and node.name in names]
        files |= _followed(_files(_uses(file, _reached(file, wanted))))
    code = [file for file in files if file.suffix == ".py" and file.relative_to(ROOT).as_posix() not in GIVEN]
    lost = {(file, what) for file in code for what in _whole(file).unknown}
    tools = {ROOT / "pyproject.toml", *conftests}
    for file in conftests:
        tools |= {tool for used in (file, *_of_tests(_whole(file))) for tool in (used, *_of_tests(_whole(used)))}
    return files | tools, {what for file, what in lost if "imports" in what or ROOT / "tests" in file.parents}


def _of_tests(uses: Uses) -> list[Path]:
    return [file for file in _files(uses) if ROOT / "tests" in file.parents and file.suffix == ".py"]


def _followed(start: Iterable[Path]) -> set[Path]:
    """These files with all that they use, whole, and the packages around each, with what runs at import."""
    whole, packages, todo = set[Path](), set[Path](), [*start]
    while todo:
        file = todo.pop()
        if file in whole:
            continue
        whole.add(file)
        if file.suffix == ".py":
            todo += _files(_whole(file))
            for package in _packages(file) - packages:
                packages.add(package)
                todo += _files(_at_import(package))
    return whole | packages | {file for folder in {f.parent for f in whole | packages} for file in _data(folder)}


def _files(uses: Uses) -> set[Path]:
    return {file for name in uses.modules if (file := _file(name))} | uses.files


def _packages(file: Path) -> set[Path]:
    """The `__init__` of every package around a file."""
    around = (folder / "__init__.py" for folder in file.parents if ROOT in folder.parents)
    return {path for path in around if path != file and path.is_file()}


@cache
def _file(module: str) -> Path | None:
    """The file of a module of the project."""
    path = ROOT.joinpath(*module.split("."))
    found = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in found if file.is_file()), None) if module.split(".")[0] in FOLDERS else None


@cache
def _modules() -> dict[str, None]:
    found = (file.relative_to(ROOT) for file in _all_files() if file.suffix == ".py")
    return dict.fromkeys(".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in found)


def sources() -> Iterator[Path]:
    return (file for folder in FOLDERS for file in _below(folder))


_all_files = cache(lambda: tuple(sources()))


@cache
def _by_name() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in _all_files():
        if file.name != "__init__.py":
            found.setdefault(file.name, []).append(file)
    return found


def _below(path: str) -> Iterator[Path]:
    at = ROOT / path
    if at.is_file():
        yield at
    elif not at.exists() and path not in FOLDERS:
        raise FileNotFoundError(f"a mark names {path}, which does not exist")
    for folder, folders, files in os.walk(at):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        yield from (Path(folder, name) for name in files)


@cache
def _data(folder: Path) -> tuple[Path, ...]:
    """What is no module in the folder of a package, and in folders of it that are no packages."""
    if not (folder / "__init__.py").is_file():
        return ()
    below = (file for path in folder.iterdir() if not (path / "__init__.py").is_file() for file in _below(str(path)))
    return tuple(file for file in below if file.suffix not in (".py", ".pyc"))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def _whole(file: Path) -> Uses:
    return _uses(file, _tree(file).body)


@cache
def _names(file: Path) -> frozenset[str]:
    """The fixtures that a file may ask for: parameters of its functions, and words for pytest."""
    found: set[str] = set()
    for node in ast.walk(_tree(file)) if file.suffix == ".py" else ():
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Call) and _name(node) in ("usefixtures", "getfixturevalue"):
            found |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    return frozenset(found)


def _is_fixture(node: ast.stmt) -> bool:
    marks = [ast.unparse(mark) for mark in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
    return any("fixture" in mark and "autouse" not in mark for mark in marks)


@cache
def _at_import(file: Path) -> Uses:
    """What a module uses when it is imported, and none of its functions is called from elsewhere."""
    return _uses(file, _reached(file, [node for node in _tree(file).body if not isinstance(node, DEFINES)]))


def _reached(file: Path, start: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of a file with the functions and classes of it that they name, at any depth, and the imports of such names."""
    body = _tree(file).body
    found, names, new = list(start), set[str](), list(start)
    while new:
        names |= {node.id for part in new for node in ast.walk(part) if isinstance(node, ast.Name)}
        new = [node for node in body if node not in found and names & _binds(node)]
        found += new
    return found


def _binds(node: ast.stmt) -> set[str]:
    """The names that a function, a class or an import gives to a module."""
    if isinstance(node, DEFINES):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return set()


def _uses(file: Path, nodes: Iterable[ast.stmt]) -> Uses:
    """What these statements of a file name."""
    found = Uses(set(), set(), set())
    own = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    package = own if file.name == "__init__.py" else own.rpartition(".")[0]
    docstrings: set[int] = set()
    for node in (part for top in nodes for part in ast.walk(top)):
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.Import):
            found.modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package.split(".")[: len(package.split(".")) + 1 - node.level]] * bool(node.level))
            _from(found, ".".join(filter(None, (base, node.module))), [alias.name for alias in node.names])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            _in_text(found, file, node.value)
        elif isinstance(node, ast.List | ast.Tuple):
            words = [part.value if isinstance(part, ast.Constant) else None for part in node.elts]
            run = [str(name) for flag, name in pairwise(words) if flag == "-m"]
            found.modules.update(f"{name}{end}" for name in run for end in ("", ".__main__"))
        elif isinstance(node, ast.Call):
            _called(found, own, file, node)
    return found


def _from(found: Uses, base: str, names: Iterable[str]) -> None:
    """`from base import names`: modules, or what the base itself has."""
    for name in names:
        found.modules.add(f"{base}.{name}" if _file(f"{base}.{name}") else base)


def _in_text(found: Uses, file: Path, text: str) -> None:
    for base, names, module in IN_TEXT.findall(text):
        _from(found, base, re.findall(r"\w+", names)) if base else found.modules.add(module)
    for dotted in DOTTED.findall(text):
        parts = dotted.split(".")
        known = [".".join(parts[:n]) for n in range(len(parts), 1, -1) if _file(".".join(parts[:n]))]
        found.modules.update(known[:1])
    if len(text) < 200 and "." in text:
        found.files.update(_by_name().get(text.rpartition("/")[2], ()))


def _called(found: Uses, own: str, file: Path, call: ast.Call) -> None:
    name, where = _name(call), f"{file.relative_to(ROOT)}:{call.lineno}"
    if name in SCANS:
        found.unknown.add(f"{where} looks through a folder")
    if name not in ("import_module", "__import__") or not call.args:
        return
    target = call.args[0]
    if isinstance(target, ast.Constant):
        found.modules.add(str(target.value))
    elif isinstance(target, ast.JoinedStr):
        pattern = re.compile("".join(_pattern(part, own) for part in target.values))
        found.modules.update(module for module in _modules() if pattern.fullmatch(module))
    else:
        found.unknown.add(f"{where} imports by a name that cannot be read there")


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _pattern(part: ast.expr, own: str) -> str:
    if isinstance(part, ast.Constant):
        return re.escape(str(part.value))
    return re.escape(own) if "__name__" in ast.unparse(part) else r"[\w.]+"
