"""Fields of configurations, each with its help and its bounds: what a value may be stands once, here where the field is.

    @dataclass(frozen=True)
    class TrainConfig(Section, section="train"):
        seq: int = at_least(1, 256, "sequence length")

A configuration that is made with a value beyond the bounds is refused with one line: `train.seq is 0, expected at least 1`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from barellm.errors import UserError, shown

EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
Check = Callable[[str, Any, Any], str | None]  # key, value, the configuration -> what is wrong, as a line


@dataclass(frozen=True)
class Entry:
    """The facts about a field. With `of_run`, training may choose it, whatever weights it begins with."""

    kind: type
    help: str
    of_run: bool
    check: Check


def value(
    default: Any, help: str, *, check: Check = lambda key, found, config: None, of_run: bool = False, init: bool = True
) -> Any:
    """A field of any value of its type. Not `init`: it follows from others, and `overrides.changed` takes it for them."""
    return field(default=default, init=init, metadata={"help": help, "check": check, "of_run": of_run})


def between(least: float, most: float | None, default: Any, help: str, **more: Any) -> Any:
    """A number from `least` to `most`, both included; None: no upper bound."""

    def check(key: str, found: Any, config: Any) -> str | None:
        if found < least:
            return f"{key} is {found}, expected at least {least}"
        return f"{key} is {found}, expected at most {most}" if most is not None and found > most else None

    return value(default, help, check=check, **more)


def at_least(least: float, default: Any, help: str, **more: Any) -> Any:
    return between(least, None, default, help, **more)


def above(least: float | str, default: Any, help: str, **more: Any) -> Any:
    """A field for a number above `least`, a constant or another field's name."""

    def check(key: str, found: Any, config: Any) -> str | None:
        bound, name = least, ""
        if isinstance(least, str):
            bound, name = getattr(config, least), f" {key.rpartition('.')[0]}.{least}"
        return None if found > bound else f"{key} is {found}, expected above{name} {bound}"

    return value(default, help, check=check, **more)


def below_one(default: float, help: str, **more: Any) -> Any:
    """A number from 0 to 1, but not 1: a rate."""

    def check(key: str, found: Any, config: Any) -> str | None:
        name = key.rpartition(".")[2]
        return None if 0 <= found < 1 else f"{key} is {found}, expected 0 <= {name} < 1"

    return value(default, help, check=check, **more)


def inside_one(default: float, help: str, **more: Any) -> Any:
    """A number between 0 and 1, neither of them: a share that leaves something on both sides."""

    def check(key: str, found: Any, config: Any) -> str | None:
        return None if 0 < found < 1 else f"{key} is {found}, expected between 0 and 1"

    return value(default, help, check=check, **more)


def one_of(known: Sequence[str], default: str, help: str, **more: Any) -> Any:
    def check(key: str, found: Any, config: Any) -> str | None:
        if found in known:
            return None
        return f"{key} is {found!r}, expected {', '.join(known[:-1])}{' or ' if known[1:] else ''}{known[-1]}"

    return value(default, help, check=check, **more)


def words(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def some_of(known: Sequence[str], help: str) -> Any:
    """A field for a comma-separated list of these words; default: none."""

    def check(key: str, found: Any, config: Any) -> str | None:
        named = words(found)
        if unknown := [word for word in named if word not in known]:
            return f"{key} names {unknown[0]!r}, expected any of {', '.join(known)}"
        repeated = [word for i, word in enumerate(named) if word in named[:i]]
        return f"{key} names {repeated[0]!r} twice, expected each once" if repeated else None

    return value("", help, check=check)


def divides(other: str, default: int, help: str, *, even: bool = False, unless: str = "", **more: Any) -> Any:
    """A field for a number >= 1 that divides field `other`, with `even` into even parts; any number if field `unless` is not 0."""

    def check(key: str, found: Any, config: Any) -> str | None:
        """What is wrong with the value `found` of `key`, None if nothing is. `config`: whole, `other` and `unless` included."""
        total = getattr(config, other)
        if found < 1:
            return f"{key} is {found}, expected at least 1"
        if unless and getattr(config, unless):
            return None
        section = key.rpartition(".")[0]
        if total % found:
            return f"{key} {found} does not divide {section}.{other} {total}"
        if even and total // found % 2:
            return f"{key} {found} divides {section}.{other} {total} into parts of {total // found}, expected an even size"
        return None

    return value(default, help, check=check, **more)


@dataclass(frozen=True)
class Section:
    """A part of the configuration: a frozen dataclass of the fields above."""

    section: ClassVar[str]

    def __init_subclass__(cls, *, section: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if section:
            cls.section = section

    def __post_init__(self) -> None:
        for name, entry in entries(type(self)).items():
            if entry.kind in EXPECTED:
                object.__setattr__(self, name, converted(f"{self.section}.{name}", getattr(self, name), entry.kind))
        for name, entry in entries(type(self)).items():
            if problem := entry.check(f"{self.section}.{name}", getattr(self, name), self):
                raise UserError(problem)


@cache
def entries(section: type[Section]) -> dict[str, Entry]:
    hints = get_type_hints(section)
    return {f.name: Entry(hints[f.name], **f.metadata) for f in fields(section)}  # pyright: ignore[reportArgumentType]


def converted(key: str, found: Any, kind: type) -> Any:
    """`found` as a value of type `kind` (Python's or NumPy's). UserError for other types, non-finite and huge (> 100 bits) ones."""
    is_truth = isinstance(found, bool) or getattr(getattr(found, "dtype", None), "kind", "") == "b"
    of_kind = {int: Integral, float: Real, bool: bool, str: str}[kind]
    if is_truth != (kind is bool) or not (is_truth or isinstance(found, of_kind)) or getattr(found, "ndim", 0):
        raise not_of(key, found, kind)
    try:
        if kind is float and not isfinite(found):
            raise not_of(key, found, kind)
        if kind is int and abs(found) >> 100:  # the sizes of a tensor, multiplied, must fit into a float
            raise not_of(key, found, kind)
        return kind(found)
    except OverflowError:  # an integer that no float can hold
        raise not_of(key, found, kind) from None


def path_of(key: str, found: Any) -> Path:
    """`found` as a path. UserError for what is none."""
    if not isinstance(found, str | PathLike):
        raise UserError(f"{key} is {shown(found)}, expected a path")
    return Path(found)


def not_of(key: str, found: Any, kind: type) -> UserError:
    return UserError(f"{key} is {shown(found)}, expected {EXPECTED[kind]}")
