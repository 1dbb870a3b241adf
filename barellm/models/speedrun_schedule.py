"""The stages of the speedrun's runs: what each step runs, and what its programs read. models/speedrun.py is the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

from barellm.errors import UserError
from barellm.models.stages import Schedule, parse, table
from barellm.models.training_schedule import ScheduledSession, StepPlan, momentum

if TYPE_CHECKING:
    from barellm.config import Config as Run
    from barellm.program.ops.attention.qk_rotary import Yarn

LEAST = 0.15  # factor of the learning rates after the decay
ENDLESS = 1 << 30  # steps


class Staged(Protocol):
    """The fields of a model's configuration that its stages are made of; models/speedrun.py says what each is."""

    @property
    def stages(self) -> str: ...
    @property
    def extension(self) -> int: ...
    @property
    def decay_fraction(self) -> float: ...
    @property
    def untie(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def final_window(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def max_seq(self) -> int: ...


def _staged(config: Run) -> Staged:
    return cast(Staged, config.model)


def yarn(cfg: Staged, index: int) -> Yarn:
    """RoPE frequencies and attention scale of stage `index`: YaRN applied once for each widening of the long window up to it."""
    from barellm.program.ops.attention.qk_rotary import Yarn

    stages = parse(cfg.stages, key="model.stages")
    angles = Yarn.of_head(cfg.head_size)
    windows = [stage.windows[1] * cfg.block for stage in stages[: index + 1]]
    for old, new in pairwise(windows):
        angles = angles.widened(old, new) if new != old else angles
    return angles


@dataclass(frozen=True)
class Stages:
    """The `TrainingSchedule` of a run. Matrices of layers learn in every step, the rest in every second one,
    from the sum of two steps' gradients."""

    run: Run
    cycle: int = 2

    def schedule(self, total: int | None) -> Schedule:
        cfg = self._config
        stages = parse(cfg.stages, key="model.stages")
        return Schedule(stages, total or self.run.train.steps, cfg.extension, cfg.decay_fraction, LEAST)

    @property
    def _config(self) -> Staged:
        return _staged(self.run)

    def step(self, index: int, total: int | None) -> StepPlan:
        """What step `index` runs: Adam's parameters are updated in every second step, from two steps' gradients."""
        schedule, optim, train, cfg = self.schedule(total), self.run.optim, self.run.train, self._config
        stage, rate = schedule.stages[schedule.index(index)], schedule.lr(index)
        begins = schedule.first(cfg.untie) if cfg.untie < len(schedule.stages) else schedule.total + 1
        untied = begins | 1  # an odd step: the embedding leaves the classifier at the end of it
        rates = optim.rates(lambda high, low: high * rate)
        scalars = {**rates, "step": (index + 1) // 2, "seed": train.seed}
        scalars["momentum"] = momentum(index, total=schedule.total, optim=optim)
        if index % 2 == 0:
            updates = [("optimizer_step", scalars)]
        else:
            updates = [("optimizer_step_tied" if index <= untied else "optimizer_step_untied", scalars)]
            updates += [("untie", {})] * (index == untied)
        return StepPlan(
            seq=stage.seq, document=stage.document, rates=rates, inv_targets=1.0 / train.gradient_accumulation_steps,
            shown=1.0 / (train.micro_batch_size * stage.seq), loss="next_loss", adds=index % 2 == 1, updates=tuple(updates),
        )  # fmt: skip

    def on_step(self, session: ScheduledSession, index: int, total: int | None) -> None:
        """Set what step `index` reads: the scalars window_short and window_long (tokens), mtp_0, mtp_1, ... (weights of the next
        tokens' losses) and attention_scale, and the YaRN tables. Behind the last step, `total`, it is the last window of all."""
        schedule, cfg = self.schedule(total), self._config
        number = schedule.index(index)
        short, long = (blocks * cfg.block for blocks in schedule.stages[number].windows)
        if index >= schedule.total:
            long = cfg.final_window * cfg.block
        angles = yarn(cfg, number)
        weights = schedule.weights(index)
        session.default_scalars |= {f"mtp_{k}": weight for k, weight in enumerate(weights)}
        if angles.scale != session.default_scalars.get("attention_scale"):  # the tables and the scale change at the same steps
            for name, values in zip(("yarn.cos", "yarn.sin"), angles.tables(2 * cfg.max_seq), strict=True):
                session.write(name, values)
        session.default_scalars |= {"window_short": short, "window_long": long, "attention_scale": angles.scale}


def training_schedule(config: Run) -> Stages:
    """UserError where a stage is longer than the rows that the run has room for, or where their number is not known."""
    cfg, train = _staged(config), config.train
    longest = max(stage.seq for stage in parse(cfg.stages, key="model.stages"))
    if longest > train.seq:
        raise UserError(f"model.stages has seq={longest}, above train.seq {train.seq}")
    if train.minutes:
        raise UserError("train.minutes is set, and model.stages are shares of train.steps: expected train.minutes 0")
    if cfg.extension >= train.steps:
        raise UserError(f"model.extension is {cfg.extension}, expected fewer than train.steps {train.steps}")
    return Stages(config)


def only_stage(config: Run, number: int) -> Run:
    """The run as if it had one stage only, which does not end: of those of its table the one with this number, from 1."""
    cfg = _staged(config)
    stages = parse(cfg.stages, key="model.stages")
    if not 1 <= number <= len(stages):
        raise UserError(f"--stage is {number}, expected 1 to {len(stages)}")
    stage = stages[number - 1]
    rows = replace(stage, share=Fraction(1)), replace(stage, share=Fraction(0))
    untie = 0 if number > cfg.untie else len(rows)
    alone: dict[str, Any] = {"stages": table(rows), "untie": untie, "extension": 0}
    return replace(config, model=replace(config.model, **alone), train=replace(config.train, seq=stage.seq, steps=ENDLESS))
