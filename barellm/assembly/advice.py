"""What would make a run fit into memory that it does not fit into: each change is planned before it is advised."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from barellm.config import Config
from barellm.errors import UserError
from barellm.program.planner import Plan

LEAST_SEQ = 16


def of_training(config: Config, limit: int, plan: Callable[[Config], Plan], *, ranks: int = 1) -> str:
    """Advice at the end of an out-of-memory message: which changes make the run fit `limit` bytes. `plan(config)` gives a plan;
    batches stay multiples of `ranks`. Each change by itself where one is enough, else all savings together."""
    train, all_savings = config.train, {"recompute": True, "moments": "16bit"}

    def fits(**changes: Any) -> bool:
        moments = changes.pop("moments", config.optim.moments)
        other = replace(config, train=replace(train, **changes), optim=replace(config.optim, moments=moments))
        try:
            return plan(other).arena_bytes <= limit
        except UserError:
            return False  # the model has no such shape

    def largest(name: str, least: int) -> list[str]:
        """["train.NAME N"] for the largest of a size's halves, quarters, ... that fits; [] if none does."""
        size = getattr(train, name)
        if size <= least or not fits(**{name: least}):
            return []
        while (size := max(size // 2 // least * least, least)) > least:
            if fits(**{name: size}):
                break
        return [f"train.{name} {size}"]

    options = [*largest("micro_batch_size", ranks), *largest("seq", LEAST_SEQ)]
    options += ["train.recompute"] if not train.recompute and fits(recompute=True) else []
    if config.optim.moments == "fp32" and fits(moments="16bit"):
        options.append("optim.moments 16bit")
    if options:
        return f"choose {' or '.join(options)}"
    if fits(micro_batch_size=ranks, **all_savings):
        return f"choose train.micro_batch_size {ranks}, train.recompute and optim.moments 16bit together"
    return "no batch is small enough: choose a smaller model"
