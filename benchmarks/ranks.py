"""A step of gpt2-124m by one process of two threads, by two ranks of one thread, and by PyTorch's DistributedDataParallel with gloo
on two ranks of one thread: in turns, at one global batch.

python -m benchmarks.ranks --processor NAME --out benchmarks/results/NAME/ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from barellm import models
from barellm.assembly.build import resolved
from barellm.config import Config
from barellm.cpu.threads import allowed_cpus
from barellm.distributed.launch import mpiexec
from benchmarks.interleaved import Variant, interleave

ROOT = Path(__file__).parents[1]
OURS, RANKS = "one process", "ranks"


def config_of(args: argparse.Namespace) -> Config:
    preset = models.preset("gpt2-124m")
    return resolved(replace(preset, train=replace(preset.train, micro_batch_size=args.batch, seq=args.seq, dtype="bf16")), "cpu")


def serve(args: argparse.Namespace) -> None:
    """One side of the comparison, or one rank of it. All but the first rank are told by pipes what the first is told: they sleep
    meanwhile."""
    from barellm.tools.profile import step

    if args.serve == OURS:
        step.serve(config_of(args))
        return
    from barellm.distributed.mpi import MpiRanks

    ranks = MpiRanks()
    ranks.settle(allowed_cpus())
    if ranks.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (to the end of the process)
        step.serve(config_of(args), ranks=ranks, lines=open(args.pipes / str(ranks.rank)))  # noqa: SIM115
    else:
        others = [open(args.pipes / str(rank), "w") for rank in range(1, ranks.count)]  # noqa: SIM115

        def lines() -> Iterator[str]:
            for line in sys.stdin:
                for other in others:
                    other.write(line)
                    other.flush()
                yield line

        step.serve(config_of(args), ranks=ranks, lines=lines())


def variants(args: argparse.Namespace, pipes: Path) -> list[Variant]:
    sizes = ["--batch", str(args.batch), "--seq", str(args.seq), "--pipes", str(pipes)]
    python, tuned = [sys.executable, "-m", "benchmarks.ranks", *sizes, "--serve"], _tuned()
    found = [
        Variant(OURS, [*python, OURS], {"BARELLM_THREADS": str(args.ranks)}, "one process, as many threads as ranks"),
        Variant(
            RANKS,
            [mpiexec(), "-n", str(args.ranks), *python, RANKS],
            {"BARELLM_THREADS": "1", "BARELLM_RANK_LIMIT": "3600"},
            "MPICH",
        ),
    ]
    script = str(ROOT / "benchmarks" / "peers" / "torch_ddp.py")
    each = ["--ranks", str(args.ranks), "--threads", "1", "--batch", str(args.batch // args.ranks)]
    for mode in args.peers.split(",") if args.peers else ():
        command = [sys.executable, script, "--mode", mode, "--dtype", "bf16", "--seq", str(args.seq), *each]
        found.append(Variant(f"ddp {mode}", command, tuned, "autocast, gloo, malloc in huge pages"))
    return found


def _tuned() -> dict[str, str]:
    """The environment in which PyTorch is fastest; each rank has one core already."""
    found = json.loads((ROOT / "benchmarks" / "peers" / "environments.json").read_text())["tuned"]["set"]
    return {name: value for name, value in found.items() if "{" not in value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processor", default="")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default="eager,compile", help="modes of PyTorch; empty for none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    with tempfile.TemporaryDirectory(prefix="barellm-pipes-") as name:
        for rank in range(1, args.ranks):
            os.mkfifo(Path(name) / str(rank))
        sides = variants(args, Path(name))
        steps = interleave(sides, rounds=args.rounds, report=lambda line: print(line, flush=True))
    middle = {v.name: median(v.samples) for v in sides}
    ratios = {v.name: middle[v.name] / middle[OURS if v.name == RANKS else RANKS] for v in sides[1:]}
    for name, ratio in ratios.items():
        of = OURS if name == RANKS else RANKS
        print(f"{name}: {middle[name] * 1e3:.0f} ms, {ratio:.2f} times {of} ({middle[of] * 1e3:.0f} ms)")
    if args.out:
        found = {
            "kind": "ranks", "processor": args.processor, "batch": args.batch, "seq": args.seq, "ranks": args.ranks,
            "steps_of_a_turn": steps, "ratios": ratios, "variants": [v.to_json(ROOT) for v in sides],
        }  # fmt: skip
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
