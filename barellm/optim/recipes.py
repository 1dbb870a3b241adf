"""From a configuration to the table of rules, and to the program of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from barellm.config import OptimConfig
from barellm.optim.rules import Rule, update

if TYPE_CHECKING:
    from barellm.program.builder import Program


def rules(config: OptimConfig) -> list[Rule]:
    """The table that `config.name` stands for."""
    if config.name == "muon":
        from barellm.optim import muon

        return muon.rules(config)
    from barellm.optim import adamw

    return adamw.rules(config)


def optimize(p: Program, config: OptimConfig) -> None:
    """Append the update of all parameters of the store."""
    update(p, rules(config), clip=config.clip)
