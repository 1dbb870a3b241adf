"""The step on one thread, two, four ... and all; with contention for one of the cores; and with two threads on one core.

python -m benchmarks.scaling gpt2-124m --batch 4 --seq 64 --rounds 7 --out benchmarks/results/scaling-gpt2-124m-4x64-bf16.json
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from barellm import models
from barellm.assembly.build import build_programs, resolved
from barellm.config import Config
from barellm.cpu.threads import allowed_cpus, thread_count
from barellm.errors import UserError
from barellm.tools.bench.description import CHECKOUT, description
from barellm.tools.plan.roofline import measured_ceiling
from benchmarks.interleaved import Variant, interleave, ours
from benchmarks.roofline import step_bound


@dataclass(frozen=True)
class Setup:
    """A way to run a step: on `threads` threads and `cores` processors. With `contention`, another process computes on the last of
    these."""

    name: str
    threads: int
    cores: int
    contention: bool = False


def setups(threads: int) -> list[Setup]:
    counts = sorted({1 << i for i in range(threads.bit_length()) if 1 << i <= threads} | {threads})
    made = [Setup(f"{n} thread{'s' * (n > 1)}", n, n) for n in counts]
    if threads > 1:
        made.append(Setup(f"{threads} threads, contention on one core", threads, threads, contention=True))
        made.append(Setup("2 threads on one core", 2, 1))
    return made


def measure(config: Config, *, rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all setups in turns, and keep every sample."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("thread scaling needs a system on which processes can be bound to processors")
    threads, cpus = thread_count(), allowed_cpus()
    if threads > len(cpus):
        raise UserError(f"BARELLM_THREADS is {threads}, expected at most {len(cpus)}: thread scaling gives each a core")
    chosen = setups(threads)
    variants = [
        ours(
            config,
            name=setup.name,
            environment={"BARELLM_THREADS": str(setup.threads)},
            cpus=tuple(cpus[: setup.cores]),
            contention=cpus[setup.cores - 1] if setup.contention else None,
        )
        for setup in chosen
    ]
    load = os.getloadavg()
    steps = interleave(variants, rounds=rounds, report=report)
    return {
        **description("scaling", config),
        "rounds": rounds,
        "steps_per_turn": steps,
        "load_before": load,
        "load_after": os.getloadavg(),
        "cases": [
            compared(setup, variant, variants[0], variants[-3], config) | variant.to_json(CHECKOUT)
            for setup, variant in zip(chosen, variants, strict=True)
        ],
    }


def compared(setup: Setup, variant: Variant, one: Variant, full: Variant, config: Config) -> dict[str, Any]:
    """`one`: on one thread; `full`: on all cores, each thread with one of its own."""
    seconds = median(variant.samples)
    if setup.contention:
        share = median(turn["rival_share"] for turn in variant.turns)
        fair = setup.cores / (setup.cores - share)
        return {"rival_share": share, "slower": seconds / median(full.samples), "slower_by_what_was_taken": fair}
    if setup.cores < setup.threads:
        return {"slower_than_one_thread": seconds / median(one.samples)}
    ceiling = measured_ceiling(threads=setup.threads)
    bound = step_bound(build_programs(config), config.train.dtype, ceiling)
    return {
        "times_one_thread": median(one.samples) / seconds,
        "bound_s": bound,
        "percent_of_bound": 100 * bound / seconds,
        "ceiling": ceiling.to_json(),
    }


def lines_of(r: dict[str, Any]) -> list[str]:
    """What a person reads of `measure`'s result."""
    lines = [f"{r['preset']}, batch {r['batch']} x {r['seq']}, {r['dtype']}", f"{'ms':>43}"]
    for case in r["cases"]:
        if "rival_share" in case:
            fair = f"{100 * case['rival_share']:.0f} % of a core, worth {case['slower_by_what_was_taken']:.2f}x"
            words = f"{case['slower']:.2f}x as long as without;\n{'':<40}it took {fair}"
        elif "slower_than_one_thread" in case:
            words = f"{case['slower_than_one_thread']:.2f}x as long as 1 thread"
        else:
            words = f"{case['times_one_thread']:.2f}x as fast, {case['percent_of_bound']:.1f} % of roofline"
        lines.append(f"  {case['name']:<33}{case['median_s'] * 1e3:>8.1f}  {words}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = resolved(models.preset(args.preset), "cpu")
    given = {name: n for name, n in (("micro_batch_size", args.batch), ("seq", args.seq)) if n}
    result = measure(replace(config, train=replace(config.train, **given)), rounds=args.rounds, report=print)
    print("\n".join(lines_of(result)))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
