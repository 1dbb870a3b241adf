"""A training run from its configuration to its report: what it trains on, the machine, the loop, the last evaluation."""

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from barellm import __version__, models
from barellm.assembly.build import CompiledModel, open_model, shards_of
from barellm.checkpoint import checkpoint
from barellm.checkpoint.error_feedback_state import ErrorFeedbackState
from barellm.checkpoint.folder import RunFolder
from barellm.checkpoint.shards import ShardedState
from barellm.checkpoint.weights import Weights
from barellm.config import Config, overrides
from barellm.data.kinds import load_tokenizer, tokenizer_files
from barellm.data.tokenizers import Ids
from barellm.errors import UserError
from barellm.generation.decode import Decoder, open_decoder
from barellm.optim import powersgd
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE
from barellm.training import agreement, exponent_stats, report, trackers
from barellm.training.console import Console, duration
from barellm.training.inputs import Inputs
from barellm.training.loop import Loop, Progress
from barellm.training.output import Output, Silent
from barellm.training.resume import Start
from barellm.training.saving import Saving, SharedSaving
from barellm.training.signal_grace_period import SignalGracePeriod
from barellm.training.spikes import Spikes
from barellm.training.stopping import Agreed, Stopping
from barellm.training.training_schedule import training_schedule

SAMPLE_TOKENS = 160


class Run(Inputs):
    """One training run, from its seed, from `weights`, or from `start` on. `started`: time.monotonic() when the command began, for
    honest totals. `requested`: as `Inputs` have it. `listen`: as the loop has it. `ranks`: the processes of the run, of which this
    is one; all but rank 0 are silent, and write nothing."""

    def __init__(
        self, config: Config, *, start: Start | None, weights: Weights | None, device: str, console: Console, started: float,
        requested: bool = True, listen: Callable[[dict[str, Any]], bool] | None = None, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """Check the configuration for contradictions before anything slow, then load the inputs."""
        config.check()
        agreement.check(config, device=device, ranks=ranks)
        trackers.chosen(config.train.track)  # before anything slow begins
        training_schedule(config)
        self.weights, self.device, self.started, self.listen = weights, device, started, listen
        self.base: dict[str, str] = {}  # what checkpoints say of the weights that they do not hold, if there are any
        tokenizer = load_tokenizer(start.path, rows=config.model.vocab_size) if start else None
        if weights and not start:
            tokenizer = weights.tokenizer or Ids(weights.model.vocab_size)
        super().__init__(config, start=start, tokenizer=tokenizer, requested=requested, console=console, ranks=ranks)

    def execute(self, folder: RunFolder) -> int:
        """Run the training. Returns the exit status: 0 finished, 130 or 143 stopped by a signal with a checkpoint saved."""
        self.base = self._named_base()
        with ExitStack() as opening:
            with agreement.rank_zero_first(self.ranks):  # what rank 0 compiles, the others find in the cache
                options: dict[str, Any] = {"positions": self.positions, "scoring": self.scoring, "ranks": self.ranks}
                options["documents"] = self.data.masked
                compiled = opening.enter_context(open_model(self.config, device=self.device, **options))
            self.config = compiled.config
            agreement.check_consistent_across_ranks(self.ranks, self._facts(compiled))
            self.stored: Any = compiled.session  # as checkpoints have it
            if self.ranks.count > 1:
                self.stored = ShardedState(compiled.session, *shards_of(self.config, self.ranks), self.ranks)
            if self.ranks.rank == 0:
                folder.need_space(checkpoint.checkpoint_bytes(self.stored))
            with Agreed(self.ranks.rank) if self.ranks.count > 1 else Stopping() as stop:
                self.console.on_lost = lambda: stop.request(141)
                return self._train(folder, compiled, stop)

    def initialize(self, compiled: CompiledModel) -> None:
        """Weights from the seed, or from elsewhere."""
        if self.weights is None:
            compiled.initialize(self.config.train.seed)
        else:
            if self.base:
                compiled.session.run("init", seed=self.config.train.seed)
            self.weights.load(compiled.loading)
            adapter = f" and the adapter of {self.config.train.init_from}" if self.weights.trained else ""
            self.console.line(f"initialized with the weights of {self.weights.path}{adapter}")

    def _named_base(self) -> dict[str, str]:
        """The path and the hash of the weights of which some are frozen. UserError where there are none."""
        adapter = self.config.adapter
        if not adapter.active:
            return {}
        if self.weights is None:
            option = "--adapt" if adapter.method else "--train-only"
            raise UserError(f"{option} freezes weights, and none are given: name them with --init-from")
        return {"path": str(self.weights.path.resolve()), "hash": self.weights.digest()}

    def _train(self, folder: RunFolder, compiled: CompiledModel, stop: Stopping) -> int:
        """Train with everything opened (metrics, trackers, savers); all is closed in reverse order at the end."""
        output = (Silent if self.ranks.rank else Output)(self, folder.path, compiled)
        progress = self._begin(folder, compiled)
        self._print_intentions(compiled, progress)
        decoder = open_decoder(compiled.session, self.config.model, self.data.tokenizer, positions=self.positions)
        with ExitStack() as last, ExitStack() as files:
            loop = self._loop(folder, compiled, progress, files, output=output, stop=stop)
            loop.samples = lambda step: output.samples(decoder, stop, count=1, tokens=SAMPLE_TOKENS, seed=step)
            # It covers the closing of the files and trackers too, of which one may hang.
            last.enter_context(SignalGracePeriod(self.config.train.signal_grace_period, loop=loop, stop=stop, console=self.console))
            if loop.run() and self._finish(output, compiled, loop, decoder, stop):
                return 0
            # Without a new step the checkpoint is the one from before, which does not know what this command line changed.
            as_before = self.start is not None and loop.progress.step == self.start.meta["step"]
            run_arg = f"{folder.path}{models.option(self.config.model)}"
            again = "the same command" if as_before else f"barellm train --out {run_arg} --resume"
            self.console.line(f"stopped after step {loop.progress.step}; resume with: {again}")
            return stop.status

    def _loop(
        self, folder: RunFolder, compiled: CompiledModel, progress: Progress, files: ExitStack, *, output: Output, stop: Stopping
    ) -> Loop:  # fmt: skip
        """The loop from `progress` on. `files` closes what it writes to; `stop`: set by signals; `output`: makes the metrics."""
        log = files.enter_context(closing(output.metrics(progress.step)))
        watch = None
        if every := self.config.train.exponent_stats:
            file = exponent_stats.file_of(folder.path)
            watch = files.enter_context(closing(exponent_stats.ExponentStats(file, compiled, every=every)))
        tracking = files.enter_context(closing(output.tracking(progress.step)))
        saving = files.enter_context(closing(self._saving(folder, compiled, stop)))
        return Loop(
            config=self.config, session=compiled.session, batches=self.batches, training_schedule=self.training_schedule,
            batch_rampup=self.batch_rampup, spikes=self._spikes(), evaluator=self.evaluator,
            final_targets=self.final_evaluator.windows.targets, metrics=log, watch=watch, console=self.console, stop=stop,
            saving=saving, tracking=tracking, meta=self.meta(compiled), ranks=self.ranks, hellaswag=output.hellaswag(stop),
            flops_per_step=compiled.flops_per_step, peak=compiled.peak().value, progress=progress, started=self.started,
            listen=self.listen,
        )  # fmt: skip

    def _spikes(self) -> Spikes:
        optim = self.config.optim
        state = self.start.meta.get("spikes") if self.start else None
        return Spikes(loss_limit=optim.skip_loss_z, norm_limit=optim.skip_norm_z, state=state)

    def _saving(self, folder: RunFolder, compiled: CompiledModel, stop: Stopping) -> Saving:
        kind = Saving if self.ranks.count == 1 else partial(SharedSaving, ranks=self.ranks)
        return kind(
            folder.checkpoints, self.stored, written=compiled.written, shared=compiled.shared,
            threads=int(compiled.meta().get("threads", 1)), tokenizer=tokenizer_files(self.data.tokenizer),
            console=self.console, stop=stop, saved=self.start.path if self.start else None,
        )  # fmt: skip

    def _begin(self, folder: RunFolder, compiled: CompiledModel) -> Progress:
        """Print the header and set the weights: initialized from the seed, imported, or from the checkpoint."""
        for line in report.header(compiled, self.data, folder.path):
            self.console.line(line)
        if self.start is None:
            self.initialize(compiled)
            return Progress()
        if self.weights is not None and self.base:
            self.weights.load(compiled.loading)
        self._load(self.start.path, compiled)
        meta = self.start.meta
        # A checkpoint of an older version does not say how many tokens it has seen.
        tokens = meta.get("tokens", meta["samples"] * self.config.train.seq)
        if meta["machine"]["isa"] != compiled.meta()["isa"]:
            found = f"saved on {meta['machine']['isa']}, resuming with {compiled.meta()['isa']}"
            self.console.line(f"warning: {found}: not bitwise identical to a run without interruption")
        self.console.line(f"resumed from {self.start.path} after {duration(meta['seconds'])} of training")
        return Progress(meta["step"], meta["total_steps"], meta["seconds"], tokens)

    def _load(self, path: Path, compiled: CompiledModel) -> None:
        """Load a checkpoint; each rank keeps its shard. Error feedback is redistributed if the number of ranks changed."""
        source: Any = self.stored
        if self.config.optim.powersgd:
            file = path / checkpoint.OPTIMIZER
            source = ErrorFeedbackState(self.stored, compiled.session, self.ranks, file, suffix=f".{powersgd.ERROR}")
            if source.blocks != self.ranks.count:
                before, after = (f"{n} rank{'s' * (n > 1)}" for n in (source.blocks, self.ranks.count))
                self.console.line(f"what compression has left out on {before} is added up for {after}")
        checkpoint.load(path, source)

    def _print_intentions(self, compiled: CompiledModel, progress: Progress) -> None:
        """Print packing, budget and warnings before the first step; without a measured peak no least time."""
        train, peak = self.config.train, compiled.peak().value
        total = progress.total or (None if train.minutes else train.steps)
        bound_s = compiled.flops_per_step / peak if peak else 0.0
        packed = report.packing(self.packed) if self.packed else []
        found = packed + report.intentions(
            self.config, self.epoch_tokens, batch_rampup=self.batch_rampup, done=progress.step, total=total, bound_s=bound_s
        )
        # Windows are few because the text is short, or because few were asked for.
        seq = train.eval_seq or train.seq
        all_windows = self.data.validation(seq=seq).windows
        few = all_windows < report.FEW_WINDOWS
        windows = all_windows if few else self.evaluator.windows.windows
        found.append(report.few_windows(windows, seq, "--data.val_fraction" if few else "--train.eval_tokens"))
        for line in (*filter(None, found), ""):
            self.console.line(line)

    def meta(self, compiled: CompiledModel) -> dict[str, Any]:
        """The content of each checkpoint's meta.json that does not depend on the step."""
        tokenizer = self.data.tokenizer
        names = ("numpy", "llvmlite")
        versions = {"barellm": __version__, "python": platform.python_version()}
        return {
            "config": overrides.to_json(self.config),
            "data": {"name": self.data.name, "hash": self.data.hash},
            "tokenizer": {"kind": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
            "machine": compiled.meta() | ({"ranks": self.ranks.count} if self.ranks.count > 1 else {}),
            "versions": versions | {name: import_module(name).__version__ for name in names},
            **({"base": self.base} if self.base else {}),
        }

    def _facts(self, compiled: CompiledModel) -> dict[str, Any]:
        """What all ranks must have alike."""
        meta = compiled.meta()
        return {
            "barellm": agreement.version(), "the text": f"{self.data.name} ({self.data.hash})",
            "the configuration": overrides.to_json(self.config), "the tokenizer": self.data.tokenizer.hash,
            "the instruction set": meta["isa"], "the checkpoint": self.start.meta["step"] if self.start else None,
            "the base": self.base.get("hash"),
        }  # fmt: skip

    def _finish(self, output: Output, compiled: CompiledModel, loop: Loop, decoder: Decoder, stop: Stopping) -> bool:
        """The final evaluation, samples, curve and report. False if `stop` was set before the end: nothing is reported then."""
        step = loop.progress.step
        tell = self.console.evaluating(self.final_evaluator.windows.windows)
        result = self.final_evaluator.run(compiled.session, stop=lambda: bool(stop), report=tell)
        if result is None:
            return False
        loop.record_evaluation(step, result)
        if not loop.try_hellaswag(step):
            return False
        texts = output.final_samples(decoder, stop, step)
        if stop:
            return False
        output.close(loop, result, texts, lambda: time.monotonic() - self.started)
        return True
