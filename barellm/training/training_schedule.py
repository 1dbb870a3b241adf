"""The training schedule of a run: that of its architecture, or a constant one, in which only the learning rates change."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from barellm import models
from barellm.config import Config
from barellm.errors import UserError
from barellm.models.training_schedule import ScheduledSession, StepPlan, TrainingSchedule, model_schedule, momentum
from barellm.training.batch_rampup import BatchRampup
from barellm.training.schedule import rates


@dataclass(frozen=True)
class ConstantSchedule:
    """The loss is the mean over the targets of the whole step, and the program "optimizer_step" ends it. Its gradient may be
    larger, where the model says so."""

    config: Config
    cycle: int = 1

    @cached_property
    def batch_rampup(self) -> BatchRampup:
        return BatchRampup(self.config.train)

    @cached_property
    def loss_gradient(self) -> float | None:
        return models.loss_gradient(self.config.model)

    def step(self, index: int, total: int | None) -> StepPlan:
        train, optim = self.config.train, self.config.optim
        found = rates(index, total=total, optim=optim)
        scalars = {"step": index + 1, **found, "seed": train.seed}
        scalars["momentum"] = momentum(index, total=total, optim=optim)
        inv_targets = 1.0 / (train.micro_batch_size * self.batch_rampup.count(index) * train.seq)
        larger = (self.loss_gradient or inv_targets) / inv_targets
        updates = ((("grad_norm", {}),) if optim.skips else ()) + (("optimizer_step", scalars),)
        return StepPlan(train.seq, found, inv_targets * larger, updates, shown=1.0 / larger)

    def on_step(self, session: ScheduledSession, index: int, total: int | None) -> None:
        return


def training_schedule(config: Config) -> TrainingSchedule:
    """The architecture's schedule if its runs have stages, else a constant one. UserError for settings that need equal steps."""
    found = model_schedule(config)
    if found is None:
        return ConstantSchedule(config)
    stages = f"the runs of {models.name_of(config.model)} have stages"
    optim, train = config.optim, config.train
    for key, requested in (
        ("optim.skip_loss_z", optim.skip_loss_z),
        ("optim.skip_norm_z", optim.skip_norm_z),
        ("train.batch_rampup_from", train.batch_rampup_from),
        ("train.epochs", train.epochs),
    ):
        if requested:
            raise UserError(f"{key} is {requested:g}, and {stages}, expected 0")
    if config.data.order == "llmc":
        raise UserError(f"data.order is 'llmc', and {stages}, whose rows change their length, expected another order")
    return found


def tokens_before(config: Config) -> Callable[[int], int]:
    """A function that tells how many tokens all steps before the one with this index have."""
    steps, batch_rampup, train = training_schedule(config), BatchRampup(config.train), config.train
    seen = [0]

    def before(index: int) -> int:
        while len(seen) <= index:
            last = len(seen) - 1
            seen.append(seen[-1] + train.micro_batch_size * batch_rampup.count(last) * steps.step(last, train.steps or None).seq)
        return seen[index]

    return before
