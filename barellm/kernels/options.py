"""Options of array functions that are numbers, checked before anything is compiled. Nothing heavy is imported here."""

from __future__ import annotations

from math import isfinite
from operator import index
from typing import Any


def real(name: str, option: str, found: Any, *, least: float | None = None) -> float:
    """The option as a float. TypeError for what is no number; with `least`, ValueError for a number below it or not finite."""
    if isinstance(found, str | bytes):
        raise TypeError(f"{name} expects {option} as a number, it is {found!r}")
    try:
        number = float(found)
    except (TypeError, ValueError):
        raise TypeError(f"{name} expects {option} as a number, it is of type {type(found).__name__}") from None
    if least is not None and not (number >= least and isfinite(number)):
        raise ValueError(f"{name} expects a finite {option} of at least {least:g}, it is {number}")
    return number


def whole(name: str, option: str, found: Any) -> int:
    """The option as an int. TypeError for what is no integer."""
    try:
        return index(found)
    except TypeError:
        raise TypeError(f"{name} expects {option} as an integer, it is {found!r}") from None


def whole_or_pair(name: str, option: str, found: Any) -> int | tuple[int, int]:
    """The option as an int, or as one for rows and one for columns."""
    several = isinstance(found, list | tuple)
    sizes = list(found) if several else [found]
    try:
        numbers = [index(size) for size in sizes]
    except TypeError:
        numbers = []
    if len(numbers) != (2 if several else 1):
        raise TypeError(f"{name} expects {option} as an integer or two, it is {found!r}")
    return (numbers[0], numbers[1]) if several else numbers[0]
