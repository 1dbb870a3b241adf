"""Run-time scalars: 8 bytes each, in a block that every kernel can read. Changing one recompiles nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# name -> kind; the order is the layout.
SCALARS: dict[str, str] = {
    "batch": "i64",  # sequences in this micro-batch
    "seq": "i64",  # tokens of each
    "pos": "i64",  # position of the first token: 0 but in decoding
    "accumulate": "i64",  # 1: gradients are added to what is there
    "step": "i64",  # optimizer steps, from 1
    "seed": "i64",
    "sample": "i64",  # global index of the first sample, for counter-based random bits
    "lr": "fp64",
    "inv_targets": "fp64",  # 1 / valid targets of the whole batch
    "momentum": "fp64",  # of Muon
}

OFFSET: dict[str, int] = {name: 8 * i for i, name in enumerate(SCALARS)}
NBYTES = 8 * len(SCALARS)

# What a run has that is not told otherwise: nothing of an earlier run, a decoding's position say, reaches into the next.
DEFAULTS: dict[str, int] = {"pos": 0, "accumulate": 0, "seed": 0, "sample": 0}


def check_names(program: str, programs: Collection[str], values: Mapping[str, Any]) -> None:
    """ValueError for a program or a scalar that a run names and nobody has."""
    if program not in programs:
        raise ValueError(f"no program is named {program!r}, there are {', '.join(programs)}")
    if not values.keys() <= SCALARS.keys():
        raise ValueError(f"unknown scalars {sorted(values.keys() - SCALARS.keys())}, expected some of {list(SCALARS)}")
