"""Generate text from a checkpoint (autoregressive decoding with a KV cache). CHECKPOINT is a checkpoint's folder, or a run's, whose
newest complete one is taken. It may also be a preset with a vocabulary of its own, as gpt2-774m: its weights are random then, and
only its speed means anything.

Sample i uses the seed --seed + i - 1, so you can draw any one of them again by passing its own seed. Generation is batched, --batch
sequences at a time, and batch-invariant: each is the text that it would be alone, but for roundings with --weights and on a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from barellm.cli.parsing import options
from barellm.errors import UserError

if TYPE_CHECKING:
    from barellm.assembly.build import CompiledModel
    from barellm.cli.checkpoints import Found
    from barellm.generation.decode import Decoder
    from barellm.generation.samplers import Sampling
    from barellm.tools.bench.decoding import Pace


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options. TEXT may have escapes (`options.escaped`)."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    text = {"type": options.escaped, "metavar": "TEXT"}
    parser.add_argument("--prompt", help=rf"what the text begins with (default: nothing); {options.ESCAPES}", **text)
    options.add(parser, "--prompts FILE",
        'a file with a prompt a line, or of records with "prompt" (.jsonl, .json, .csv, .parquet)')  # fmt: skip
    options.add(parser, "--special", "prompts may have special tokens, as <|im_end|>")
    options.add(parser, "--prompt-ids IDS", "ids that the text begins with: 1,29,3")
    options.add(parser, "--interactive", "read prompts from the terminal, one after another")
    options.add_context(parser)
    options.add_exact(parser)
    options.add(parser, "--samples N", "samples of each prompt (default: 1)", 1, least=1)
    options.add(parser, "--batch N", "batch size of the generation, up to 64 (default: 16)", 16, least=1)
    options.add(parser, "-n --max-new-tokens N", "most tokens that are generated for each text (default: 256)", 256, least=1)
    said = rf"end before this text; may be given several times; {options.ESCAPES}"
    parser.add_argument("--stop", action="append", default=[], help=said, **text)
    options.add_sampling(parser)
    options.add(parser, "--seed N", "the same seed gives the same text (default: 1337)", 1337)
    options.add_opening(parser)
    options.add(parser, "--measure", "print tokens/s to stderr, and the roofline of this machine's memory bandwidth")
    options.add(parser, "--json", "print one line with a JSON object for each text")


def run(args: argparse.Namespace) -> int:
    """Check the options, open the model for the longest prompt, and generate in batches."""
    from barellm.cli.checkpoints import found_or_fresh
    from barellm.generation import decode, writing

    if sum((args.prompt is not None, args.prompts is not None, args.prompt_ids is not None, args.interactive)) > 1:
        raise UserError("--prompt, --prompts, --prompt-ids and --interactive all say what texts begin with: choose one")
    if args.batch > decode.MOST_TOGETHER:
        raise UserError(f"--batch is {args.batch}, expected at most {decode.MOST_TOGETHER}")
    if "" in args.stop:
        raise UserError("--stop is '', expected a text of one character or more")
    if args.interactive and (args.samples > 1 or args.json or args.measure):
        raise UserError("--interactive is one text in a terminal: leave out --samples, --json and --measure")
    checkpoint = found_or_fresh(args.checkpoint, device=args.device, dtype=args.dtype, weights=args.weights, adapter=args.adapter)
    first = options.sampling_of(args, checkpoint.tokenizer)
    limit = checkpoint.config.model.max_seq
    context = options.context_of(args.context, limit)
    if args.interactive:
        with checkpoint.opened(positions=context, exact=args.exact) as compiled:
            model, tokenizer = compiled.config.model, checkpoint.tokenizer
            _talk(args, checkpoint, decode.open_decoder(compiled.session, model, tokenizer, positions=context), first)
        return 0
    limit = context if args.context else limit  # unless asked for, it grows with the texts
    prompts = [args.prompt or ""] if args.prompts is None else _prompts(args.prompts)
    ids_of = {prompt: checkpoint.tokenizer.prompt(prompt, special=args.special) for prompt in prompts}
    if args.prompt_ids is not None:
        ids_of = {"": _ids(args.prompt_ids, checkpoint.config.model.vocab_size)}
    for ids in ids_of.values():
        if warning := writing.unseen(ids, limit):
            print(f"barellm: warning: {warning}", file=sys.stderr)
    works = [Work(prompt, replace(first, seed=args.seed + i), ids_of[prompt]) for prompt in prompts for i in range(args.samples)]
    positions = decode.cache_positions(max(len(work.fed) for work in works) + args.max_new_tokens, limit)
    rows = min(args.batch, len(works))
    with checkpoint.opened(positions=positions, rows=rows, exact=args.exact) as compiled:
        decoder = decode.open_decoder(compiled.session, compiled.config.model, checkpoint.tokenizer, positions=positions)
        for begin in range(0, len(works), rows):
            _group(args, checkpoint, compiled, decoder, works, range(begin, min(begin + rows, len(works))))
    return 0


class Work:
    """One text to generate: its prompt, how tokens are chosen, and the ids that the model begins with."""

    def __init__(self, prompt: str, how: Sampling, fed: Sequence[int]) -> None:
        self.prompt, self.how, self.fed = prompt, how, fed


def _ids(words: str, rows: int) -> list[int]:
    numbers = words.replace(",", " ").split()
    if not numbers or not all(number.isdecimal() and int(number) < rows for number in numbers):
        raise UserError(f"--prompt-ids is {words!r}, expected ids from 0 to {rows - 1} with commas between them")
    return [int(number) for number in numbers]


def _prompts(name: str) -> list[str]:
    """The prompts of a file: one per line, or the field "prompt" of records."""
    from barellm.data.reading import Layout, blocks, documents, format_of

    path, layout = Path(name), Layout(field="prompt", separator="\n")
    found = list(documents(blocks(path, layout)))
    if format_of(path, layout) == "text":
        found = [line for text in found if (line := text.removesuffix("\r"))]
    if not found:
        raise UserError(f"{name} has no prompt")
    return found


def _group(
    args: argparse.Namespace, checkpoint: Found, compiled: CompiledModel, decoder: Decoder, works: Sequence[Work], these: range
) -> None:
    """Generate the texts `these` (numbers in `works`) as one batch, and print them: the first is streamed (not with --json), the
    others follow when the batch is complete. `compiled` is for --measure."""
    from barellm.generation.decode import kept
    from barellm.generation.writing import Written, write
    from barellm.tools.bench.decoding import Pace

    def title(i: int) -> str:
        return f"--- sample {i + 1} of {len(works)}, seed {works[i].how.seed}\n" if len(works) > 1 else ""

    def emit(piece: str) -> None:
        if not args.json:
            _write(piece)

    batch = [works[i] for i in these]
    texts = [
        Written(checkpoint.tokenizer, stops=args.stop, begins=not work.prompt, emit=(lambda piece: None) if i else emit)
        for i, work in enumerate(batch)
    ]
    # A prompt that several texts have is read once: only distinct ones count for the speed of prefill.
    pace = Pace(sum(map(len, {tuple(kept(work.fed, decoder.max_seq)) for work in batch})), len(batch))
    emit(title(these[0]) + batch[0].prompt)
    for _ in write(decoder, [w.fed for w in batch], texts, count=args.max_new_tokens, hows=[w.how for w in batch]):
        pace.token()
    emit("\n")
    for i, work, text in zip(these, batch, texts, strict=True):
        if args.json:
            row = {"checkpoint": str(checkpoint.path or args.checkpoint), "prompt": work.prompt, "seed": work.how.seed}
            print(json.dumps(row | {"text": text.text, "tokens": text.ids, "tokens_per_s": round(pace.overall, 1)}))
        elif i != these[0]:
            _write(f"{title(i)}{work.prompt}{text.text}\n")
    if args.measure:
        _measure(args, compiled, pace)


def _talk(args: argparse.Namespace, checkpoint: Found, decoder: Decoder, how: Sampling) -> None:
    """Interactive mode: the model continues everything typed and generated so far. The oldest tokens are dropped when history and
    completion do not fit the context, of which at least half remains."""
    from barellm.generation.writing import Written, write

    tokenizer, limit = checkpoint.tokenizer, decoder.max_seq
    begin = tokenizer.conventions.begin
    begins = [] if begin is None else [begin]
    history: list[int] = []
    turn = 0
    while True:
        if sys.stdin.isatty():
            _write("> ")
        line = sys.stdin.readline()
        if not line:
            return
        text = "\n" * (turn > 0) + line.removesuffix("\n")  # each line but the first begins a new one
        history += (tokenizer.encode_continued(text) if turn else tokenizer.encode(text)).tolist()
        history = history[-max(1, limit - len(begins) - min(args.max_new_tokens, limit // 2)) :]
        text = Written(tokenizer, stops=args.stop, emit=_write)
        seeded = replace(how, seed=how.seed + turn)
        for _ in write(decoder, [begins + history or [tokenizer.start]], [text], count=args.max_new_tokens, hows=[seeded]):
            pass
        _write("\n")
        history += text.shown
        turn += 1


def _measure(args: argparse.Namespace, compiled: CompiledModel, pace: Pace) -> None:
    from barellm.tools.bench.decoding import weight_bytes
    from barellm.tools.plan.roofline import measured_ceiling
    from barellm.training.console import show

    rates = measured_ceiling(device=compiled.device).bandwidth
    show(pace.line(weight_bytes(compiled.programs["decode"]), rates[8, 0, 0]), sys.stderr)


def _write(piece: str) -> None:
    sys.stdout.write(options.for_terminal(piece))
    sys.stdout.flush()
