"""An architecture in a file of the user's, for commands: the option --model."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from barellm import models
from barellm.config import ModelConfig
from barellm.errors import UserError
from barellm.fields import entries

SIZES = ("vocab_size", "padded_vocab", "max_seq", "channels")  # of any model
FUNCTIONS = ("declare(p, cfg)", "forward(p, cfg, tokens, targets, *, training)")


def add(path: Path) -> None:
    """Run a file of Python that has an architecture (`barellm.models` says what that is). All of this process then knows it by the
    file's name, and its presets too. It is the module that a program in the same folder would import.

    UserError for a file that has none, for a name that is taken, and, with the line, for code that fails.
    """
    name, file = path.stem, path.resolve()
    if models.ADDED.get(name) == file:
        return
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{path} is no file of Python, expected one that has a model, such as mine.py")
    if not name.isidentifier():
        raise UserError(f"{path}: a model has the name of its file, and {name!r} is no name in Python: rename it")
    if name in models.names() or name in sys.modules:
        raise UserError(f"{path}: a model has the name of its file, and a module {name!r} is there already: rename it")
    found = _imported(name, file)
    try:
        _check(found, path)
    except UserError:
        del sys.modules[name]
        raise
    models.ADDED[name] = file


def _imported(name: str, file: Path) -> ModuleType:
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
        if isinstance(error, Exception):
            lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
            raise UserError(f"{file}, line {lines[-1]}: {type(error).__name__}: {error}") from error
        raise
    return found


def _check(found: ModuleType, path: Path) -> None:
    """UserError for what lacks a part, or has the name of a preset that is there."""
    config = getattr(found, "Config", None)
    if not (isinstance(config, type) and issubclass(config, ModelConfig)):
        raise UserError(f"{path} has no model: no class Config of barellm.config.ModelConfig")
    if missing := [name for name in SIZES if name not in entries(config)]:
        raise UserError(
            f"{path}: its Config, a frozen dataclass, has no field {missing[0]}, expected {', '.join(SIZES)}"
        )
    for function in FUNCTIONS:
        if not callable(getattr(found, function.partition("(")[0], None)):
            raise UserError(f"{path} has no model: no function {function}")
    for name in getattr(found, "PRESETS", {}):
        if name in models.presets():
            raise UserError(f"{path}: a preset {name!r} is there already: rename it")
