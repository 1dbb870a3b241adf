"""Write a checkpoint's weights for other programs: a folder for transformers, or a file for llm.c or llama.cpp."""

import argparse

from barellm.cli.options import dtype


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step folder, or a run's folder (its newest complete one)")
    parser.add_argument(
        "--format", required=True, metavar="NAME",
        help="huggingface (hf), gguf (llama.cpp's), peft (an adapter alone), llmc, llmc-checkpoint (with AdamW's moments), or "
        "llmc-tokenizer (no weights)",
    )  # fmt: skip
    parser.add_argument("--dtype", type=dtype, default="fp32", metavar="NAME", help="fp32, bf16, or for gguf fp16 (default: fp32)")
    parser.add_argument(
        "--license",
        metavar="NAME",
        help="for the model card of huggingface, and for gguf: a name that the hub knows, as mit or apache-2.0",
    )
    parser.add_argument("--merge", action="store_true", help="add the adapter that a run trained to the weights of its base")
    parser.add_argument("--out", required=True, metavar="PATH", help="the folder or file, which must not be there yet")


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint and print what was written."""
    from pathlib import Path

    from barellm.config.aliases import FORMATS
    from barellm.interop.exported import export
    from barellm.training.console import show

    kind: str = FORMATS.get(args.format) or args.format
    options = {"kind": kind, "dtype": args.dtype, "licence": args.license, "merge": args.merge}
    for line in export(Path(args.checkpoint), Path(args.out), **options):
        show(line)
    return 0
