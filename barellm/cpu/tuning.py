"""The tuning database as the CPU backend uses it: keys for products, choices as entries."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from barellm.cpu import jit, processor, sources
from barellm.cpu.gemm_config import (
    AHEAD,
    FEW_ROLE,
    ORDERS,
    PART_UNIT,
    GemmConfig,
    SkinnyGemmConfig,
    Tile,
    default,
    tiles,
)
from barellm.cpu.isa import ISA
from barellm.runtime.tuning import Database, requested

TUNED = (
    "barellm.cpu.kernels.gemm.gemm",
    "barellm.cpu.kernels.gemm.weight_gradient",
    "barellm.cpu.kernels.gemm.skinny_gemm",
)


@cache
def _opened(folder: Path, version: str) -> Database:
    return Database(folder, version)


def version() -> str:
    """Timings hold as long as the products are made from the same files, by the same compiler."""
    return _version(sources.digest(*TUNED), jit.versions())


@cache
def _version(made: str, compiled_by: str) -> str:
    return hashlib.sha256(f"{made} {compiled_by}".encode()).hexdigest()[:16]


def folder() -> Path:
    return jit.cache_folder().parent / "tuning"


def database() -> Database:
    """The database of this version of the products, read once a process."""
    return _opened(folder(), version())


def machine(isa: ISA, threads: int) -> str:
    """The part of a key that says where its timings hold."""
    return f"cpu, {processor.name()}, {isa.name} {isa.cpu}, {threads} threads"


def key(isa: ISA, threads: int, role: str, dtype: str, cols: int, depth: int, rows: int) -> str:
    return f"{machine(isa, threads)}: {role} {dtype}, {rows} x {cols} from {depth}"


def count(isa: ISA, threads: int) -> int:
    """Products that were tuned on a machine like this, by this version, and are not done best by their defaults."""
    return sum(at.startswith(machine(isa, threads)) for at in database().entries)


def to_entry(choice: GemmConfig | SkinnyGemmConfig) -> dict[str, Any]:
    if isinstance(choice, SkinnyGemmConfig):
        return {"spans": choice.spans, "together": choice.together, "fetch": choice.fetch}
    return {
        "tile": [choice.tile.mr, choice.tile.vectors],
        "rows": [choice.rows, choice.long_rows],
        "columns": choice.columns,
        "order": choice.order,
        "part": choice.part,
        "ahead": choice.ahead,
    }


def from_entry(entry: Any, isa: ISA, role: str, dtype: str, depth: int) -> GemmConfig:
    """The choice that an entry stands for. It is a ValueError if it is no choice for this product on this ISA."""
    from barellm.cpu.kernels.gemm import amx  # kernels import gemm_config

    try:
        tile = Tile(*entry["tile"])
        named = {name: entry[name] for name in ("columns", "order", "part", "ahead")}
        choice = GemmConfig(tile, *entry["rows"], **named)
        sizes = (tile.mr, tile.vectors, choice.rows, choice.long_rows, choice.columns)
        plain = all(type(n) is int and 0 < n < 1 << 24 for n in sizes) and choice.order in ORDERS
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected tile, rows, columns, order, part, ahead ({error!r})") from error
    if not plain or choice.rows % tile.mr or choice.long_rows % tile.mr or choice.columns % tile.nr(isa):
        raise ValueError(f"blocks must be multiples of the tile: {choice}")
    if tile not in tiles(isa, dtype):
        raise ValueError(f"{isa.name} has no tile of {tile.mr} x {tile.vectors} vectors for {dtype}")
    part, on_tiles = choice.part, amx.uses_tiles(isa, dtype)
    if choice.ahead not in AHEAD or (on_tiles and choice.ahead != AHEAD[0]):
        raise ValueError(f"{choice.ahead!r} is nothing that {role} in {dtype} can do ahead")
    if part is not None:
        fits = type(part) is int and (part == depth or (0 < part < depth and part % PART_UNIT == 0))
        if on_tiles or role == "weight_gradient" or not fits:
            raise ValueError(f"{part!r} of a depth of {depth} is no part that {role} in {dtype} can have")
    return choice


def few_from_entry(entry: Any, isa: ISA, dtype: str, cols: int, depth: int) -> SkinnyGemmConfig:
    """The same of a product of few rows."""
    from barellm.cpu.kernels.gemm.skinny_gemm import skinny_configs  # kernels import this module

    ways = skinny_configs(isa, dtype, cols, depth)
    found = [way for way in ways if to_entry(way) == entry]
    if not found:
        raise ValueError(f"expected spans, together, fetch of one of {len(ways)} ways, found {entry!r}")
    return found[0]


def select_skinny_config(isa: ISA, role: str, dtype: str, cols: int, depth: int, threads: int) -> SkinnyGemmConfig:
    """As `choose`, for a product of few rows, however many a run has."""
    from barellm.cpu.kernels.gemm.skinny_gemm import FEW, skinny_configs  # kernels import this module

    return _tuned(isa, threads, (role, dtype, cols, depth, FEW)) or skinny_configs(isa, dtype, cols, depth)[0]


def select_config(isa: ISA, role: str, dtype: str, cols: int, depth: int, rows: int, threads: int) -> GemmConfig:
    """The choice for a product whose result is (rows, cols) and whose contraction has `depth` elements: the tuned one, else the
    default. Sizes that a run may lessen (tokens: the rows of most roles, the depth of weight gradients) are the planned ones."""
    return _tuned(isa, threads, (role, dtype, cols, depth, rows)) or default(isa, role, dtype, cols, depth, rows)


def _tuned(isa: ISA, threads: int, product: tuple[str, str, int, int, int]) -> Any:
    if isa.triple or not requested():  # another machine's code
        return None
    found = database()
    entry = found.entries.get(key(isa, threads, *product)) if found.entries else None
    if entry is None:
        return None
    role, dtype, cols, depth, _ = product
    try:
        if role.startswith(FEW_ROLE):
            return few_from_entry(entry.get("choice"), isa, dtype, cols, depth)
        return from_entry(entry.get("choice"), isa, role, dtype, depth)
    except ValueError as error:
        found.ignore(f"{found.path}, {key(isa, threads, *product)!r}", str(error))
        return None
