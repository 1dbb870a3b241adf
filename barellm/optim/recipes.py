"""The way from a configuration to the table of rules, and to the program of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from barellm.config import OptimConfig
from barellm.errors import UserError
from barellm.optim import powersgd
from barellm.optim.rules import Rule, change, clipped, sharded, update
from barellm.optim.sharding import OptimizerSharding

if TYPE_CHECKING:
    from barellm.program.builder import Program, Store
    from barellm.program.ranks import Ranks
    from barellm.program.tensor import Tensor


def rules(config: OptimConfig, hidden: str) -> list[Rule]:
    """The table that `config.name` stands for. `hidden` names the hidden matrices of the model (`models.hidden`)."""
    if config.name == "muon":
        from barellm.optim import muon

        return muon.rules(config, hidden)
    if config.name == "speedrun":
        from barellm.optim import normuon

        return normuon.rules(config)
    from barellm.optim import adamw

    return adamw.rules(config)


def updates(config: OptimConfig, hidden: str, ranks: Ranks | None = None) -> dict[str, Callable[[Program], None]]:
    """The programs that end a step, by name: what appends each. Where spikes may be skipped, "grad_norm" finds the gradient's norm
    and "optimizer_step" does the rest, so that a run can decide between the two. Of several `ranks` each updates its shard.
    UserError for an optimizer whose state cannot be sharded."""
    if config.name == "speedrun":
        if ranks is not None and ranks.count > 1:
            raise UserError(f"optim.name is 'speedrun', and the run has {ranks.count} ranks: expected adamw or muon")
        from barellm.optim import normuon

        return normuon.updates(config)
    if config.skips:
        how = {"config": config, "hidden": hidden, "ranks": ranks}
        return {"grad_norm": partial(_norm, **how), "optimizer_step": partial(_changes, **how)}
    return {"optimizer_step": lambda p: optimize(p, config, hidden, ranks)}


def start_reduce_scatter(p: Program, config: OptimConfig, hidden: str, ranks: Ranks) -> None:
    """Append to a backward pass what sends gradients to other ranks as soon as they are whole, if the update waits for that."""
    if ranks.count > 1 and config.name != "speedrun":
        params = p.store.of_role("parameter")
        sharding = sharded(rules(config, hidden), params, ranks, config.powersgd, config.overlap)
        if isinstance(sharding, OptimizerSharding) and sharding.overlap:
            sharding.start_reduce_scatter(p, params)


def shards(config: OptimConfig, hidden: str, store: Store, ranks: Ranks) -> dict[str, Sequence[tuple[int, int]]]:
    """The elements of each parameter, and of each tensor of the optimizer's state in `store`, that each rank holds. What is the
    same on all of them is left out. `store` has what one process has."""
    table, params = rules(config, hidden), store.of_role("parameter")
    if config.powersgd:
        suffix = f".{powersgd.ERROR}"
        kept = [t for t in store.of_role("state") if t.name.endswith(suffix)]
        return {t.name: [(r * t.size, (r + 1) * t.size) for r in range(ranks.count)] for t in kept}
    sharding = sharded(table, params, ranks)
    if not isinstance(sharding, OptimizerSharding):
        return {}
    found = dict(sharding.parts)
    for t in store.of_role("state"):
        parts = sharding.parts.get(t.name.rpartition(".")[0])
        if parts is not None:
            size = sum(end - first for first, end in parts)
            held = [(first * t.size // size, end * t.size // size) for first, end in parts]
            found[t.name] = held
    return found


def _kept(p: Program) -> Tensor:
    """The norm and the scale between the two programs. They are read by the name of the output that one program would have."""
    return p.cache("clip", (2,), "fp32")


def _norm(p: Program, *, config: OptimConfig, hidden: str, ranks: Ranks | None) -> None:
    params = p.store.of_role("parameter")
    sharding = sharded(_table(p, config, hidden), params, ranks, config.powersgd, config.overlap)
    clipped(p, params, clip=config.clip, into=_kept(p), sharding=sharding)


def _changes(p: Program, *, config: OptimConfig, hidden: str, ranks: Ranks | None) -> None:
    params, table = p.store.of_role("parameter"), _table(p, config, hidden)
    sharding = sharded(table, params, ranks, config.powersgd, config.overlap)
    change(p, table, _kept(p), params=params, sharding=sharding)


def optimize(p: Program, config: OptimConfig, hidden: str, ranks: Ranks | None = None) -> None:
    """Append the update of all parameters of the store. UserError for Muon where `hidden` names no matrix."""
    how = {"clip": config.clip, "ranks": ranks, "powersgd": config.powersgd, "overlap": config.overlap}
    update(p, _table(p, config, hidden), **how)


def _table(p: Program, config: OptimConfig, hidden: str) -> list[Rule]:
    table = rules(config, hidden)
    if config.name == "muon" and not any(table[0].matches(t) for t in p.store.of_role("parameter")):
        raise UserError(
            f"optim.name is 'muon', and no matrix of the model has a name like {hidden!r}: its module can name them by "
            f"HIDDEN, or use --optim.name adamw"
        )
    return table
