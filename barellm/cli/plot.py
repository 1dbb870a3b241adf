"""Draw the loss of runs that are finished, were stopped, or still train: charts in the terminal, or one picture with all of them.

The training loss is smoothed: each hundredth of the axis shows its mean. Runs with different tokenizers have different
tokens, so their nats per token cannot be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from barellm.training.curve import AXES

if TYPE_CHECKING:
    from barellm.training.curve import Curve


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, its metrics.jsonl, or what train --json said"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="draw a picture into this file, .png, .svg or .pdf (default: charts in the terminal)",
    )
    parser.add_argument("--x", choices=AXES, default="steps", help="what the loss is drawn over (default: steps)")


def run(args: argparse.Namespace) -> int:
    from barellm.training import curve
    from barellm.training.console import Console

    console = Console()
    curves = [_read(name, axis=args.x) for name in args.runs]
    if args.out is not None:
        title = curves[0].name if len(curves) == 1 else "training, smoothed, and validation (dots)"
        curve.image(Path(args.out), curves, title=title, axis=args.x)
    for found in curves:
        console.line(f"{found.name}: {curve.summary(found, axis=args.x)}")
        if args.out is None:
            console.line(curve.terminal(found, axis=args.x, ascii_only=not console.can_show(curve.GLYPHS)))
    if args.out is not None:
        console.line(f"curve {args.out}")
    return 0


def _read(name: str, *, axis: str) -> Curve:
    """The curve of the run in a folder. UserError for what is not there, or is not what a run writes."""
    from barellm import overrides
    from barellm.checkpoint import checkpoint
    from barellm.errors import UserError
    from barellm.training import curve, metrics

    path = Path(name)
    checkpoint.must_exist(path, expected="a run folder")
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} has no metrics.jsonl, expected the folder of a run")
    step_tokens = 1
    if axis == "tokens":
        train = overrides.from_json(checkpoint.read_json(file.parent / "config.json")).train
        step_tokens = train.batch * train.accumulate * train.seq
    try:
        found = curve.series(metrics.read(file), axis=axis, step_tokens=step_tokens)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file} has rows without kind, step or loss: no run wrote it") from None
    if not any(found):
        raise UserError(f"{file} holds no step yet")
    return curve.Curve(str(path), *found)
