"""Say whether the losses of runs differ by rounding noise or by a fault, against the spread over seeds, with a p-value. Finished
runs are grouped by their configuration without the seed, and runs with other seeds beside them are taken too; runs of one
configuration with other kernels stand behind --against.

With --roundings it trains PRESET itself, with several seeds each: as it is; on the next lesser instruction set (isa); with no ops
fused (unfused); with half the micro-batch and twice the accumulation (order). What lies in --out already is not trained again.
The exit status is 1 for a fault. docs/verify.md says which tests these are."""

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from barellm.cli.parsing import options
from barellm.cli.runs import CHOSEN_BY_DATA
from barellm.config import Config, overrides
from barellm.errors import UserError
from barellm.training.console import show

ROUNDINGS = ("isa", "unfused", "order")
SEEDS = 5


def configure(parser: options.Parser) -> None:
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="the second group; the first is RUN ...")
    options.add(parser, "--roundings LIST", f"train PRESET with other roundings: {', '.join(ROUNDINGS)}, with commas between them")
    options.add(parser, "--seeds N", f"with --roundings: seeds of each group (default: {SEEDS})", SEEDS, least=3)
    options.add(parser, "--out DIR", "with --roundings: folder of the runs (default: runs/compare-PRESET)")
    options.add(parser, "--json", "print one JSON object")
    options.add_device(parser, "auto, cpu, cuda or reference", "auto")
    options.add_configuration(parser)
    preset = next(action for action in parser._actions if action.dest == "preset")
    preset.nargs, preset.metavar, preset.help = "*", "RUN", "folders of runs; with --roundings the name of a preset"


Trained = tuple[Path, Config, list[dict[str, Any]]]  # a run by its folder: its configuration, and the rows of its metrics


def run(args: argparse.Namespace) -> int:
    """Find or train the groups, test the first beside each other one, and print the tables and verdicts."""
    from barellm.training import comparison

    groups = _found(args) if args.roundings is None else _trained(args)
    counts: set[int] = set()
    (first, a), *others = [(name, _measured(runs, counts)) for name, runs in groups.items()]
    tests = {name: comparison.compare(a, b) for name, b in others}
    if args.json:
        rows = {name: [asdict(test) for test in found] for name, found in tests.items()}
        print(json.dumps({"kind": "compare", "first": first, "seeds": sorted(a), "against": rows}))
    else:
        show("\n".join(line for name, found in tests.items() for line in comparison.lines(f"A: {first}, B: {name}", found)))
    return int(any(test.fault for found in tests.values() for test in found))


def _found(args: argparse.Namespace) -> dict[str, list[Trained]]:
    """Groups of finished runs, by the name of their first run: those before and behind --against; without it one group for each
    configuration, to which runs of other seeds in the folders beside are added. UserError for less than two groups."""
    if both := set(args.preset) & set(args.against):
        raise UserError(f"{min(both)} is named before and behind --against, expected it in one group")
    if len(args.preset) + len(args.against) < 2 or not args.preset:
        raise UserError(f"{len(args.preset)} runs are named, expected two or more, or --roundings {','.join(ROUNDINGS)}")
    if args.against:
        return {names[0]: [_read(Path(name)) for name in names] for names in (args.preset, args.against)}
    groups: dict[str, list[Trained]] = {}
    for one in (_read(Path(name)) for name in args.preset):
        groups.setdefault(_key(one[1]), []).append(one)
    if len(groups) < 2:
        raise UserError(f"the {len(args.preset)} runs have one configuration: name those with other kernels behind --against")
    for key, runs in groups.items():
        for file in sorted(runs[0][0].resolve().parent.glob("*/config.json")):
            with suppress(UserError):  # of another version, or of --model FILE
                _, config, rows = one = _read(file.parent)
                if _ended(rows) and _key(config) == key and config.train.seed not in {other.train.seed for _, other, _ in runs}:
                    runs.append(one)
    return {str(runs[0][0]): runs for runs in groups.values()}


def _trained(args: argparse.Namespace) -> dict[str, list[Trained]]:
    """Groups by rounding ("as-it-is" first), of --seeds runs each, trained where their folders are not there yet. A rounding may
    set environment variables, which are put back after its runs. Changes `args.preset` from a list to a name."""
    from barellm.assembly.build import chosen_device, resolved

    wanted = args.roundings.split(",")
    if unknown := [name for name in wanted if name not in ROUNDINGS]:
        raise UserError(f"--roundings has {unknown[0]!r}, expected {', '.join(ROUNDINGS)} with commas between them")
    if args.against or len(args.preset) > 1:
        raise UserError("--roundings trains the runs of one preset: leave the folders of runs out")
    args.preset = args.preset[0] if args.preset else None
    config = options.configuration(args)
    if config.train.minutes:
        raise UserError(f"train.minutes is {config.train.minutes:g}, and runs of one length are compared: pass --steps")
    device = chosen_device(args.device, config)
    config = resolved(config, device)
    root, first, groups = Path(args.out or f"runs/compare-{config.preset}"), config.train.seed, {}
    variants = [("as-it-is", (config, {})), *((name, _rounded(name, config, device)) for name in wanted)]
    for name, (changed, variables) in variants:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            seeded = [replace(changed, train=replace(changed.train, seed=seed)) for seed in range(first, first + args.seeds)]
            groups[name] = [_run_of(one, root / f"{name}-seed-{one.train.seed}", device) for one in seeded]
        finally:
            os.environ.clear()
            os.environ.update(before)
    return groups


def _rounded(name: str, config: Config, device: str) -> tuple[Config, dict[str, str]]:
    """(the configuration, variables of the environment) of another rounding."""
    train = config.train
    if name == "unfused":
        return config, {"BARELLM_FUSION": "0"}
    if name == "order":
        batch, count = train.micro_batch_size, train.gradient_accumulation_steps
        if batch % 2 or train.batch_rampup_from or train.overfit:
            raise UserError(f"order halves the micro-batch of {batch}, expected an even one, without a ramp-up and train.overfit")
        return replace(config, train=replace(train, micro_batch_size=batch // 2, gradient_accumulation_steps=2 * count)), {}
    from barellm.cpu.isa import available, host

    lesser = available()[available().index(host().name) + 1 :] if device == "cpu" else []
    if not lesser:
        raise UserError(f"isa is for a CPU with a lesser instruction set, found {host().name if device == 'cpu' else device}")
    return config, {"BARELLM_ISA": lesser[0]}


def _run_of(config: Config, path: Path, device: str) -> Trained:
    """The run that is there, resumed where it has not ended, or trained now. UserError where another one lies there."""
    from barellm.runs import train

    there = _read(path) if (path / "config.json").exists() else None
    if there and _key(there[1]) != _key(config):
        raise UserError(f"{path} holds a run of another configuration: name another folder with --out")
    if there and _ended(there[2]):
        return there
    print(f"training {path}", file=sys.stderr)
    if not train(None if there else config, out=path, resume=bool(there), device=device, quiet=True).finished:
        raise KeyboardInterrupt
    return _read(path)


def _read(path: Path) -> Trained:
    from barellm.checkpoint import checkpoint
    from barellm.training import metrics

    checkpoint.must_exist(path / "config.json", expected="the folder of a run")
    config = overrides.from_json(checkpoint.read_json(path / "config.json"), path / "config.json")
    return path, config, metrics.read(path / "metrics.jsonl")


def _ended(rows: list[dict[str, Any]]) -> bool:
    return any(row["kind"] == "result" for row in rows)


def _key(config: Config) -> str:
    """The configuration without the seed, and without what a run chooses by its text."""
    chosen = {"train.seed", "data.document_mask", *CHOSEN_BY_DATA}
    return json.dumps({key: value for key, value in overrides.flat(config).items() if key not in chosen})


def _measured(runs: list[Trained], counts: set[int]) -> dict[int, dict[str, float]]:
    """{seed: what was measured} of a group. UserError for a run that has not ended, two of one seed, or other `counts` of steps."""
    from barellm.training.comparison import measures

    found = {}
    for path, config, rows in runs:
        seed, ended = config.train.seed, _ended(rows)
        if not ended or seed in found:
            what = f"has the seed {seed}, as another of its group" if ended else "has not ended"
            raise UserError(f"{path} {what}, expected one finished run of each seed")
        counts.add(max(row["step"] for row in rows))
        if len(counts) > 1:
            raise UserError(f"the runs have {' and '.join(map(str, sorted(counts)))} steps, expected as many of each")
        found[seed] = measures(rows)
    return found
