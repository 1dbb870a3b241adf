"""The kernel language: Python that emits LLVM IR, one SSA value at a time."""

from barellm.cpu.lang.emit import Builder
from barellm.cpu.lang.values import Pointer, Value, Var

__all__ = ["Builder", "Pointer", "Value", "Var"]
