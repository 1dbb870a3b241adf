"""Turn text into shards of tokens, in the format of llm.c's .bin files."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from barellm.cli.parsing.options import ESCAPES, add, escaped
from barellm.config import DataConfig
from barellm.errors import UserError, nearest, visible

if TYPE_CHECKING:
    from barellm.data.examples import Examples
    from barellm.data.reading import Layout
    from barellm.data.staging_dir import StagingDir
    from barellm.data.tokenizers import Tokenizer

DESCRIPTION = """\
Tokenize text into llm.c's .bin shards (DIR_train_000001.bin, DIR_val_000000.bin, ...) with a file shards.json that says what
they were made of. Interrupted or killed, it leaves DIR.part; the same command resumes from there and writes the same bytes.
--show N prints examples for fine-tuning instead, and which of their tokens are trained. docs/data.md has all formats and
examples."""
DIM, BRIGHT, PLAIN = "\033[2m", "\033[1;32m", "\033[0m"


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="files of text, .jsonl, .json, .csv, .tsv or .parquet, also .gz or .zst; folders of them; 'patterns*'; - for "
        "standard input; stdlib; or a set: tinyshakespeare, tinystories, fineweb:10BT, fineweb-edu:10BT (100BT, 350BT)",
    )
    add(parser, "--out DIR", "folder to make; it may exist but must be empty")
    add(parser, "--show N",
        "of prompts with answers, print the first N as a model sees them: what is trained is in colour, or in brackets",
        0)  # fmt: skip
    add(parser, "--tokenizer NAME",
        "bytes, chars, bpe, gpt2, a folder with a tokenizer.json, such as Llama-3's, or a run (default: gpt2)",
        "gpt2")  # fmt: skip
    add(parser, "--vocab N", "ids of a bpe tokenizer (default: 2048)", 2048)
    add(parser, "--field NAME", "of records: the field with the text (default: text)")
    add(parser, "--separator TEXT",
        r"of plain text: what stands between documents, such as '<|endoftext|>' or '\n\n' "
        rf"(default: a file is a document); {ESCAPES}", "", type=escaped)  # fmt: skip
    add(parser, "--keep-separator", "leave the separator at each document's end")
    add(parser, "--format NAME",
        "of standard input and files whose names do not say: text, jsonl, json, csv, tsv or parquet (default: text)")  # fmt: skip
    add(parser, "--val-fraction F", "last share of the characters, for validation (default: 0.1)", type=float)
    add(parser, "--val-tokens N", "instead: the first N tokens are for validation, as in llm.c", 0, least=0)
    add(parser, "--shard-tokens N", "tokens in a shard (default: 100000000)", 100_000_000)
    add(parser, "--json", "print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Tokenize into shards. Nothing appears in --out until all are complete; an interrupted command resumes when repeated."""
    from barellm.data.named import fetched_corpus
    from barellm.data.sources import corpus_tokenizer, find_text
    from barellm.data.staging_dir import StagingDir
    from barellm.data.writing import Job
    from barellm.training.console import Console

    args.tokenizer = _of_run(args.tokenizer)
    if args.show:
        return _show(args)
    if args.out is None:
        raise UserError("--out DIR is missing: the folder to make; or --show N, to look at examples")
    fraction, layout, from_hub = _checked(args)
    console = Console(json_lines=args.json)
    with StagingDir(Path(args.out).resolve()) as work:
        val_tokens = args.val_tokens
        if from_hub:
            corpus, hub_set = fetched_corpus(args.source[0], work.folder / "files", console.line)
            val_tokens = val_tokens or hub_set.val_tokens
        else:
            if "-" in args.source:
                console.line("reading standard input")
            sources = [_path_of(name, work) for name in args.source]
            looking = console.megabytes("looking through the text")
            corpus = find_text(sources, fraction, layout=layout, report=console.line, reported=looking)
        tokenizer = corpus_tokenizer(corpus, args.tokenizer, bpe_vocab=args.vocab, report=console.line)
        job = Job(corpus, tokenizer, work.out.name, shard_tokens=args.shard_tokens, val_tokens=val_tokens)
        manifest = work.finished(job)
        if manifest:
            console.line(f"{args.out} was made by this command from this text already")
        else:
            doing = "going on with" if work.begun else "tokenizing"
            console.line(f"{doing} {corpus.name} ({tokenizer.name}, {tokenizer.vocab_size} ids)")
            tokenizer.encode("a")  # GPT-2's vocabulary may not be here: an error before anything is written
            try:
                manifest = work.fill(job, progress=console.megabytes("tokenizing"))
            except KeyboardInterrupt:
                console.line(f"stopped; the same command resumes from {work.folder}")
                raise
    console.clear()
    counts = manifest["tokens"]
    result = {
        "out": args.out, "shards": len(manifest["shards"]), "documents": manifest["documents"],
        "empty_documents": manifest["empty_documents"], "text_bytes": manifest["text_bytes"], "train_tokens": counts["train"],
        "val_tokens": counts["val"], "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
        "tokenizer_hash": tokenizer.hash,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
    else:
        empty = f" ({result['empty_documents']:,} empty ones left out)" if result["empty_documents"] else ""
        plural = "s" * (result["documents"] != 1)
        print(f"{args.out}: {result['documents']:,} document{plural}{empty}, {result['text_bytes']:,} bytes of text")
        print(f"{args.out}: {result['shards']} shards, {counts['train']:,} training and {counts['val']:,} validation tokens")
    return 0


def _of_run(name: str) -> str:
    """The tokenizer's folder, where `name` is a run: that of its newest checkpoint."""
    from barellm.checkpoint import checkpoint

    steps = checkpoint.steps(Path(name, "checkpoints"))
    return str(steps[0]) if steps else name


def _show(args: argparse.Namespace) -> int:
    """Print examples as the model sees them, with what is trained marked."""
    import numpy as np

    from barellm.data import files, forms, reading, sources
    from barellm.training.console import show

    if len(args.source) > 1 or args.show < 0:
        raise UserError(f"--show is {args.show}, of {len(args.source)} sources, expected at least 1 example of one source")
    if not forms.example_files(name := args.source[0]):
        for path in [] if name == "stdlib" else files.named(name):
            for inside in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                if reading.format_of(inside, layout := reading.Layout()) != "text":
                    next(reading.documents(reading.blocks(inside, layout)), None)  # refuses a record that has no text either
        raise UserError(f"--show is for examples of prompts and answers, and {name} is a text: all of its tokens are trained")
    data = sources.prepare(DataConfig(source=name, tokenizer=args.tokenizer, bpe_vocab=args.vocab), whole=True)
    assert data.examples is not None
    found, width = data.examples[1], shutil.get_terminal_size().columns
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sizes = np.diff(found.begins)
    for i in range(min(args.show, len(found))):
        one = found.slice(i, i + 1)
        if args.json:
            print(json.dumps({"tokens": one.tokens.tolist(), "trained": one.answer.tolist()}))
            continue
        print(f"example {i + 1} of {len(found):,}: {len(one.tokens):,} tokens, {int(one.answer.sum()):,} trained")
        print(_coloured(_texts(one, data.tokenizer), width, colours))
    if not args.json:
        show(data.name)
        sizes_in_words = f"{int(np.median(sizes)):,} in the median, at most {sizes.max():,}"
        show(f"tokens of an example: {sizes_in_words}; {len(found.tokens):,} in all")
    return 0


def _texts(one: "Examples", tokenizer: "Tokenizer") -> list[tuple[str, bool]]:
    """(text, is trained) segments of an example; special tokens are shown by name."""
    names = {i: name for name, i in tokenizer.special.items()}
    segments: list[tuple[bytes, bool]] = []
    for token, trained in zip(one.tokens.tolist(), one.answer.tolist(), strict=True):
        part = names[token].encode() if token in names else tokenizer.token_bytes(token)
        if segments and segments[-1][1] == trained:
            part = segments.pop()[0] + part
        segments.append((part, trained))
    return [(visible(part.decode("utf-8", "replace")).expandtabs(4), trained) for part, trained in segments]


def _coloured(parts: list[tuple[str, bool]], width: int, colours: bool) -> str:
    """The segments as lines of at most `width` columns: trained text bright and the rest dim, or in brackets without colours."""
    lines, style, bar, column = [""], {True: BRIGHT, False: DIM}, "  | ", 0
    for text, trained in parts:
        lines[-1] += style[trained] if colours else ""
        for character in text if colours or not trained else f"[{text}]":
            if character == "\n" or column == width - len(bar):
                lines[-1] += PLAIN if colours else ""
                lines.append(style[trained] if colours else "")
                column = 0
            if character != "\n":
                lines[-1] += character
                column += 1
        lines[-1] += PLAIN if colours else ""
    return "\n".join(f"{bar}{line}" for line in lines)


def _path_of(source: str, work: "StagingDir") -> str:
    from barellm.data.named import tinyshakespeare

    if source == "-":
        return str(work.spool(sys.stdin.buffer, name="stdin"))
    return str(tinyshakespeare()) if source == "tinyshakespeare" else source


def _checked(args: argparse.Namespace) -> "tuple[float, Layout, bool]":
    """Validate the options: (validation fraction, layout of documents, whether the source is a hub data set)."""
    from barellm.data.kinds import check_kind
    from barellm.data.named import hub_sets, is_named
    from barellm.data.reading import FORMATS, Layout
    from barellm.data.sources import find_shards

    check_kind(args.tokenizer)
    if args.val_tokens and args.val_fraction is not None:
        raise UserError("--val-tokens and --val-fraction exclude each other: pass one of them")
    fraction = 0.1 if args.val_fraction is None else args.val_fraction
    DataConfig(val_fraction=fraction)  # refuses what is no share
    if not 1 <= args.shard_tokens < 1 << 31:
        raise UserError(f"--shard-tokens is {args.shard_tokens}, expected 1 to {2**31 - 1}")
    kind = "text" if args.format is None else args.format
    if kind not in FORMATS:
        raise UserError(f"--format is {kind!r}{nearest(kind, FORMATS)}, expected {', '.join(FORMATS)}")
    if args.keep_separator and not args.separator:
        raise UserError("--keep-separator needs --separator")
    if args.source.count("-") > 1:
        raise UserError("standard input, -, was named twice: it can be read once")
    for source in args.source:
        if source != "-" and (found := find_shards(source)):
            raise UserError(f"{source} holds token shards already ({found[0].name}), expected text")
    layout = Layout("text" if args.field is None else args.field, args.separator, args.keep_separator, kind)
    for source in filter(is_named, args.source):
        path = Path(source)
        if path.exists() and path.resolve() != Path(args.out).resolve():
            raise UserError(f"{source} is the name of a set, and of what lies here: that is ./{source}; rename it for the set")
    named = [source for source in args.source if is_named(source) and source != "tinyshakespeare"]
    _check_used(args, [*named, *(["stdlib"] if "stdlib" in args.source else [])], kind)
    if named and len(args.source) > 1:
        raise UserError(f"the set {named[0]} stands alone, found with it: {', '.join(s for s in args.source if s != named[0])}")
    if named and args.val_fraction is not None:
        raise UserError(f"--val-fraction needs all of a text first, which the set {named[0]} is not: pass --val-tokens")
    if named and args.val_tokens and hub_sets()[named[0]].val:
        raise UserError(f"the set {named[0]} has a part for validation of its own: leave --val-tokens out")
    return 0.0 if args.val_tokens else fraction, layout, bool(named)


def _check_used(args: argparse.Namespace, sets: list[str], kind: str) -> None:
    """UserError for an option about documents that would have no effect on these sources. `kind`: format of standard input."""
    of_records = {"--field": args.field is not None}
    of_text = {"--separator": bool(args.separator), "--keep-separator": args.keep_separator}
    for option, given in {**of_records, **of_text, "--format": args.format is not None}.items():
        if given and sets:
            raise UserError(f"{option} does not go with {sets[0]}, whose documents are known: leave it out")
    if args.source == ["-"]:
        for option, given in (of_records if kind == "text" else of_text).items():
            if given:
                raise UserError(f"{option} does not go with standard input as {kind}: another --format, or leave it out")
