"""The tuning database as the CUDA backend uses it: tiles of Triton's products, forms of Hopper's. A key has the card's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from barellm.cuda import choices
from barellm.cuda.choices import Form, Tile
from barellm.cuda.kernel import Target
from barellm.runtime import artefacts
from barellm.runtime.tuning import Database, Entry, requested

SHIPPED = Path(__file__).with_name("tuned.json")  # what was measured on cards that people have: nothing yet
KERNELS = ("matmul", "hopper", "hopper_roles", "epilogue", "parts", "common")
SOURCES = ("choices.py", "tuning.py", *(f"kernels/{name}.py" for name in KERNELS))

Choice = Tile | Form
FETCHED = ("residual", "gelu_backward", "add", "start")  # epilogues that read a matrix


@dataclass(frozen=True)
class Product:
    """`rows` x `cols` of a result from a contraction of `depth`. Role "nt": y = x weight^T, "nn": dx = dy weight; "tn": gradient
    of the weight. Of "tn" the depth is the tokens, of the others the rows are. `kernel`: "triton" or "hopper", whose forms depend
    on the `epilogue` too."""

    role: str
    dtype: str
    rows: int
    cols: int
    depth: int
    kernel: str = "triton"
    epilogue: str = ""


_forced: list[Choice] = []
_asked: list[dict[Product, None]] = []


@cache
def _opened(folder: Path, version: str) -> Database:
    return Database(folder, version)


@cache
def version() -> str:
    h = hashlib.sha256()
    artefacts.add_sources(h, [Path(__file__).parent / name for name in SOURCES])
    return f"cuda-{h.hexdigest()[:16]}"


def folder() -> Path:
    return artefacts.cache_folder("tuning")


def database() -> Database:
    """That of this version of the kernels, read once a process."""
    return _opened(folder(), version())


@cache
def shipped() -> dict[str, Entry]:
    return json.loads(SHIPPED.read_text())["entries"]


def machine(target: Target) -> str:
    """The part of a key that says where its timings hold."""
    return f"{target.name or 'any card'}, sm_{target.arch}, {target.sms} multiprocessors"


def key(target: Target, p: Product) -> str:
    what = f"hopper {p.epilogue}".strip() + " " if p.kernel == "hopper" else ""
    return f"{machine(target)}: {what}{p.role} {p.dtype}, {p.rows} x {p.cols} from {p.depth}"


def choices_of(product: Product, arch: int) -> tuple[Choice, ...]:
    """All that there are."""
    return choices.forms() if product.kernel == "hopper" else choices.tiles(product.dtype, arch)


def from_entry(entry: Any, product: Product, arch: int) -> Choice:
    """ValueError for what is no tile, or form, for this architecture."""
    kind, name = (Form, "form") if product.kernel == "hopper" else (Tile, "tile")
    try:
        choice = kind(**entry[name])
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a {name} ({error!r})") from error
    if choice not in choices_of(product, arch):
        raise ValueError(f"sm_{arch} has no {name} {choice} for {product.dtype}")
    return choice


def to_entry(choice: Choice) -> dict[str, Any]:
    return {"form" if isinstance(choice, Form) else "tile": asdict(choice)}


def default(target: Target, p: Product) -> Any:
    if p.kernel == "hopper":
        return choices.form(choices.columns(p.role, p.rows, p.cols, p.depth), fetched=p.epilogue in FETCHED)
    return choices.tile(p.role, p.rows, p.cols, p.depth, p.dtype, target.arch)


def choose(target: Target, product: Product) -> Any:
    """The tile or form for a product: the tuned one, else the default. Tokens are the planned ones."""
    for found in _asked:
        found.setdefault(product)
    if _forced:
        return _forced[-1]
    if requested():
        at = key(target, product)
        entry = database().entries.get(at) or shipped().get(at)
        if entry is not None:
            try:
                return from_entry(entry, product, target.arch)
            except ValueError as error:
                database().ignore(at, str(error))
    return default(target, product)


def ship(found: dict[str, Entry], path: Path = SHIPPED) -> int:
    """Put entries that were measured on a card among those that the package has. The number of those that are new or other."""
    entries = json.loads(path.read_text())["entries"]
    changed = {at: {k: v for k, v in entry.items() if k in ("tile", "form", "ratio")} for at, entry in found.items()}
    changed = {at: entry for at, entry in changed.items() if entries.get(at) != entry}
    path.write_text(json.dumps({"entries": dict(sorted((entries | changed).items()))}, indent=1) + "\n")
    return len(changed)


@contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Every product that is lowered meanwhile takes this tile or form."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


@contextmanager
def watching() -> Iterator[dict[Product, None]]:
    """The products that are lowered meanwhile."""
    found: dict[Product, None] = {}
    _asked.append(found)
    try:
        yield found
    finally:
        _asked.remove(found)
