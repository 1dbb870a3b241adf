"""Kernels, a folder for each family; importing this package fills the registry of `cpu.kernel`."""

from importlib import import_module
from pkgutil import walk_packages

_PREFIX = f"{__name__}."
for _module in walk_packages(__path__, _PREFIX):
    import_module(f"{__name__}.{_module.name[len(_PREFIX) :]}")
