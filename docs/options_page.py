"""Writes docs/options.md, all commands and all keys, and barellm/__init__.pyi, in which editors find the arguments of
`barellm.train`. `python docs/options_page.py`; tests/cli/test_help.py compares."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import barellm
from barellm import models
from barellm.cli.main import COMMANDS, parser_of
from barellm.cli.parsing import help
from barellm.config import AdapterConfig, DataConfig, OptimConfig, TrainConfig, aliases, overrides
from barellm.config.fields import Section, entries

FILE = Path(__file__).with_name("options.md")
STUB_FILE = Path(barellm.__file__).with_name("__init__.pyi")
STUB = """# Made by docs/options_page.py from the configuration.
# fmt: off
# ruff: noqa: UP013
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from barellm import kernels as kernels
from barellm.api import Model as Model
from barellm.api import load as load
from barellm.config import Config
from barellm.runs import Run as Run
from barellm.runs import Step as Step

__version__: str

{classes}
def train(
    config: str | Config | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    callbacks: Iterable[Callable[[Step], object]] = (),
    quiet: bool = False,
    model: Mapping[str, object] = ...,
    optim: OptimKeys = ...,
    train: TrainKeys = ...,
    adapter: AdapterKeys = ...,
    {names}
) -> Run: ...
"""
HEAD = """# Commands and keys

Made by `python docs/options_page.py` of what the commands declare: the pages that `barellm COMMAND --help-all` prints, and every
configuration key with its default. `barellm presets NAME` prints the values of a preset.
"""
NANOGPT = """nanoGPT's line for its character model on a CPU, and the same run here, whose preset has these sizes. Options that have
no counterpart are named, all at once, with what does it here:

```text
python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64
    --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
```
```sh
barellm train shakespeare-char --data tinyshakespeare.txt --device=cpu --block_size=64 --n_layer=4 --dropout=0.0
```
"""


def commands() -> Iterator[str]:
    """Each command's own options. Those that take configuration keys have them below, once."""
    for name, text in COMMANDS.items():
        parser = parser_of(name, [])
        keys = set(overrides.every_key())
        for action in parser._actions:
            if action.dest in keys:
                action.help = "==SUPPRESS=="
        more = "\n\nand the [configuration keys](#configuration-keys)." if any(a.dest in keys for a in parser._actions) else ""
        yield f"### barellm {name}\n\n{text[0].upper()}{text[1:]}.\n\n```text\n{help.page(parser, everything=True)}\n```{more}\n"


def table(title: str, rows: Iterator[tuple[str, str, object, str]]) -> str:
    lines = [f"### {title}\n", "| key | type | default | |", "|---|---|---|---|"]
    for key, kind, default, text in rows:
        value = str(default).lower() if isinstance(default, bool) else "" if default == "" else f"`{default}`"
        lines.append(f"| `{key}` | {kind} | {value} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def section(part: type[Section]) -> Iterator[tuple[str, str, object, str]]:
    made = part()
    for name, entry in entries(part).items():
        key = f"{part.section}.{name}"
        short = overrides.SHORT_NAMES.get(key)
        also = f" (`--{short.replace('_', '-')}`)" if short else ""
        yield key, entry.kind.__name__, getattr(made, name), entry.help + also


def others() -> str:
    """What options of other trainers are here."""
    names: dict[str, list[str]] = {}
    for name, key in aliases.KEYS.items():
        if name != key.partition(".")[2]:
            names.setdefault(key, []).append(name)
    lines = ["### Options of other trainers\n"]
    lines.append(NANOGPT)
    lines.append("`barellm train` takes these names of nanoGPT, llm.c, torchtitan and transformers as they are:\n")
    lines += ["| key here | also accepted |", "|---|---|"]
    lines += [f"| `{key}` | {', '.join(f'`--{name}`' for name in also)} |" for key, also in sorted(names.items())]
    lines += ["\nand answers these with what it has instead:\n", "| option there | here |", "|---|---|"]
    lines += [f"| `--{name}` | {text} |" for name, text in sorted(aliases.INSTEAD.items())]
    return "\n".join(lines) + "\n"


def page() -> str:
    parts = [HEAD, "## Commands\n", *commands(), "## Configuration keys\n"]
    parts.append(
        "Options `--KEY VALUE` of a command, keys of a TOML file for `--config`, arguments of [`barellm.train`](python.md).\n"
    )
    for part in (OptimConfig, DataConfig, TrainConfig, AdapterConfig):
        parts.append(table(f"[{part.section}]", section(part)))
    parts.append(others())
    for name in models.names():
        config = models.module(name).Config
        parts.append(table(f"[model] of {name}", section(config)))
    return "\n".join(parts)


def wrapped(parts: Iterable[str]) -> str:
    """Parts with commas between and behind them, as many on a line as fit."""
    return textwrap.fill(", ".join(part.replace(" ", "\0") for part in parts) + ",", 126).replace("\n", "\n    ").replace("\0", " ")


def stub() -> str:
    """The types of what `import barellm` gives: a TypedDict for each section, and `train` with the short names of keys."""
    kinds: dict[str, str] = {}
    classes = []
    for part in (OptimConfig, DataConfig, TrainConfig, AdapterConfig):
        keys = {name: entry.kind.__name__ for name, entry in entries(part).items()}
        class_name, fields = f"{part.section.title()}Keys", wrapped(f'"{name}": {kind}' for name, kind in keys.items())
        classes.append(f'{class_name} = TypedDict("{class_name}", {{\n    {fields}\n}}, total=False)\n')
        kinds |= {f"{part.section}.{name}": kind for name, kind in keys.items()}
    short = {short: kinds.get(key, "int") for key, short in overrides.SHORT_NAMES.items()}
    short |= {"data": "str | Path | DataKeys", "init_from": "str | Path", "tokenizer": "str | Path"}
    names = wrapped(f"{name}: {kind} = ..." for name, kind in short.items())
    return STUB.format(classes="\n".join(classes), names=names)


if __name__ == "__main__":
    STUB_FILE.write_text(stub())
    os.environ.pop("COLUMNS", None)
    FILE.write_text(page())
