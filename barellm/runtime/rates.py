"""The rates of this machine, measured once and kept: FLOP/s of matmuls by dtype, bytes/s of memory by mix of reads and writes.

They are what rooflines and MFU are estimated from, so all commands and runs share them. `barellm doctor --measure` measures them
again. A rate is the best of a few measurements. Where these differ much, something else used the machine: the rate is noisy, every
command says so, and the next process measures once more and keeps the better one."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from barellm.errors import UserError
from barellm.runtime.artefacts import cache_folder
from barellm.runtime.tuner.database import Database

REPEATS = 3
NOISY = 0.1  # relative difference of the best measurement and the worst above which a rate may be too low


@dataclass(frozen=True)
class Rate:
    value: float  # per second
    spread: float  # 1 - worst / best of its measurements

    @property
    def noisy(self) -> bool:
        return self.spread > NOISY


def rate(machine: str, name: str, measure: Callable[[], float], *, renew: bool = False) -> Rate:
    """The rate `name` of a machine (a text with all that it depends on), per second: the best of REPEATS calls of `measure`, which
    takes one measurement. Kept for this process and in the database; a database that can't be written is no error. Measured if
    missing, once per process if the stored one is noisy, and with `renew` in any case."""
    key = f"{machine}, {name}"
    kept = _process.get(key) or _kept(key)
    if kept and not renew and (key in _process or not kept.noisy):
        return kept
    samples = [measure() for _ in range(REPEATS)]
    found = Rate(max(samples), 1 - min(samples) / max(samples))
    if kept and not renew and kept.value > found.value:  # noise only slows: the higher value is nearer to the truth
        found = Rate(kept.value, found.spread)
    _process[key] = found
    if base := _database():
        with contextlib.suppress(OSError):
            base.change({key: {"rate": found.value, "spread": found.spread}})
    return found


def kept_rates(machine: str) -> dict[str, Rate]:
    """What was measured of a machine: name -> rate."""
    base, begin = _database(), f"{machine}, "
    return {
        key.removeprefix(begin): found for key in (base.entries if base else ()) if key.startswith(begin) and (found := _kept(key))
    }


_process: dict[str, Rate] = {}  # measured by this process: a noisy rate once
_databases: dict[Path, Database] = {}


def _database() -> Database | None:
    with contextlib.suppress(UserError):
        folder = cache_folder("rates")
        return _databases.setdefault(folder, Database(folder, "rates-1"))
    return None


def _kept(key: str) -> Rate | None:
    """A rate of the database; None where there is none or it is damaged."""
    base = _database()
    entry = base.entries.get(key, {}) if base else {}
    value, spread = entry.get("rate"), entry.get("spread")
    if isinstance(value, float) and isinstance(spread, float) and 0 < value < inf and 0 <= spread <= 1:
        return Rate(value, spread)
    return None
