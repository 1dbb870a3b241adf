"""The tuning database (autotuning cache) of the CPU: keys of GEMM problems, GemmConfigs as JSON entries."""

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from barellm.cpu import jit, processor, sources
from barellm.cpu.gemm_config import KC_UNIT, ORDERS, OVERLAPS, SKINNY_KIND, GemmConfig, SkinnyGemmConfig, Tile, default, tiles
from barellm.cpu.isa import ISA
from barellm.runtime.tuner.database import Database, Entry, requested
from barellm.runtime.tuner.problem import given_config

if TYPE_CHECKING:
    from barellm.cpu.kernel import Lowering

TUNED = ("barellm.cpu.kernels.gemm.gemm", "barellm.cpu.kernels.gemm.weight_gradient", "barellm.cpu.kernels.gemm.skinny_gemm")


def version() -> str:
    """Timings hold as long as the GEMM kernels come from the same files and the same compiler."""
    return _version(sources.digest(*TUNED), jit.versions())


@cache
def _version(made: str, compiled_by: str) -> str:
    return hashlib.sha256(f"{made} {compiled_by}".encode()).hexdigest()[:16]


def folder() -> Path:
    return jit.cache_folder().parent / "tuning"


def database() -> Database:
    """The database of this version of the GEMM kernels, read once a process."""
    return Database.opened(folder(), version())


def machine(isa: ISA, threads: int) -> str:
    """The part of a key that says where its timings hold."""
    return f"cpu, {processor.name()}, {isa.name} {isa.cpu}, {threads} threads"


def key(isa: ISA, threads: int, kind: str, dtype: str, cols: int, depth: int, rows: int) -> str:
    return f"{machine(isa, threads)}: {kind} {dtype}, {rows} x {cols} from {depth}"


def count(isa: ISA, threads: int) -> int:
    """GEMM problems tuned on a machine like this, for this version, for which another config than the default is best."""
    return sum(at.startswith(machine(isa, threads)) for at in database().entries)


def to_entry(config: GemmConfig | SkinnyGemmConfig) -> dict[str, Any]:
    if isinstance(config, SkinnyGemmConfig):
        return {"panels": config.panels, "unroll": config.unroll, "prefetch": config.prefetch}
    return {
        "tile": [config.tile.mr, config.tile.vectors], "mc": [config.mc, config.long_mc], "nc": config.nc, "order": config.order,
        "kc": config.kc, "overlap": config.overlap,
    }  # fmt: skip


def from_entry(entry: Any, isa: ISA, kind: str, dtype: str, depth: int) -> GemmConfig:
    """The config of a database entry. ValueError if the entry is malformed, or this GEMM cannot have that config on this ISA."""
    from barellm.cpu.kernels.gemm import amx  # kernels import gemm_config

    try:
        tile = Tile(*entry["tile"])
        config = GemmConfig(tile, *entry["mc"], **{name: entry[name] for name in ("nc", "order", "kc", "overlap")})
        sizes = (tile.mr, tile.vectors, config.mc, config.long_mc, config.nc)
        plain = all(type(n) is int and 0 < n < 1 << 24 for n in sizes) and config.order in ORDERS
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected tile, mc, nc, order, kc, overlap ({error!r})") from error
    if not plain or config.mc % tile.mr or config.long_mc % tile.mr or config.nc % tile.nr(isa):
        raise ValueError(f"blocks must be multiples of the tile: {config}")
    if tile not in tiles(isa, dtype):
        raise ValueError(f"{isa.name} has no tile of {tile.mr} x {tile.vectors} vectors for {dtype}")
    kc, on_tiles = config.kc, amx.uses_tiles(isa, dtype)
    if config.overlap not in OVERLAPS or (on_tiles and config.overlap != OVERLAPS[0]):
        raise ValueError(f"{config.overlap!r} is no overlap that {kind} in {dtype} can have")
    if kc is not None:
        fits = type(kc) is int and (kc == depth or (0 < kc < depth and kc % KC_UNIT == 0))
        if on_tiles or kind == "weight_gradient" or not fits:
            raise ValueError(f"{kc!r} of a depth of {depth} is no KC that {kind} in {dtype} can have")
    return config


def skinny_from_entry(entry: Any, isa: ISA, dtype: str, cols: int, depth: int) -> SkinnyGemmConfig:
    """The config of a skinny GEMM's entry."""
    from barellm.cpu.kernels.gemm.skinny_gemm import skinny_configs  # kernels import this module

    configs = skinny_configs(isa, dtype, cols, depth)
    matching = [config for config in configs if to_entry(config) == entry]
    if not matching:
        raise ValueError(f"expected panels, unroll, prefetch of one of {len(configs)} configs, found {entry!r}")
    return matching[0]


def select_skinny_config(c: "Lowering", kind: str, dtype: str, cols: int, depth: int) -> SkinnyGemmConfig:
    """The given, the tuned or the default config of a skinny GEMM, for any number of rows."""
    from barellm.cpu.kernels.gemm.skinny_gemm import FEW, skinny_configs  # kernels import this module

    given = given_config(c.config, kind, SkinnyGemmConfig)
    gemm = kind, dtype, cols, depth, FEW
    return given or _tuned(c.isa, c.threads, gemm) or skinny_configs(c.isa, dtype, cols, depth)[0]


def select_config(c: "Lowering", kind: str, dtype: str, cols: int, depth: int, rows: int) -> GemmConfig:
    """The given, the tuned or the default config of a GEMM with a result (rows, cols) and a contraction over `depth`. The number of
    tokens (rows, or the depth of a weight gradient), which a run may lessen, is the planned one."""
    gemm = kind, dtype, cols, depth, rows
    return given_config(c.config, kind, GemmConfig) or _tuned(c.isa, c.threads, gemm) or default(c.isa, *gemm)


def _tuned(isa: ISA, threads: int, gemm: tuple[str, str, int, int, int]) -> Any:
    """The tuned config of a GEMM (kind, dtype, cols, depth, rows) on this machine; None if none is wanted or known."""
    if isa.triple or not requested():  # another machine's code
        return None
    kind, dtype, cols, depth, _ = gemm

    def decode(entry: Entry) -> Any:
        if kind.startswith(SKINNY_KIND):
            return skinny_from_entry(entry.get("choice"), isa, dtype, cols, depth)
        return from_entry(entry.get("choice"), isa, kind, dtype, depth)

    tuned = database()
    at = key(isa, threads, *gemm) if tuned.entries else ""
    return tuned.decoded(at, tuned.entries.get(at), decode)
