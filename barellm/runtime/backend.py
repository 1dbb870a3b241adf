"""Backends by name: what trains and samples never imports one."""

import ctypes
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from barellm.errors import UserError

NAMES = ("cpu", "cuda")


def backend(name: str) -> ModuleType:
    """The module `barellm.<name>.backend`: open_session, planned, default_dtype, describe, measured_peak."""
    if name not in NAMES:
        raise UserError(f"unknown backend {name!r}, expected one of {', '.join(NAMES)}")
    return import_module(f"barellm.{name}.backend")


def automatic(prove: Callable[[], object]) -> str:
    """The device for "auto": the GPU if there is a driver and `prove` (the self-check) raises no UserError, else the CPU; also the
    CPU if the self-check is disabled. Without a driver nothing is imported or printed; an unusable GPU is explained in one line."""
    if os.environ.get("BARELLM_SELF_CHECK") == "0":
        return "cpu"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    gpu = backend("cuda")
    try:
        prove()
    except gpu.driver.NoGpu:
        return "cpu"
    except UserError as error:
        print(f"barellm: note: the CPU is used, and not the GPU: {error}", file=sys.stderr, flush=True)
        return "cpu"
    return "cuda"
