"""Write a checkpoint's weights for other programs: a folder for transformers, or a file for llm.c or llama.cpp."""

import argparse

from barellm.cli.parsing.options import add, add_checkpoint, dtype


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add(parser, "--format NAME",
        "huggingface (hf), gguf (llama.cpp's), peft (an adapter alone), llmc, llmc-checkpoint (with AdamW's moments), or "
        "llmc-tokenizer (no weights)", required=True)  # fmt: skip
    add(parser, "--dtype NAME", "fp32, bf16, or for gguf fp16 (default: fp32)", "fp32", type=dtype)
    add(parser, "--license NAME",
        "for the model card of huggingface, and for gguf: a name that the hub knows, as mit or apache-2.0")  # fmt: skip
    add(parser, "--merge", "add the adapter that a run trained to the weights of its base")
    add(parser, "--out PATH", "the folder or file, which must not be there yet", required=True)


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint and print what was written. --format may be another program's name of it (`aliases`). Returns 0."""
    from pathlib import Path

    from barellm.config.aliases import FORMATS
    from barellm.interop.exported import export
    from barellm.training.console import show

    kind: str = FORMATS.get(args.format) or args.format
    options = {"kind": kind, "dtype": args.dtype, "licence": args.license, "merge": args.merge}
    for line in export(Path(args.checkpoint), Path(args.out), **options):
        show(line)
    return 0
