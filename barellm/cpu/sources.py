"""Which files decide the machine code of a kernel: its own module, what that imports, and what every kernel is emitted with.

Keys of cached objects hold a digest of these files and of no others, so that an edit elsewhere throws nothing away. Imports are
read from the text: no file has to be loaded for it."""

import hashlib
import marshal
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from barellm.runtime import artefacts

ROOT = Path(__file__).parents[2]
EMITTED_WITH = "barellm.cpu.specialisation"
# What runs before code is emitted. Its results reach the code as operands and constants, which are part of the key themselves;
# of what a kernel's module imports from here, plain values count.
BEFORE = frozenset({
    "barellm.cpu.kernel", "barellm.cpu.sources", "barellm.cpu.tuning", "barellm.cpu.processor", "barellm.errors",
    "barellm.program.ops.base", "barellm.program.tensor", "barellm.runtime.artefacts", "barellm.runtime.lowering",
})  # fmt: skip
IMPORT = re.compile(r"^[ \t]*from (barellm[\w.]*) import (\([^)]*\)|[^\n#]*)", re.M)


@cache
def path_of(module: str) -> Path | None:
    """The file of a module of barellm."""
    at = f"{ROOT}/{module.replace('.', '/')}"
    return next((Path(p) for p in (f"{at}.py", f"{at}/__init__.py") if os.path.isfile(p)), None)


def imported(text: str) -> Iterable[tuple[str, str]]:
    """(module, name) for each name that a source imports from barellm; (module, "") for a whole module."""
    for package, names in IMPORT.findall(text):
        path = path_of(package)
        of_package = path is not None and path.name == "__init__.py"
        for word in names.strip("()").split(","):
            name = word.split("#")[0].strip().split(" ")[0]
            if name and of_package and path_of(f"{package}.{name}"):
                yield f"{package}.{name}", ""
            elif name:
                yield package, name


@cache
def _imports(path: Path) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(set(imported(path.read_text()))))


@cache
def _file_digest(path: Path) -> bytes:
    h = hashlib.sha256()
    artefacts.add_sources(h, [path])
    return h.digest()


@cache
def files(*modules: str) -> tuple[Path, ...]:
    """The source files of these modules and of all that they import from barellm, directly or not, without those in BEFORE."""
    paths: dict[str, Path] = {}
    queue = list(modules)
    while queue:
        name = queue.pop()
        path = path_of(name)
        if path and name not in paths and name not in BEFORE:
            paths[name] = path
            queue += [module for module, _ in _imports(path)]
    return tuple(paths[name] for name in sorted(paths))


def _values(paths: Iterable[Path]) -> list[tuple[str, str, str]]:
    """Plain values that these files take from modules that run before."""
    names = {link for path in paths for link in _imports(path) if link[0] in BEFORE and link[1]}
    values = {link: getattr(import_module(link[0]), link[1]) for link in names}
    plain = {link: value for link, value in values.items() if not callable(value) and not hasattr(value, "__file__")}
    return sorted((*link, repr(value)) for link, value in plain.items())


@cache
def digest(*modules: str) -> str:
    """A digest of all that decides what the kernels of these modules become."""
    paths = files(EMITTED_WITH, *modules)
    h = hashlib.sha256(repr(_values(paths)).encode())
    for path in paths:
        h.update(_file_digest(path))
    return h.hexdigest()


@cache
def of_kernel(emit: Callable[..., None]) -> str:
    """Digest of all that decides what a kernel becomes, whether it stands in barellm, in another file, or in a notebook's cell."""
    module = emit.__module__ or ""
    if module.startswith("barellm.") and path_of(module):
        return digest(module)
    path = Path(emit.__code__.co_filename)
    own = path.read_bytes() if path.is_file() else marshal.dumps(emit.__code__)
    used = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in emit.__globals__.values()}
    known = sorted(name for name in used if isinstance(name, str) and name.startswith("barellm."))
    return hashlib.sha256(own + digest(*known).encode()).hexdigest()


def forget() -> None:
    """A kernel was defined again: files may have changed since they were read."""
    for known in (path_of, _imports, _file_digest, files, digest, of_kernel):
        known.cache_clear()
