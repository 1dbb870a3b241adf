"""Checks of the arrays that functions take and return, and of their memory layout, with the messages for others.

A legend such as `"... K"` names the axes of an argument. `...` stands for any number of leading axes, which are seen as one; a
letter is a size, the same wherever it stands in the arguments of a call; a number is itself. Axes in parentheses, as in
`"B T (H D)"`, are one axis of the tensor."""

from collections.abc import Mapping
from ctypes import c_int64
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from barellm.errors import WrongType
from barellm.program.dtypes import numpy_dtype

Array = NDArray[Any]

ALIGN = 64  # bytes: kernels store past the caches in whole vectors, at aligned addresses
LEAD = "..."


def axes_of(legend: str) -> list[str]:
    """What stands for each axis of an array."""
    return legend.replace("(", "").replace(")", "").split()


def size_of(letter: str, sizes: Mapping[str, Any]) -> int:
    return int(letter) if letter.isdigit() else sizes[letter]


def format_axes(legend: str) -> str:
    axes = axes_of(legend)
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def check_array(name: str, argument: str, array: Any) -> np.ndarray:
    """The argument, if it is an array; else a WrongType in one line."""
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise WrongType(f"{name} expects arrays without a mask, {argument} has one: fill it with {argument}.filled(...)")
    if not isinstance(array, np.ndarray):
        raise WrongType(f"{name} expects NumPy arrays, {argument} is of type {type(array).__name__}")
    return array


def format_name(name: str, argument: str, array: np.ndarray, allowed: tuple[str, ...]) -> str:
    """The format (`program.dtypes`) of an array, one of the `allowed`; else a WrongType in one line."""
    for known in allowed:
        if array.dtype == numpy_dtype(known):
            return known
    wanted = " or ".join(str(numpy_dtype(known)) for known in allowed)
    hint = f": cast it with {argument}.astype(np.float32)" if "fp32" in allowed else ""
    raise WrongType(f"{name} expects {argument} as {wanted}, it is {array.dtype}{hint}")


def sizes_of(name: str, legends: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Sizes of all letters of the legends, and under `...` the leading axes. ValueError, naming the argument and the expected
    shape, if the shapes do not agree."""
    sizes: dict[str, Any] = {}
    set_by: dict[str, str] = {}  # letter -> the argument that set it
    for argument, shape in shapes.items():
        axes = axes_of(legends[argument])
        has_lead = axes[0] == LEAD
        tail = axes[1:] if has_lead else axes
        split = len(shape) - len(tail)
        if split < 0 or (split and not has_lead):
            raise ValueError(f"{name} expects {argument} {format_axes(legends[argument])}, it has shape {shape}")
        pairs = [*([(LEAD, shape[:split])] if has_lead else []), *zip(tail, shape[split:], strict=True)]
        for letter, size in pairs:
            wanted = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            set_by.setdefault(letter, argument)
            if wanted != size:
                other = set_by[letter]
                reason = f", {letter} being {wanted} as in {other} {shapes[other]}" if other != argument else ""
                found = f"it has shape {shape}"
                raise ValueError(f"{name} expects {argument} {format_axes(legends[argument])}{reason}; {found}")
        if not prod(shape):
            raise ValueError(f"{name} expects {argument} with at least one element, it has shape {shape}")
    return sizes


def ready(array: np.ndarray) -> np.ndarray:
    """The array itself where a kernel can read it as it lies: row-major, each element at a multiple of its size. Else a copy."""
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.ascontiguousarray(array) if array.flags.aligned else array.copy()


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array for a result, at an aligned address."""
    kind = numpy_dtype(dtype)
    nbytes = prod(shape) * kind.itemsize
    raw = np.empty(nbytes + ALIGN, np.uint8)
    skip = -address(raw) % ALIGN
    return raw[skip : skip + nbytes].view(kind).reshape(shape)


def address(array: np.ndarray) -> int:
    """Where the array's first element lies. NumPy's C interface fixes that it stands behind the object's head; `array.ctypes.data`,
    which gives the same, takes 2.5 us of a call that takes 15."""
    return c_int64.from_address(id(array) + object.__basicsize__).value
