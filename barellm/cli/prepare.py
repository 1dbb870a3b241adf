"""Turn text into shards of tokens, in the format of llm.c's .bin files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = "Tokenize text into llm.c's .bin shards (DIR_train_000001.bin, DIR_val_000000.bin, ...)."
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="text files, folders of .txt files, or 'stdlib'")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make; it may exist but must be empty")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        metavar="NAME",
        help="bytes, chars, bpe, gpt2, or a folder with a tokenizer.json, such as Llama-3's (default: gpt2)",
    )
    parser.add_argument("--vocab", type=int, default=2048, metavar="N", help="ids of a bpe tokenizer (default: 2048)")
    parser.add_argument("--val-fraction", type=float, default=0.1, metavar="F", help="validation part (default: 0.1)")
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens in a shard (default: 100000000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Writes the shards; nothing appears in --out until all of them are complete."""
    from barellm.config import DataConfig
    from barellm.data.cache import new_folder
    from barellm.data.kinds import check_kind
    from barellm.data.sources import corpus_tokenizer, find_shards, find_text, write_split
    from barellm.errors import UserError
    from barellm.training.console import Console

    check_kind(args.tokenizer)
    DataConfig(val_fraction=args.val_fraction)  # refuses what is no share
    if not 1 <= args.shard_tokens < 1 << 31:
        raise UserError(f"--shard-tokens is {args.shard_tokens}, expected 1 to {2**31 - 1}")
    for source in args.source:
        if found := find_shards(source):
            raise UserError(f"{source} holds token shards already ({found[0].name}), expected text")
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there and not an empty folder: choose another or remove it")

    console = Console(json_lines=args.json)
    corpus = find_text(args.source, args.val_fraction)
    tokenizer = corpus_tokenizer(corpus, args.tokenizer, bpe_vocab=args.vocab, report=console.line)
    console.line(f"tokenizing {corpus.name} ({tokenizer.name}, {tokenizer.vocab_size} ids)")
    try:
        with new_folder(out.resolve()) as made:
            counts = write_split(
                made,
                out.resolve().name,
                corpus,
                tokenizer,
                shard_tokens=args.shard_tokens,
                progress=console.tokenizing(),
            )
            shards = len(list(made.glob("*.bin")))
    except FileExistsError as error:
        raise UserError(f"{out} was filled by another process meanwhile") from error
    result = {
        "out": str(out),
        "shards": shards,
        "train_tokens": counts["train"],
        "val_tokens": counts["val"],
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_hash": tokenizer.hash,
    }
    console.clear()
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{out}: {shards} shards, {counts['train']} training and {counts['val']} validation tokens")
    return 0
