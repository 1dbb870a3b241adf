"""The way from a configuration to the table of rules, and to the program of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from barellm.config import OptimConfig
from barellm.errors import UserError
from barellm.optim import powersgd, rules
from barellm.optim.sharding import OptimizerSharding

if TYPE_CHECKING:
    from barellm.program.builder import Program, Store
    from barellm.program.ranks import Ranks
    from barellm.program.tensor import Tensor


def rules_for(config: OptimConfig, hidden: str) -> list[rules.Rule]:
    """The table that `config.name` stands for. `hidden` names the hidden matrices of the model (`models.hidden`)."""
    if config.name == "muon":
        from barellm.optim import muon

        return muon.muon_rules(config, hidden)
    if config.name == "speedrun":
        from barellm.optim import normuon

        return normuon.speedrun_rules(config)
    from barellm.optim import adamw

    return adamw.adamw_rules(config)


def updates(config: OptimConfig, hidden: str, ranks: Ranks | None = None) -> dict[str, Callable[[Program], None]]:
    """The programs that end a step: {name: function that appends its ops}. One, "optimizer_step"; where spikes may be skipped,
    "grad_norm" computes the gradient's norm and "optimizer_step" does the rest, so that a run can decide between the two. Of
    several `ranks` each updates its shard. UserError for an optimizer whose state cannot be sharded."""
    if config.name == "speedrun":
        if ranks is not None and ranks.count > 1:
            raise UserError(f"optim.name is 'speedrun', and the run has {ranks.count} ranks: expected adamw or muon")
        from barellm.optim import normuon

        return normuon.updates(config)
    if config.skips:
        how = {"config": config, "hidden": hidden, "ranks": ranks}
        return {"grad_norm": partial(_append_grad_norm, **how), "optimizer_step": partial(_append_optimizer_step, **how)}
    return {"optimizer_step": lambda p: optimize(p, config, hidden, ranks)}


def start_reduce_scatter(p: Program, config: OptimConfig, hidden: str, ranks: Ranks) -> None:
    """Append to a backward pass the non-blocking sends of gradients to other ranks, each as soon as it is complete, if the
    configuration overlaps communication with the backward pass."""
    if ranks.count > 1 and config.name != "speedrun":
        params = p.store.trainable
        sharding = rules.select_sharding(rules_for(config, hidden), params, ranks, config.powersgd, config.overlap)
        if isinstance(sharding, OptimizerSharding) and sharding.overlap:
            sharding.start_reduce_scatter(p, params)


def shards(config: OptimConfig, hidden: str, store: Store, ranks: Ranks) -> dict[str, Sequence[tuple[int, int]]]:
    """{name: [(first, end) of the elements that each rank holds]} of each parameter, and of each tensor of the optimizer's state in
    `store`, which has the tensors of one process. Tensors that are the same on all ranks are left out."""
    table, params = rules_for(config, hidden), store.trainable
    if config.powersgd:
        suffix = f".{powersgd.ERROR}"
        # Every rank has its own; a checkpoint holds them one after the other.
        errors = [t for t in store.of_role("state") if t.name.endswith(suffix)]
        return {t.name: [(r * t.size, (r + 1) * t.size) for r in range(ranks.count)] for t in errors}
    sharding = rules.select_sharding(table, params, ranks)
    if not isinstance(sharding, OptimizerSharding):
        return {}
    shards_of = dict(sharding.parts)
    for t in store.of_role("state"):
        parts = sharding.parts.get(t.name.rpartition(".")[0])  # of the parameter whose state it is
        if parts is not None:
            size = sum(end - first for first, end in parts)
            shards_of[t.name] = [(first * t.size // size, end * t.size // size) for first, end in parts]
    return shards_of


def _clip_tensor(p: Program) -> Tensor:
    """[norm, scale] of the gradient, which the first of the two programs leaves for the second. It has the name of the output that
    one program would have, by which it is read."""
    return p.cache("clip", (2,), "fp32")


def _append_grad_norm(p: Program, *, config: OptimConfig, hidden: str, ranks: Ranks | None) -> None:
    params = p.store.trainable
    sharding = rules.select_sharding(_checked_rules(p, config, hidden), params, ranks, config.powersgd, config.overlap)
    rules.append_clip_scale(p, params, clip=config.clip, into=_clip_tensor(p), sharding=sharding)


def _append_optimizer_step(p: Program, *, config: OptimConfig, hidden: str, ranks: Ranks | None) -> None:
    params, table = p.store.trainable, _checked_rules(p, config, hidden)
    sharding = rules.select_sharding(table, params, ranks, config.powersgd, config.overlap)
    rules.append_updates(p, table, _clip_tensor(p), params=params, sharding=sharding)


def optimize(p: Program, config: OptimConfig, hidden: str, ranks: Ranks | None = None) -> None:
    """Append the update of all parameters of the store. UserError for Muon where `hidden` names no matrix."""
    how = {"clip": config.clip, "ranks": ranks, "powersgd": config.powersgd, "overlap": config.overlap}
    rules.update(p, _checked_rules(p, config, hidden), **how)


def _checked_rules(p: Program, config: OptimConfig, hidden: str) -> list[rules.Rule]:
    table = rules_for(config, hidden)
    if config.name == "muon" and not any(table[0].matches(t) for t in p.store.trainable):
        hint = "its module can name them by HIDDEN, or use --optim.name adamw"
        raise UserError(f"optim.name is 'muon', and no matrix of the model has a name like {hidden!r}: {hint}")
    return table
