"""Turn another program's model into a checkpoint. `sample`, `eval` and `export` read it, and `train --init-from` begins with it."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face folder with config.json and model.safetensors, or an llm.c file",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint, new or empty")
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="NAME",
        help="bytes, gpt2, a folder with tokenizer.json, llm.c's .bin (default: what lies with the model; GPT-2's for 50257 ids)",
    )


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from barellm import models
    from barellm.data.gpt2 import Gpt2
    from barellm.errors import UserError
    from barellm.interop import imported
    from barellm.interop.sources import is_checkpoint, open_weights

    weights = open_weights(Path(args.source), tokenizer=args.tokenizer)
    if is_checkpoint(weights):
        raise UserError(f"{weights.path} is a checkpoint of barellm already")
    saved = imported.save(weights, Path(args.out))
    model, tokenizer = weights.model, weights.tokenizer
    assert tokenizer is not None
    count = sum(t.size for t in weights.tensors.values())
    print(
        f"{saved}: {models.name_of(model)}, {count:,} parameters, {model.max_seq} positions, tokenizer {tokenizer.name}"
    )
    if isinstance(tokenizer, Gpt2) and not tokenizer.found:
        print("GPT-2's vocabulary is not on this machine: there is no text in or out before it is")
    return 0
