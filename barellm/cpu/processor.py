"""Which processor this is, and its caches."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

LINE = 64
TYPICAL = {1: 32 << 10, 2: 1 << 20, 3: 16 << 20}  # bytes by level, where the system does not tell
CPUINFO = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")


@cache
def caches() -> dict[int, int]:
    """Bytes of the data caches by level, as one core sees them."""
    found = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[int(level)] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return found or dict(TYPICAL)


@cache
def name() -> str:
    """The model in words that tell one from another: a database of timings is no use on another model."""
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read(4096)  # the first core; a machine may have hundreds
    except OSError:
        text = ""
    first = text.split("\n\n")[0]
    facts = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    known = {k.strip(): v.strip() for k, v in facts.items()}
    model = " ".join(known[k] for k in CPUINFO if k in known) or platform.processor() or platform.machine()
    return f"{model}, " + " ".join(f"L{level} {size >> 10}K" for level, size in sorted(caches().items()))
