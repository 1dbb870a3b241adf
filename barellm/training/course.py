"""The steps of a run whose steps are all alike but for the learning rate, and who else has a say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from barellm import models
from barellm.config import Config
from barellm.errors import UserError
from barellm.models.course import Course, Standing, Step, momentum, own
from barellm.training.ramp import Ramp
from barellm.training.schedule import learning_rate


@dataclass(frozen=True)
class Plain:
    """The loss is the mean over the targets of the whole step, and the program "update" ends it. Its gradient may be larger, where
    the model says so."""

    config: Config
    cycle: int = 1

    @cached_property
    def ramp(self) -> Ramp:
        return Ramp(self.config.train)

    def step(self, index: int, total: int | None) -> Step:
        train, optim = self.config.train, self.config.optim
        lr = learning_rate(index, total=total, optim=optim)
        scalars = {"step": index + 1, "lr": lr, "seed": train.seed}
        scalars["momentum"] = momentum(index, total=total, optim=optim)
        inv_targets = 1.0 / (train.batch * self.ramp.count(index) * train.seq)
        larger = (models.loss_gradient(self.config.model) or inv_targets) / inv_targets
        updates = ((("norm", {}),) if optim.skips else ()) + (("update", scalars),)
        return Step(train.seq, lr, inv_targets * larger, updates, shown=1.0 / larger)

    def enter(self, session: Standing, index: int, total: int | None) -> None:
        return


def course(config: Config) -> Course:
    """The architecture's own, where its runs have stages. UserError for what goes with steps only that are all alike."""
    found = own(config)
    if found is not None:
        for key, asked in (("optim.skip_loss_z", config.optim.skips), ("train.ramp_from", config.train.ramp_from)):
            if asked:
                raise UserError(f"{key} is set, and the runs of {models.name_of(config.model)} have stages, expected 0")
    return found or Plain(config)
