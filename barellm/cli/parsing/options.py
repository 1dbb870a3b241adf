"""Command-line options: argparse with one-line errors, and the configuration keys as options."""

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from barellm import models
from barellm.cli.parsing import help
from barellm.config import Config, aliases, overrides
from barellm.errors import UserError, nearest, visible

if TYPE_CHECKING:
    from barellm.data.tokenizers import Tokenizer
    from barellm.generation.samplers import Sampling


ESCAPES = r"\n, \r, \t, \f, \0, \xHH, \uHHHH and \\ are escapes"
_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "0": "\0", "\\": "\\"}
_HEX = "([0-9a-fA-F]{%d})"
_ESCAPE = re.compile(rf"\\(?:([nrtf0\\])|x{_HEX % 2}|u{_HEX % 4}|U{_HEX % 8}|[xuU]|\Z)")


def escaped(words: str) -> str:
    """Argument type: text with backslash escapes resolved, as in llama.cpp; a backslash that begins no escape stays."""

    def resolve(found: re.Match[str]) -> str:
        if found[1]:
            return _CHARACTERS[found[1]]
        if digits := found[2] or found[3] or found[4]:
            return chr(int(digits, 16))
        raise argparse.ArgumentTypeError(f"{words!r} ends in the middle of an escape at {found[0]!r}, expected {ESCAPES}")

    try:
        return _ESCAPE.sub(resolve, words).encode("utf-16", "surrogatepass").decode("utf-16")
    except (OverflowError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{words!r} has a character that is none in Unicode") from error


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose mistakes are UserErrors, with the nearest known option; abbreviations are refused, names that other
    programs give an option are accepted (barellm/config/aliases.py), and so are --no-x for a boolean and 1e4 for an integer."""

    preset: str | None = None  # which the command line names: --help shows its keys and their values

    def __init__(self, *, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action=help.Help, const=False)
        self.add_argument("--help-all", action=help.Help, const=True)
        self.register("type", int, integer)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def format_help(self) -> str:
        return help.page(self, everything=True)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, with aliases of other programs. UserError for unknown options, with the nearest one, and missing arguments."""
        known = dict(self._option_string_actions)
        alias_of = aliases.aliases_of(known)
        self._option_string_actions.update({alias: known[name] for alias, name in alias_of.items()})
        argv = [positive for word in argv for positive in self._without_no(word)]
        required = help.needed(self)
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self._refuse(unknown, known)
        if missing := [action for action in required if not getattr(args, action.dest)]:
            raise help.missing(self, missing)
        for action in self._actions:
            least, value = getattr(action, "least", None), getattr(args, action.dest, None)
            if least is not None and value is not None and value < least:
                raise UserError(f"{action.option_strings[-1]} is {value}, expected at least {least}")
        typed = [option for option in map(_option_of, argv) if option in alias_of]
        if line := aliases.renamed(option.lstrip("-").replace("-", "_") for option in typed):
            print(f"barellm: note: {line}", file=sys.stderr)
        args.words = [_known(word, alias_of) for word in argv]
        return args

    def _refuse(self, unknown: Sequence[str], known: Collection[str]) -> NoReturn:
        """UserError for the words that no option takes: what barellm has instead of each, or the nearest of the `known` options."""
        hint = f"(see {self.prog} --help)"
        if not unknown[0].startswith("-"):
            raise UserError(f"unexpected argument {unknown[0]!r} {hint}")
        instead = {o: aliases.instead(o, known) for o in map(_option_of, unknown) if o.startswith("-")}
        described = "; ".join(f"{o}: barellm has {has}" if has else f"{o}{nearest(o, known)}" for o, has in instead.items())
        raise UserError(f"unknown option {described}" if all(instead.values()) else f"unknown option {described} {hint}")

    def _without_no(self, word: str) -> list[str]:
        """--recompute false for --no-recompute, and any other word as it is."""
        action = self._option_string_actions.get(f"--{word[5:]}") if word.startswith(("--no-", "--no_")) else None
        if action is None or word in self._option_string_actions or action.const != "true":
            return [word]
        return [f"--{word[5:]}", "false"]


def add(parser: Any, words: str, text: str, default: Any = None, least: float | None = None, **more: Any) -> None:
    """Add an option: its names and the metavar of its value, as in "-n --max-new-tokens N", its help and its default, of whose type
    a number is; less than `least` is refused. A name without a metavar, or `choices`, is a switch. `parser`: or a group of one."""
    *names, last = words.split()
    value = {} if last.startswith("-") else {"metavar": last}
    if value or "choices" in more:
        kind = {"type": type(default)} if isinstance(default, int | float) else {}
        more = value | kind | {"default": default} | more
    else:
        more = {"action": "store_true"} | more
    parser.add_argument(*names, *([] if value else [last]), help=text, **more).least = least  # pyright: ignore[reportAttributeAccessIssue]


def integer(text: str) -> int:
    """An integer of a command line, also as 1e4. ValueError for what is none."""
    try:
        return int(text)
    except ValueError:
        if (number := float(text)).is_integer():
            return int(number)
        raise


def _option_of(word: str) -> str:
    return word.partition("=")[0]


def _known(word: str, other: Mapping[str, str]) -> str:
    """A word of a command line, with the option's own name in the place of an alias."""
    option, equals, value = word.partition("=")
    return other.get(option, option) + equals + value


def add_own_models(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add --model FILE.py and import the file first: the keys of its Config become options of the parser."""
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
    help.group(parser, "model").add_argument(
        "--model", help="a model of your own, in a file (docs/python.md); its code runs", **option
    )


# Keys that --help shows, for commands that train, and for those that look at a step.
TRAINED = (
    "model.layers model.heads model.d_model optim.name optim.lr optim.schedule optim.warmup optim.weight_decay data.source "
    "data.tokenizer train.steps train.epochs train.minutes train.micro_batch_size train.gradient_accumulation_steps train.seq "
    "train.dtype train.seed train.init_from adapter.method train.eval_every train.sample_every train.checkpoint_every"
)
STEP = (
    "model.layers model.heads model.d_model optim.name train.micro_batch_size train.gradient_accumulation_steps train.seq "
    "train.dtype train.recompute"
)
OUTPUT = re.compile(r"train\.(eval|sample|checkpoint|hellaswag|keep|save|track|exponent|early)")


def add_configuration(parser: Parser, common: str = STEP) -> None:
    """Add PRESET, --config and one option per configuration key of any architecture; keys of other architectures are refused after
    the preset is known. `common`: keys shown by --help."""
    config = models.preset(parser.preset or models.usual())
    known, values = overrides.known_keys(config), overrides.flat(config)
    chosen = help.group(parser, "model")
    chosen.add_argument(
        "preset", nargs="?", metavar="PRESET", help=f"name of a preset (default: {models.usual()}); barellm presets lists them"
    )
    add(chosen, "--config FILE", "TOML file, or a run's config.json; with preset, [model], [optim], [data], [train]")
    for key, owners in overrides.every_key().items():
        entry, section = known.get(key), key.partition(".")[0]
        titles = {"optim": "optimizer", "train": "training", "adapter.method": "training"}  # the one of adapters that --help shows
        title = "output" if OUTPUT.match(key) else titles.get(key, titles.get(section, section))
        short = overrides.SHORT_NAMES.get(key, "").replace("_", "-")
        names = [f"--{short}"] if short and f"--{short}" not in parser._option_string_actions else []
        kinds = {owner.kind for owner in owners.values()}
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in kinds else {}
        metavar = "|".join(sorted(kind.__name__.upper() for kind in ({entry.kind} if entry else kinds)))
        text = argparse.SUPPRESS if entry is None else _help(entry.help, values[key])
        group = help.group(parser, title)
        group = group if key in common.split() else help.Rare(group)
        group.add_argument(f"--{key}", *names, dest=key, metavar=metavar, help=text, **optional)


def _help(text: str, value: object) -> str:
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return (f"{text} (default: {shown})" if shown and "(default:" not in text else text).replace("%", "%%")


def dtype(text: str) -> str:
    """The dtype that a command line names, also as PyTorch calls it: bfloat16, float32, half."""
    return aliases.VALUES["train.dtype"].get(text, text)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step folder, or a run's folder (its newest complete one)")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    add(parser, "--dtype STR", "fp32, bf16 or auto (default: what it was trained in)", type=dtype)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options; those not given come from the model's generation_config.json."""
    for name, metavar, kind, default, what in (
        ("temperature", "T", float, 0.8, "0 is greedy decoding"),
        ("top-p", "P", float, 1.0, "nucleus sampling: fewest tokens with cumulative probability P"),
        ("min-p", "P", float, 0.0, "only tokens P times as likely as the likeliest"),
        ("repetition-penalty", "X", float, 1.0, "penalty of tokens of the text"),
        ("top-k", "K", int, 0, "only the K most likely tokens; 0 is all"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"{what} (default: the model's, else {default:g})")


def sampling_of(args: argparse.Namespace, tokenizer: "Tokenizer") -> "Sampling":
    from barellm.chat.conventions import SAMPLING
    from barellm.generation.samplers import sampling

    return sampling(tokenizer.conventions.sampling, seed=args.seed, **{name: getattr(args, name) for name in SAMPLING})


def for_terminal(text: str) -> str:
    """A model's text, `visible` where it goes to a terminal; into a file or a pipe it goes as it is."""
    return visible(text) if sys.stdout.isatty() else text


DEFAULT_CONTEXT = 4096  # tokens


def add_context(parser: argparse.ArgumentParser) -> None:
    """--context of commands that read texts with a checkpoint."""
    usual = f"(default: the smaller of the model's and {DEFAULT_CONTEXT})"
    said = f"context length; tokens that the model sees of a text, which memory is for, at most the model's {usual}"
    add(parser, "--context N", said, 0)


def add_exact(parser: argparse.ArgumentParser) -> None:
    said = "a token has the same bits in a prompt and as it is generated (on a CPU; slower: docs/generation.md)"
    add(help.Rare(parser), "--exact", said)


def context_of(wanted: int, most: int) -> int:
    """The context length of a model that has `most` positions. UserError for more than it has."""
    if not 0 <= wanted <= most:
        raise UserError(f"--context is {wanted}, expected 1 to {most}, the model's positions (model.max_seq)")
    return wanted or min(most, DEFAULT_CONTEXT)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """--weights of commands that read a checkpoint and do not train it."""
    add(parser, "--weights FORMAT",
        "weight quantization: int8, int4 or nf4; int4/128 sets the group size (default: none, as --dtype)")  # fmt: skip


def add_opening(parser: argparse.ArgumentParser) -> None:
    """How commands that read a checkpoint and do not train it open it."""
    add_device(parser, "auto, cpu, cuda or reference", "auto")
    add_dtype(parser)
    add_weights(parser)
    add(parser, "--adapter DIR", "LoRA adapter of this model: a run's, or a PEFT folder", "")


def add_device(parser: argparse._ActionsContainer, what: str = "cpu or cuda", default: str = "cpu") -> None:
    auto = "; auto: a GPU that has passed its self-check, else the CPU" if default == "auto" else ""
    add(parser, "--device NAME", f"{what}{auto} (default: {default})", default)


MEASURED_STAGE = "the training stage that is measured, of a model whose runs have stages (default: 1)"


def add_stage(parser: argparse.ArgumentParser, what: str = MEASURED_STAGE) -> None:
    add(help.Rare(parser), "--stage N", what, type=int)


RATES = (overrides.MUON_LR, overrides.MUON_LR_RATIO)
SUPERSEDES = {**{key: overrides.LIMITS for key in overrides.LIMITS}, **dict.fromkeys((overrides.LR, *RATES), RATES)}


@dataclass(frozen=True)
class CommandLine:
    """The request of a command line, by itself and by the file of --config. `preset` is None if it names none."""

    preset: str | None
    file: overrides.File | None
    texts: Mapping[str, str]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "CommandLine":
        file = None if args.config is None else overrides.read_file(Path(args.config))
        texts = {key: text for key in overrides.every_key() if (text := getattr(args, key)) is not None}
        if texts.keys() >= {"train.steps", "train.epochs"}:
            raise UserError("--steps and --epochs are both given, expected one of them")
        if file and not file.origin.endswith(".json") and (line := aliases.renamed(file.keys)):
            print(f"barellm: note: {file.origin}: {line}", file=sys.stderr)
        preset = args.preset or (file and file.preset)
        return cls(preset and aliases.PRESETS.get(preset, preset), file, texts)

    def base(self) -> Config:
        """The preset."""
        name = self.preset or models.usual()
        if name not in models.presets() and Path(name).exists():
            hint = "a text is named with --data, a run or configuration with --config, a model with --model"
            raise UserError(f"{name} is a file or folder, expected the name of a preset: {hint}")
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
        config = overrides.changed(config, {} if self.file is None else self.file.changes(config), self.texts)
        if line := overrides.unread(config, self.texts):
            print(f"barellm: note: {line}", file=sys.stderr)
        return config


def configuration(args: argparse.Namespace) -> Config:
    """The resolved configuration of a command line that has `add_configuration`'s options."""
    requested = CommandLine.of(args)
    base = requested.base()
    from barellm.interop.sources import starting_weights

    return starting_weights(requested.changed(base), requested.changes(base))[0]
