"""Replay a step of a run from the checkpoint before it, and say whether it has the same bits as when the run did it: loss, gradient
norm, and the weights and the optimizer's state of a checkpoint behind it.

Where it differs, or with --ops, the step is replayed op by op. Each op is executed twice from the same inputs, held against its
float64 reference, and what it reads must be as the op before left it: the first op and tensor that fail are named. The exit status
is 1 for a step that differs, or an op that fails. docs/verify.md says which faults that finds."""

import argparse
import json
import os
import sys
from pathlib import Path

from barellm.cli.parsing.options import Parser, add
from barellm.config import overrides
from barellm.errors import UserError
from barellm.training.console import show


def configure(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    add(parser, "--step N", "the step (default: the last one that was recorded)", type=int)
    add(parser, "--ops", "go op by op even where the step has the recorded bits")
    add(parser, "--device NAME", "auto, cpu, cuda or reference (default: as the run)")
    add(parser, "--json", "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Replay a step of the run and print what differs. Returns 0 if all bits are equal and no op is at fault, else 1. Takes the
    run's ISA where this machine has it (sets BARELLM_ISA): other vector widths sum in another order."""
    from barellm.assembly.build import chosen_device
    from barellm.cpu.isa import available, host
    from barellm.interop.sources import starting_weights
    from barellm.runtime import poison
    from barellm.training import replay

    if poison.requested():
        raise UserError("BARELLM_POISON is 1, which overwrites what an op has read: verify replays without it")
    recorded = replay.Recorded.of(Path(args.run), args.step)
    config, weights = starting_weights(recorded.config, overrides.flat(recorded.config), recorded.start)
    device = chosen_device(args.device or recorded.machine["device"], config)
    if device == "reference" and args.ops:
        raise UserError("--ops is for kernels, and the device is reference, which has none")
    isa = recorded.machine.get("isa", "")
    if device == "cpu" and isa not in ("", host().name) and "BARELLM_ISA" not in os.environ:
        if isa in available():
            os.environ["BARELLM_ISA"] = isa
        else:
            print(f"barellm: warning: the run used {isa}, this machine has {host().name}: expect other bits", file=sys.stderr)
    found = replay.Replay(recorded, config, weights, device=device).compare(ops=args.ops)
    print(json.dumps(found)) if args.json else show("\n".join(replay.lines(found)))
    return 0 if found["equal"] and not found.get("fault") else 1
