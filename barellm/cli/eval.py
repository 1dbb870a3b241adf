"""Evaluate a checkpoint: loss in nats per token and bits per byte on a validation split, or accuracy on HellaSwag."""

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from barellm.cli.parsing.options import add, add_checkpoint, add_context, add_opening, context_of
from barellm.data.cache import new_file
from barellm.errors import UserError
from barellm.training.console import evaluation_progress, show

if TYPE_CHECKING:
    from barellm.cli.checkpoints import Found


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options; `run` refuses combinations that would contradict each other."""
    add_checkpoint(parser)
    add(parser, "--data SOURCE", "another dataset, of which the validation split is used (default: the run's own)")
    add(parser, "--split", "the validation split, or all of the text (default: val)", "val", choices=("val", "all"))
    parser.add_argument("--whole", action="store_const", const="all", dest="split", help=argparse.SUPPRESS)  # its old name
    add(parser, "--tokens N", "evaluate on about N tokens, evenly spread (default: all)", 0, least=0)
    add(parser, "--first N",
        "evaluate on the first N tokens, each a target once, as a record of modded-nanogpt does with 10485760", 0, 0)  # fmt: skip
    add(parser, "--hellaswag FILE", "choose HellaSwag's endings instead: the public hellaswag_val.jsonl, or llm.c's .bin")
    add(parser, "--limit N", "only its first N examples (default: all)", 0, least=0)
    add(parser, "--per-document FILE",
        "write a JSON object for each document of the text, or each example of HellaSwag, to a new file")  # fmt: skip
    add(parser, "--batch N", "batch size (default: 8); of rows of train.eval_seq as many tokens, at least a row", 8, least=1)
    add_opening(parser)
    add_context(parser)
    add(parser, "--json", "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Refuse options that contradict each other (UserError), then run the evaluation that they choose. Returns the exit status."""
    from barellm.cli.checkpoints import found

    if args.hellaswag is not None and (args.data is not None or args.split == "all" or args.tokens or args.first):
        raise UserError("--hellaswag has its own text: leave out --data, --split, --tokens and --first")
    if args.tokens and args.first:
        raise UserError("--tokens are spread over the text and --first are not: leave out one of them")
    if args.limit and args.hellaswag is None:
        raise UserError("--limit is about examples: add --hellaswag FILE")
    if args.per_document is not None and (args.tokens or args.first):
        raise UserError("--per-document scores complete documents: leave out --tokens and --first")
    options = {"device": args.device, "dtype": args.dtype, "weights": args.weights, "batch": args.batch, "adapter": args.adapter}
    checkpoint = found(args.checkpoint, **options)
    if args.hellaswag is not None:
        return _hellaswag(args, checkpoint)
    return _loss(args, checkpoint) if args.per_document is None else _documents(args, checkpoint)


def _loss(args: argparse.Namespace, checkpoint: "Found") -> int:
    """Evaluate the loss of the text of --data or of the run's own, and print it: nats a token, bits a byte. Returns 0."""
    from barellm.data.sources import prepare
    from barellm.evaluation.validation import Evaluator
    from barellm.training.inputs import with_document_mask

    # The text: the validation split, or all; of --data documents are masked as its kind says.
    config = checkpoint.config
    if args.data is not None:
        config = replace(config, data=replace(config.data, source=args.data, document_mask="auto"))
    data = prepare(config.data, tokenizer=checkpoint.tokenizer, whole=args.split == "all")
    _, data = with_document_mask(config, data, device=checkpoint.device)
    if args.first >= len(data.val):
        part = "" if args.split == "all" else "the validation part of "
        found = f"--first is {args.first}, and {part}{data.name} has {len(data.val)} tokens"
        raise UserError(f"{found}, expected at most {len(data.val) - 1}: each has one before it")
    # Windows of --tokens, spread over the text, or of its --first tokens.
    batch, seq = config.train.eval_shape(args.batch)
    windows = data.validation(seq=seq, max_tokens=args.first or args.tokens, first=args.first > 0)
    evaluator = Evaluator(windows, batch=batch, byte_lengths=data.byte_lengths)
    with checkpoint.opened(positions=0, documents=data.masked) as compiled, evaluation_progress(windows.windows) as report:
        result = evaluator.run(compiled.session, report=report)
    assert result is not None
    _check_finite(checkpoint, result.nats)
    if args.json:
        row = {"checkpoint": str(checkpoint.path), "data": data.name, "nats": result.nats, "bits_per_byte": result.bits_per_byte}
        print(json.dumps(row | {"targets": result.targets, "bytes": result.bytes}))
    else:
        _print(checkpoint, result.nats, result.bits_per_byte, f"{result.targets:,} tokens of {data.name}")
    return 0


def _check_finite(checkpoint: "Found", nats: float) -> None:
    if not math.isfinite(nats):
        raise UserError(f"the loss of {checkpoint.path} is {nats}, expected a finite number: are the weights finite?")


def _print(checkpoint: "Found", nats: float, bits: float | None, words: str) -> None:
    from barellm.training.report import perplexity

    per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
    print(f"{nats:.4f} nats per token, perplexity {perplexity(nats)}{per_byte}")
    show(f"  {checkpoint.path} on {words}")


def _hellaswag(args: argparse.Namespace, checkpoint: "Found") -> int:
    """Evaluate HellaSwag and print both accuracies, by the sum and the mean of an ending's losses. Returns 0."""
    from barellm.evaluation import hellaswag
    from barellm.evaluation.scoring import Scorer, shape_for

    out = _new_file(args.per_document)
    config, path = checkpoint.config, Path(args.hellaswag)
    task = hellaswag.HellaSwag(hellaswag.read(path, checkpoint.tokenizer, limit=args.limit))
    context = context_of(args.context, config.model.max_seq)
    batch, seq = shape_for(task.texts, tokens=args.batch * config.train.seq, most_seq=context)
    with checkpoint.opened(positions=0, scoring=(batch, seq)) as compiled, evaluation_progress(len(task.texts)) as report:
        result = task.run(Scorer(compiled.session, batch=batch, seq=seq), report=report)
    assert result is not None
    _check_finite(checkpoint, sum(map(sum, result.losses)))
    if out is not None:
        _write_lines(out, result.rows())
    if args.json:
        print(json.dumps({"checkpoint": str(checkpoint.path), "hellaswag": str(path), **result.summary()}))
    else:
        shares = (f"{name} {result.summary()[name]:.4f}" for name in ("acc", "acc_norm"))
        print(f"{checkpoint.path}: {', '.join(shares)} ({result.total:,} examples of {path})")
    return 0


def _documents(args: argparse.Namespace, checkpoint: "Found") -> int:
    """Evaluate each document by itself, write their rows, and print the totals."""
    from barellm.data import forms, reading
    from barellm.data.sources import find_text, prepare
    from barellm.evaluation import documents
    from barellm.evaluation.scoring import Scorer, shape_for

    out = _new_file(args.per_document)
    assert out is not None
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    source = config.data if args.data is None else replace(config.data, source=args.data)
    path = Path(source.source).expanduser()
    if forms.example_files(source.source):
        raise UserError(f"{path} has prompts and answers, whose loss is of the answers alone: leave out --per-document")
    if path.is_file() and reading.format_of(path, reading.Layout()) != "text":
        corpus = find_text([source.source], 1.0 if args.split == "all" else source.val_fraction)
        name, (found, lengths) = corpus.name, documents.of_records(corpus, tokenizer)
    else:
        data = prepare(source, tokenizer=tokenizer, whole=args.split == "all")
        name, found, lengths = data.name, documents.of_stream(data.val, tokenizer.eot), data.byte_lengths
    task = documents.Documents(found, seq=config.train.seq, byte_lengths=lengths)
    if not task.texts:
        part = "" if args.split == "all" else "the validation part of "
        hint = "" if args.split == "all" else "; --split all takes all of it"
        raise UserError(f"{part}{name} has no document of two tokens{hint}")
    batch, seq = shape_for(task.texts, tokens=args.batch * config.train.seq, most_seq=config.train.seq)
    with checkpoint.opened(positions=0, scoring=(batch, seq)) as compiled, evaluation_progress(len(task.texts)) as report:
        rows = list(task.rows(Scorer(compiled.session, batch=batch, seq=seq), report=report))
    total = documents.total(rows)
    _check_finite(checkpoint, total["nats"])
    _write_lines(out, rows)
    if args.json:
        print(json.dumps({"checkpoint": str(checkpoint.path), "data": name, **total}))
    else:
        several = f"{total['documents']:,} document{'s' * (total['documents'] != 1)}"
        words = f"{total['tokens']:,} tokens of {several} of {name}"
        _print(checkpoint, total["nats_per_token"], total["bits_per_byte"], words)
    return 0


def _new_file(name: str | None) -> Path | None:
    if name is not None and Path(name).exists():
        raise UserError(f"{name} exists, expected a new file")
    return None if name is None else Path(name)


def _write_lines(path: Path, rows: Iterable[dict]) -> None:
    with new_file(path) as file:
        for row in rows:
            file.write(json.dumps(row).encode() + b"\n")
