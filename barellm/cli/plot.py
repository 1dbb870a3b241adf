"""Draw runs that are finished, were stopped, or still train: charts in the terminal, one picture with all of them, or a page.

What is drawn is the loss, or what --y names. A finished run has a dashed line for gzip -9. Training is smoothed: each hundredth of
the axis shows its mean. Runs with different tokenizers have different tokens, so their nats per token cannot be compared, but their
bits per byte can (--y bits).

With --exponent-stats it shows exponent histograms (dynamic range) of a run's activations, gradients and weights, which
`train --train.exponent_stats N` logs: a table of the last step in the terminal, a picture of the first and the last step, or all
numbers. docs/exponent_stats.md explains it."""

import argparse
import json
from pathlib import Path

from barellm.cli.parsing.options import add
from barellm.config import overrides
from barellm.errors import UserError
from barellm.training import curve
from barellm.training.console import Console
from barellm.training.curve import AXES, QUANTITIES, Curve


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, its metrics.jsonl, or what train --json said")
    add(parser, "--out FILE", "a picture, .png, .svg or .pdf, or a page for a browser, .html (default: charts in the terminal)")
    add(parser, "--x", "what it is drawn over (default: steps)", choices=AXES)
    add(parser, "--y",
        "loss, bits (per byte, of evaluations), lr, norm (of the gradient), speed (tokens per second) or hellaswag (accuracy "
        "by the mean loss of a token) (default: loss)", choices=QUANTITIES)  # fmt: skip
    add(parser, "--log", "which axes are logarithmic (default: none)", choices=("x", "y", "xy"))
    add(parser, "--exponent-stats", "exponent histograms of one run, in the place of losses")
    add(parser, "--json", "with --exponent-stats: print the numbers of every step, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Draw the curves: as an HTML page or a picture, by the suffix of --out, or without --out in the terminal. Returns 0."""
    console = Console()
    page = not args.exponent_stats and (args.out or "").lower().endswith(".html")
    for option in ("x", "y", "log") if args.exponent_stats or page else ():
        if getattr(args, option) is not None:
            other = "in a page they are chosen there" if page else "--exponent-stats draws none"
            raise UserError(f"--{option} is for curves, and {other}: leave one of them out")
    if args.exponent_stats:
        return _exponent_stats(args, console)
    axis, log = args.x or "steps", args.log or ""
    if args.json:
        raise UserError("--json is for --exponent-stats: the losses of a run are in its metrics.jsonl")
    if page:
        return _page(args, console)
    curves = [one for name in args.runs for one in _read(name, axis=axis, y=args.y or "loss")]
    if args.out is not None:
        title = str(Path(args.runs[0])) if len(args.runs) == 1 else "training, smoothed, and validation (dots)"
        title = "validation" if len(args.runs) > 1 and not any(one.train for one in curves) else title
        curve.image(Path(args.out), curves, title=title, axis=axis, log=log)
    for one in curves:
        console.line(f"{one.name}: {curve.summary(one, axis=axis)}")
        if args.out is None:
            ascii_only = not console.can_show(curve.GLYPHS)
            console.line(curve.terminal(one, axis=axis, log=log, ascii_only=ascii_only))
    if args.out is not None:
        console.line(f"curve {args.out}")
    return 0


def _page(args: argparse.Namespace, console: Console) -> int:
    """Write the runs as a self-contained HTML page."""
    from barellm.checkpoint import storage
    from barellm.serving import live
    from barellm.training import metrics

    files = [(name, _metrics_of(Path(name))) for name in args.runs]
    found = [live.archived(name, metrics.read(file), file.parent / "config.json") for name, file in files]
    storage.replace_file(Path(args.out), live.html(found)[0].encode())
    console.line(f"page {args.out}")
    return 0


def _exponent_stats(args: argparse.Namespace, console: Console) -> int:
    """Show the exponent histograms of one run: as JSON, as a picture (--out) or in the terminal, the last step. Returns 0."""
    from barellm.checkpoint import checkpoint
    from barellm.training import exponent_stats, exponent_stats_chart

    if len(args.runs) > 1:
        raise UserError(f"--exponent-stats shows one run, found {len(args.runs)}")
    (name,) = args.runs
    path = Path(name)
    checkpoint.must_exist(path, expected="a run folder")
    rows = exponent_stats.steps(path)
    try:
        if args.json:
            print(json.dumps({"run": name, "steps": [exponent_stats_chart.numbers(row) for row in rows]}))
        elif args.out is not None:
            exponent_stats_chart.image(Path(args.out), exponent_stats_chart.chosen(rows), title=name)
            console.line(f"exponents {args.out}")
        else:
            console.line(exponent_stats_chart.terminal(rows[-1], ascii_only=not console.can_show(exponent_stats_chart.SHADES)))
    except UserError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise UserError(f"{path} has exponents that no run wrote in {exponent_stats.FILE}") from None
    return 0


def _read(name: str, *, axis: str, y: str) -> list[Curve]:
    """The curve of a run's folder; two of learning rates if Muon has its own. UserError for files that no run wrote."""
    from barellm.checkpoint import checkpoint
    from barellm.training import metrics, training_schedule

    path, file = Path(name), _metrics_of(Path(name))
    rows, before = metrics.read(file), int
    if axis == "tokens" and any("tokens" not in row for row in rows if row.get("kind") == "train"):
        # Older versions did not write them. The configuration knows, of a step with more tokens than the one before too.
        saved = file.parent / "config.json"
        before = training_schedule.tokens_before(overrides.from_json(checkpoint.read_json(saved), saved))
    try:
        found = curve.series(rows, axis=axis, before=before, y=y)
        muon = curve.series(rows, axis=axis, before=before, y=y, muon=True)[0] if curve.QUANTITIES[y].muon else ()
        gzip = curve.gzip_line(rows, y=y)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise UserError(f"{file} has rows without kind, step or loss: no run wrote it") from None
    if not any(found):
        what = "no step yet" if y in ("loss", "lr", "norm", "speed") else f"no {curve.QUANTITIES[y].label}"
        raise UserError(f"{file} holds {what}")
    if not muon:
        return [curve.Curve(str(path), *found, y=y, gzip=gzip)]
    return [curve.Curve(f"{path}, {of}", points, (), y=y) for of, points in (("AdamW", found[0]), ("Muon", muon))]


def _metrics_of(path: Path) -> Path:
    """The file with a run's rows. UserError where there is none."""
    from barellm.checkpoint import checkpoint

    checkpoint.must_exist(path, expected="a run folder")
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} has no metrics.jsonl, expected the folder of a run")
    return file
