"""The loop over steps. What happens after step n is a function of n alone, so that a resumed run repeats it exactly."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite, log
from os import environ
from typing import Any, NoReturn

import numpy as np

from barellm import models
from barellm.checkpoint import checkpoint, tensorfile
from barellm.config import Config
from barellm.data import loader, mapping
from barellm.errors import UserError, visible
from barellm.evaluation import hellaswag, validation
from barellm.evaluation.text import repetitive
from barellm.models.training_schedule import StepPlan, TrainingSchedule
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import first
from barellm.runtime.session import Session
from barellm.training import exponent_stats, report, stopping, trackers
from barellm.training.batch_rampup import BatchRampup
from barellm.training.console import Console, duration, in_words, short
from barellm.training.metrics import Metrics
from barellm.training.saving import Point, Saving
from barellm.training.schedule import steps_in_time
from barellm.training.spikes import Spikes
from barellm.training.training_schedule import ConstantSchedule

# With `minutes` the number of steps is chosen after so many steps, and so many seconds of stepping or this share of
# the time: a busy moment must not decide.
CALIBRATION_STEPS, CALIBRATION_S, CALIBRATION_SHARE = 10, 8.0, 0.12
FINAL_SHARE = 0.03  # of `minutes`, kept for samples, checkpoint and curve; the last evaluation comes on top
ANY_STEPS = 1 << 31  # where only `minutes` limit a run
ESTIMATE_STEPS, ESTIMATE_S = (3, 60.0)  # steps after which the whole time is said, where it is longer than so many seconds
# How far a first loss may be from the logarithm of the vocabulary: a share of it, and for each dimension of the embedding, since
# logits have a variance of up to twice 0.02^2 for each.
LOSS_SHARE, LOSS_SPREAD = 0.1, 4e-4
NOT_FINITE_LIMIT = 10  # skipped updates in a row that end the run
ALL = 1 << 31  # checkpoints to keep
STOPPED = 130  # the status of a run that whoever listens has stopped: as Ctrl-C
SHOWN_LINES = 16  # of a sample; metrics.jsonl has all of it


@dataclass
class Progress:
    """The part of the loop that a checkpoint remembers. `total` is None until the number of steps is chosen."""

    step: int = 0
    total: int | None = None
    seconds: float = 0.0  # spent in all sessions of the run, from the start of the command
    tokens: int = 0  # trained on


@dataclass
class Loop:
    config: Config
    session: Session
    batches: loader.Rows
    training_schedule: TrainingSchedule
    batch_rampup: BatchRampup
    spikes: Spikes
    evaluator: validation.Evaluator
    final_targets: int  # of the evaluation after the last step
    metrics: Metrics
    watch: exponent_stats.ExponentStats | None  # of the exponents, where they are asked for
    console: Console
    stop: stopping.Stopping
    saving: Saving
    tracking: trackers.Tracking
    meta: dict[str, Any]  # what a checkpoint's meta.json says besides the progress
    ranks: Ranks
    samples: Callable[[int], list[str]] = lambda step: []  # step -> texts; empty when stopped
    hellaswag: Callable[[], hellaswag.Result | None] | None = None
    flops_per_step: int = 0
    peak: float = 0.0  # FLOP/s; 0: not measured
    progress: Progress = field(default_factory=Progress)
    started: float = field(default_factory=time.monotonic)  # of the command
    listen: Callable[[dict[str, Any]], bool] | None = None  # gets each row of the metrics; where it is True the run stops
    _before: float = 0.0  # seconds of earlier sessions
    _micro_s: float = 0.0  # of a micro-batch and its part of the update, running mean
    _pause_s: float = 0.0  # for evaluation, a step's part
    _tried_s: float = 0.0  # for HellaSwag, likewise
    _evaluated_per_s: float = float("inf")
    _stepping_s: float = 0.0
    _stepped: int = 0
    _not_finite: int = 0  # steps in a row
    _save_due: bool = False
    _milestone_due: bool = False
    # After the last step that changed the weights: an update is skipped where the gradient's norm is not finite.
    _changed: Point | None = None

    def run(self) -> bool:
        """Train to the last step; False if stopped early. A checkpoint of the last complete step is on disk either way, also when a
        shard is truncated during the run (LostFile): rows are read before a step changes weights. With several ranks none saves."""
        try:
            return self._run()
        except mapping.LostFile:
            if self.ranks.count == 1:
                self.saving.last(self.point())
            raise

    def _run(self) -> bool:
        """`run` without the handling of lost files. All ranks take the same branches: they agree on stops and totals."""
        train = self.config.train
        if self.progress.total is None and train.minutes == 0:
            self.progress.total = train.steps
        self._before, self._changed = self.progress.seconds, self.point()
        self.training_schedule.on_step(self.session, self.progress.step, self.progress.total)
        while True:
            step = self.progress.step
            self._after_step(step)
            # A barrier: rank 0 may have been evaluating or sampling alone
            first(self.ranks, None)
            if step == self.progress.total or self.stop:
                break
            if not self._step():
                break
            self._choose_total()
            self._save_if_due()
            if self._stepped == 1:
                gc.collect()
                gc.freeze()  # what start-up made lives to the end: later collections need not walk it
            if self.progress.step == self.progress.total:
                self.saving.last(self.point())
        if self.progress.step != self.progress.total:
            self.saving.last(self.point())
            return False
        if not self._stepped and self.ranks.rank == 0 and self._ended_finite():
            self.saving.thin(self.point())
        return not self.stop

    def _ended_finite(self) -> bool:
        """Whether the loss and the norm of the run's last step were finite: no checkpoint may go for one that may be bad."""
        rows = [row for row in self.metrics.rows if row["kind"] == "train"]
        return bool(rows) and None not in (rows[-1].get("loss"), rows[-1].get("grad_norm"))

    def replay(self, step: int) -> None:
        """Only the steps up to this one: nothing is evaluated, sampled or saved between them. `progress.total` is known."""
        self.training_schedule.on_step(self.session, self.progress.step, self.progress.total)
        while self.progress.step < step:
            self._step()

    def _step(self) -> bool:
        """Do one optimizer step: forward and backward of its micro-batches, then the update. False if stopped between
        micro-batches, whose gradients are then discarded."""
        train, session, step = self.config.train, self.session, self.progress.step
        begin = time.perf_counter()
        plan = self.training_schedule.step(step, self.progress.total)
        batch = train.micro_batch_size // self.ranks.count  # of each micro-batch so many rows are this rank's
        shape = {"batch": batch, "seq": plan.seq}
        loss, micro_batches_before, count = 0.0, self.batch_rampup.before(step), self.batch_rampup.count(step)
        # The loss is the mean over the targets that count: exactly as planned where all of them do.
        samples = train.micro_batch_size * count
        share = self.batches.counted(micro_batches_before * train.micro_batch_size, samples, seq=plan.seq) / (samples * plan.seq)
        for micro in range(count):
            if micro and self.stop:
                return False
            sample = (micro_batches_before + micro) * train.micro_batch_size + self.ranks.rank * batch
            inputs, targets = self.batches.batch(sample, batch, seq=plan.seq, document=plan.document)
            validation.write_batch(session, inputs, targets, self.batches.starts(sample, batch, inputs))
            random = {"seed": train.seed, "step": step + 1, "sample": sample}
            accumulate = int(micro > 0 or plan.adds)
            # The last micro-batch finds the gradients of the whole step.
            with_stats = self.watch is not None and micro + 1 == count and self.watch.due(step + 1)
            program = "forward_backward_stats" if with_stats else "forward_backward"
            self.saving.before(program)
            sizes = {**shape, "accumulate": accumulate, "last": int(micro + 1 == count)}
            session.run(program, inv_targets=plan.inv_targets / share, **sizes, **random)
            loss += float(session.read(plan.loss)[0]) * plan.shown
            if with_stats and self.watch is not None:
                self.watch.record(step + 1)
            if micro + 1 < count and self.console.due(inside=True):
                total = "?" if self.progress.total is None else self.progress.total
                self.console.progress(f"step {step + 1:>5}/{total}  micro-batch {micro + 1} of {count}")
        loss = self._meet(loss)
        if not step:
            self._check_first(loss)
        with self.saving.changing:
            norm, spike = self._update(plan, loss)
            self._count((time.perf_counter() - begin) / count)
            self.progress.step = step + 1
            self.progress.tokens += train.micro_batch_size * count * plan.seq
            self.progress.seconds = self._before + time.monotonic() - self.started
            self.training_schedule.on_step(session, step + 1, self.progress.total)
        self._report(loss, norm, plan, spike)
        return True

    def _meet(self, loss: float) -> float:
        """All ranks tell their part of the loss, and whether they were asked to stop. Gives the loss."""
        found = self.ranks.gather((loss, self.stop.status))
        self.stop.agree([status for _, status in found])
        total = found[0][0]
        for more, _ in found[1:]:
            total += more
        return total

    def _check_first(self, loss: float) -> None:
        """UserError for a first loss that is not finite; on a GPU also for one far from ln(vocabulary), that of uniform
        predictions, with newly initialized weights: that is the sign of a broken kernel."""
        model, on_gpu = self.config.model, self.meta["machine"]["device"] == "cuda"
        fresh = on_gpu and not self.config.train.init_from and models.begins_uniform(model)
        uniform_loss = log(model.vocab_size)
        tolerance = LOSS_SHARE * uniform_loss + LOSS_SPREAD * model.d_model
        if isfinite(loss) and (not fresh or abs(loss - uniform_loss) <= tolerance or environ.get("BARELLM_SELF_CHECK") == "0"):
            return
        wanted = f"about {uniform_loss:.2f}, the ln of {model.vocab_size:,} ids, with new weights" if fresh else "a finite number"
        advice = "check the kernels with `barellm doctor --gpu`, or use --device cpu" if on_gpu else "are the weights finite?"
        raise UserError(f"the first loss is {loss:.4g}, expected {wanted}: {advice}")

    def _update(self, plan: StepPlan, loss: float) -> tuple[float, str]:
        """Run the programs that end a step; returns the gradient norm (from the first), and why the others were skipped, or ""."""
        (first, scalars), *others = plan.updates
        self.saving.before(first)
        self.session.run(first, **scalars)
        norm = float(self.session.read("clip")[0])
        spike = self.spikes.look(loss=loss, norm=norm) if self.spikes.active else ""
        for program, scalars in others if not spike else ():
            self.saving.before(program)
            self.session.run(program, **scalars)
        return norm, spike

    def _count(self, seconds: float) -> None:
        """Count a step whose micro-batches took so long on average."""
        self._stepped += 1
        if self._stepped > 1:  # the first step of a process touches cold memory
            self._stepping_s += seconds * self.batch_rampup.count(self.progress.step)
            weight = max(0.05, 1 / (self._stepped - 1))
            self._micro_s += weight * (seconds - self._micro_s)
        else:
            self._micro_s = seconds

    @property
    def _step_s(self) -> float:
        """How long a step takes that has as many micro-batches as the last one."""
        return self._micro_s * self.batch_rampup.count(max(0, self.progress.step - 1))

    @property
    def _pauses_s(self) -> float:
        """Seconds between two steps for evaluations, in the mean."""
        return self._pause_s + self._tried_s

    def _left_s(self, total: int) -> float:
        step = self.progress.step
        return (self.batch_rampup.before(total) - self.batch_rampup.before(step)) * self._micro_s + (total - step) * self._pauses_s

    def _report(self, loss: float, norm: float, plan: StepPlan, spike: str) -> None:
        """Record the step's metrics, show progress, and end the run after NOT_FINITE_LIMIT non-finite steps in a row."""
        step, total, train = self.progress.step, self.progress.total, self.config.train
        rate = train.micro_batch_size * plan.seq / self._micro_s
        finite = isfinite(loss) and isfinite(norm)
        row = {
            "kind": "train", "step": step, "loss": loss if isfinite(loss) else None, **plan.rates,
            "grad_norm": norm if isfinite(norm) else None, "tokens": self.progress.tokens, "tokens_per_s": round(rate, 1),
            "seconds": round(self.progress.seconds, 3),
        }  # fmt: skip
        if self.spikes.active:
            row |= {f"{name}_z": score for name, score in self.spikes.scores.items()} | {"skipped": bool(spike)}
        self.record(row)
        if self.console.due():
            flops = self.flops_per_step / train.gradient_accumulation_steps
            share = f"  {flops / self._micro_s / self.peak:.0%} MFU" if self.peak else ""
            time_left = "" if total is None else f"  {duration(self._left_s(total))} left"
            total_text = "?" if total is None else total
            # What matters most comes first: a narrow terminal cuts the end.
            numbers = f"loss {loss:.4f}  {short(rate)} tok/s{share}  grad norm {norm:.2f}  {report.rates(plan.rates)}"
            self.console.progress(f"step {step:>5}/{total_text}{time_left}  {numbers}")
        if spike:
            self.console.line(f"step {step:>5}  skipped: {spike} ({self.spikes.skipped:,} skipped so far)")
        self._estimate()
        self._not_finite = 0 if finite else self._not_finite + 1
        if isfinite(norm) and not spike:
            self._changed = self.point()
        if self._not_finite == NOT_FINITE_LIMIT:
            self._diverged(loss, norm)

    def _estimate(self) -> None:
        """Print once, as soon as the speed is known, how long the run takes."""
        if self._stepped != ESTIMATE_STEPS or self.progress.total is None:
            return
        seconds = self._left_s(self.progress.total)
        if seconds > ESTIMATE_S:
            speed = f"{self._step_s * 1e3:,.1f} ms a step"
            self.console.line(f"speed    {speed}: {in_words(seconds)} left")
            if seconds > report.LONG_S:
                self.console.line(report.months_warning(f"at {speed} this run takes {in_words(seconds)}"))

    def _diverged(self, loss: float, norm: float) -> NoReturn:
        """End a diverged run with a UserError. First save the weights of the last finite step, unless its update broke them. All
        earlier checkpoints are kept, and the message names the newest."""
        step, point = self.progress.step, self._changed
        assert point is not None
        if point.step and first(self.ranks, self._weights_are_finite()):
            self.saving.now_or_warn(replace(point, keep=ALL))
        self.saving.wait()
        target = checkpoint.step_folder(self.saving.folder, point.step)
        hint = f"; {target} holds the last weights that were finite" if target.is_dir() else ""
        if earlier := [path for path in checkpoint.steps(self.saving.folder) if path != target]:
            hint += f"; the checkpoint before that is {earlier[0]}" if hint else f"; {earlier[0]} is the last checkpoint"
        found = f"was not finite for {NOT_FINITE_LIMIT} steps up to step {step} (loss {loss}, norm {norm})"
        rates = f"a lower learning rate, {report.lower_rates(self.config.optim)}"
        longer = " or a longer --optim.warmup" if isinstance(self.training_schedule, ConstantSchedule) else ""
        raise UserError(f"loss or gradient norm {found}: restart with {rates}{longer}{hint}")

    def _weights_are_finite(self) -> bool:
        return all(
            np.isfinite(self.session.read_rows(name, lo, hi)).all()
            for name, t in checkpoint.of_role(self.session, "parameter").items()
            for lo, hi in tensorfile.pieces(t.shape, itemsize=4)
        )

    def record(self, row: dict[str, Any]) -> None:
        had_problem = self.metrics.problem is not None
        self.metrics.add(row)
        self.tracking.add(row)
        self.console.record(row)
        if self.listen is not None and self.listen(row):
            self.stop.request(STOPPED)
        if self.metrics.problem and not had_problem:
            self.console.line(f"warning: metrics wait in memory: {self.metrics.problem}")

    def _choose_total(self) -> None:
        """Choose the number of steps of a run limited by `minutes`, once, from the speed so far; checkpoints keep it."""
        if self.progress.total is not None:
            return
        self.progress.total = first(self.ranks, self._total_in_time())
        if (total := self.progress.total) is None:
            return
        fit = f"{total:,} steps fit into {self.config.train.minutes:g} min"
        self.console.line(f"speed    {self._step_s * 1e3:.1f} ms a step: {fit}")
        if self.config.optim.warmup >= total:
            self.console.line(report.warmup_warning(self.config, total))

    def _total_in_time(self) -> int | None:
        """The number of steps that fit into the time; None until the speed is known well enough."""
        train, progress = self.config.train, self.progress
        budget = 60 * train.minutes * (1 - FINAL_SHARE)
        calibration_s = min(CALIBRATION_S, CALIBRATION_SHARE * budget)
        enough = self._stepped > CALIBRATION_STEPS and self._stepping_s >= calibration_s
        if not enough and progress.step != train.steps:
            return None
        return steps_in_time(
            done=progress.step, step_s=self._step_s, pause_s=self._pauses_s,
            left_s=budget - progress.seconds - self.final_targets / self._evaluated_per_s, limit=train.steps or ANY_STEPS,
        )  # fmt: skip

    def _after_step(self, step: int) -> None:
        """Evaluations and samples due at this step (repeated after a resume, recorded once). May end the run (early stopping)."""
        train, last = self.config.train, step == self.progress.total
        if last or self.stop:
            return  # the final report looks closer
        if train.eval_every and step % train.eval_every == 0:
            begin = time.perf_counter()
            report_progress = self.console.evaluating(self.evaluator.windows.windows)
            result = self.evaluator.run(self.session, stop=lambda: bool(self.stop), report=report_progress)
            if result is None:
                return
            seconds = time.perf_counter() - begin
            self._pause_s = seconds / train.eval_every
            self._evaluated_per_s = result.targets / seconds
            self.record_evaluation(step, result)
            if self._evaluated(step):
                return
        if train.hellaswag_every and step and step % train.hellaswag_every == 0 and not self.try_hellaswag(step):
            return
        if train.sample_every and step and step % train.sample_every == 0 and not self._not_finite:
            for text in self.samples(step):
                self.record_sample(step, text)

    def record_evaluation(self, step: int, result: validation.Result) -> None:
        bits = result.bits_per_byte
        found = {"val_nats": result.nats, "val_bits_per_byte": bits, "targets": result.targets}
        self.record({"kind": "eval", "step": step, **found})
        per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
        self.console.line(f"step {step:>5}  validation {result.nats:.4f} nats per token{per_byte}")

    def _evaluated(self, step: int) -> bool:
        """Save the best checkpoint, and return whether early stopping ends the run: the validation loss has not improved for
        `early_stopping` evaluations. Only rank 0 has all evaluations, also those before a resume."""
        train = self.config.train
        losses = [row["val_nats"] for row in self.metrics.rows if row["kind"] == "eval"]
        stale = len(losses) - 1 - losses.index(min(losses))
        if train.keep_best and first(self.ranks, stale) == 0 and not self._not_finite:
            self.saving.best(self.point())
        if not train.early_stopping or first(self.ranks, stale) < train.early_stopping:
            return False
        self.console.line(f"step {step:>5}  early stopping: {stale} evaluations without a lower validation loss")
        self.progress.total = step
        self.saving.last(self.point())
        return True

    def try_hellaswag(self, step: int) -> bool:
        """Evaluate on HellaSwag if the run asks for it. False if stopped meanwhile."""
        if self.hellaswag is None:
            return True
        begin = time.perf_counter()
        scores = self.hellaswag()
        if scores is None:
            return False
        self._tried_s = (time.perf_counter() - begin) / max(1, self.config.train.hellaswag_every)
        self.record({"kind": "hellaswag", "step": step, **scores.summary()})
        shares = f"acc {scores.acc:.4f}, acc_norm {scores.acc_norm:.4f}"
        self.console.line(f"step {step:>5}  HellaSwag {shares} ({scores.total:,} examples)")
        return True

    def record_sample(self, step: int, text: str, *, show: bool = True) -> None:
        self.record({"kind": "sample", "step": step, "text": text})
        if show and repetitive(text):
            self.console.line(f"step {step:>5}  sample  {text[:16]!r} again and again (metrics.jsonl has all of it)")
        elif show:
            lines = visible(text).splitlines()
            more = ["  | ..."] * (len(lines) > SHOWN_LINES)
            self.console.line("\n".join([f"step {step:>5}  sample", *(f"  | {x}" for x in lines[:SHOWN_LINES]), *more]))

    def point(self) -> Point:
        """The last complete step for a checkpoint. The newest `save_total_limit` stay, or all while loss or norm is not finite."""
        train, progress = self.config.train, self.progress
        meta = {
            **self.meta, "total_steps": progress.total, "samples": self.batch_rampup.before(progress.step) * train.micro_batch_size,
            "tokens": progress.tokens, "seconds": round(progress.seconds, 3),
            "milestone": self._milestone_due or self._is_milestone(progress.step),
        }  # fmt: skip
        if self.spikes.active:
            meta["spikes"] = self.spikes.state()
        unfinished = progress.step != progress.total
        keeps_gradients = unfinished and self.training_schedule.step(progress.step, progress.total).adds
        return Point(progress.step, meta, ALL if self._not_finite else train.save_total_limit, keeps_gradients)

    def _save_if_due(self) -> None:
        """Begin a due checkpoint. None is made while the loss or norm is not finite, as it could replace a good one. A stopping run
        saves its last step elsewhere (`saving.last`, or the grace period's thread)."""
        train, step = self.config.train, self.progress.step
        with self.saving.changing:
            self.saving.report()
            self._milestone_due |= self._is_milestone(step)
            self._save_due |= self._milestone_due or (train.checkpoint_every > 0 and step % train.checkpoint_every == 0)
            if self._save_due and step != self.progress.total and not self._not_finite and not self.stop:
                self.saving.begin(self.point())
                self._save_due = self._milestone_due = False

    def _is_milestone(self, step: int) -> bool:
        every = self.config.train.keep_every
        return every > 0 and step > 0 and step % every == 0
