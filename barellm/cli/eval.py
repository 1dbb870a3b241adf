"""Measure a checkpoint's loss, in nats per token and bits per byte, on the validation part of its text or on another text."""

from __future__ import annotations

import argparse
import json
import sys

from barellm.cli.options import add_device, add_dtype, add_weights


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder, or a run's, whose newest whole one is taken"
    )
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="another text, or shards, of which the validation part is used (default: the run's own)",
    )
    parser.add_argument("--whole", action="store_true", help="use all of the text, not only its validation part")
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="look at about N tokens, evenly spread (default: all)"
    )
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="how many sequences are computed at once (default: 8)"
    )
    add_device(parser, "cpu, cuda or reference")
    add_dtype(parser)
    add_weights(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from barellm.cli.checkpoints import found
    from barellm.data.loader import Validation
    from barellm.data.sources import prepare
    from barellm.errors import UserError
    from barellm.evaluation.validation import Evaluator
    from barellm.training.console import Console

    for name, least in (("tokens", 0), ("batch", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is {getattr(args, name)}, expected at least {least}")
    checkpoint = found(args.checkpoint, device=args.device, dtype=args.dtype, weights=args.weights, batch=args.batch)
    config = checkpoint.config
    source = config.data if args.data is None else replace(config.data, source=args.data)
    data = prepare(source, tokenizer=checkpoint.tokenizer, whole=args.whole)
    windows = Validation(data.val, seq=config.train.seq, max_tokens=args.tokens)
    with checkpoint.opened(positions=0) as machine:
        console = Console(json_lines=not sys.stderr.isatty(), stream=sys.stderr)
        evaluator = Evaluator(windows, batch=args.batch, byte_lengths=data.byte_lengths)
        result = evaluator.run(machine.session, report=console.evaluating(windows.windows))
        console.clear()
    assert result is not None
    bits = result.bits_per_byte
    if args.json:
        row = {"checkpoint": str(checkpoint.path), "data": data.name, "nats": result.nats, "bits_per_byte": bits}
        print(json.dumps(row | {"targets": result.targets, "bytes": result.bytes}))
    else:
        per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
        print(
            f"{checkpoint.path}: {result.nats:.4f} nats per token{per_byte} ({result.targets:,} tokens of {data.name})"
        )
    return 0
