"""What every measurement of a step says of itself, and the way to the baselines."""

import contextlib
import os
import platform
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from barellm.config import Config
from barellm.cpu import threads
from barellm.errors import UserError
from barellm.runtime.backend import backend

CHECKOUT = Path(__file__).parents[3]


def in_checkout(name: str, option: str = "--baselines") -> Any:
    """A module of the checkout's benchmarks/, where the baselines and their scripts lie: an installed package has none of them, and
    gets a UserError that names the `option`."""
    folder = CHECKOUT / "benchmarks"
    if not folder.is_dir():
        raise UserError(f"{folder} is missing: {option} needs a checkout of the project, not an installed package")
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return import_module(f"benchmarks.{name}")


def description(kind: str, config: Config, device: str = "cpu") -> dict[str, Any]:
    """The facts of a measurement: what was measured, when and where."""
    return {
        "kind": kind, "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "preset": config.preset,
        "batch": config.train.micro_batch_size, "seq": config.train.seq, "dtype": config.train.dtype,
        "recompute": config.train.recompute, "moments": config.optim.moments, "machine": machine(device),
    }  # fmt: skip


def machine(device: str = "cpu") -> dict[str, Any]:
    """Facts about the machine that results depend on: the backend's own description, processor, memory in bytes, versions."""
    described, info = backend(device).describe(), {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        **described, **({"gpu": described["processor"]} if device == "cuda" else {}),
        "processor": f"{info.get('model name', platform.processor())} family {info.get('cpu family')} model {info.get('model')}",
        "cores": len(threads.logical_cpus()), "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(), "python": platform.python_version(),
        "huge_pages": huge.read_text().strip() if huge.exists() else None,
    }  # fmt: skip
