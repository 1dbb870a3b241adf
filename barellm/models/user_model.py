"""An architecture in a file of the user's, for commands: the option --model."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

from barellm import models
from barellm.config import ModelConfig, aliases
from barellm.config.fields import entries
from barellm.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
SIZES = ("vocab_size", "padded_vocab", "max_seq", "d_model")  # of any model
FUNCTIONS = {"declare(p, cfg)": ("pc", {}), "forward(p, cfg, tokens, targets, *, training)": ("pctt", {"training": True})}


def add(path: Path) -> None:
    """Run a file of Python that has an architecture (`barellm.models` says what that is). All of this process then knows it by the
    file's name, and its presets too. It is the module that a program in the same folder would import.

    UserError for a file that has none, for a name that is taken, and, with the line, for code that fails."""
    name, file = path.stem, path.resolve()
    if models.ADDED.get(name) == file:
        return
    if not file.exists():
        raise UserError(f"--model {path} does not exist, expected a file of Python that has a model, such as mine.py")
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{path} is no file of Python, expected one that has a model, such as mine.py")
    if not name.isidentifier():
        raise UserError(f"{path}: a model has the name of its file, and {name!r} is no name in Python: rename it")
    if name in models.names() or name in sys.modules:
        raise UserError(f"{path}: a model has the name of its file, and a module {name!r} is there already: rename it")
    found = _imported(name, file)
    try:
        _check_parts(found, path)
    except UserError:
        del sys.modules[name]
        raise
    presets = getattr(found, "PRESETS", None)
    if isinstance(presets, dict):
        found.PRESETS = {key: partial(_named, file, make) for key, make in presets.items()}  # pyright: ignore
    models.ADDED[name] = file


def _imported(name: str, file: Path) -> ModuleType:
    """Import the file as module `name`; UserError with the line for a mistake in it."""
    spec = spec_from_file_location(name, file)
    assert spec and spec.loader
    found = sys.modules[name] = module_from_spec(spec)
    sys.path.append(str(file.parent))  # for what it imports from its folder
    try:
        spec.loader.exec_module(found)
    except BaseException as error:
        del sys.modules[name]
        sys.path.remove(str(file.parent))
        if isinstance(error, SyntaxError):
            raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
        if isinstance(error, Exception) and (line := _mistake(file, error)):
            raise line from error
        raise
    return found


def place(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else str(function)


def _mistake(file: Path, error: Exception) -> UserError | None:
    """The error as one line with the place in the file, or in one beside it that it imports; None where neither has to do with it.
    Notes name the parameters that an op got (`program.graph`)."""
    frames = [frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).parent == file.parent]
    if not frames:
        return None
    words = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return UserError(f"{frames[-1].filename}, line {frames[-1].lineno}: {kind}{words}")


def mistakes_named(build: Callable[Concatenate[ModelConfig, P], R]) -> Callable[Concatenate[ModelConfig, P], R]:
    """The function, which calls the code of a model. What fails in a file that was added becomes a UserError with file and line; a
    module that the program itself has imported keeps its traceback."""

    @wraps(build)
    def named(model: ModelConfig, *args: P.args, **more: P.kwargs) -> R:
        return _named(models.ADDED.get(models.name_of(model)), partial(build, model, *args, **more))

    return named


def _named(file: Path | None, function: Callable[[], R]) -> R:
    try:
        return function()
    except Exception as error:
        if file is None or (line := _mistake(file, error)) is None:
            raise
        raise line from error


def _check_parts(found: ModuleType, path: Path) -> None:
    """Raise a UserError for a user's module without Config, its fields or one of FUNCTIONS, or with the name of a known preset."""
    config = getattr(found, "Config", None)
    if not (isinstance(config, type) and issubclass(config, ModelConfig)):
        raise UserError(f"{path} has no model: no class Config of barellm.config.ModelConfig")
    known = {aliases.RENAMED.get(f"model.{name}", f"model.{name}") for name in entries(config)}
    if missing := [name for name in SIZES if f"model.{name}" not in known]:
        raise UserError(f"{path}: its Config, a frozen dataclass, has no field {missing[0]}, expected {', '.join(SIZES)}")
    for wanted, (args, more) in FUNCTIONS.items():
        function = getattr(found, wanted.partition("(")[0], None)
        if not callable(function):
            raise UserError(f"{path} has no model: no function {wanted}")
        try:
            signature(function).bind(*args, **more)
        except TypeError as error:
            raise UserError(f"{place(function)}: {error}, expected {wanted}") from None
    for name in getattr(found, "PRESETS", {}):
        if name in models.presets():
            raise UserError(f"{path}: a preset {name!r} is there already: rename it")
