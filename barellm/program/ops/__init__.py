"""Primitive ops, the large families in folders. Each op of these modules is a name of this package: `ops.Matmul`. A module's class
`Calls` has the methods of Program that append its ops."""

from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

from barellm.program.ops.base import Op
from barellm.program.ops.pointwise.elementwise import ACTIVATIONS

__all__ = ["ACTIVATIONS"]

_PREFIX = f"{__name__}."
for _file in walk_packages(__path__, _PREFIX):  # in the order of their names
    _module = import_module(f"{__name__}.{_file.name[len(_PREFIX) :]}")
    for _name, _value in vars(_module).items():
        if isinstance(_value, type) and issubclass(_value, Op) and hasattr(_value, "name"):  # base classes have none
            globals()[_name] = _value
            __all__ += [_name] if _name not in __all__ else []  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
