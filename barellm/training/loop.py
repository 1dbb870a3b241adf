"""The loop over steps. What happens after step n is a function of n alone, so that a resumed run repeats it exactly."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from barellm.checkpoint import checkpoint, tensorfile
from barellm.config import Config
from barellm.data.loader import Rows
from barellm.errors import UserError
from barellm.evaluation.validation import Evaluator, Result
from barellm.models.course import Course, Step
from barellm.runtime.session import Session
from barellm.training import report
from barellm.training.console import Console, duration, in_words, short
from barellm.training.metrics import Metrics
from barellm.training.ranges import Watch
from barellm.training.schedule import steps_in_time
from barellm.training.stopping import Stopping

# With `minutes` the number of steps is chosen after so many steps, and so many seconds of stepping or this share of
# the time: a busy moment must not decide.
CALIBRATION_STEPS, CALIBRATION_S, CALIBRATION_SHARE = 10, 8.0, 0.12
FINAL_SHARE = 0.03  # of `minutes`, kept for samples, checkpoint and curve; the last evaluation comes on top
ANY_STEPS = 1 << 31  # where only `minutes` limit a run
ESTIMATE_STEPS, ESTIMATE_S = (
    3,
    60.0,
)  # steps after which the whole time is said, where it is longer than so many seconds
NOT_FINITE_LIMIT = 10  # skipped updates in a row that end the run
ALL = 1 << 31  # checkpoints to keep
SHOWN_LINES = 16  # of a sample; metrics.jsonl has all of it
FULL_DISK_S, FULL_DISK_PAUSE_S = 3600.0, 10.0  # the last save waits for room so long, and tries so often


@dataclass
class Progress:
    """The part of the loop that a checkpoint remembers. `total` is None until the number of steps is chosen."""

    step: int = 0
    total: int | None = None
    seconds: float = 0.0  # spent in all sessions of the run, from the start of the command


@dataclass
class Loop:
    config: Config
    session: Session
    batches: Rows
    course: Course
    evaluator: Evaluator
    final_targets: int  # of the evaluation after the last step
    metrics: Metrics
    watch: Watch | None  # of the exponents, where they are asked for
    console: Console
    stop: Stopping
    folder: Path  # of the checkpoints
    meta: dict[str, Any]  # what a checkpoint's meta.json says besides the progress
    tokenizer: dict[str, bytes]
    samples: Callable[[int], list[str]]  # step -> texts; empty when stopped
    flops_per_step: int = 0
    peak: float = 0.0  # FLOP/s; 0: not measured
    progress: Progress = field(default_factory=Progress)
    started: float = field(default_factory=time.monotonic)  # of the command
    saved: Path | None = None
    _before: float = 0.0  # seconds of earlier sessions
    _step_s: float = 0.0  # running mean
    _pause_s: float = 0.0  # for evaluation, a step's part
    _evaluated_per_s: float = float("inf")
    _stepping_s: float = 0.0
    _stepped: int = 0
    _not_finite: int = 0  # steps in a row
    _save_due: bool = False
    _changed: int = (
        0  # the last step that changed the weights: an update is skipped where the gradient's norm is not finite
    )

    def run(self) -> bool:
        """Train to the last step. False if stopped; a checkpoint of the last whole step is on disk either way."""
        train = self.config.train
        if self.progress.total is None and train.minutes == 0:
            self.progress.total = train.steps
        self._before, self._changed = self.progress.seconds, self.progress.step
        self.course.enter(self.session, self.progress.step, self.progress.total)
        while True:
            step = self.progress.step
            self._after_step(step)
            if step == self.progress.total or self.stop:
                break
            if not self._step():
                break
            self._choose_total()
            last = self.progress.step == self.progress.total
            self._save_due |= bool(train.checkpoint_every) and self.progress.step % train.checkpoint_every == 0
            # While the loss or the norm is not finite no checkpoint is made: it could push out a good one.
            if self._save_due and not last and not self._not_finite:
                self._save_or_warn()
            if self._stepped == 1:
                gc.collect()
                gc.freeze()  # what start-up made lives to the end: later collections need not walk it
            if last:
                self._save_last()
        if self.progress.step != self.progress.total:
            self._save_last()
            return False
        return not self.stop

    # --- one step ---

    def _step(self) -> bool:
        """Do one optimizer step. Returns False if it was stopped between its micro-batches, which are then thrown away."""
        train, session, step = self.config.train, self.session, self.progress.step
        begin = time.perf_counter()
        plan = self.course.step(step, self.progress.total)
        shape = {"batch": train.batch, "seq": plan.seq}
        loss = 0.0
        for micro in range(train.accumulate):
            if micro and self.stop:
                return False
            sample = (step * train.accumulate + micro) * train.batch
            inputs, targets = self.batches.batch(sample, train.batch, seq=plan.seq, document=plan.document)
            session.write("tokens", inputs)
            session.write("targets", targets)
            random = {"seed": train.seed, "step": step + 1, "sample": sample}
            adds = int(micro > 0 or plan.adds)
            # The last micro-batch finds the gradients of the whole step.
            watched = self.watch is not None and micro + 1 == train.accumulate and self.watch.due(step + 1)
            program = "ranges" if watched else "micro"
            session.run(program, accumulate=adds, inv_targets=plan.inv_targets, **shape, **random)
            loss += float(session.read("loss")[0]) * plan.shown
            if watched and self.watch is not None:
                self.watch.record(step + 1)
            if micro + 1 < train.accumulate and self.console.due(inside=True):
                total = "?" if self.progress.total is None else self.progress.total
                self.console.progress(f"step {step + 1:>5}/{total}  micro-batch {micro + 1} of {train.accumulate}")
        norm = self._update(plan)
        self._count(time.perf_counter() - begin)
        self.progress.step = step + 1
        self.progress.seconds = self._before + time.monotonic() - self.started
        self.course.enter(session, step + 1, self.progress.total)
        self._report(loss, norm, plan)
        return True

    def _update(self, plan: Step) -> float:
        """Runs the programs that end a step; gives the norm of the gradient."""
        (first, scalars), *others = plan.updates
        self.session.run(first, **scalars)
        norm = float(self.session.read("clip")[0])
        for program, scalars in others:
            self.session.run(program, **scalars)
        return norm

    def _count(self, seconds: float) -> None:
        self._stepped += 1
        if self._stepped > 1:  # the first step of a process touches cold memory
            self._stepping_s += seconds
            weight = max(0.05, 1 / (self._stepped - 1))
            self._step_s += weight * (seconds - self._step_s)
        else:
            self._step_s = seconds

    def _report(self, loss: float, norm: float, plan: Step) -> None:
        step, total, train, lr = self.progress.step, self.progress.total, self.config.train, plan.lr
        rate = train.batch * train.accumulate * plan.seq / self._step_s
        finite = isfinite(loss) and isfinite(norm)
        row = {
            "kind": "train",
            "step": step,
            "loss": loss if isfinite(loss) else None,
            "lr": lr,
            "grad_norm": norm if isfinite(norm) else None,
            "tokens_per_s": round(rate, 1),
            "seconds": round(self.progress.seconds, 3),
        }
        self.record(row)
        if self.console.due():
            share = f"  {self.flops_per_step / self._step_s / self.peak:.0%} of peak" if self.peak else ""
            left = "" if total is None else f"  {duration((total - step) * (self._step_s + self._pause_s))} left"
            of = "?" if total is None else total
            # What matters most comes first: a narrow terminal cuts the end.
            numbers = f"loss {loss:.4f}  {short(rate)} tok/s{share}  norm {norm:.2f}  lr {lr:.1e}"
            self.console.progress(f"step {step:>5}/{of}{left}  {numbers}")
        self._estimate()
        self._not_finite = 0 if finite else self._not_finite + 1
        self._changed = step if isfinite(norm) else self._changed
        if self._not_finite == NOT_FINITE_LIMIT:
            self._diverged(loss, norm)

    def _estimate(self) -> None:
        """Says once, as soon as the speed is known, how long the run takes."""
        if self._stepped != ESTIMATE_STEPS or self.progress.total is None:
            return
        seconds = (self.progress.total - self.progress.step) * (self._step_s + self._pause_s)
        if seconds > ESTIMATE_S:
            speed = f"{self._step_s * 1e3:,.1f} ms a step"
            self.console.line(f"speed    {speed}: {in_words(seconds)} to go")
            if seconds > report.LONG_S:
                self.console.line(report.months_warning(f"at {speed} this run takes {in_words(seconds)}"))

    def _diverged(self, loss: float, norm: float) -> NoReturn:
        """Ends the run with one line. The weights are saved first, as the last update that was not skipped left them, unless that
        update was what broke them. They may be bad already, so all earlier checkpoints stay, and the line names the newest."""
        step, self.progress.step = self.progress.step, self._changed
        if self._changed and self._weights_are_finite():
            self._save_or_warn()
        target = checkpoint.step_folder(self.folder, self._changed)
        held = f"; {target} holds the last weights that were finite" if target.is_dir() else ""
        if earlier := [path for path in checkpoint.steps(self.folder) if path != target]:
            held += (
                f"; the checkpoint before that is {earlier[0]}" if held else f"; {earlier[0]} is the last checkpoint"
            )
        raise UserError(
            f"loss or gradient norm was not finite for {NOT_FINITE_LIMIT} steps up to step {step} (loss {loss}, "
            f"norm {norm}): try an optim.lr below {self.config.optim.lr} or a longer optim.warmup{held}"
        )

    def _weights_are_finite(self) -> bool:
        return all(
            np.isfinite(self.session.read_rows(name, lo, hi)).all()
            for name, t in checkpoint.of_role(self.session, "parameter").items()
            for lo, hi in tensorfile.pieces(t.shape, itemsize=4)
        )

    def record(self, row: dict[str, Any]) -> None:
        had_problem = self.metrics.problem is not None
        self.metrics.add(row)
        self.console.record(row)
        if self.metrics.problem and not had_problem:
            self.console.line(f"warning: metrics wait in memory: {self.metrics.problem}")

    def _choose_total(self) -> None:
        """Choose the number of steps of a run with `minutes`, once, from the speed seen so far; checkpoints keep it."""
        train, progress = self.config.train, self.progress
        budget = 60 * train.minutes * (1 - FINAL_SHARE)
        wait = min(CALIBRATION_S, CALIBRATION_SHARE * budget)
        enough = self._stepped > CALIBRATION_STEPS and self._stepping_s >= wait
        if progress.total is not None or not (enough or progress.step == train.steps):
            return
        progress.total = steps_in_time(
            done=progress.step,
            step_s=self._step_s,
            pause_s=self._pause_s,
            left_s=budget - progress.seconds - self.final_targets / self._evaluated_per_s,
            limit=train.steps or ANY_STEPS,
        )
        self.console.line(
            f"speed    {self._step_s * 1e3:.1f} ms a step: {progress.total:,} steps fit into {train.minutes:g} minutes"
        )
        if self.config.optim.warmup >= progress.total:
            self.console.line(report.warmup_warning(self.config, progress.total))

    # --- between steps ---

    def _after_step(self, step: int) -> None:
        """Evaluation and samples that are due at this step; made again after a resume, never recorded twice."""
        train, last = self.config.train, step == self.progress.total
        if last or self.stop:
            return  # the final report looks closer
        if train.eval_every and step % train.eval_every == 0:
            begin = time.perf_counter()
            tell = self.console.evaluating(self.evaluator.windows.windows)
            result = self.evaluator.run(self.session, stop=lambda: bool(self.stop), report=tell)
            if result is None:
                return
            seconds = time.perf_counter() - begin
            self._pause_s = seconds / train.eval_every
            self._evaluated_per_s = result.targets / seconds
            self.record_evaluation(step, result)
        if train.sample_every and step and step % train.sample_every == 0 and not self._not_finite:
            for text in self.samples(step):
                self.record_sample(step, text)

    def record_evaluation(self, step: int, result: Result) -> None:
        bits = result.bits_per_byte
        found = {"val_nats": result.nats, "val_bits_per_byte": bits, "targets": result.targets}
        self.record({"kind": "eval", "step": step, **found})
        per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
        self.console.line(f"step {step:>5}  validation {result.nats:.4f} nats per token{per_byte}")

    def record_sample(self, step: int, text: str, *, show: bool = True) -> None:
        self.record({"kind": "sample", "step": step, "text": text})
        if show:
            lines = text.splitlines()
            more = ["  | ..."] * (len(lines) > SHOWN_LINES)
            self.console.line("\n".join([f"step {step:>5}  sample", *(f"  | {x}" for x in lines[:SHOWN_LINES]), *more]))

    # --- checkpoints ---

    def save(self) -> None:
        """Save this step. The newest `train.keep` checkpoints stay, or all of them while the loss or the norm is not finite."""
        train, progress = self.config.train, self.progress
        keep = ALL if self._not_finite else train.keep
        meta = {
            **self.meta,
            "total_steps": progress.total,
            "samples": progress.step * train.batch * train.accumulate,
            "seconds": round(progress.seconds, 3),
        }
        going_on = progress.step != progress.total
        self.saved = checkpoint.save(
            self.folder,
            self.session,
            step=progress.step,
            meta=meta,
            tokenizer=self.tokenizer,
            keep=keep,
            gradients=going_on and self.course.step(progress.step, progress.total).adds,
        )
        self._save_due = False
        self.console.line(f"saved {self.saved}")

    def _save_or_warn(self) -> None:
        """A failed save on the way costs only itself: older checkpoints stay, the training goes on."""
        try:
            self.save()
        except OSError as error:
            step = self.progress.step
            self.console.line(f"warning: no checkpoint of step {step}: {error.strerror}: {error.filename}")

    def _save_last(self) -> None:
        """Save the last checkpoint. Nothing else holds these weights, so if the disk is full, wait for room. Ctrl-C gives up."""
        begin, stopped = time.monotonic(), bool(self.stop)
        while True:
            try:
                return self.save()
            except OSError as error:
                waited = time.monotonic() - begin
                gave_up = bool(self.stop) and not stopped
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or gave_up or waited > FULL_DISK_S:
                    raise
                megabytes = checkpoint.checkpoint_bytes(self.session) / 1e6
                self.console.line(
                    f"warning: {error.filename}: {error.strerror}. The last checkpoint needs {megabytes:,.0f} MB; it is "
                    f"tried again every {FULL_DISK_PAUSE_S:g} s, {duration(FULL_DISK_S - waited)} more. Ctrl-C gives up"
                )
            again = time.monotonic() + FULL_DISK_PAUSE_S
            while time.monotonic() < again and bool(self.stop) == stopped:
                time.sleep(0.05)  # a signal does not end a sleep
