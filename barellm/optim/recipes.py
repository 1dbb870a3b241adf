"""The way from a configuration to the table of rules, and to the program of an update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from barellm.config import OptimConfig
from barellm.errors import UserError
from barellm.optim.rules import Rule, change, clipped, update

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor


def rules(config: OptimConfig, hidden: str) -> list[Rule]:
    """The table that `config.name` stands for. `hidden` names the hidden matrices of the model (`models.hidden`)."""
    if config.name == "muon":
        from barellm.optim import muon

        return muon.rules(config, hidden)
    from barellm.optim import adamw

    return adamw.rules(config)


def updates(config: OptimConfig, hidden: str) -> dict[str, Callable[[Program], None]]:
    """The programs that end a step, by name: what appends each. Where spikes may be skipped, "norm" finds the gradient's norm and
    "update" does the rest, so that a run can decide between the two."""
    if config.name == "speedrun":
        from barellm.optim import normuon

        return normuon.updates(config)
    if config.skips:
        return {"norm": partial(_norm, clip=config.clip), "update": partial(_changes, config=config, hidden=hidden)}
    return {"update": lambda p: optimize(p, config, hidden)}


def _kept(p: Program) -> Tensor:
    """The norm and the scale between the two programs. They are read by the name of the output that one program would have."""
    return p.cache("clip", (2,), "fp32")


def _norm(p: Program, *, clip: float) -> None:
    clipped(p, p.store.of_role("parameter"), clip=clip, into=_kept(p))


def _changes(p: Program, *, config: OptimConfig, hidden: str) -> None:
    change(p, _table(p, config, hidden), _kept(p), params=p.store.of_role("parameter"))


def optimize(p: Program, config: OptimConfig, hidden: str) -> None:
    """Append the update of all parameters of the store. UserError for Muon where `hidden` names no matrix."""
    update(p, _table(p, config, hidden), clip=config.clip)


def _table(p: Program, config: OptimConfig, hidden: str) -> list[Rule]:
    table = rules(config, hidden)
    if config.name == "muon" and not any(table[0].matches(t) for t in p.store.of_role("parameter")):
        raise UserError(
            f"optim.name is 'muon', and no matrix of the model has a name like {hidden!r}: its module can name them by "
            f"HIDDEN, or use --optim.name adamw"
        )
    return table
