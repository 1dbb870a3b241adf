"""The way from a configuration to the table of rules, and to the program of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from barellm.config import OptimConfig
from barellm.errors import UserError
from barellm.optim.rules import Rule, update

if TYPE_CHECKING:
    from barellm.program.builder import Program


def rules(config: OptimConfig, hidden: str) -> list[Rule]:
    """The table that `config.name` stands for. `hidden` names the hidden matrices of the model (`models.hidden`)."""
    if config.name == "muon":
        from barellm.optim import muon

        return muon.rules(config, hidden)
    from barellm.optim import adamw

    return adamw.rules(config)


def updates(config: OptimConfig, hidden: str) -> dict[str, Callable[[Program], None]]:
    """The programs that end a step, by name: what appends each."""
    if config.name == "speedrun":
        from barellm.optim import normuon

        return normuon.updates(config)
    return {"update": lambda p: optimize(p, config, hidden)}


def optimize(p: Program, config: OptimConfig, hidden: str) -> None:
    """Append the update of all parameters of the store. UserError for Muon where `hidden` names no matrix."""
    table = rules(config, hidden)
    if config.name == "muon" and not any(table[0].matches(t) for t in p.store.of_role("parameter")):
        raise UserError(
            f"optim.name is 'muon', and no matrix of the model has a name like {hidden!r}: its module can name them by "
            f"HIDDEN, or use --optim.name adamw"
        )
    update(p, table, clip=config.clip)
