"""Device functions as plain Python until a compiler asks for them.

    from barellm.cuda.lang import constant, device, tl

    LOG2_E = constant(1.4426950408889634)

    @device
    def scale(x, y, rows, C): ...

Triton's decorator needs Triton at import time, and a training run whose kernels lie in the cache must not import it. So `device`
only marks the function; `materialised()` builds its module's namespace a second time, with the real `tl` and with every
marked function as Triton's object: compiled code, or the interpreter's for tests. A parameter in capitals is a constant of the
code: Triton's annotation `tl.constexpr` may stand there, and goes without saying. Sizes that only a run knows have a type: `M:
tl.int32`. Annotations are never evaluated, under `from __future__ import annotations`."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

TRITON = "3.6.0"  # Gluon's names change between versions, and other versions give other registers and bits


class LazyModule:
    """A module by name, imported where a device function is materialised."""

    def __init__(self, name: str) -> None:
        self.module = name


tl = LazyModule("triton.language")
gl = LazyModule("triton.experimental.gluon.language")
ampere = LazyModule("triton.experimental.gluon.language.nvidia.ampere")
hopper = LazyModule("triton.experimental.gluon.language.nvidia.hopper")


@dataclass(frozen=True)
class constant:
    """A number of a module that device functions may use."""

    value: Any


class DeviceFunction:
    """A marked function. `dialect`: "triton", "gluon" or "host"."""

    def __init__(self, function: Callable[..., Any], dialect: str) -> None:
        self.function, self.dialect = function, dialect
        self.module, self.name = function.__module__, function.__name__
        code = function.__code__
        self.parameters: tuple[str, ...] = code.co_varnames[: code.co_argcount]
        types = {name: str(function.__annotations__.get(name, "constexpr")) for name in self.parameters if name.isupper()}
        self.constants = frozenset(name for name, kind in types.items() if kind.endswith("constexpr"))

    def materialised(self, *, interpreted: bool = False) -> Any:
        """Triton's object for this function. Needs Triton."""
        return namespace(self.module, interpreted)[self.name]

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


def device(function: Callable[..., Any]) -> DeviceFunction:
    """Mark a Triton kernel, or a function that kernels call."""
    return DeviceFunction(function, "triton")


def gluon(function: Callable[..., Any]) -> DeviceFunction:
    """Mark a Gluon kernel, or a function that Gluon kernels call."""
    return DeviceFunction(function, "gluon")


def compile_time(function: Callable[..., Any]) -> DeviceFunction:
    """Mark a function of constants, as of a layout, that kernels call while they are compiled."""
    return DeviceFunction(function, "host")


@cache
def namespace(module: str, interpreted: bool) -> dict[str, Any]:
    """The globals of a kernel module as Triton must see them: real `tl` and `gl`, constants as constexpr, and device functions, its
    own and imported ones, as Triton's or Gluon's objects (`interpreted`: of Triton's interpreter). A copy of each function gets
    these globals, so functions that call one another find the objects."""
    import triton.language
    from triton import knobs
    from triton.experimental import gluon as gluon_jit

    objects: dict[str, Any] = {}
    functions: list[DeviceFunction] = []
    for name, value in vars(sys.modules[module]).items():
        if isinstance(value, LazyModule):
            objects[name] = import_module(value.module)
        elif isinstance(value, constant):
            objects[name] = triton.language.constexpr(value.value)
        elif isinstance(value, DeviceFunction) and value.module != module:
            objects[name] = namespace(value.module, interpreted)[value.name]
        elif isinstance(value, DeviceFunction):
            functions.append(value)
        else:
            objects[name] = value
    for f in functions:
        copy = types.FunctionType(f.function.__code__, objects, f.name, f.function.__defaults__)
        copy.__annotations__, copy.__module__, copy.__qualname__ = dict.fromkeys(f.constants, "tl.constexpr"), module, f.name
        with knobs.runtime.scope():
            knobs.runtime.interpret = interpreted
            objects[f.name] = {"gluon": gluon_jit.jit, "triton": triton.jit, "host": triton.constexpr_function}[f.dialect](copy)
    return objects


def modules_of(function: DeviceFunction) -> tuple[str, ...]:
    """The modules whose source decides the code of `function`, sorted: its own and those whose device functions or constants it
    uses."""
    modules: set[str] = set()

    def visit(module: str) -> None:
        if module not in modules:
            modules.add(module)
            for value in list(vars(sys.modules[module]).values()):
                if isinstance(value, DeviceFunction):
                    visit(value.module)

    visit(function.module)
    return tuple(sorted(modules))
