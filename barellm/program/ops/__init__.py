"""Primitive ops, one file per family. Each op of the folder's modules is a name of this package: `ops.Matmul`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from barellm.program.ops.base import Op
from barellm.program.ops.elementwise import ACTIVATIONS

__all__ = ["ACTIVATIONS"]

for _file in iter_modules(__path__):  # in the order of their names
    _module = import_module(f"{__name__}.{_file.name}")
    for _name, _value in vars(_module).items():
        if isinstance(_value, type) and issubclass(_value, Op) and hasattr(_value, "name"):  # base classes have none
            globals()[_name] = _value
            __all__ += [_name] if _name not in __all__ else []

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
