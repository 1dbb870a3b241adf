"""Consistency of the ranks of a run: configuration, versions and data are checked to be equal before it begins."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import barellm
from barellm import models
from barellm.config import Config
from barellm.errors import UserError
from barellm.models.training_schedule import model_schedule
from barellm.program.ranks import Ranks


def check(config: Config, *, device: str, ranks: Ranks) -> None:
    """Raise a UserError for settings that a run on several ranks, or one with frozen weights (an adapter), does not support."""
    adapter = config.adapter
    for what, found, expected in (
        ("--device", device if device == "cuda" else "", "cpu"),
        ("train.exponent_stats", config.train.exponent_stats, "0"), ("optim.powersgd", config.optim.powersgd, "0"),
        ("the preset", config.preset if model_schedule(config) is not None else "", "one whose steps are all alike"),
    ):  # fmt: skip
        if found and adapter.active:
            option = f"--adapt is {adapter.method!r}" if adapter.method else f"--train-only is {adapter.train_only!r}"
            raise UserError(f"{option}, and {what} is {found}: expected {expected}")
    if config.optim.powersgd and device == "cuda":
        raise UserError(f"optim.powersgd is {config.optim.powersgd}, and --device is cuda: expected 0, for now")
    if ranks.count == 1:
        return
    train, said = config.train, f"and the run has {ranks.count} ranks"
    if train.micro_batch_size % ranks.count:
        why = "which do not divide it: each takes as many sequences"
        raise UserError(f"train.micro_batch_size is {train.micro_batch_size}, {said}, {why}")
    if model_schedule(config) is not None:
        raise UserError(f"the runs of {models.name_of(config.model)} have stages, {said}: expected another preset")
    for key, value in (("train.exponent_stats", train.exponent_stats), ("train.signal_grace_period", train.signal_grace_period)):
        if value:
            raise UserError(f"{key} is {value:g}, {said}: expected 0")
    if config.data.order == "llmc":
        raise UserError(f"data.order is 'llmc', {said}: it shuffles whole micro-batches, expected another order")


@contextmanager
def rank_zero_first(ranks: Ranks) -> Iterator[None]:
    """Rank 0 goes through this first, then all others: they find in caches what it has made."""
    if ranks.rank:
        ranks.gather(None, no_timeout=True)
    yield
    if ranks.count > 1 and ranks.rank == 0:
        ranks.gather(None)


def check_consistent_across_ranks(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise a UserError on all ranks that names the first rank for which something is not as for rank 0."""
    found = ranks.gather(dict(facts), no_timeout=True)
    for rank, theirs in enumerate(found):
        for name, value in found[0].items():
            if theirs[name] != value:
                there, here = (json.dumps(v) for v in _difference(theirs[name], value))
                raise UserError(f"{name} is {there} on rank {rank}, and {here} on rank 0: all ranks need the same")


def _difference(a: Any, b: Any) -> tuple[Any, Any]:
    """The first entry in which two values differ, where both have entries."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                return tuple({key: one} for one in _difference(a.get(key), b.get(key)))  # pyright: ignore[reportReturnType]
    return a, b


def version() -> str:
    """The version, with a digest of the sources: those of two machines may differ under one number."""
    h, root = hashlib.sha256(), Path(barellm.__file__).parent
    for path in sorted(root.rglob("*.py")):
        h.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{barellm.__version__} ({h.hexdigest()[:8]})"
