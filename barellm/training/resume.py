"""Which run is resumed, from which checkpoint, and what a command line may change in it."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

from barellm.checkpoint import checkpoint
from barellm.config import Config, overrides
from barellm.errors import UserError
from barellm.training.console import Console
from barellm.training.spikes import Spikes

FREE_KEYS = frozenset((
    "train.steps", "train.epochs", "train.save_total_limit", "train.signal_grace_period", "train.gemm_backend", "train.track",
    "train.hellaswag", "train.hellaswag_every", "train.eval_every", "train.eval_tokens", "train.eval_from", "train.eval_seq",
    "train.sample_every", "train.checkpoint_every", "train.keep_every", "train.keep_best", "train.early_stopping",
    "train.exponent_stats", "data.source", "optim.moments", "optim.decay_fraction",
))  # fmt: skip


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    path: Path
    meta: dict[str, Any]


def resume_from(
    out: Path, *, preset: str | None, requested: Callable[[Config], Mapping[str, Any]], console: Console
) -> tuple[Config, Mapping[str, Any], Start | None]:
    """(configuration of the run in `out`, changes that the command line makes, its newest valid checkpoint or None if there is none
    yet). `requested(config)`: the command line's keys. UserError if they mean another run: only FREE_KEYS may change."""
    path, meta = out / "config.json", None
    if path.is_file() and not checkpoint.steps(out / "checkpoints"):
        console.line(f"{out} has no checkpoint yet: starting again from step 0")
        config = overrides.from_json(checkpoint.read_json(path), path)
    else:
        path, wrong = checkpoint.find(out)
        for text in wrong:
            console.line(f"warning: skipped {text}")
        meta = checkpoint.read_meta(path)
        config = overrides.from_json(meta["config"], path / checkpoint.META)
        if not (path / checkpoint.OPTIMIZER).is_file():
            raise UserError(f"{path} holds weights alone: begin a run with them, with --init-from {out}")
        _check_meta(meta, path / checkpoint.META)
    if preset is not None and preset != config.preset:
        raise UserError(f"{out} holds a run of preset {config.preset!r}, the command line says {preset!r}")
    saved, changes = overrides.flat(config), requested(config)
    for key, value in changes.items():
        differs = value != saved[key] and (key, value) not in {("train.dtype", "auto")}  # auto: as the run has it
        if key == overrides.MUON_LR_RATIO:  # a quotient, which is rounded
            differs = not isclose(value, saved[key])
        if differs and key not in FREE_KEYS:
            raise UserError(f"{key} is {saved[key]!r} in {path}, the command line says {value!r}: a resumed run keeps it")
    free = {key: value for key, value in changes.items() if key in FREE_KEYS}
    if meta and "train.steps" in free and free["train.steps"] != saved["train.steps"]:
        meta["total_steps"] = max(free["train.steps"], meta["step"])
        if free["train.steps"] < meta["step"]:
            console.line(f"warning: the run is at step {meta['step']} already, past train.steps {free['train.steps']}")
    return overrides.changed(config, free), changes, Start(path, meta) if meta else None


def newest_run(root: Path, preset: str) -> Path | None:
    """The last run of a preset below `root` that has a checkpoint, whatever its folder is called."""
    runs = [path.parent for path in root.glob("*/config.json") if checkpoint.steps(path.parent / "checkpoints")]
    found = [path for path in runs if checkpoint.read_json(path / "config.json").get("preset") == preset]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _check_meta(meta: dict[str, Any], path: Path) -> None:
    """UserError where a checkpoint lacks something that is read later, after what is slow."""
    try:
        _ = float(meta["seconds"]), meta["samples"], meta["total_steps"], meta["machine"]["isa"] + ""
        _ = (meta["data"] or {"hash": ""})["hash"] + "", Spikes(loss_limit=0, norm_limit=0, state=meta.get("spikes"))
        if (theirs := meta.get("llmc")) and theirs["shuffled"]:
            _ = [operator.index(n) for n in (theirs["processes"], theirs["shard"], theirs["sample"], *theirs["shards"])]
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path} lacks what a run goes on with: expected what barellm writes there") from None
