"""The peer of several ranks: torch_gpt2.py's model under DistributedDataParallel with gloo, in processes that wait for their turns.

echo 5 | python torch_ddp.py --ranks 2 --threads 1 --batch 2 --seq 256     (the batch of each rank)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

import torch.distributed as dist
import torch_gpt2
from torch.nn.parallel import DistributedDataParallel
from torch_step import serve

OWN = torch_gpt2.OWN | {"ranks": 2, "rank": 0, "meeting": ""}


def build(a: argparse.Namespace) -> DistributedDataParallel:
    return DistributedDataParallel(torch_gpt2.build(a), gradient_as_bucket_view=True, static_graph=True)


class Passing:
    """Standard input, of which every line goes to other processes too."""

    def __init__(self, others: list[IO[str]]) -> None:
        self._others, self._own = others, sys.stdin

    def __iter__(self) -> Iterator[str]:
        for line in self._own:
            for other in self._others:
                other.write(line)
                other.flush()
            yield line


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("ranks", "rank"):
        parser.add_argument(f"--{name}", type=int, default=OWN[name])
    parser.add_argument("--meeting", default="", help="the file where the ranks find each other")
    a, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = a.meeting or f"{folder}/meeting"
        if a.rank == 0:
            others = [
                subprocess.Popen(
                    [sys.executable, *sys.argv, "--rank", str(rank), "--meeting", meeting],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    text=True,
                )
                for rank in range(1, a.ranks)
            ]
            sys.stdin = Passing([other.stdin for other in others if other.stdin])  # pyright: ignore
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cpus[a.rank * len(cpus) // a.ranks : (a.rank + 1) * len(cpus) // a.ranks])
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=a.rank, world_size=a.ranks)
        serve(build, OWN)


if __name__ == "__main__":
    main()
