"""A range test of the learning rate (Smith 2015): a short training whose rate grows from step to step until it diverges."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from barellm.assembly.machine import open_machine
from barellm.checkpoint import storage
from barellm.checkpoint.folder import RunFolder
from barellm.config import Config
from barellm.data.loader import Rows
from barellm.errors import UserError
from barellm.models.course import own
from barellm.runtime.session import Session
from barellm.training import curve, report
from barellm.training.course import Plain
from barellm.training.run import Run
from barellm.training.stopping import Stopping

LOWEST, HIGHEST, STEPS = 1e-6, 10.0, 200
SMOOTH = 0.9  # decay rate of the mean loss
DIVERGED = 1.1  # the test ends where the smoothed loss is so many times that of the beginning
BELOW_LEAST = 3.0  # the suggestion is so many times below the rate at which the loss was least
FEW_STEPS = 20
UNUSED = frozenset(
    {f"optim.{key}" for key in ("lr", "min_lr", "warmup", "schedule", "cooldown", "skip_loss_z", "skip_norm_z")}
    | {f"optim.{key}" for key in ("momentum_cooldown",)}
    | {
        f"train.{key}"
        for key in ("eval_every", "eval_tokens", "sample_every", "hellaswag", "hellaswag_every", "ranges")
    }
    | {f"train.{key}" for key in ("checkpoint_every", "keep", "milestones", "grace", "track")}
)


@dataclass(frozen=True)
class Look:
    """One step of the test."""

    lr: float
    loss: float
    smoothed: float


def steps_of(config: Config, changes: Mapping[str, Any]) -> int:
    """How many steps a test has at most. UserError for what no test can do, before anything slow begins. `changes`: what the user
    asked for."""
    if own(config) is not None:
        raise UserError("--find-lr needs steps that are all alike, and the runs of this model have stages")
    if changes.get("train.minutes"):
        raise UserError("train.minutes is set, and --find-lr takes a number of steps: pass --steps")
    steps = int(changes.get("train.steps", STEPS))
    if steps < FEW_STEPS:
        raise UserError(f"--steps is {steps}, expected at least {FEW_STEPS} for --find-lr")
    return steps


def unused(changes: Mapping[str, Any]) -> str:
    """A line about what the user asked for and a test has no use for; "" if there is nothing."""
    found = ", ".join(key for key in changes if key in UNUSED)
    return f"lr       the test has no use for {found}" if found else ""


def rates(steps: int) -> list[float]:
    """From LOWEST to HIGHEST, each the same factor above the one before."""
    return [LOWEST * (HIGHEST / LOWEST) ** (i / (steps - 1)) for i in range(steps)]


def test(
    config: Config, session: Session, batches: Rows, *, steps: int, told: Callable[[int, Look], bool]
) -> list[Look]:
    """The steps up to the one at which the loss has diverged. The weights are worth nothing afterwards. `told` hears of each,
    and says whether to go on."""
    course, train = Plain(config), config.train
    looks: list[Look] = []
    for step, lr in enumerate(rates(steps)):
        plan, loss, count = course.step(step, None), 0.0, course.ramp.count(step)
        samples = train.batch * count
        counted = batches.counted(course.ramp.before(step) * train.batch, samples, seq=plan.seq)
        inv_targets = plan.inv_targets * samples * plan.seq / counted
        for micro in range(count):
            sample = (course.ramp.before(step) + micro) * train.batch
            inputs, targets = batches.batch(sample, train.batch, seq=plan.seq, document=plan.document)
            session.write("tokens", inputs)
            session.write("targets", targets)
            random = {"seed": train.seed, "step": step + 1, "sample": sample}
            shape = {"batch": train.batch, "seq": plan.seq, "accumulate": int(micro > 0)}
            session.run("micro", inv_targets=inv_targets, **shape, **random)
            loss += float(session.read("loss")[0]) * plan.shown
        for program, scalars in plan.updates:
            session.run(program, **{name: lr if name == "lr" else value for name, value in scalars.items()})
        if not isfinite(loss):
            break
        looks.append(Look(lr, loss, _smoothed([*(look.loss for look in looks), loss])))
        if not told(step, looks[-1]) or looks[-1].smoothed > DIVERGED * looks[0].loss:
            break
    return looks


def _smoothed(losses: Sequence[float]) -> float:
    """The mean of all losses, of which each counts SMOOTH times as much as the one after it."""
    weights = [SMOOTH**i for i in range(len(losses))]
    return sum(w * loss for w, loss in zip(weights, reversed(losses), strict=True)) / sum(weights)


def suggestion(looks: Sequence[Look]) -> tuple[float, float]:
    """Gives the rate to try, and the rate at which the smoothed loss was least. UserError where the loss never fell."""
    least = min(looks, key=lambda look: look.smoothed, default=None)
    if least is None or least.smoothed >= looks[0].loss:
        raise UserError(f"the loss never fell below its first value in {len(looks)} steps: there is no rate to suggest")
    return least.lr / BELOW_LEAST, least.lr


def write(folder: Path, looks: Sequence[Look], *, title: str) -> dict[str, Any]:
    """The files lr.json and lr.png, and what the first of them says."""
    lr, least = suggestion(looks)
    rule = f"the rate at which the smoothed loss was least, divided by {BELOW_LEAST:g}"
    found = {"suggestion": lr, "rule": rule, "least": least, "steps": [asdict(look) for look in looks]}
    picture = _picture(looks, lr, title)  # whatever is refused is refused before a file is there
    storage.replace_file(folder / "lr.json", (json.dumps(found, indent=1) + "\n").encode())
    curve.save(picture, folder / "lr.png")
    return found


def _picture(looks: Sequence[Look], lr: float, title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = [look.lr for look in looks]
    axes.plot(places, [look.loss for look in looks], color="#c3cad2", linewidth=0.6, label="loss of the step")
    axes.plot(places, [look.smoothed for look in looks], color="#475569", linewidth=1.4, label="smoothed")
    axes.axvline(lr, color="#c2410c", linewidth=1.2, label=f"suggestion: {lr:.2g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
    axes.set_ylim(top=DIVERGED * looks[0].loss)
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def run(job: Run, folder: RunFolder, *, steps: int) -> int:
    """Tests learning rates in the place of the training that `job` is. Only lr.json and lr.png are written."""
    say = job.console
    with open_machine(job.config, device=job.device) as machine, Stopping() as stop:
        for line in report.header(machine, job.data, folder.path):
            say.line(line)
        job.initialize(machine)

        def told(step: int, look: Look) -> bool:
            say.record({"kind": "find_lr", "step": step + 1, "lr": look.lr, "loss": look.loss})
            if say.due():
                say.progress(f"step {step + 1:>5}/{steps}  lr {look.lr:.1e}  loss {look.smoothed:.4f}")
            return not stop

        looks = test(machine.config, machine.session, job.batches, steps=steps, told=told)
    if stop:
        return stop.status
    found = write(folder.path, looks, title=f"{job.config.preset}: learning rates")
    say.record({"kind": "result", **{key: found[key] for key in ("suggestion", "rule", "least")}})
    ended = "" if len(looks) == steps else f", and the test ended at {looks[-1].lr:.1e}"
    say.line(f"lr       the loss was least at {found['least']:.1e}{ended}")
    say.line(f"         try --lr {found['suggestion']:.1e}: {found['rule']}")
    say.line(f"saved    {folder.path / 'lr.png'} and lr.json")
    return 0
