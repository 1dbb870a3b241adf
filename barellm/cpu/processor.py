"""The processor's model, and its caches."""

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

TYPICAL = {1: 32 << 10, 2: 1 << 20, 3: 16 << 20}  # bytes by level, where the system does not tell
CPUINFO = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")


def sysctl(name: str) -> bytes | None:
    """The value of macOS's system variable of this name: a number in little-endian bytes, or a text and a zero. Else None."""
    if sys.platform != "darwin":
        return None
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.raw[: size.value]


def sysctl_number(*names: str) -> int:
    """The first that macOS knows and that is not 0; else 0."""
    return next((n for name in names if (n := int.from_bytes(sysctl(name) or b"", "little"))), 0)


@cache
def caches() -> dict[int, int]:
    """The sizes of the data caches in bytes, by level, as one core sees them: from the system, else typical ones."""
    return known_caches() or dict(TYPICAL)


def known_caches() -> dict[int, int]:
    """The sizes that the system tells, by level: from macOS's sysctl or Linux's /sys; {} if none."""
    sizes = {}
    for level, names in {1: "l1dcachesize", 2: "l2cachesize", 3: "l3cachesize"}.items():
        # Performance cores first: Apple's efficiency cores have less.
        if size := sysctl_number(f"hw.perflevel0.{names}", f"hw.{names}"):
            sizes[level] = size
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                sizes[int(level)] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sizes


@cache
def name() -> str:
    """The processor's model and caches, as a text that tells models apart: timings of one are of no use on another."""
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read(4096)  # the first core; a machine may have hundreds
    except OSError:
        text = ""
    first = text.split("\n\n")[0]
    facts = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    known = {k.strip(): v.strip() for k, v in facts.items()}
    model = " ".join(known[k] for k in CPUINFO if k in known) or brand() or platform.processor() or platform.machine()
    return f"{model}, " + " ".join(f"L{level} {size >> 10}K" for level, size in sorted(caches().items()))


def brand() -> str | None:
    """The model as macOS calls it."""
    return (sysctl("machdep.cpu.brand_string") or b"").rstrip(b"\0").decode() or None
