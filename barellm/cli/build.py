"""Make a program that trains without Python: a shared library, a C header and a driver, linked by the system's C compiler."""

import argparse
import time

from barellm.cli.parsing.options import Parser, add, add_configuration, configuration


def configure(parser: Parser) -> None:
    add(parser, "-o --out DIR", "the folder to make", required=True)
    add(parser, "--threads N", "the most threads of a session (default: this machine's)", type=int)
    add(parser, "--static", "train-static and sample-static too, which need no shared libraries at all")
    add(parser, "--isa NAME", "the instructions of another machine: avx2, avx512_bf16, neon, neon_bf16, ...")
    add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    """Build the program from a preset, or from a run's config.json."""
    from pathlib import Path

    from barellm.errors import UserError
    from barellm.native.build import build
    from barellm.tools.inspect.kernels import isa_named
    from barellm.training.console import Console, show
    from barellm.training.run import Run

    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise UserError(f"--threads is {args.threads}, expected 1 to 1024")
    of_run = Path(args.preset or "") / "config.json"
    if args.preset and of_run.is_file():
        args.preset, args.config = None, str(of_run)
    isa = isa_named(args.isa) if args.isa else None
    config = configuration(args)
    job = Run(config, start=None, weights=None, device="cpu", console=Console(), started=time.monotonic(), requested=True)
    built = build(job, Path(args.out), threads=args.threads, static=args.static, isa=isa)
    for path in sorted(path for path in built.folder.iterdir() if path.is_file()):
        print(f"{path}  {path.stat().st_size:,} bytes")
    quoted = " ".join(f"'{word}'" if "*" in word else word for word in built.command)
    show(f"train with: {quoted} --out RUN")
    return 0
