"""The pages of --help and --help-all: options in groups, with their types and defaults, in 80 columns."""

import argparse
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from barellm import models
from barellm.errors import UserError

WIDTH, LEFT = 80, 27  # columns of a page, and of its options' names
GROUPS = ("model", "optimizer", "data", "training", "output")  # of commands with a configuration, in this order
_DEFAULT = re.compile(r" ?\(default: (?:[^()]|\([^()]*\))*\)")


class Help(argparse.Action):
    """-h, --help: what is used often, a line or two each. --help-all: everything."""

    def __init__(self, option_strings: list[str], dest: str = argparse.SUPPRESS, const: bool = False, **more: object):
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, const=const)
        self.help = "every option" if const else "this page"

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(page(parser, everything=bool(self.const)))
        parser.exit()


class Rare:
    """Options that --help-all alone shows, added to a parser or a group."""

    def __init__(self, parser: argparse._ActionsContainer) -> None:
        self._parser = parser

    def add_argument(self, *names: str, **more: Any) -> argparse.Action:
        action = self._parser.add_argument(*names, **more)
        action.rare = True  # pyright: ignore[reportAttributeAccessIssue]
        return action


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The group of options with this title, made where it is not there yet."""
    groups = {found.title: found for found in parser._action_groups}
    return groups.get(title) or parser.add_argument_group(title)


def page(parser: argparse.ArgumentParser, *, everything: bool) -> str:
    """The help page: with `everything` all options and paragraphs, else common ones and the first paragraph."""
    paragraphs = (parser.description or "").strip().split("\n\n")
    shown = paragraphs if everything else paragraphs[:1]
    lines = [*_filled(usage(parser), indent=7), ""]
    for paragraph in shown:
        verbatim = paragraph.startswith(" ")  # a table, or a command line
        lines += [*(paragraph.splitlines() if verbatim else _filled(paragraph)), ""]
    for title, actions in _groups(parser, everything):
        lines.append(f"{title}:")
        for action in actions:
            lines += _entry(action, everything)
        lines += [""] * everything
    if everything:
        return "\n".join(lines[:-1])
    return "\n".join([*lines, "", *_filled(f"{parser.prog} --help-all has every option, and the whole of each text.")])


def usage(parser: argparse.ArgumentParser) -> str:
    words = [_positional(action) for action in parser._actions if not action.option_strings]
    words += [_names(action, False) for action in needed(parser) if action.option_strings]
    return " ".join(["usage:", parser.prog, *words, "[options]"])


def needed(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The required arguments. Not enforced by argparse, so that a wrong option is reported before a missing one."""
    for action in parser._actions:
        action.needed = getattr(action, "needed", action.required)  # pyright: ignore[reportAttributeAccessIssue]
        action.required = False
    return [action for action in parser._actions if action.needed]  # pyright: ignore[reportAttributeAccessIssue]


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _groups(parser: argparse.ArgumentParser, everything: bool) -> Iterator[tuple[str, list[argparse.Action]]]:
    """(title, options) of the page, in the order of GROUPS, positional arguments first."""

    def order(found: argparse._ArgumentGroup) -> int:
        return GROUPS.index(found.title) if found.title in GROUPS else -1

    for found in sorted(parser._action_groups, key=order):
        actions = [a for a in found._group_actions if a.help != argparse.SUPPRESS]
        actions = [a for a in actions if everything or not (getattr(a, "rare", False) or isinstance(a, Help))]
        if actions:
            yield str(found.title).removeprefix("positional "), sorted(actions, key=lambda a: bool(a.option_strings))


def _entry(action: argparse.Action, everything: bool) -> list[str]:
    """The lines of one option; without `everything` the help text ends at its first semicolon."""
    text = action.help or ""
    if not everything:
        default = _DEFAULT.search(text)
        head = _DEFAULT.sub("", text).partition(";")[0]
        text = head + (default[0] if default else "")
    found = _filled(text.replace("%%", "%"), width=WIDTH - LEFT) or [""]
    names = "  " + (_names(action, everything) if action.option_strings else str(action.metavar or action.dest))
    first = [f"{names:<{LEFT}}{found.pop(0)}".rstrip()] if len(names) < LEFT else [names]
    return first + [" " * LEFT + line for line in found]


def _short(action: argparse.Action) -> str:
    """The name of an option that is shown: of a key the one without its section, where it has one."""
    long = [name for name in action.option_strings if name.startswith("--")]
    return min(long or action.option_strings, key=lambda name: ("." in name, long.index(name) if long else 0))


def _names(action: argparse.Action, everything: bool) -> str:
    """An option's names and the type of its value: all names, or the letter and the shortest one."""
    short = _short(action)
    names = [name for name in action.option_strings if name == short or everything or len(name) == 2]
    names.sort(key=lambda name: (name != short, len(name)) if len(short) > 2 and everything else len(name))
    truth = action.const == "true"  # of a key: true without a value
    names += [f"--no-{short.lstrip('-')}"] if truth and everything else []
    kind = action.metavar or (("{" + ",".join(map(str, action.choices)) + "}") if action.choices else "")
    kind = "" if action.nargs == 0 or truth else " ".join(kind) if isinstance(kind, tuple) else kind
    return f"{', '.join(names)} {kind}".rstrip()


def _filled(text: str, *, width: int = WIDTH, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def missing(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> UserError:
    words = [_positional(a) if not a.option_strings else _names(a, False) for a in actions]
    return UserError(f"{' and '.join(words)} {'is' if len(words) == 1 else 'are'} missing: {usage(parser)}")


def completion(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The shell script that completes commands and options, made by the package shtab."""
    try:
        shtab = import_module("shtab")
    except ModuleNotFoundError:
        raise UserError('--completion needs the package shtab: pip install "barellm[completion]"') from None
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"--completion is {shell!r}, expected {', '.join(shtab.SUPPORTED_SHELLS)}")
    root = argparse.ArgumentParser(prog="barellm")
    commands = root.add_subparsers()
    for name, parser in parsers.items():
        for action in parser._actions:
            if action.dest == "preset":
                action.choices = list(models.presets())
        commands.choices[name] = parser  # pyright: ignore[reportIndexIssue]
        description = (parser.description or "").strip().partition(".")[0]
        commands._choices_actions.append(commands._ChoicesPseudoAction(name, [], description))
    return shtab.complete(root, shell).replace("-o bashdefault", "-o bashdefault -o default")  # files and folders too
