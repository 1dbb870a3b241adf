"""Weight quantization of a checkpoint, with error compensation on a calibration text (GPTQ, Frantar et al. 2022).
`sample` and `eval` read it. It cannot be trained or exported: for that the run stays as it is."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from barellm.cli.parsing.options import add, add_checkpoint, add_device
from barellm.errors import UserError
from barellm.training.console import evaluation_progress, show

if TYPE_CHECKING:
    import numpy as np

    from barellm.assembly.quantized import Matrix
    from barellm.checkpoint.weights import Weights
    from barellm.cli.checkpoints import Found

LOSS_TOKENS = 1 << 13  # of validation, before and after
FORMATS = "int8, int4 or nf4; int4/128 sets the group size"


def configure(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    add(parser, "--weights FORMAT", FORMATS, required=True)
    add(parser, "--out DIR", "folder for the checkpoint, new or empty", required=True)
    add(parser, "--data SOURCE", "a text, or shards, to calibrate with (default: what the run was trained on)")
    add(parser, "--tokens N", "calibrate on about N tokens, evenly spread; 0: round to nearest (default: 32768)", 32768, least=0)
    add(parser, "--batch N", "batch size (default: 8)", 8, least=1)
    add_device(parser, "cpu, cuda or reference")


def run(args: argparse.Namespace) -> int:
    """Quantize the weights into a new checkpoint and print the validation loss before and after."""
    from barellm.assembly.build import build_programs
    from barellm.assembly.quantized import quantize_programs
    from barellm.checkpoint import checkpoint as checkpoints
    from barellm.checkpoint.folder import RunFolder
    from barellm.checkpoint.quantized import Quantized, meta_of
    from barellm.checkpoint.weights import of_checkpoint
    from barellm.cli.checkpoints import found
    from barellm.data.kinds import tokenizer_files
    from barellm.interop.sources import is_checkpoint
    from barellm.program.quantization import scheme

    if args.data is not None and not args.tokens:
        raise UserError("--data is a text to calibrate with, and with --tokens 0 nothing is: leave one of them out")
    scheme(args.weights)
    checkpoint = found(args.checkpoint, device=args.device, dtype="fp32", batch=args.batch)
    assert checkpoint.path is not None
    if checkpoint.source is not None and not is_checkpoint(checkpoint.source):
        raise UserError(f"{checkpoint.path} is another program's: quantize what barellm import {checkpoint.path} --out RUN makes")
    weights = checkpoint.source or of_checkpoint(checkpoint.path)  # with the adapter that the run trained, if it did
    forward = {"eval": build_programs(checkpoint.config, training=False, positions=0)["eval"]}
    quantized = {name: m for name, m in quantize_programs(forward, args.weights).items() if not m.stays}
    with RunFolder(Path(args.out), resume=None) as folder:
        meta = checkpoints.read_meta(checkpoint.path)
        meta.pop("base", None)
        meta["config"].pop("adapter", None)  # what it trained is in the codes
        meta |= {"source": str(checkpoint.path), **meta_of(scheme(args.weights))}
        moments, meta["calibration"] = {}, None
        if args.tokens:
            moments, meta["calibration"] = _moments(checkpoint, weights, args.data, args.tokens)
        codes = {}
        for name, m in quantized.items():
            if sys.stderr.isatty():
                print(f"\r{len(codes)} of {len(quantized)} matrices", end="", file=sys.stderr)
            codes[name] = _codes(name, m, weights.read_rows(name, 0, int(m.parameter.shape[0])), moments.get(name))
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        source = Quantized(weights, {name: m.how for name, m in quantized.items()}, codes)
        folder.need_space(checkpoints.checkpoint_bytes(source))
        files = tokenizer_files(checkpoint.tokenizer)
        saved = checkpoints.save(folder.checkpoints, source, step=meta.pop("step"), meta=meta, tokenizer=files, keep=1)
    used = meta["calibration"]
    how = f"calibrated on {used['tokens']:,} tokens of {used['data']}" if used else "nearest codes"
    show(f"{saved}: {len(quantized)} matrices in {args.weights}\n  {how}")
    for name, which in (("before", checkpoint), ("after", found(str(saved), device=args.device, dtype="fp32"))):
        assert which.path is not None
        size = (which.path / checkpoints.WEIGHTS).stat().st_size
        print(f"  {name:<6} {size / 1e6:>10,.1f} MB{_loss(which, args.data)}")
    return 0


def _loss(checkpoint: "Found", source: str | None) -> str:
    """The loss on a few validation tokens, in words; "" if the text is not available."""
    from barellm.data.sources import prepare
    from barellm.evaluation.validation import Evaluator
    from barellm.training.inputs import with_document_mask
    from barellm.training.report import perplexity

    config = checkpoint.config
    config = config if source is None else replace(config, data=replace(config.data, source=source, document_mask="auto"))
    try:
        data = prepare(config.data, tokenizer=checkpoint.tokenizer)
        _, data = with_document_mask(config, data, device=checkpoint.device)
    except UserError:
        return ""
    windows = data.validation(seq=config.train.seq, max_tokens=LOSS_TOKENS, first=False)
    with checkpoint.opened(positions=0, documents=data.masked) as compiled:
        result = Evaluator(windows, batch=1, byte_lengths=None).run(compiled.session)
    assert result is not None
    return f"   {result.nats:.4f} nats per token, perplexity {perplexity(result.nats)}"


def _moments(checkpoint: "Found", weights: "Weights", source: str | None, tokens: int) -> "tuple[dict[str, np.ndarray], dict]":
    """(second moments of the inputs of each quantized matmul, what they were measured on)."""
    from barellm.assembly.build import build_programs, opened
    from barellm.assembly.quantized import products_of
    from barellm.data.loader import Validation
    from barellm.data.sources import prepare
    from barellm.evaluation.calibration import Calibration

    config = checkpoint.config
    config = replace(config, train=replace(config.train, eval_seq=0))  # rows of training, `batch` at a time
    source_config = config.data if source is None else replace(config.data, source=source)
    data = prepare(source_config, tokenizer=checkpoint.tokenizer, whole=source is not None)
    windows = Validation(data.train if source is None else data.val, seq=config.train.seq, max_tokens=tokens)
    programs = {"eval": build_programs(config, training=False, positions=0)["eval"]}
    calibration = Calibration(programs["eval"], products_of(programs["eval"])[:-1])
    with opened(programs, checkpoint.device) as session, evaluation_progress(windows.windows) as report:
        weights.load(session)
        calibration.measure(session, windows, batch=config.train.micro_batch_size, report=report)
        moments = {name: calibration.read(session, name) for name in calibration.moments}
    return moments, {"data": data.name, "tokens": windows.targets}


def _codes(name: str, m: "Matrix", w_NK: "np.ndarray", moments_KK: "np.ndarray | None") -> "tuple[np.ndarray, np.ndarray]":
    from barellm.program.compensation import compensated_codes
    from barellm.program.quantization import quantize

    if moments_KK is None:
        return quantize(w_NK, m.how, name=name)
    return compensated_codes(w_NK, moments_KK, m.how, name=name)
