"""Backends by name: what trains and samples never imports one."""

from importlib import import_module
from types import ModuleType

from barellm.errors import UserError

NAMES = ("cpu", "cuda")


def backend(name: str) -> ModuleType:
    """The module `barellm.<name>.backend`, with open_session(programs), planned(programs), default_dtype(), describe() and
    measured_peak(dtype)."""
    if name not in NAMES:
        raise UserError(f"unknown backend {name!r}, expected one of {', '.join(NAMES)}")
    return import_module(f"barellm.{name}.backend")
