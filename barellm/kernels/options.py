"""Checks of the options of array functions, before anything is compiled. Nothing heavy is imported here."""

from math import isfinite
from operator import index
from typing import Any

from barellm.errors import WrongType, shown


def _number(found: Any) -> bool:
    """Whether it may stand for a number: no text, no truth value and no number under a mask."""
    kind = getattr(getattr(found, "dtype", None), "kind", "")
    return not (isinstance(found, str | bytes | bool) or kind == "b" or hasattr(found, "mask"))


def number(name: str, option: str, found: Any, *, least: float | None = None) -> float:
    """The option as a float. TypeError for what is no number; with `least`, ValueError for a number below it or not finite."""
    if not _number(found):
        raise WrongType(f"{name} expects {option} as a number, it is {shown(found)}")
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise WrongType(f"{name} expects {option} as a number, it is of type {type(found).__name__}") from None
    if least is not None and not (value >= least and isfinite(value)):
        raise ValueError(f"{name} expects a finite {option} of at least {least:g}, it is {value}")
    return value


def integer(name: str, option: str, found: Any) -> int:
    """The option as an int. TypeError for what is no integer."""
    try:
        if _number(found):
            return index(found)
    except TypeError:
        pass
    raise WrongType(f"{name} expects {option} as an integer, it is {shown(found)}")


def boolean(name: str, option: str, found: Any) -> bool:
    """The option as a bool. TypeError for anything that is none, of Python's or NumPy's."""
    if isinstance(found, bool) or (getattr(getattr(found, "dtype", None), "kind", "") == "b" and not found.ndim):
        return bool(found)
    raise WrongType(f"{name} expects {option} as True or False, it is {shown(found)}")


def integer_or_pair(name: str, option: str, found: Any) -> int | tuple[int, int]:
    """The option as an int, or as one for rows and one for columns."""
    several = isinstance(found, list | tuple)
    sizes = list(found) if several else [found]
    try:
        numbers = [index(size) for size in sizes if _number(size)]
    except TypeError:
        numbers = []
    if len(numbers) != (2 if several else 1):
        raise WrongType(f"{name} expects {option} as an integer or two, it is {shown(found)}")
    return (numbers[0], numbers[1]) if several else numbers[0]
