"""The tuning database as the CUDA backend uses it: tiles of Triton's products. Hopper's own products choose by arithmetic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from barellm.cuda import choices
from barellm.cuda.choices import Tile
from barellm.cuda.kernel import Target
from barellm.runtime import artefacts
from barellm.runtime.tuning import Database, Entry, requested

SHIPPED = Path(__file__).with_name("tuned.json")  # what was measured on cards that people have: nothing yet
SOURCES = ("choices.py", "tuning.py", *(f"kernels/{name}.py" for name in ("matmul", "epilogue", "parts", "common")))

Product = tuple[str, str, int, int, int]  # role, dtype, rows, cols, depth

_forced: list[Tile] = []
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
    return f"cuda, sm_{target.arch}, {target.sms} multiprocessors"


def key(target: Target, product: Product) -> str:
    role, dtype, rows, cols, depth = product
    return f"{machine(target)}: {role} {dtype}, {rows} x {cols} from {depth}"


def from_entry(entry: Any, dtype: str, arch: int) -> Tile:
    """ValueError for what is no tile for this architecture."""
    try:
        tile = Tile(**entry["tile"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a tile ({error!r})") from error
    if tile not in choices.tiles(dtype, arch):
        raise ValueError(f"sm_{arch} has no tile {tile} for {dtype}")
    return tile


def to_entry(tile: Tile) -> dict[str, Any]:
    return {"tile": asdict(tile)}


def default(target: Target, product: Product) -> Tile:
    role, dtype, rows, cols, depth = product
    return choices.tile(role, rows, cols, depth, dtype, target.arch)


def choose(target: Target, product: Product) -> Tile:
    """The tile for a product: the tuned one, else the default. Tokens are the planned ones."""
    for found in _asked:
        found.setdefault(product)
    if _forced:
        return _forced[-1]
    if requested():
        at = key(target, product)
        entry = database().entries.get(at) or shipped().get(at)
        if entry is not None:
            try:
                return from_entry(entry, product[1], target.arch)
            except ValueError as error:
                database().ignore(at, str(error))
    return default(target, product)


@contextmanager
def forced(tile: Tile) -> Iterator[None]:
    """Every product that is lowered meanwhile takes this tile."""
    _forced.append(tile)
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
