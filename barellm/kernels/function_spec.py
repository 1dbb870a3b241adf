"""The specification of an array function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class FunctionSpec:
    """The specification of an array function. `build(p, **arguments, **options)` appends the ops to a Program and returns the
    result, or a tuple of results; without it the method of Program does that has the function's name. `shapes` has the legend of
    each argument and `results` that of each result (`arrays`), in which an option that is an integer is a size. `formats` are the
    dtypes that an argument may have, float32 and bfloat16 unless given. An argument in `transposable` may be a transposed view:
    build gets its storage, and the option `NAME_transposed`. An argument in `optional` may be None, and build gets None for it."""

    name: str
    shapes: Mapping[str, str]
    results: tuple[str, ...]
    build: Callable[..., Any] | None = None
    formats: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposable: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
