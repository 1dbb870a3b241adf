"""List and compare the runs of a folder: how far, how good, how fast, and which keys are not those of the preset."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from barellm import models
from barellm.cli.parsing.options import add
from barellm.config import overrides
from barellm.errors import UserError
from barellm.training.console import duration, short, show

CHOSEN_BY_DATA = ("model.vocab_size", "model.padded_vocab", "model.separator", "data.tokenizer", "train.steps")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="a folder of runs (default: runs)")
    add(parser, "--sort", "the last first, or the best (default: date)", "date", choices=("date", "loss"))
    add(parser, "--json", "print a JSON object for each run")


def run(args: argparse.Namespace) -> int:
    """List the runs in a folder, or the one that it is: the latest first, or by loss, those without one last. Returns 0."""
    root = Path(args.folder)
    folders = [path.parent for path in sorted([*root.glob("config.json"), *root.glob("*/config.json")])]
    if not folders:
        raise UserError(f"{root}/ holds no runs, expected folders that barellm train has made")
    found = [facts(folder) for folder in folders]
    by_loss, measure = args.sort == "loss", measure_of(found)
    found.sort(key=lambda f: (f["val_nats"] is None, f[measure] or 0.0) if by_loss else -f["changed"])
    for row in found if args.json else ():
        print(json.dumps(row))
    if not args.json:
        show("\n".join(table(found)))
    return 0


def measure_of(found: list[dict[str, Any]]) -> str:
    """What runs are compared by: bits per byte where all have them, as tokenizers may differ."""
    return "val_nats" if any(f["val_bits_per_byte"] is None is not f["val_nats"] for f in found) else "val_bits_per_byte"


def facts(folder: Path) -> dict[str, Any]:
    """A run's row, from its files. `changed`: Unix time of the last change."""
    from barellm.checkpoint import checkpoint
    from barellm.training import metrics

    rows = metrics.read(folder / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "train"]
    evaluated = [row for row in rows if row["kind"] == "eval"]
    last, seen = steps[-1] if steps else {}, evaluated[-1] if evaluated else {}
    saved = checkpoint.read_json(folder / "config.json")
    return {
        "folder": str(folder), "preset": saved.get("preset"), "step": last.get("step", 0),
        "finished": any(row["kind"] == "result" for row in rows), "train_loss": last.get("loss"), "val_nats": seen.get("val_nats"),
        "val_bits_per_byte": seen.get("val_bits_per_byte"), "tokens_per_s": last.get("tokens_per_s"),
        "seconds": last.get("seconds"), "changed": max(path.stat().st_mtime for path in folder.iterdir()),
        "keys": own_keys(saved, folder),
    }  # fmt: skip


def own_keys(saved: Any, folder: Path) -> dict[str, Any]:
    """The keys of a run that are not as in its preset, which another version or --model FILE may have had."""
    try:
        config = overrides.from_json(saved, folder / "config.json")
        preset = overrides.flat(models.preset(config.preset))
    except UserError:
        return {}
    return {k: v for k, v in overrides.flat(config).items() if k not in CHOSEN_BY_DATA and v != preset.get(k, v)}


def table(found: list[dict[str, Any]]) -> list[str]:
    """The runs (`facts` of each) as lines, two for each; the one with the least validation loss is marked. "-": not measured."""

    def shown(value: float | None, form: Callable[[float], str] = "{:.4f}".format) -> str:
        return "-" if value is None else form(value)

    best = min((f for f in found if f["val_nats"] is not None), key=lambda f: f[measure_of(found)], default=None)
    lines = [f"{'step':>7} {'train loss':>10} {'val loss':>8} {'bits/byte':>9} {'tok/s':>6} {'time':>8}  run"]
    for f in found:
        losses = f"{shown(f['train_loss']):>10} {shown(f['val_nats']):>8} {shown(f['val_bits_per_byte']):>9}"
        speed = f"{shown(f['tokens_per_s'], short):>6} {shown(f['seconds'], duration):>8}"
        mark = "*" if f is best else " "
        name = Path(f["folder"]).name + ("" if f["finished"] else " (not finished)")
        lines.append(f"{f['step']:>7,} {losses} {speed} {mark}{name}")
        keys = ", ".join(f"{overrides.SHORT_NAMES.get(key, key)} {value}" for key, value in f["keys"].items())
        lines.append(f"{'':9}{f['preset']}{': ' if keys else ''}{keys}")
    return [*lines, "", "*: the best; barellm plot RUN ... draws their curves"]
