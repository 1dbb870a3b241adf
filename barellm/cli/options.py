"""Command-line options: argparse with one-line errors, and the configuration keys as options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from barellm import overrides
from barellm.config import Config, preset
from barellm.errors import UserError

SHORT_FORMS: dict[str, str] = {
    "data.source": "--data",
    "train.steps": "--steps",
    "train.batch": "--batch",
    "train.seq": "--seq",
    "train.seed": "--seed",
    "train.minutes": "--minutes",
    "train.dtype": "--dtype",
    "train.recompute": "--recompute",
    "train.matmul": "--matmul",
    "optim.lr": "--lr",
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose mistakes are UserErrors, with the nearest known option; abbreviations are refused."""

    def __init__(self, *, prog: str, description: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        for word in unknown:
            if word.startswith("-"):
                option = word.split("=")[0]
                raise UserError(f"unknown option {option}{overrides.nearest(option, self._option_string_actions)}")
            raise UserError(f"unexpected argument {word!r} (see {self.prog} --help)")
        return args


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """PRESET, --config and one option per configuration key."""
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="a named configuration (default: default)")
    parser.add_argument("--config", metavar="FILE.toml", help="TOML with preset, [model], [optim], [data], [train]")
    group = parser.add_argument_group("configuration keys")
    for key, kind in overrides.known_keys().items():
        names = [SHORT_FORMS[key]] if key in SHORT_FORMS else []
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
        group.add_argument(f"--{key}", *names, dest=key, metavar=kind.__name__.upper(), **optional)


def add_device(parser: argparse.ArgumentParser, what: str = "cpu or cuda") -> None:
    parser.add_argument("--device", default="cpu", metavar="NAME", help=f"{what} (default: cpu)")


def explicit_changes(args: argparse.Namespace) -> tuple[str | None, dict[str, object]]:
    """What the user asked for: the preset's name or None, and {key: value}, the command line over the file."""
    name: str | None = args.preset
    changes: dict[str, object] = {}
    if args.config is not None:
        file_preset, changes = overrides.read_toml(Path(args.config))
        name = name or file_preset
    changes |= {key: text for key in overrides.known_keys() if (text := getattr(args, key)) is not None}
    return name, overrides.checked(changes)


def configuration(args: argparse.Namespace) -> Config:
    """The resolved configuration of a command line that has `add_configuration`'s options."""
    name, changes = explicit_changes(args)
    return overrides.changed(preset(name or "default"), changes)
