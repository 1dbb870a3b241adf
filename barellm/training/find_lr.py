"""A range test of the learning rate (Smith 2015): a short training whose rate grows from step to step until it diverges.

Each step has the rates of a run whose --lr is that of the step: with Muon its matrices too, in the ratio that the run has."""

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, log
from pathlib import Path
from typing import Any

from barellm.assembly.build import open_model
from barellm.checkpoint import storage
from barellm.checkpoint.folder import RunFolder
from barellm.config import Config, overrides
from barellm.data.loader import Rows
from barellm.errors import UserError
from barellm.evaluation.validation import write_batch
from barellm.models.training_schedule import model_schedule
from barellm.runtime.session import Session
from barellm.training import console, curve, report, stopping
from barellm.training.run import Run
from barellm.training.training_schedule import ConstantSchedule

LOWEST, HIGHEST, STEPS = 1e-6, 10.0, 200
SMOOTH = 0.9  # decay rate of the mean loss
DIVERGED = 1.1  # the test ends where the smoothed loss is so many times that of the beginning
BELOW_LEAST = 3.0  # the suggestion is about so many times below the rate at which the loss was least
FEW_STEPS = 20
# Options that are the test's own, or that the rates replace.
RATES = ("lr", "optim.lr", "optim.muon_lr", "optim.muon_lr_ratio")
OF_TEST = frozenset(f"--{name}" for name in ("find-lr", "out", "steps", "train.steps", *RATES))
UNUSED = frozenset(
    {f"optim.{key}" for key in ("lr", "min_lr", "warmup", "schedule", "decay_fraction", "skip_loss_z", "skip_norm_z")}
    | {f"optim.{key}" for key in ("momentum_cooldown",)}
    | {f"train.{key}" for key in ("eval_every", "eval_tokens", "sample_every", "hellaswag", "hellaswag_every", "exponent_stats")}
    | {f"train.{key}" for key in ("checkpoint_every", "save_total_limit", "keep_every", "signal_grace_period", "track")}
)


@dataclass(frozen=True)
class Look:
    """One step of the test. `muon_lr` is None where Muon has no rate of its own."""

    lr: float
    muon_lr: float | None
    loss: float
    smoothed: float


def steps_of(config: Config, options: Mapping[str, Any]) -> int:
    """The number of steps of the test, from the command line's `options` (a config file's steps are the run's). UserError, before
    anything slow begins, for runs that cannot be tested."""
    if model_schedule(config) is not None:
        raise UserError("--find-lr needs steps that are all alike, and the runs of this model have stages")
    if options.get("train.minutes"):
        raise UserError("train.minutes is set, and --find-lr takes a number of steps: pass --steps")
    steps = int(options.get("train.steps", STEPS))
    if steps < FEW_STEPS:
        raise UserError(f"--steps is {steps}, expected at least {FEW_STEPS} for --find-lr")
    with_rate(config, LOWEST)
    return steps


def unused(changes: Mapping[str, Any]) -> str:
    """A line about what the user asked for and a test has no use for; "" if there is nothing."""
    found = ", ".join(key for key in changes if key in UNUSED)
    return f"lr       the test has no use for {found}" if found else ""


def rates(steps: int) -> list[float]:
    """From LOWEST to HIGHEST, each about the same factor above the one before: in the four digits that a user types."""
    return [float(f"{LOWEST * (HIGHEST / LOWEST) ** (i / (steps - 1)):.3e}") for i in range(steps)]


def with_rate(config: Config, lr: float) -> Config:
    """The configuration with this `--lr`: Muon's rate follows, and so does the lowest one where it would be above."""
    optim, changes = config.optim, {"optim.lr": lr}
    if optim.min_lr > lr and optim.schedule != "constant":
        changes["optim.min_lr"] = float(f"{lr * (optim.min_lr / optim.lr):.3g}")
    return overrides.changed(config, changes)


def command(words: Sequence[str], found: Config, config: Config) -> str:
    """The command line that trains with the rates of `found` (made by `with_rate` from `config`), from the test's own `words`."""
    options = shlex.split(report.rate_options(found.optim))
    if found.optim.min_lr != config.optim.min_lr:
        options += ["--optim.min_lr", f"{found.optim.min_lr:.12g}"]
    dropped, kept, rest = {*OF_TEST, *options}, [], iter(words)
    for word in rest:
        option, given, _ = word.partition("=")
        if option not in dropped:
            kept.append(word)
        elif option != "--find-lr" and not given:
            next(rest)  # its value
    return shlex.join(["barellm", "train", *kept, *options])


def test(config: Config, session: Session, batches: Rows, *, steps: int, reported: Callable[[int, Look], bool]) -> list[Look]:
    """Train with a learning rate that grows per step, until the loss diverges; returns the tested steps. The weights are useless
    afterwards. `reported` gets each step (from 0) and what was seen of it, and returns whether to continue: False ends the test."""
    training_schedule, train = ConstantSchedule(config), config.train
    results: list[Look] = []
    for step, lr in enumerate(rates(steps)):
        tested = with_rate(config, lr).optim.rates(lambda high, low: high)
        plan, loss, count = training_schedule.step(step, None), 0.0, training_schedule.batch_rampup.count(step)
        samples = train.micro_batch_size * count
        valid_targets = batches.counted(training_schedule.batch_rampup.before(step) * train.micro_batch_size, samples, seq=plan.seq)
        inv_targets = plan.inv_targets * samples * plan.seq / valid_targets
        for micro in range(count):
            sample = (training_schedule.batch_rampup.before(step) + micro) * train.micro_batch_size
            inputs, targets = batches.batch(sample, train.micro_batch_size, seq=plan.seq, document=plan.document)
            write_batch(session, inputs, targets, batches.starts(sample, train.micro_batch_size, inputs))
            random = {"seed": train.seed, "step": step + 1, "sample": sample}
            shape = {"batch": train.micro_batch_size, "seq": plan.seq, "accumulate": int(micro > 0)}
            session.run("forward_backward", inv_targets=inv_targets, **shape, **random)
            loss += float(session.read("loss")[0]) * plan.shown
        for program, scalars in plan.updates:
            session.run(program, **{name: tested.get(name, value) for name, value in scalars.items()})
        if not isfinite(loss):
            break
        results.append(Look(lr, tested.get("muon_lr"), loss, _smoothed([*(look.loss for look in results), loss])))
        if not reported(step, results[-1]) or results[-1].smoothed > DIVERGED * results[0].loss:
            break
    return results


def _smoothed(losses: Sequence[float]) -> float:
    """The mean of all losses, of which each counts SMOOTH times as much as the one after it."""
    weights = [SMOOTH**i for i in range(len(losses))]
    return sum(w * loss for w, loss in zip(weights, reversed(losses), strict=True)) / sum(weights)


def suggestion(looks: Sequence[Look]) -> tuple[Look, Look]:
    """Gives the step with the rates to try, and the one with the least smoothed loss. UserError where the loss never fell."""
    least = min(looks, key=lambda look: look.smoothed, default=None)
    if least is None or least.smoothed >= looks[0].loss:
        raise UserError(f"the loss never fell below its first value in {len(looks)} steps: there is no rate to suggest")
    return min(looks, key=lambda look: abs(log(look.lr * BELOW_LEAST / least.lr))), least


def write(folder: Path, looks: Sequence[Look], *, config: Config, words: Sequence[str]) -> dict[str, Any]:
    """Write lr.json and lr.png and return the content of lr.json. `words`: the test's command line."""
    best, lowest = suggestion(looks)
    rule = f"the tested rate nearest to that of the least smoothed loss, divided by {BELOW_LEAST:g}"
    found: dict[str, Any] = {"suggestion": best.lr, "muon_lr": best.muon_lr, "rule": rule, "least": lowest.lr}
    found |= {"command": command(words, with_rate(config, best.lr), config), "steps": [asdict(look) for look in looks]}
    picture = _picture(looks, best.lr, f"{config.preset}: learning rates")  # whatever is refused is refused before a file is there
    storage.replace_file(folder / "lr.json", (json.dumps(found, indent=1) + "\n").encode())
    curve.save(picture, folder / "lr.png")
    return found


def _picture(looks: Sequence[Look], lr: float, title: str) -> Any:
    """A matplotlib figure of loss over learning rate, with the suggestion `lr` as a line; losses above the limit are cut."""
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


def run(job: Run, folder: RunFolder, *, steps: int, words: Sequence[str]) -> int:
    """Run the test in place of the training `job`; writes only lr.json and lr.png. Returns the exit status."""
    out, started = job.console, [0.0]
    with open_model(job.config, device=job.device, documents=job.data.masked) as compiled, stopping.Stopping() as stop:
        for line in report.header(compiled, job.data, folder.path, "lr.json has the losses, lr.png their curve"):
            out.line(line)
        job.initialize(compiled)

        def reported(step: int, look: Look) -> bool:
            found = {key: value for key, value in asdict(look).items() if value is not None}
            out.record({"kind": "find_lr", "step": step + 1} | {k: v for k, v in found.items() if k != "smoothed"})
            started[0] = started[0] or time.monotonic()  # behind the first step, which touches cold memory
            if out.due():
                left = (time.monotonic() - started[0]) / step * (steps - 1 - step) if step else None
                eta = "" if left is None else f"  at most {console.duration(left)} left"
                out.progress(f"step {step + 1:>5}/{steps}{eta}  loss {look.smoothed:.4f}  {report.rates(found)}")
            return not stop

        looks = test(compiled.config, compiled.session, job.batches, steps=steps, reported=reported)
    if stop:
        return stop.status
    found = write(folder.path, looks, config=job.config, words=words)
    out.record({"kind": "result", **{key: value for key, value in found.items() if key != "steps"}})
    ended = "" if len(looks) == steps else f", and the test ended at {looks[-1].lr:.1e}"
    muon = "" if found["muon_lr"] is None else f" (AdamW), {found['muon_lr']:.4g} (Muon)"
    out.line(f"lr       the loss was least at {found['least']:.4g}{ended}")
    out.line(f"         try {found['suggestion']:.4g}{muon}: {found['rule']}")
    out.line(f"saved    {folder.path / 'lr.png'} and lr.json")
    out.line(f"next     {found['command']}")
    return 0
