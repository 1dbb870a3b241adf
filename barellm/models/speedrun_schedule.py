"""The stages of the speedrun's runs: what each step runs, and what its programs read. models/speedrun.py is the model."""

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from barellm.errors import UserError
from barellm.models.stages import Schedule, Stage, parse, table
from barellm.models.training_schedule import ScheduledSession, StepPlan, momentum

if TYPE_CHECKING:
    from barellm.config import Config as Run
    from barellm.program.ops.attention.qk_rotary import Yarn

LEAST = 0.15  # factor of the learning rates after the decay
ENDLESS = 1 << 30  # steps


@dataclass(frozen=True)
class StageSettings:
    """The fields of a model's configuration that its stages are made of (models/speedrun.py)."""

    stages: tuple[Stage, ...]  # the rows of the table
    extension: int  # steps behind those of the table
    decay_fraction: float  # of the steps of the table, the last ones: the learning rates decay linearly
    untie: int  # the stage from whose first step on the embedding is another matrix than the classifier
    block: int  # tokens of one unit of an attention window
    final_window: int  # blocks of the long window behind the last step
    head_size: int
    max_seq: int

    @classmethod
    def of(cls, model: Any) -> "StageSettings":
        found: dict[str, Any] = {field.name: getattr(model, field.name) for field in fields(cls)}
        found["stages"] = parse(model.stages, key="model.stages")
        return cls(**found)


def yarn(cfg: StageSettings, index: int) -> "Yarn":
    """RoPE frequencies and attention scale of stage `index`: YaRN applied once for each widening of the long window up to it."""
    from barellm.program.ops.attention.qk_rotary import Yarn

    angles = Yarn.of_head(cfg.head_size)
    windows = [stage.windows[1] * cfg.block for stage in cfg.stages[: index + 1]]
    for old, new in pairwise(windows):
        if new != old:
            angles = angles.widened(old, new)
    return angles


@dataclass(frozen=True)
class Stages:
    """The `TrainingSchedule` of a run. Matrices of layers learn in every step, the rest in every second one, from two gradients."""

    run: "Run"
    cfg: StageSettings
    cycle: int = 2

    def schedule(self, total: int | None) -> Schedule:
        cfg = self.cfg
        return Schedule(cfg.stages, total or self.run.train.steps, cfg.extension, cfg.decay_fraction, LEAST)

    def step(self, index: int, total: int | None) -> StepPlan:
        """What step `index` (from 0) of `total` runs: its sequence length, learning rates, and the programs behind the backward
        pass. Gradients are kept over pairs of steps: an odd step adds to those of the step before it."""
        schedule, optim, train = self.schedule(total), self.run.optim, self.run.train
        stage = schedule.stages[schedule.index(index)]
        factor = schedule.lr(index)
        rates = optim.rates(lambda high, low: high * factor)
        scalars = {**rates, "step": (index + 1) // 2, "seed": train.seed}
        scalars["momentum"] = momentum(index, total=schedule.total, optim=optim)
        return StepPlan(
            seq=stage.seq, document=stage.document, rates=rates, inv_targets=1.0 / train.gradient_accumulation_steps,
            shown=1.0 / (train.micro_batch_size * stage.seq), loss="next_loss", adds=index % 2 == 1,
            updates=self._updates(index, schedule, scalars),
        )  # fmt: skip

    def _updates(self, index: int, schedule: Schedule, scalars: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
        """(program, its scalars) of each update of step `index`: an even step updates the matrices of layers alone, an odd one all
        parameters, the embedding with the classifier until they are untied."""
        if index % 2 == 0:
            return (("optimizer_step", scalars),)
        untie = self.cfg.untie
        begins = schedule.first(untie) if untie < len(schedule.stages) else schedule.total + 1
        last_tied = begins | 1  # an odd step, the first from `begins` on: at its end the embedding becomes a copy
        if index > last_tied:
            return (("optimizer_step_untied", scalars),)
        tied = ("optimizer_step_tied", scalars)
        return (tied, ("untie", {})) if index == last_tied else (tied,)

    def on_step(self, session: ScheduledSession, index: int, total: int | None) -> None:
        """Set what step `index` reads: the scalars window_short and window_long (tokens), mtp_0, mtp_1, ... (weights of the next
        tokens' losses) and attention_scale, and the YaRN tables. Behind the last step, `total`, it is the last window of all."""
        schedule, cfg, scalars = self.schedule(total), self.cfg, session.default_scalars
        number = schedule.index(index)
        # Attention windows, in tokens.
        short, long = schedule.stages[number].windows
        scalars["window_short"] = short * cfg.block
        scalars["window_long"] = (long if index < schedule.total else cfg.final_window) * cfg.block
        # Multi-token prediction.
        for distance, weight in enumerate(schedule.weights(index)):
            scalars[f"mtp_{distance}"] = weight
        # YaRN: the tables and the scale change at the same steps, so tables are written only where the scale is a new one.
        angles = yarn(cfg, number)
        if angles.scale != scalars.get("attention_scale"):
            cos, sin = angles.tables(2 * cfg.max_seq)
            session.write("yarn.cos", cos)
            session.write("yarn.sin", sin)
            scalars["attention_scale"] = angles.scale


def training_schedule(config: "Run") -> Stages:
    """UserError where a stage is longer than the rows that the run has room for, or where their number is not known."""
    cfg, train = StageSettings.of(config.model), config.train
    longest = max(stage.seq for stage in cfg.stages)
    if longest > train.seq:
        raise UserError(f"model.stages has seq={longest}, above train.seq {train.seq}")
    if train.minutes:
        raise UserError("train.minutes is set, and model.stages are shares of train.steps: expected train.minutes 0")
    if cfg.extension >= train.steps:
        raise UserError(f"model.extension is {cfg.extension}, expected fewer than train.steps {train.steps}")
    return Stages(config, cfg)


def only_stage(config: "Run", number: int) -> "Run":
    """The run as if it had one stage only, which does not end: of those of its table the one with this number, from 1."""
    cfg = StageSettings.of(config.model)
    if not 1 <= number <= len(cfg.stages):
        raise UserError(f"--stage is {number}, expected 1 to {len(cfg.stages)}")
    stage = cfg.stages[number - 1]
    rows = replace(stage, share=Fraction(1)), replace(stage, share=Fraction(0))
    untie = 0 if number > cfg.untie else len(rows)
    alone: dict[str, Any] = {"stages": table(rows), "untie": untie, "extension": 0}
    return replace(config, model=replace(config.model, **alone), train=replace(config.train, seq=stage.seq, steps=ENDLESS))
