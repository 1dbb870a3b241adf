"""Kernels, a folder for each family; importing this package fills the registry of `cpu.kernel`.

`k` is the KernelBuilder. Positional parameters without an annotation exist when the kernel runs: Pointers, and Values in registers
(or integers in their place). What is annotated, and a kernel's keyword-only parameters, is known while code is emitted."""

from importlib import import_module
from pkgutil import walk_packages

_PREFIX = f"{__name__}."
for _module in walk_packages(__path__, _PREFIX):
    import_module(f"{__name__}.{_module.name[len(_PREFIX) :]}")
