"""List the presets, or print the values of one as a file for --config."""

import argparse
import json
from dataclasses import fields
from typing import Any

from barellm import models
from barellm.cli.parsing.options import add
from barellm.config import Config, overrides
from barellm.config.fields import entries


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", nargs="?", metavar="NAME", help="the preset whose values are printed, as TOML")
    add(parser, "--json", "print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table of presets, or the values of one as TOML, or either as JSON. Returns 0; UserError for an unknown name."""
    if args.preset:
        config = models.preset(args.preset)
        print(json.dumps(overrides.to_json(config)) if args.json else toml(config))
        return 0
    found = {name: facts(make()) for name, make in models.presets().items()}
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{'preset':<22} {'model':<9} {'parameters':>10} {'batch x sequence':>20}  data")
    for name, fact in found.items():
        print(f"{name:<22} {fact['model']:<9} {short(fact['parameters']):>10} {fact['step']:>20}  {fact['data']}")
    print("\nbarellm presets NAME prints all values of one, barellm train NAME trains it")
    return 0


def facts(config: Config) -> dict[str, Any]:
    """A preset's row in the table; its step is micro-batch x gradient accumulation x sequence length."""
    from barellm.program.builder import Program
    from barellm.program.graph import Store

    program, train = Program(Store()), config.train
    models.of(config.model).declare(program, config.model)
    return {
        "model": models.name_of(config.model),
        "parameters": sum(t.trained for t in program.store.of_role("parameter")),
        "step": f"{train.micro_batch_size} x {train.gradient_accumulation_steps} x {train.seq:,}",
        "data": config.data.source or "--data FILE",
    }


def short(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 999.5e6 else f"{count / 1e6:.3g}M"


def toml(config: Config) -> str:
    """The values as a TOML file for --config, with a key's meaning where the line has room."""
    lines = [f'preset = "{config.preset}"']
    for section in overrides.SECTIONS:
        lines += ["", f"[{section}]"]
        part = getattr(config, section)
        for name in (field.name for field in fields(part) if field.init):
            entry = entries(type(part))[name]
            line = f"{name} = {json.dumps(getattr(part, name))}"
            help = f"  # {entry.help.partition(';')[0]}"
            lines.append(line + help * (len(line + help) <= 80))
    return "\n".join(lines)
