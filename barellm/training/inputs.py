"""What a run trains on and is measured by: the text, the order of its rows, and the evaluations."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm import models
from barellm.config import Config
from barellm.data.examples import ExampleRows
from barellm.data.llmc import LlmcOrder
from barellm.data.loader import Batches, Documents, Repeated, Rows
from barellm.data.sources import Dataset, prepare
from barellm.data.tokenizers import Tokenizer
from barellm.errors import UserError
from barellm.evaluation import hellaswag, scoring, validation
from barellm.generation.decode import cache_positions
from barellm.program.ranks import Ranks
from barellm.training import agreement
from barellm.training.batch_rampup import BatchRampup
from barellm.training.console import Console
from barellm.training.loop import ANY_STEPS
from barellm.training.resume import Start
from barellm.training.training_schedule import ConstantSchedule, training_schedule

# The last evaluation is longer, but costs a few percent of the training: 1 / FINAL_SHARE of the tokens trained on within
# these bounds, in evenly spread windows; all of the validation part if it has no more.
FINAL_LEAST, FINAL_MOST, FINAL_SHARE = 1 << 13, 1 << 20, 4
FINAL_SAMPLE_TOKENS, FINAL_SAMPLE_SHARE = 384, 256


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """The configuration with the tokenizer's vocabulary size (presets without padding stay unpadded) and, for models that separate
    documents, its begin-of-document token."""
    size, model = tokenizer.rows or tokenizer.vocab_size, config.model
    separator = getattr(model, "separator", None)
    if separator is not None and tokenizer.eot not in (None, separator):
        model = replace(model, separator=tokenizer.eot)  # pyright: ignore[reportCallIssue]
        config = replace(config, model=model)
    if size == model.vocab_size:
        return config
    padded = size if model.padded_vocab == model.vocab_size else 0
    return replace(config, model=replace(model, vocab_size=size, padded_vocab=padded))


def with_document_mask(config: Config, data: Dataset, *, device: str) -> tuple[Config, Dataset]:
    """Resolve data.document_mask "auto" (on for examples, if supported) in both. UserError where "on" is not supported."""
    mode, name = config.data.document_mask, models.name_of(config.model)
    reason = "" if models.masks_documents(config.model) else f"the architecture {name} has no such mask"
    reason = reason or ("CUDA has no kernels for positions that begin anew" if device == "cuda" else "")
    if not reason and data.examples is None and data.tokenizer.eot is None:
        reason = f"the tokenizer {data.tokenizer.name} has no token that begins a document"
    if mode == "on" and reason:
        raise UserError(f"data.document_mask is on, and {reason}: expected off")
    on = mode == "on" or (mode == "auto" and data.examples is not None and not reason)
    return replace(config, data=replace(config.data, document_mask="on" if on else "off")), replace(data, masked=on)


class Inputs:
    """`tokenizer`: that of the weights that a run begins with, if there are any. `requested`: whether the user chose one, so that
    shards of another one are refused. `config` is resolved: it has the tokenizer's vocabulary."""

    device = "cpu"

    def __init__(
        self, config: Config, *, start: Start | None, tokenizer: Tokenizer | None, requested: bool, console: Console, ranks: Ranks
    ) -> None:  # fmt: skip
        """Load the data and tokenizer, resolve the configuration by them, and set up row order, evaluations and sample lengths.
        `start`: the checkpoint to resume from, whose data must be the same."""
        self.start, self.console, self.ranks = start, console, ranks
        with agreement.rank_zero_first(ranks):  # what rank 0 prepares, the others find in the cache
            shown: dict[str, Any] = {"report": console.line, "progress": console.megabytes("tokenizing")}
            self.data: Dataset = prepare(config.data, tokenizer=tokenizer, requested=requested, **shown)
        if not requested:
            config = replace(config, data=replace(config.data, tokenizer=self.data.tokenizer.name))
        config, self.data = with_document_mask(config, self.data, device=self.device)
        self.config = with_vocabulary(config, self.data.tokenizer)
        known = start.meta["data"] if start else None  # None too for a state that another program has left
        if start and known and known["hash"] != self.data.hash:
            raise UserError(f"the text of {config.data.source} is not the one that {start.path} was trained on")
        train = self.config.train
        self.training_schedule, self.batch_rampup = training_schedule(self.config), BatchRampup(train)
        rows = self._rows()
        self.packed = rows.packed if isinstance(rows, ExampleRows) else None
        # Of one pass: those of the text, or of the sequences that examples are packed into.
        self.epoch_tokens = len(self.packed.rows) * train.seq if self.packed else len(self.data.train)
        if train.epochs:  # the steps follow, now that the length of the text is known
            steps = bisect_left(range(ANY_STEPS), train.epochs * self.epoch_tokens, key=self.batch_rampup.tokens)
            train = replace(train, steps=max(1, steps))
            self.config = replace(self.config, train=train)
            if start and not train.minutes:
                start.meta["total_steps"] = max(train.steps, start.meta["step"])
        self.batches = Repeated(rows, train.overfit * train.micro_batch_size) if train.overfit else rows
        llmc_state = start.meta.get("llmc") if start else None
        if start and llmc_state and llmc_state["shuffled"] and llmc_state["processes"] == 1 and isinstance(self.batches, LlmcOrder):
            self.batches.check(self.batch_rampup.before(start.meta["step"]), llmc_state)
        self.evaluator = self._evaluator(train.eval_tokens)
        self.hellaswag: hellaswag.HellaSwag | None = None
        self.scoring: tuple[int, int] | None = None
        if train.hellaswag:
            examples = hellaswag.read(Path(train.hellaswag), self.data.tokenizer)
            self.hellaswag, most = hellaswag.HellaSwag(examples), self.config.model.max_seq
            self.scoring = scoring.shape_for(self.hellaswag.texts, tokens=train.micro_batch_size * train.seq, most_seq=most)
        trained = self.batch_rampup.tokens(train.steps or ANY_STEPS)
        eval_tokens = train.eval_tokens or FINAL_MOST if train.eval_every else 0
        self.final_evaluator = self.evaluator
        if train.eval_from == "spread":
            self.final_evaluator = self._evaluator(min(FINAL_MOST, max(FINAL_LEAST, eval_tokens, trained // FINAL_SHARE)))
        self.final_sample_tokens = 64 + trained // FINAL_SAMPLE_SHARE
        # Of the longest samples. Those of a usual prompt are as many as `build_programs` takes.
        self.positions = cache_positions(len(self.data.prompt) + FINAL_SAMPLE_TOKENS, self.config.model.max_seq)

    def check_vocabulary(self, changes: Mapping[str, Any]) -> None:
        """Raise a UserError where `changes`, what the user asked for, want another vocabulary than the tokenizer has."""
        vocab, chosen = self.config.model.vocab_size, changes.get("model.vocab_size")
        if chosen not in (None, vocab):
            raise UserError(f"model.vocab_size is {chosen}, the tokenizer has {vocab} ids: change data.tokenizer or data.bpe_vocab")

    def _rows(self) -> Rows:
        found = self._rows_in_order()
        found.separator = self.data.separator
        return found

    def _rows_in_order(self) -> Rows:
        """The source of training rows: of examples by themselves, else as `data.order` says. UserError: examples in stages."""
        train, data = self.config.train, self.config.data
        if self.data.examples is not None:
            if not isinstance(self.training_schedule, ConstantSchedule):
                stages = f"the runs of {models.name_of(self.config.model)} have stages, whose rows change their length"
                raise UserError(f"{data.source} has prompts and answers, and {stages}: expected a text")
            fill, options = self.data.tokenizer.start, {"order": data.order, "masked": self.data.masked}
            return ExampleRows(self.data.examples[0], seq=train.seq, seed=train.seed, fill=fill, **options)
        if data.order == "llmc":
            return LlmcOrder(self.data.train, batch=train.micro_batch_size, seq=train.seq)
        if data.order != "documents":
            return Batches(self.data.train, seq=train.seq, seed=train.seed, order=data.order)

        def shape(sample: int) -> tuple[int, int]:
            step = self.training_schedule.step(sample // (train.micro_batch_size * train.gradient_accumulation_steps), train.steps)
            return step.seq, step.document

        return Documents(self.data.train, separator=self.data.tokenizer.eot, shape=shape, span=data.span_shards)

    def _evaluator(self, tokens: int) -> validation.Evaluator:
        train = self.config.train
        batch, seq = train.eval_shape(train.micro_batch_size // self.ranks.count)
        windows = self.data.validation(seq=seq, max_tokens=tokens, first=train.eval_from == "first")
        return validation.Evaluator(windows, batch=batch, byte_lengths=self.data.byte_lengths, ranks=self.ranks)
