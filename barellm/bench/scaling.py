"""The step on one thread, two, four ... and all; with a rival for one of the cores; and with two threads on one core."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from barellm.assembly.machine import build_programs
from barellm.bench.peers import FOLDER, description, ours
from barellm.bench.turns import Variant, interleave
from barellm.config import Config
from barellm.cpu.threads import allowed_cpus, thread_count
from barellm.errors import UserError
from barellm.plans.roofline import measured_ceiling, step_bound


@dataclass(frozen=True)
class Case:
    """`threads` of a step on `cores` processors, with another process computing on the last of them or not."""

    name: str
    threads: int
    cores: int
    rival: bool = False


def cases(threads: int) -> list[Case]:
    counts = sorted({1 << i for i in range(threads.bit_length()) if 1 << i <= threads} | {threads})
    made = [Case(f"{n} thread{'s' * (n > 1)}", n, n) for n in counts]
    if threads > 1:
        made.append(Case(f"{threads} threads, a rival on one core", threads, threads, rival=True))
        made.append(Case("2 threads on one core", 2, 1))
    return made


def measure(config: Config, *, rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    """All cases interleaved, every sample kept."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("bench scaling needs a system on which processes can be bound to processors")
    threads, cpus = thread_count(), allowed_cpus()
    if threads > len(cpus):
        raise UserError(f"BARELLM_THREADS is {threads}, expected at most {len(cpus)}: bench scaling gives each a core")
    chosen = cases(threads)
    variants = [
        ours(
            config,
            name=case.name,
            environment={"BARELLM_THREADS": str(case.threads)},
            cpus=tuple(cpus[: case.cores]),
            rival=cpus[case.cores - 1] if case.rival else None,
        )
        for case in chosen
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
            compared(case, variant, variants[0], variants[-3], config) | variant.to_json(FOLDER.parent)
            for case, variant in zip(chosen, variants, strict=True)
        ],
    }


def compared(case: Case, variant: Variant, one: Variant, full: Variant, config: Config) -> dict[str, Any]:
    """`one`: on one thread; `full`: on all cores, each thread with one of its own."""
    seconds = median(variant.samples)
    if case.rival:
        share = median(turn["rival_share"] for turn in variant.turns)
        fair = case.cores / (case.cores - share)
        return {"rival_share": share, "slower": seconds / median(full.samples), "slower_by_what_was_taken": fair}
    if case.cores < case.threads:
        return {"slower_than_one_thread": seconds / median(one.samples)}
    ceiling = measured_ceiling(threads=case.threads)
    bound = step_bound(build_programs(config), config.train.dtype, ceiling)
    return {
        "times_one_thread": median(one.samples) / seconds,
        "bound_s": bound,
        "percent_of_bound": 100 * bound / seconds,
        "ceiling": ceiling.to_json(),
    }
