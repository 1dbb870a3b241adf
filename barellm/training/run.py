"""A training run from its configuration to its report: data, machine, folder, loop, final numbers."""

from __future__ import annotations

import json
import operator
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import isclose
from pathlib import Path
from typing import Any

from barellm import __version__, models
from barellm.assembly.build import CompiledModel, open_model, shards_of
from barellm.checkpoint import checkpoint, storage
from barellm.checkpoint.error_feedback_state import ErrorFeedbackState
from barellm.checkpoint.folder import RunFolder
from barellm.checkpoint.shards import ShardedState
from barellm.checkpoint.weights import Weights
from barellm.config import Config, overrides
from barellm.data.documents import Documents
from barellm.data.examples import ExampleRows
from barellm.data.kinds import load_tokenizer, tokenizer_files
from barellm.data.llmc import LlmcOrder
from barellm.data.loader import Batches, Repeated, Rows
from barellm.data.sources import Dataset, prepare
from barellm.data.tokenizers import Ids, Tokenizer
from barellm.errors import UserError
from barellm.evaluation import hellaswag
from barellm.evaluation.scoring import Scorer, shape_for
from barellm.evaluation.text import gzip_bits_per_byte, python_share, repetitive
from barellm.evaluation.validation import Evaluator, Result
from barellm.generation.decode import Decoder, cache_positions, open_decoder
from barellm.generation.samplers import Sampling
from barellm.optim import powersgd
from barellm.program.ranks import Ranks
from barellm.runtime.ranks import ALONE
from barellm.training import agreement, curve, exponent_stats, metrics, report, trackers
from barellm.training.batch_rampup import BatchRampup
from barellm.training.console import Console, duration, short
from barellm.training.loop import ANY_STEPS, Loop, Progress
from barellm.training.saving import Saving, SharedSaving
from barellm.training.signal_grace_period import SignalGracePeriod
from barellm.training.spikes import Spikes
from barellm.training.stopping import Agreed, Stopping
from barellm.training.trackers import Tracking
from barellm.training.training_schedule import ConstantSchedule, training_schedule

# The last evaluation is longer, but costs a few percent of the training: 1 / FINAL_SHARE of the tokens trained on within
# these bounds, in evenly spread windows; all of the validation part if it has no more.
FINAL_LEAST, FINAL_MOST, FINAL_SHARE = 1 << 13, 1 << 20, 4
SAMPLE_TOKENS = 160
FINAL_SAMPLES, FINAL_SAMPLE_TOKENS, FINAL_SAMPLE_SHARE, FINAL_SHOWN = 6, 384, 256, 2
INTERVALS = (
    "eval_every",
    "eval_tokens",
    "eval_from",
    "eval_seq",
    "sample_every",
    "checkpoint_every",
    "keep_every",
    "keep_best",
    "early_stopping",
    "exponent_stats",
)
FREE_KEYS = frozenset(
    {
        f"train.{key}"
        for key in (
            "steps",
            "epochs",
            "save_total_limit",
            "signal_grace_period",
            "gemm_backend",
            "track",
            "hellaswag",
            "hellaswag_every",
            *INTERVALS,
        )
    }
    | {"data.source", "optim.moments", "optim.decay_fraction"}
)


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    path: Path
    meta: dict[str, Any]


def resume_from(
    out: Path, *, preset: str | None, requested: Callable[[Config], Mapping[str, Any]], console: Console
) -> tuple[Config, Mapping[str, Any], Start | None]:
    """The configuration of the run in `out`, what of it the command line changes, and its newest checkpoint that verifies: None
    where it ended before its first one. `asked`: what the command line asks for. UserError where that is another run:
    only FREE_KEYS may change (`train.steps` and `optim.decay_fraction` change the rest of the schedule)."""
    path, meta = out / "config.json", None
    if path.is_file() and not checkpoint.steps(out / "checkpoints"):
        console.line(f"{out} has no checkpoint yet: starting again from step 0")
        config = overrides.from_json(checkpoint.read_json(path), path)
    else:
        path, wrong = checkpoint.find(out)
        for text in wrong:
            console.line(f"warning: skipped {text}")
        meta = checkpoint.read_meta(path)
        config = overrides.from_json(meta["config"], path / checkpoint.META)
        if not (path / checkpoint.OPTIMIZER).is_file():
            raise UserError(f"{path} holds weights alone: begin a run with them, with --init-from {out}")
        try:  # what is read later, after what is slow
            _ = float(meta["seconds"]), meta["samples"], meta["total_steps"], meta["machine"]["isa"] + ""
            _ = (
                (meta["data"] or {"hash": ""})["hash"] + "",
                Spikes(loss_limit=0, norm_limit=0, state=meta.get("spikes")),
            )
            if (theirs := meta.get("llmc")) and theirs["shuffled"]:
                _ = [
                    operator.index(n)
                    for n in (theirs["processes"], theirs["shard"], theirs["sample"], *theirs["shards"])
                ]
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
            raise UserError(
                f"{path / checkpoint.META} lacks what a run goes on with: expected what barellm writes there"
            ) from None
    if preset is not None and preset != config.preset:
        raise UserError(f"{out} holds a run of preset {config.preset!r}, the command line says {preset!r}")
    saved, changes = overrides.flat(config), requested(config)
    for key, value in changes.items():
        differs = value != saved[key] and (key, value) not in {("train.dtype", "auto")}
        if key == overrides.MUON_LR_RATIO:  # a quotient, which is rounded
            differs = not isclose(value, saved[key])
        if differs and key not in FREE_KEYS:
            raise UserError(
                f"{key} is {saved[key]!r} in {path}, the command line says {value!r}: a resumed run keeps it"
            )
    free = {key: value for key, value in changes.items() if key in FREE_KEYS}
    if meta and "train.steps" in free and free["train.steps"] != saved["train.steps"]:
        meta["total_steps"] = max(free["train.steps"], meta["step"])
        if free["train.steps"] < meta["step"]:
            console.line(f"warning: the run is at step {meta['step']} already, past train.steps {free['train.steps']}")
    return overrides.changed(config, free), changes, Start(path, meta) if meta else None


def newest_run(root: Path, preset: str) -> Path | None:
    """The last run of a preset below `root` that has a checkpoint, whatever its folder is called."""
    runs = [path.parent for path in root.glob("*/config.json") if checkpoint.steps(path.parent / "checkpoints")]
    model_schedule = [path for path in runs if checkpoint.read_json(path / "config.json").get("preset") == preset]
    return max(model_schedule, key=lambda path: path.stat().st_mtime, default=None)


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """The model gets the tokenizer's vocabulary; a preset without padding stays without. One that tells documents apart gets the
    token that begins them."""
    size, model = tokenizer.rows or tokenizer.vocab_size, config.model
    separator = getattr(model, "separator", None)
    if separator is not None and tokenizer.eot not in (None, separator):
        model = replace(model, separator=tokenizer.eot)  # pyright: ignore[reportCallIssue]
        config = replace(config, model=model)
    if size == model.vocab_size:
        return config
    padded = size if model.padded_vocab == model.vocab_size else 0
    return replace(config, model=replace(model, vocab_size=size, padded_vocab=padded))


class Run:
    """One training run, from its seed, from `weights`, or from `start` on. `started`: time.monotonic() when the command began, for
    honest totals. `asked`: whether the user chose the tokenizer, so that shards of another one are refused. `listen`: as the loop
    has it. `ranks`: the processes of the run, of which this is one; all but rank 0 are silent, and write nothing."""

    def __init__(
        self,
        config: Config,
        *,
        start: Start | None,
        weights: Weights | None,
        device: str,
        console: Console,
        started: float,
        requested: bool = True,
        listen: Callable[[dict[str, Any]], bool] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        config.check()
        agreement.check(config, device=device, ranks=ranks)
        self.ranks = ranks
        trackers.chosen(config.train.track)  # before anything slow begins
        training_schedule(config)
        self.start, self.weights, self.device, self.console, self.started = start, weights, device, console, started
        self.listen = listen
        tokenizer = load_tokenizer(start.path, rows=config.model.vocab_size) if start else None
        if weights and not start:
            tokenizer = weights.tokenizer or Ids(weights.model.vocab_size)
        with agreement.rank_zero_first(ranks):  # what rank 0 prepares, the others find in the cache
            self.data: Dataset = prepare(
                config.data,
                tokenizer=tokenizer,
                requested=requested,
                report=console.line,
                progress=console.tokenizing(),
            )
        if not requested:
            config = replace(config, data=replace(config.data, tokenizer=self.data.tokenizer.name))
        self.config = with_vocabulary(config, self.data.tokenizer)
        known = start.meta["data"] if start else None  # None too for a state that another program has left
        if start and known and known["hash"] != self.data.hash:
            raise UserError(f"the text of {self.data.name} is not the one that {start.path} was trained on")
        train = self.config.train
        self.training_schedule, self.batch_rampup = training_schedule(self.config), BatchRampup(train)
        if train.epochs:
            train = replace(train, steps=self._steps_of_epochs())
            self.config = replace(self.config, train=train)
            if start and not train.minutes:
                start.meta["total_steps"] = max(train.steps, start.meta["step"])
        self.batches = rows = self._rows()
        self.packed = rows.packed if isinstance(rows, ExampleRows) else None
        if train.overfit:
            self.batches = Repeated(rows, train.overfit * train.micro_batch_size)
        theirs = start.meta.get("llmc") if start else None
        if start and theirs and theirs["shuffled"] and theirs["processes"] == 1 and isinstance(self.batches, LlmcOrder):
            self.batches.check(self.batch_rampup.before(start.meta["step"]), theirs)
        self.evaluator = self._evaluator(train.eval_tokens)
        self.hellaswag: hellaswag.HellaSwag | None = None
        self.scoring: tuple[int, int] | None = None
        if train.hellaswag:
            examples = hellaswag.read(Path(train.hellaswag), self.data.tokenizer)
            self.hellaswag, most = hellaswag.HellaSwag(examples), self.config.model.max_seq
            self.scoring = shape_for(self.hellaswag.texts, tokens=train.micro_batch_size * train.seq, most_seq=most)
        trained = self.batch_rampup.tokens(train.steps or ANY_STEPS)
        usual = train.eval_tokens or FINAL_MOST if train.eval_every else 0
        self.final_evaluator = self.evaluator
        if train.eval_from == "spread":
            self.final_evaluator = self._evaluator(min(FINAL_MOST, max(FINAL_LEAST, usual, trained // FINAL_SHARE)))
        self.final_sample_tokens = 64 + trained // FINAL_SAMPLE_SHARE
        # Of the longest samples. Those of a usual prompt are as many as `build_programs` takes.
        self.positions = cache_positions(len(self.data.prompt) + FINAL_SAMPLE_TOKENS, self.config.model.max_seq)

    def check_vocabulary(self, changes: Mapping[str, Any]) -> None:
        """Raise a UserError where `changes`, what the user asked for, want another vocabulary than the tokenizer has."""
        vocab, chosen = self.config.model.vocab_size, changes.get("model.vocab_size")
        if chosen not in (None, vocab):
            raise UserError(
                f"model.vocab_size is {chosen}, the tokenizer has {vocab} ids: change data.tokenizer or data.bpe_vocab"
            )

    def _rows(self) -> Rows:
        """The source of the rows of the micro-batches."""
        train, data = self.config.train, self.config.data
        if self.data.examples is not None:
            if not isinstance(self.training_schedule, ConstantSchedule):
                stages = f"the runs of {models.name_of(self.config.model)} have stages, whose rows change their length"
                raise UserError(f"{data.source} has prompts and answers, and {stages}: expected a text")
            fill = self.data.tokenizer.start
            return ExampleRows(self.data.examples[0], seq=train.seq, seed=train.seed, fill=fill, order=data.order)
        if data.order == "llmc":
            return LlmcOrder(self.data.train, batch=train.micro_batch_size, seq=train.seq)
        if data.order != "documents":
            return Batches(self.data.train, seq=train.seq, seed=train.seed, order=data.order)

        def shape(sample: int) -> tuple[int, int]:
            step = self.training_schedule.step(
                sample // (train.micro_batch_size * train.gradient_accumulation_steps), train.steps
            )
            return step.seq, step.document

        return Documents(self.data.train, separator=self.data.tokenizer.eot, shape=shape, span=data.span_shards)

    def _steps_of_epochs(self) -> int:
        """The steps of train.epochs, now that the length of the text is known: of examples, of their packed sequences."""
        train, tokens = self.config.train, len(self.data.train)
        if self.data.examples is not None:
            rows = self._rows()
            assert isinstance(rows, ExampleRows)
            tokens = len(rows.packed.rows) * train.seq
        return max(1, bisect_left(range(ANY_STEPS), train.epochs * tokens, key=self.batch_rampup.tokens))

    def _evaluator(self, tokens: int) -> Evaluator:
        train = self.config.train
        batch, seq = train.eval_shape(train.micro_batch_size // self.ranks.count)
        windows = self.data.validation(seq=seq, max_tokens=tokens, first=train.eval_from == "first")
        return Evaluator(windows, batch=batch, byte_lengths=self.data.byte_lengths, ranks=self.ranks)

    def execute(self, folder: RunFolder) -> int:
        """Exit status: 0 finished, 130 or 143 stopped by a signal with a checkpoint saved."""
        with ExitStack() as opening:
            with agreement.rank_zero_first(self.ranks):  # what rank 0 compiles, the others find in the cache
                how: dict[str, Any] = {"positions": self.positions, "scoring": self.scoring, "ranks": self.ranks}
                opened = open_model(self.config, device=self.device, **how)
                compiled = opening.enter_context(opened)
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
            self.weights.load(compiled.session)
            self.console.line(f"initialized with the weights of {self.weights.path}")

    def _train(self, folder: RunFolder, compiled: CompiledModel, stop: Stopping) -> int:
        progress, rows = self._begin(folder, compiled)
        decoder = open_decoder(compiled.session, self.config.model, self.data.tokenizer, positions=self.positions)
        with ExitStack() as last, ExitStack() as files:
            log = metrics.Metrics(None if self.ranks.rank else folder.path / "metrics.jsonl", rows=rows)
            files.enter_context(closing(log))
            watch = None
            if every := self.config.train.exponent_stats:
                watch = files.enter_context(
                    closing(exponent_stats.ExponentStats(exponent_stats.file_of(folder.path), compiled, every=every))
                )
            tracking = files.enter_context(closing(self._tracking(folder, progress.step)))
            saving = files.enter_context(closing(self._saving(folder, compiled, stop)))
            loop = Loop(
                config=self.config,
                session=compiled.session,
                batches=self.batches,
                training_schedule=self.training_schedule,
                batch_rampup=self.batch_rampup,
                spikes=self._spikes(),
                evaluator=self.evaluator,
                final_targets=self.final_evaluator.windows.targets,
                metrics=log,
                watch=watch,
                console=self.console,
                stop=stop,
                saving=saving,
                tracking=tracking,
                meta=self.meta(compiled),
                ranks=self.ranks,
                samples=lambda step: self._samples(decoder, stop, count=1, tokens=SAMPLE_TOKENS, seed=step),
                hellaswag=self._hellaswag(compiled, stop),
                flops_per_step=compiled.flops_per_step,
                peak=compiled.peak().value,
                progress=progress,
                started=self.started,
                listen=self.listen,
            )
            # It covers the closing of the files and trackers too, of which one may hang.
            last.enter_context(
                SignalGracePeriod(self.config.train.signal_grace_period, loop=loop, stop=stop, console=self.console)
            )
            if loop.run() and self._finish(folder, compiled, loop, decoder, stop):
                return 0
            # Without a new step the checkpoint is the one from before, which does not know what this command line changed.
            as_before = self.start is not None and loop.progress.step == self.start.meta["step"]
            this = f"{folder.path}{models.option(self.config.model)}"
            again = "the same command" if as_before else f"barellm train --out {this} --resume"
            self.console.line(f"stopped after step {loop.progress.step}; resume with: {again}")
            return stop.status

    def _tracking(self, folder: RunFolder, step: int) -> Tracking:
        names = () if self.ranks.rank else trackers.chosen(self.config.train.track)
        config = overrides.flat(self.config)
        subject = trackers.subject(folder.path, project=self.config.preset, step=step, config=config) if names else None
        return Tracking(names, subject, say=self.console.line)

    def _spikes(self) -> Spikes:
        optim = self.config.optim
        state = self.start.meta.get("spikes") if self.start else None
        return Spikes(loss_limit=optim.skip_loss_z, norm_limit=optim.skip_norm_z, state=state)

    def _saving(self, folder: RunFolder, compiled: CompiledModel, stop: Stopping) -> Saving:
        kind = Saving if self.ranks.count == 1 else partial(SharedSaving, ranks=self.ranks)
        return kind(
            folder.checkpoints,
            self.stored,
            written=compiled.written,
            shared=compiled.shared,
            threads=int(compiled.meta().get("threads", 1)),
            tokenizer=tokenizer_files(self.data.tokenizer),
            console=self.console,
            stop=stop,
            saved=self.start.path if self.start else None,
        )

    def _begin(self, folder: RunFolder, compiled: CompiledModel) -> tuple[Progress, list[dict[str, Any]]]:
        """Weights from the seed, from elsewhere or from the checkpoint; the resolved configuration printed and saved."""
        for line in report.header(compiled, self.data, folder.path):
            self.console.line(line)
        if self.start is None:
            self.initialize(compiled)
            progress = Progress()
        else:
            self._load(self.start.path, compiled)
            meta = self.start.meta
            # A checkpoint of an older version does not say how many tokens it has seen.
            tokens = meta.get("tokens", meta["samples"] * self.config.train.seq)
            progress = Progress(meta["step"], meta["total_steps"], meta["seconds"], tokens)
            if meta["machine"]["isa"] != compiled.meta()["isa"]:
                found = f"saved on {meta['machine']['isa']}, resuming with {compiled.meta()['isa']}"
                self.console.line(f"warning: {found}: not bitwise identical to a run without interruption")
            self.console.line(f"resumed from {self.start.path} after {duration(progress.seconds)} of training")
        rows = [] if self.ranks.rank else self._begin_files(folder, progress.step)
        self._print_intentions(compiled, progress)
        return progress, rows

    def _load(self, path: Path, compiled: CompiledModel) -> None:
        """What a checkpoint has, where each rank keeps its share."""
        source: Any = self.stored
        if self.config.optim.powersgd:
            file = path / checkpoint.OPTIMIZER
            source = ErrorFeedbackState(self.stored, compiled.session, self.ranks, file, suffix=f".{powersgd.ERROR}")
            if source.blocks != self.ranks.count:
                was, now = (f"{n} rank{'s' * (n > 1)}" for n in (source.blocks, self.ranks.count))
                self.console.line(f"what compression has left out on {was} is added up for {now}")
        checkpoint.load(path, source, optimizer=True)

    def _begin_files(self, folder: RunFolder, step: int) -> list[dict[str, Any]]:
        """The resolved configuration, and the rows of the metrics that the run goes on from."""
        resolved = json.dumps(overrides.to_json(self.config), indent=2) + "\n"
        storage.replace_file(folder.path / "config.json", resolved.encode())  # first: with it alone --resume works
        log, rows = folder.path / "metrics.jsonl", []
        if self.start is None:
            storage.replace_file(log, b"")
        else:
            rows = metrics.truncate(log, step=step)
        found = exponent_stats.file_of(folder.path)
        if found.exists():  # of the run that goes on, or of one that ended before its first checkpoint
            metrics.truncate(found, step=step)
        return rows

    def _print_intentions(self, compiled: CompiledModel, progress: Progress) -> None:
        train, peak = self.config.train, compiled.peak().value
        total = progress.total or (None if train.minutes else train.steps)
        bound_s = compiled.flops_per_step / peak if peak else 0.0
        packed = report.packing(self.packed) if self.packed else []
        found = packed + report.intentions(
            self.config, self.data, batch_rampup=self.batch_rampup, done=progress.step, total=total, bound_s=bound_s
        )
        # Windows are few because the text is short, or because few were asked for.
        seq = train.eval_seq or train.seq
        whole = self.data.validation(seq=seq).windows
        few = whole < report.FEW_WINDOWS
        windows = whole if few else self.evaluator.windows.windows
        found.append(report.few_windows(windows, seq, "--data.val_fraction" if few else "--train.eval_tokens"))
        for line in (*filter(None, found), ""):
            self.console.line(line)

    def meta(self, compiled: CompiledModel) -> dict[str, Any]:
        """What each checkpoint's meta.json says, besides how far the run is."""
        tokenizer = self.data.tokenizer
        names = ("numpy", "llvmlite")
        versions = {"barellm": __version__, "python": platform.python_version()}
        return {
            "config": overrides.to_json(self.config),
            "data": {"name": self.data.name, "hash": self.data.hash},
            "tokenizer": {"kind": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
            "machine": compiled.meta() | ({"ranks": self.ranks.count} if self.ranks.count > 1 else {}),
            "versions": versions | {name: import_module(name).__version__ for name in names},
        }

    def _facts(self, compiled: CompiledModel) -> dict[str, Any]:
        """What all ranks must have alike."""
        meta = compiled.meta()
        return {
            "barellm": agreement.version(),
            "the text": f"{self.data.name} ({self.data.hash})",
            "the configuration": overrides.to_json(self.config),
            "the tokenizer": self.data.tokenizer.hash,
            "the instruction set": meta["isa"],
            "the checkpoint": self.start.meta["step"] if self.start else None,
        }

    def _hellaswag(self, compiled: CompiledModel, stop: Stopping) -> Callable[[], hellaswag.Result | None] | None:
        """A function that tries the model on HellaSwag, if the run shall."""
        task, scoring = self.hellaswag, self.scoring
        if task is None or scoring is None or self.ranks.rank:
            return None
        scorer = Scorer(compiled.session, batch=scoring[0], seq=scoring[1])
        tell = self.console.evaluating
        return lambda: task.run(scorer, stop=lambda: bool(stop), report=tell(len(task.texts)))

    def _samples(self, decoder: Decoder, stop: Stopping, *, count: int, tokens: int, seed: int) -> list[str]:
        if self.ranks.rank:  # all have the same weights: one writes
            return []
        if self.data.byte_lengths is None:  # shards of a vocabulary that is not here: ids, but no text
            return []
        tokenizer, prompt = self.data.tokenizer, self.data.prompt
        shown = tokenizer.decode(prompt) if self.data.examples else ""
        texts = []
        for i in range(count):
            how = Sampling(temperature=0.8, top_p=0.95, seed=(self.config.train.seed << 32) + (seed << 8) + i)
            ids = []
            for token in decoder.tokens(prompt, count=tokens, how=how):
                if stop:
                    return []
                if token in tokenizer.ends:
                    break
                ids.append(token)
            texts.append(shown + tokenizer.decode(ids))
        return texts

    def _finish(self, folder: RunFolder, compiled: CompiledModel, loop: Loop, decoder: Decoder, stop: Stopping) -> bool:
        """The last, longer look: evaluation, samples, curve, and what they come to. False if stopped before the end."""
        say, step = self.console.line, loop.progress.step
        tell = self.console.evaluating(self.final_evaluator.windows.windows)
        result = self.final_evaluator.run(compiled.session, stop=lambda: bool(stop), report=tell)
        if result is None:
            return False
        loop.record_evaluation(step, result)
        if not loop.try_hellaswag(step):
            return False
        # Those that are not shown are only for tokenize's share.
        most = FINAL_SAMPLES if self.config.data.source == "stdlib" else FINAL_SHOWN
        count = max(1, min(most, self.final_sample_tokens // FINAL_SAMPLE_TOKENS))
        length = min(FINAL_SAMPLE_TOKENS, self.final_sample_tokens // count)
        texts = self._samples(decoder, stop, count=count, tokens=length, seed=step)
        if stop:
            return False
        if self.ranks.rank:
            return True
        # Of the texts that are not one piece again and again, where there are such.
        shown = sorted(range(len(texts)), key=lambda i: repetitive(texts[i]))[:FINAL_SHOWN]
        for i, text in enumerate(texts):
            loop.record_sample(step, text, show=i in shown)
        found = curve.Curve(self.config.preset, *curve.series(loop.metrics.rows))
        if not self.console.notebook:  # which shows the picture
            say(curve.terminal(found, ascii_only=not self.console.can_show(curve.GLYPHS)))
        image = folder.path / "loss.png"
        title = f"{self.config.preset}, {short(compiled.parameters)} parameters"
        try:
            if image.is_symlink():  # what it points to is not the run's
                storage.remove(image)
            curve.image(image, [found], title=title)
        except OSError as error:  # the weights are safe; a picture is not worth the report
            say(f"warning: no curve in {image}: {error.strerror}")
        row = self._result(compiled, loop, result, texts, seconds=time.monotonic() - self.started)
        loop.record(row)
        for line in report.closing(row, folder.path, self.config):
            say(line)
        return True

    def _result(
        self, compiled: CompiledModel, loop: Loop, result: Result, texts: list[str], *, seconds: float
    ) -> dict[str, Any]:
        final: dict[str, Any] = {
            "kind": "result",
            "step": loop.progress.step,
            "preset": self.config.preset,
            "val_nats": result.nats,
            "val_bits_per_byte": result.bits_per_byte,
            "val_bytes": result.bytes,
        }
        if result.bytes:
            text = self.final_evaluator.text(self.data.tokenizer)
            final["gzip_bits_per_byte"] = gzip_bits_per_byte(text)
        if self.config.data.source == "stdlib":
            final["tokenize_share"], final["tokenize_lines"] = python_share("\n".join(texts))
            final["tokenize_share_of_validation"], _ = python_share(text.decode("utf-8", "replace")[: 1 << 18])
        speeds = [row["tokens_per_s"] for row in loop.metrics.rows if row["kind"] == "train"]
        if loop.spikes.active:
            final["skipped_steps"] = loop.spikes.skipped
        return final | {
            "seconds": round(seconds, 2),
            "seconds_all_sessions": round(loop.progress.seconds, 2),
            "steps": loop.progress.step,
            "tokens_per_s": sorted(speeds)[len(speeds) // 2],
            "parameters": compiled.parameters,
            **compiled.meta(),
            "checkpoint": str(loop.saving.saved),
            "curve": str(loop.saving.folder.parent / "loss.png"),
        }
