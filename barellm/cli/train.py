"""Train a model. Without arguments this is a small GPT on the source of Python's own library, in about two minutes.

Ctrl-C (or SIGTERM) ends the run after the current step and saves a checkpoint; the exit status is then 130 (143). A second
Ctrl-C ends the run at once. docs/first_run.md explains what you see on the screen."""

import argparse
import os
import sys
import time
from contextlib import ExitStack, nullcontext, redirect_stdout
from pathlib import Path

from barellm import models
from barellm.cli.parsing import help, options
from barellm.config import overrides
from barellm.errors import UserError
from barellm.program.ranks import Ranks
from barellm.training.console import Console


def configure(parser: options.Parser) -> None:
    """The command's options, in --help's groups; last, every key of a configuration is an option (`add_configuration`)."""
    training, output = help.group(parser, "training"), help.group(parser, "output")
    options.add(training, "--resume", "resume the run in --out; from its newest complete checkpoint")
    options.add_device(training, "auto, cpu, cuda or reference; that is NumPy, for small models", "auto")
    options.add(training, "--ranks N",
        "data-parallel training (ZeRO-1) with N processes; of this machine (docs/ranks.md)", type=int)  # fmt: skip
    options.add(help.Rare(training), "--find-lr",
        "learning rate range test: --steps steps (default: 200) of a growing rate until it diverges, and a suggestion")  # fmt: skip
    options.add(output, "--out DIR", "output folder (default: runs/PRESET-DATE-TIME)")
    options.add(output, "--json", "print the rows of metrics.jsonl as they come; and nothing else")
    live = "show the run in a browser; on this machine alone, at this port or any that is free (docs/live.md)"
    output.add_argument("--live", nargs="?", type=int, const=-1, metavar="PORT", help=live)
    options.add_configuration(parser, options.TRAINED)


def run(args: argparse.Namespace) -> int:
    from barellm.distributed.dispatch import dispatched

    return dispatched("train", args, _train)


def _train(args: argparse.Namespace, ranks: Ranks) -> int:
    """One run, or this rank's part of it; with --json everything but the JSON rows goes to stderr."""
    started = time.monotonic()
    silent = open(os.devnull, "w") if ranks.rank else None  # noqa: SIM115  (to the end of the process)
    console = Console(json_lines=args.json, stream=silent, several=ranks.count > 1)
    # What trackers print, from threads of theirs, is no JSON.
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        return _trained(args, ranks, console, started)


def _trained(args: argparse.Namespace, ranks: Ranks, console: Console, started: float) -> int:
    """Resolve the configuration (new, resumed or learning rate test), then train. Returns the exit status."""
    from barellm.assembly.build import check_device, chosen_device
    from barellm.checkpoint import folder
    from barellm.interop.sources import starting_weights
    from barellm.serving import live
    from barellm.training import find_lr, resume, run

    check_device(args.device)
    requested = options.CommandLine.of(args)
    name = requested.preset
    wanted = name or models.usual()
    start = None
    root = Path("runs")
    if args.find_lr and ranks.count > 1:
        raise UserError("--find-lr tests with one process: leave --ranks out")
    if args.find_lr and args.live is not None:
        raise UserError("--find-lr writes no metrics that --live could show: leave one of them out")
    if args.resume and args.find_lr:
        raise UserError("--find-lr is a test from the start: it cannot --resume (--init-from begins with a run's weights)")
    if args.resume:
        out = Path(args.out) if args.out is not None else resume.newest_run(root, wanted)
        if out is None:
            raise UserError(f"nothing to resume: no run of {wanted} in {root}/ has a checkpoint (or name it with --out)")
        config, changes, start = resume.resume_from(out, preset=name, requested=requested.changes, console=console)
        keys = changes if start else overrides.flat(config)
    else:
        base = requested.base()
        config, keys = requested.changed(base), (changes := requested.changes(base))
        label = f"{config.preset}-find-lr" if args.find_lr else config.preset
        out = Path(args.out) if args.out is not None else root / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    config, weights = starting_weights(config, keys, start)
    config.check()
    before = start.meta["machine"].get("device", "") if start else ""
    device = chosen_device(args.device, config, ranks=ranks.count, before=before)
    steps = find_lr.steps_of(config, overrides.checked(requested.texts, config)) if args.find_lr else 0
    run_folder = folder.RunFolder(out, resume=args.resume, numbered=args.out is None and not args.resume)
    with ExitStack() as files:
        opened = files.enter_context(run_folder) if ranks.rank == 0 else run_folder  # only the first rank writes
        if args.live is not None and ranks.rank == 0:
            address = files.enter_context(live.serving(opened.path, args.live))
            print(f"live     {address}", file=sys.stderr) if args.json else console.line(f"live     {address}")
        job = run.Run(
            config, start=start, weights=weights, device=device, console=console, started=started,
            requested=args.resume or "data.tokenizer" in changes, ranks=ranks,
        )  # fmt: skip
        job.check_vocabulary(changes)
        if args.find_lr:
            if line := find_lr.unused(changes):
                console.line(line)
            return find_lr.run(job, opened, steps=steps, words=args.words)
        return job.execute(opened)
