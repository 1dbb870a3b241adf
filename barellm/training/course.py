"""The steps of a run whose steps are all alike but for the learning rate, and who else has a say."""

from __future__ import annotations

from dataclasses import dataclass

from barellm import models
from barellm.config import Config
from barellm.models.course import Course, Standing, Step, momentum, own
from barellm.training.schedule import learning_rate


@dataclass(frozen=True)
class Plain:
    """The loss is the mean over the targets of the whole step, and the program "update" ends it. Its gradient may be larger, where
    the model says so."""

    config: Config
    cycle: int = 1

    def step(self, index: int, total: int | None) -> Step:
        train, optim = self.config.train, self.config.optim
        lr = learning_rate(index, total=total, optim=optim)
        scalars = {"step": index + 1, "lr": lr, "seed": train.seed}
        scalars["momentum"] = momentum(index, total=total, optim=optim)
        inv_targets = 1.0 / (train.batch * train.accumulate * train.seq)
        larger = (models.loss_gradient(self.config.model) or inv_targets) / inv_targets
        return Step(train.seq, lr, inv_targets * larger, (("update", scalars),), shown=1.0 / larger)

    def enter(self, session: Standing, index: int, total: int | None) -> None:
        return


def course(config: Config) -> Course:
    """The architecture's own, where its runs have stages."""
    return own(config) or Plain(config)
