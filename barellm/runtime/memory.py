"""How much memory a process may have, and the refusal of a plan that will not fit."""

import os
import re
from pathlib import Path

from barellm.errors import UserError
from barellm.program.planner import Plan
from barellm.runtime import cgroup

PLURAL = {"parameter": "parameters", "gradient": "gradients", "state": "optimizer state", "cache": "caches",
          "constant": "constants", "input": "inputs", "activation": "activations", "output": "outputs",
          "scratch": "scratch"}  # fmt: skip


def memory_limit() -> tuple[int, str]:
    """The limit of a run's memory in bytes, and what sets it: BARELLM_MEMORY_LIMIT, else the control group's limit if it is below
    the machine's memory, else that memory."""
    requested = os.environ.get("BARELLM_MEMORY_LIMIT")
    if requested:
        return _parse(requested), "BARELLM_MEMORY_LIMIT"
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [(physical, "this machine's memory")]
    limits += [(nbytes, f"the cgroup's limit ({path})") for nbytes, path in cgroup.memory_limits()]
    return min(limits)


def available() -> int:
    """Bytes that this process may still take: what its limit leaves, and what the machine has free or can free at once."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        (free,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except (OSError, ValueError):  # not Linux
        return memory_limit()[0] // 2
    return min(memory_limit()[0] - resident, int(free) << 10)


class TooLarge(UserError):
    """A plan that needs more than `limit` bytes."""

    def __init__(self, message: str, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


def check_fits(plan: Plan, *, what: str, limit: tuple[int, str] | None = None) -> None:
    """Refuse, with the arithmetic, an arena beyond the limit. `what` names the sizes that the user chose."""
    available, source = limit or memory_limit()
    if plan.arena_bytes <= available:
        return
    parts = sorted(plan.by_role().items(), key=lambda part: -part[1])
    sums = " + ".join(f"{PLURAL[role]} {nbytes / 2**20:.1f}" for role, nbytes in parts if nbytes)
    needs = f"{what} needs {plan.arena_bytes / 2**20:.1f} MiB ({sums})"
    raise TooLarge(f"{needs}, {source} is {available / 2**20:.1f} MiB", available)


def _parse(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not found:
        raise UserError(f"BARELLM_MEMORY_LIMIT is {text!r}, expected bytes, or a number with K, M, G or T")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))
