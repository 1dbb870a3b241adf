"""Training schedules: what each optimizer step runs. An architecture with training stages has `training_schedule(config)`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from barellm import models
from barellm.errors import UserError

if TYPE_CHECKING:
    from barellm.config import Config, OptimConfig
    from barellm.program.tensor import Tensor


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step.

    `seq`: tokens in a sequence; `document`: the most tokens of a document that are kept, where rows are made of documents.
    `inv_targets`: what the summed loss of a micro-batch is multiplied by. The sum of the output `loss`, times `shown`, is what a
    user sees.
    `adds`: the gradients are added to those that the step before has left. `updates`: the programs that end the step, in their
    order, each with its scalars; the first has the output "clip". `rates`: the learning rates, of which a user sees all."""

    seq: int
    rates: Mapping[str, float]
    inv_targets: float
    updates: tuple[tuple[str, Mapping[str, Any]], ...]
    document: int = 0
    shown: float = 1.0
    loss: str = "loss"
    adds: bool = False


class ScheduledSession(Protocol):
    """What `on_step` needs of a session: `default_scalars` are those of every run of a program that does not override them."""

    default_scalars: dict[str, Any]
    tensors: "dict[str, Tensor]"

    def write(self, name: str, values: Any, /) -> None: ...


class TrainingSchedule(Protocol):
    """`total`: steps of the run; None while they are not chosen yet. `cycle`: after so many steps the same programs run again."""

    @property
    def cycle(self) -> int: ...

    def step(self, index: int, total: int | None) -> StepPlan:
        """The step with this index, from 0."""
        ...

    def on_step(self, session: ScheduledSession, index: int, total: int | None) -> None:
        """Give a session what its programs read in this step; after the last, what evaluation and sampling read."""
        ...


def momentum(step: int, *, total: int | None, optim: "OptimConfig") -> float:
    """Muon's momentum in the step with this index: a line from `momentum_start` to `momentum` in the first `momentum_warmup` steps,
    and one back in the last `momentum_cooldown`."""
    low, high = optim.momentum_start, optim.momentum
    if step < optim.momentum_warmup:
        return low + step / optim.momentum_warmup * (high - low)
    falling = 0 if total is None else max(0, step - (total - optim.momentum_cooldown))
    return high - falling / max(1, optim.momentum_cooldown) * (high - low)


def model_schedule(config: "Config") -> TrainingSchedule | None:
    """The schedule of an architecture whose runs have stages, else None. UserError for stages that do not fit the run."""
    make = getattr(models.of(config.model), "training_schedule", None)
    return None if make is None else make(config)


def runs_per_step(config: "Config") -> dict[str, float]:
    """How often each program runs in an optimizer step: "forward_backward" once for each micro-batch, a program that ends every
    second step half the time. Counted over the second cycle of a run's schedule: untying, and the like, may be in the first."""
    training_schedule, train = model_schedule(config), config.train
    micro = {"forward_backward": float(train.gradient_accumulation_steps)}
    if training_schedule is None:
        return micro | ({"grad_norm": 1.0} if config.optim.skips else {}) | {"optimizer_step": 1.0}
    steps = [training_schedule.step(training_schedule.cycle + i, train.steps or None) for i in range(training_schedule.cycle)]
    counts = Counter(name for step in steps for name, _ in step.updates)
    return micro | {name: count / training_schedule.cycle for name, count in counts.items()}


def only_stage(config: "Config", number: int | None) -> "Config":
    """The run as its stage with this number alone, from 1; without a number the first. A run without stages stays as it is, and
    UserError where a number is asked of it."""
    alone = getattr(models.of(config.model), "only_stage", None)
    if alone is None and number is not None:
        architecture = models.name_of(config.model)
        raise UserError(f"--stage is {number}: the preset {config.preset!r} is {architecture}, whose runs have no stages")
    return config if alone is None else alone(config, 1 if number is None else number)


def on_step(session: ScheduledSession, config: "Config", step: int, total: int | None) -> None:
    """Gives a session what the programs of its model read at this step of a run."""
    training_schedule = model_schedule(config)
    if training_schedule is not None:
        training_schedule.on_step(session, step, total)
