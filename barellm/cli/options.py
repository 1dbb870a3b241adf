"""Command-line options: argparse with one-line errors, and the configuration keys as options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from barellm import models
from barellm.config import Config, aliases, overrides
from barellm.errors import UserError, nearest

if TYPE_CHECKING:
    from barellm.checkpoint.weights import Weights
    from barellm.config.fields import Entry


ESCAPES = r"\n, \r, \t, \f, \0, \xHH, \uHHHH and \\ are escapes"
_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "0": "\0", "\\": "\\"}
_HEX = "([0-9a-fA-F]{%d})"
_ESCAPE = re.compile(rf"\\(?:([nrtf0\\])|x{_HEX % 2}|u{_HEX % 4}|U{_HEX % 8}|[xuU]|\Z)")


def escaped(words: str) -> str:
    """A piece of text on the command line as it is meant: the type of every option that takes one. As in llama.cpp, a backslash
    that begins no escape stays."""

    def meant(found: re.Match[str]) -> str:
        if found[1]:
            return _CHARACTERS[found[1]]
        if digits := found[2] or found[3] or found[4]:
            return chr(int(digits, 16))
        raise argparse.ArgumentTypeError(
            f"{words!r} ends in the middle of an escape at {found[0]!r}, expected {ESCAPES}"
        )

    try:
        return _ESCAPE.sub(meant, words).encode("utf-16", "surrogatepass").decode("utf-16")
    except (OverflowError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{words!r} has a character that is none in Unicode") from error


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose mistakes are UserErrors, with the nearest known option; abbreviations are refused, and
    names that other programs give an option are accepted (barellm/config/aliases.py)."""

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
        known = dict(self._option_string_actions)
        other = aliases.aliases_of(known)
        self._option_string_actions.update({alias: known[name] for alias, name in other.items()})
        args, unknown = self.parse_known_args(argv)
        for word in unknown:
            if word.startswith("-"):
                option = word.split("=")[0]
                if instead := aliases.instead(option):
                    raise UserError(f"unknown option {option}: barellm has {instead}")
                raise UserError(f"unknown option {option}{nearest(option, known)}")
            raise UserError(f"unexpected argument {word!r} (see {self.prog} --help)")
        typed = [option for word in argv if (option := word.split("=")[0]) in other]
        if line := aliases.renamed(option.lstrip("-").replace("-", "_") for option in typed):
            print(f"barellm: note: {line}", file=sys.stderr)
        args.words = [_known(word, other) for word in argv]
        return args


def _known(word: str, other: Mapping[str, str]) -> str:
    """A word of a command line, with the option's own name in the place of an alias."""
    option, equals, value = word.partition("=")
    return other.get(option, option) + equals + value


def add_own_models(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """--model FILE.py. It is looked for before the parser has its other options, since the keys of the file's Config are some of
    them."""
    option = {"action": "append", "default": [], "metavar": "FILE.py"}
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--model", **option)
    try:
        files = early.parse_known_args(argv)[0].model
    except argparse.ArgumentError:  # the parser itself will say so
        files = []
    for file in files:
        from barellm.models import user_model

        user_model.add(Path(file))
    parser.add_argument("--model", help="a model of your own, in a file (docs/python.md); its code runs", **option)


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """PRESET, --config and one option per configuration key of any architecture. The preset decides which of them
    there are, so the others are refused later."""
    parser.add_argument("preset", nargs="?", metavar="PRESET", help=f"{', '.join(models.presets())} (default: default)")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML with preset, [model], [optim], [data], [train]; or a run's config.json"
    )
    group = parser.add_argument_group("configuration keys (PRESET gives the others their values)")
    for key, owners in overrides.every_key().items():
        short = overrides.SHORT_NAMES.get(key)
        names = [f"--{short.replace('_', '-')}"] if short else []
        kinds = {entry.kind for entry in owners.values()}
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in kinds else {}
        metavar = "|".join(sorted(kind.__name__.upper() for kind in kinds))
        group.add_argument(f"--{key}", *names, dest=key, metavar=metavar, help=_help(key, owners), **optional)
    positional = "".join(f"[{action.metavar}] " for action in parser._positionals._group_actions)
    parser.usage = f"%(prog)s {positional}[options] [--KEY VALUE ...]"  # not each of some forty keys


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """--dtype of commands that read a checkpoint."""
    parser.add_argument("--dtype", metavar="STR", help="fp32, bf16 or auto (default: what it was trained in)")


DEFAULT_CONTEXT = 4096  # tokens


def add_context(parser: argparse.ArgumentParser) -> None:
    """--context of commands that read texts with a checkpoint."""
    parser.add_argument(
        "--context",
        type=int,
        default=0,
        metavar="N",
        help=f"context length: tokens that the model sees of a text, which memory is for; at most the model's (default: "
        f"the smaller of the model's and {DEFAULT_CONTEXT})",
    )


def context_of(wanted: int, most: int) -> int:
    """The context length of a model that has `most` positions. UserError for more than it has."""
    if not 0 <= wanted <= most:
        raise UserError(f"--context is {wanted}, expected 1 to {most}, the model's positions (model.max_seq)")
    return wanted or min(most, DEFAULT_CONTEXT)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """--weights of commands that read a checkpoint and do not train it."""
    parser.add_argument(
        "--weights",
        metavar="FORMAT",
        help="weight quantization: int8, int4 or nf4; int4/128 sets the group size (default: none, as --dtype)",
    )


def _help(key: str, owners: Mapping[str, Entry]) -> str:
    """The meaning of a key. If the key means different things in different sections, it says which means what."""
    everybody = models.names() if key.startswith("model.") else [""]
    said: dict[str, list[str]] = {}
    for owner, entry in owners.items():
        said.setdefault(entry.help, []).append(owner)
    whole = len(said) == 1 and len(owners) == len(everybody)
    return "; ".join(text if whole else f"{text} ({', '.join(names)})" for text, names in said.items()).replace(
        "%", "%%"
    )


def add_device(parser: argparse.ArgumentParser, what: str = "cpu or cuda") -> None:
    parser.add_argument("--device", default="cpu", metavar="NAME", help=f"{what} (default: cpu)")


MEASURED_STAGE = "the training stage that is measured, of a model whose runs have stages (default: 1)"


def add_stage(parser: argparse.ArgumentParser, what: str = MEASURED_STAGE) -> None:
    parser.add_argument("--stage", type=int, metavar="N", help=what)


RATES = (overrides.MUON_LR, overrides.MUON_LR_RATIO)
SUPERSEDES = {
    "train.steps": ("train.minutes",),
    "train.minutes": ("train.steps",),
    **dict.fromkeys((overrides.LR, *RATES), RATES),
}


@dataclass(frozen=True)
class CommandLine:
    """The request of a command line, by itself and by the file of --config. `preset` is None if it names none."""

    preset: str | None
    file: overrides.File | None
    texts: Mapping[str, str]

    @classmethod
    def of(cls, args: argparse.Namespace) -> CommandLine:
        file = None if args.config is None else overrides.read_file(Path(args.config))
        texts = {key: text for key in overrides.every_key() if (text := getattr(args, key)) is not None}
        if file and not file.origin.endswith(".json") and (line := aliases.renamed(file.keys)):
            print(f"barellm: note: {file.origin}: {line}", file=sys.stderr)
        preset = args.preset or (file and file.preset)
        return cls(preset and aliases.PRESETS.get(preset, preset), file, texts)

    def base(self) -> Config:
        """The preset."""
        name = self.preset or models.usual()
        if name not in models.presets() and Path(name).exists():
            raise UserError(
                f"{name} is a file or folder, expected the name of a preset: a text is named with --data, a run or "
                "configuration with --config, a model with --model"
            )
        return models.preset(name)

    def changes(self, config: Config) -> dict[str, Any]:
        """{key: value} for `config`, the command line over the file."""
        changes = {} if self.file is None else self.file.changes(config)
        for key, others in SUPERSEDES.items():
            if key in self.texts:  # what the file says of the others is not meant either
                changes = {k: v for k, v in changes.items() if k not in others}
        return overrides.checked({**changes, **self.texts}, config)

    def changed(self, config: Config) -> Config:
        """`config` as the file changes it, and then the command line."""
        return overrides.changed(config, {} if self.file is None else self.file.changes(config), self.texts)


def configuration(args: argparse.Namespace) -> Config:
    """The resolved configuration of a command line that has `add_configuration`'s options."""
    requested = CommandLine.of(args)
    base = requested.base()
    return with_weights(requested.changed(base), requested.changes(base))[0]


def with_weights(config: Config, changes: Mapping[str, object]) -> tuple[Config, Weights | None]:
    """`config` with the sizes of the weights that it says to begin with, and those. `changes`: what the user asked for."""
    if not config.train.init_from:
        return config, None
    from barellm.interop.sources import open_weights

    weights = open_weights(Path(config.train.init_from), tokenizer=str(changes.get("data.tokenizer", "")))
    return weights.configured(config, changes), weights
