"""Kernels, one file per family; importing this package fills the registry of `cuda.kernel`."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
