"""Convert another program's model into a checkpoint. `sample`, `eval` and `export` read it, and `train --init-from` starts from it.

With llm.c's optimizer state, state_*.bin next to model_*.bin, it is a checkpoint from which `train --resume` resumes with llm.c's
moments and step. llm.c does not save its learning rate, schedule or batch size: give them by PRESET and keys."""

import argparse
import shlex

from barellm import models
from barellm.cli.parsing.options import CommandLine, Parser, add, add_configuration
from barellm.errors import UserError
from barellm.training.console import show


def configure(parser: Parser) -> None:
    sources = "a folder with config.json and model.safetensors, hf:OWNER/NAME on the hub, a GGUF file, or an llm.c file"
    parser.add_argument("source", metavar="SOURCE", help=sources)
    add(parser, "--out DIR", "folder for the checkpoint, new or empty", required=True)
    add(parser, "--tokenizer NAME",
        "bytes, gpt2, a folder with tokenizer.json, llm.c's .bin (default: what lies with the model; GPT-2's for 50257 ids)",
        "")  # fmt: skip
    add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    """Convert the model to a run's folder and print how to use it. Without a preset the configuration is that of a model of its
    kind (`imported.like`); llm.c's optimizer state is taken along where its files lie beside. Returns 0."""
    from pathlib import Path

    from barellm.data.gpt2 import Gpt2
    from barellm.interop import huggingface, imported, llmc_state, sources

    requested = CommandLine.of(args)
    weights = sources.open_weights(Path(args.source), tokenizer=args.tokenizer or requested.texts.get("data.tokenizer", ""))
    if sources.is_checkpoint(weights):
        raise UserError(f"{weights.path} is a checkpoint of barellm already")
    base = imported.like(weights) if requested.preset is None else requested.base()
    config = weights.configured(requested.changed(base), requested.changes(base))
    states = llmc_state.beside(weights.path)
    state = llmc_state.read(states, weights) if states else None
    saved = imported.save(weights, Path(args.out), config=config, state=state)
    model, tokenizer, out = weights.model, weights.tokenizer, shlex.quote(args.out)
    count = sum(t.trained for t in weights.tensors.values())
    without = "no tokenizer: it trains on shards of its ids; --tokenizer names one"
    family, architecture = huggingface.hugging_face(model).model_type, models.name_of(model)
    family += "" if family == architecture else f" (architecture {architecture})"
    named = f"tokenizer {tokenizer.name}" if tokenizer else without
    show(f"{saved}: {family}, {count:,} parameters, {model.max_seq} positions, {named}")
    if tokenizer and (missing := tokenizer.vocab_size - model.vocab_size):
        what = "an id without a row is refused in a text" if missing > 0 else "a row without an id is never sampled"
        show(f"the model has {model.vocab_size:,} rows, the tokenizer {tokenizer.vocab_size:,} ids: {what}")
    if state is not None:
        show(f"{state.story}; resume with: barellm train --out {out} --resume --data SHARDS")
    if isinstance(tokenizer, Gpt2) and not tokenizer.found:
        show("GPT-2's vocabulary is not on this machine: there is no text in or out before it is")
    if tokenizer and state is None:
        chats = [f"barellm chat {out}"] * bool(tokenizer.conventions.templates)
        for i, line in enumerate([*chats, f"barellm train {config.preset} --init-from {out} --data FILE"]):
            show(f"{'' if i else 'next':<9}{line}")
    return 0
