"""Command-line options: argparse with one-line errors, and the configuration keys as options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from barellm import overrides
from barellm.config import PRESETS, Config, preset
from barellm.errors import UserError

if TYPE_CHECKING:
    from barellm.checkpoint.weights import Weights

SHORT_FORMS: dict[str, str] = {
    "data.source": "--data",
    "train.steps": "--steps",
    "train.batch": "--batch",
    "train.seq": "--seq",
    "train.seed": "--seed",
    "train.minutes": "--minutes",
    "train.init_from": "--init-from",
    "train.dtype": "--dtype",
    "train.recompute": "--recompute",
    "train.matmul": "--matmul",
    "optim.lr": "--lr",
    "optim.schedule": "--schedule",
}

MEANINGS: dict[str, str] = {
    "model.layers": "transformer blocks",
    "model.heads": "attention heads in a block; must divide the channels",
    "model.channels": "width of the residual stream",
    "model.vocab_size": "token ids; a run takes the number from its tokenizer",
    "model.padded_vocab": "rows of the embedding in memory; 0: vocab_size rounded up to a multiple of 64",
    "model.max_seq": "positions: the longest sequence that the model can see",
    "model.bias": "biases in products and norms",
    "model.dropout": "dropout rate in training",
    "optim.name": "adamw, or muon: Muon for matrices of blocks, AdamW for the rest",
    "optim.lr": "highest learning rate, after the warmup; with muon that of AdamW",
    "optim.min_lr": "learning rate at the last step, to which all schedules but constant fall",
    "optim.warmup": "steps of linear warmup",
    "optim.schedule": "after the warmup: cosine, linear (to the last step), constant, or wsd (constant, then a line)",
    "optim.cooldown": "of wsd: share of all steps, the last ones, over which the rate falls",
    "optim.beta1": "decay rate of AdamW's first moment",
    "optim.beta2": "decay rate of AdamW's second moment",
    "optim.eps": "AdamW's epsilon, added to the root of the second moment",
    "optim.weight_decay": "weight decay of matrices, embeddings included",
    "optim.clip": "gradients of a larger norm are scaled down to it; 0: no clipping",
    "optim.moments": "how AdamW's moments of matrices are stored: fp32, 16bit or 16bit-stochastic",
    "optim.muon_lr": "of muon: highest learning rate of matrices of blocks",
    "optim.momentum": "of muon: decay rate of the mean gradient",
    "optim.momentum_start": "of muon: momentum of the first step, where momentum_warmup is not 0",
    "optim.momentum_warmup": "of muon: steps in which the momentum rises",
    "optim.iteration": "of muon: polar-express or jordan, two ways to make singular values one",
    "optim.turns": "of muon: turns of the iteration, at most 5; fewer are faster",
    "optim.step_scale": "of muon: jordan (steps of norm sqrt(rows / cols), at least 1) or moonshot (as large as AdamW's)",
    "optim.cautious": "of muon: weight decay only where the step makes a weight smaller too",
    "optim.normuon": "of muon: decay rate of NorMuon's mean square of rows; 0: plain Muon",
    "data.source": "a text file, a folder of .txt files, a .bin shard, a folder of shards, or stdlib: Python's own library",
    "data.tokenizer": "bytes, chars, bpe, gpt2, or a folder with tokenizer.json",
    "data.bpe_vocab": "size of the vocabulary where a bpe is trained on the text",
    "data.val_fraction": "share of the text, taken from its end, for validation (shards named train and val have their own)",
    "data.order": "epoch: every window once before any comes again; random: windows from anywhere",
    "train.batch": "sequences in a micro-batch",
    "train.seq": "tokens in a sequence",
    "train.accumulate": "micro-batches in a step (gradient accumulation)",
    "train.steps": "optimizer steps; 0: as many as fit into train.minutes. For bench and profile: how many are timed",
    "train.minutes": "time limit: as many steps as fit, at most train.steps; 0: no limit. For tune: nothing new is tried after it",
    "train.eval_every": "steps between evaluations; 0: only one at the end",
    "train.eval_tokens": "tokens in an evaluation, spread evenly over the validation text; 0: all of it",
    "train.sample_every": "steps between samples; 0: only at the end",
    "train.checkpoint_every": "steps between checkpoints; 0: only at the end, or when stopped",
    "train.keep": "how many checkpoints are kept",
    "train.seed": "seed of weights, order of the data, dropout and samples",
    "train.init_from": "start from these weights, with their sizes: a run, a checkpoint, a Hugging Face folder or an llm.c file",
    "train.dtype": "fp32, bf16, or auto: bf16 where the machine has instructions for it",
    "train.recompute": "recompute activations in the backward pass: less memory, more work",
    "train.matmul": "who does matrix products on a GPU: own (barellm's kernels) or cublaslt",
    "train.tf32": "on a GPU: fp32 products on tensor cores, with 10 bits of mantissa",
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose mistakes are UserErrors, with the nearest known option; abbreviations are refused."""

    def __init__(self, *, prog: str, description: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        for word in unknown:
            if word.startswith("-"):
                option = word.split("=")[0]
                raise UserError(f"unknown option {option}{overrides.nearest(option, self._option_string_actions)}")
            raise UserError(f"unexpected argument {word!r} (see {self.prog} --help)")
        return args


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """PRESET, --config and one option per configuration key."""
    parser.add_argument("preset", nargs="?", metavar="PRESET", help=f"{', '.join(PRESETS)} (default: default)")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML with preset, [model], [optim], [data], [train]; or a run's config.json"
    )
    group = parser.add_argument_group("configuration keys (PRESET gives the others their values)")
    for key, kind in overrides.known_keys().items():
        names = [SHORT_FORMS[key]] if key in SHORT_FORMS else []
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
        group.add_argument(f"--{key}", *names, dest=key, metavar=kind.__name__.upper(), help=MEANINGS[key], **optional)
    positional = "".join(f"[{action.metavar}] " for action in parser._positionals._group_actions)
    parser.usage = f"%(prog)s {positional}[options] [--KEY VALUE ...]"  # not each of some forty keys


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """--dtype of commands that read a checkpoint."""
    parser.add_argument("--dtype", metavar="STR", help="fp32, bf16 or auto (default: what it was trained in)")


def add_device(parser: argparse.ArgumentParser, what: str = "cpu or cuda") -> None:
    parser.add_argument("--device", default="cpu", metavar="NAME", help=f"{what} (default: cpu)")


def explicit_changes(args: argparse.Namespace) -> tuple[str | None, dict[str, object]]:
    """What the user asked for: the preset's name or None, and {key: value}, the command line over the file."""
    name: str | None = args.preset
    changes: dict[str, object] = {}
    if args.config is not None:
        file_preset, changes = overrides.read_file(Path(args.config))
        name = name or file_preset
    asked = {key: text for key in overrides.known_keys() if (text := getattr(args, key)) is not None}
    for limit, other in (("train.steps", "train.minutes"), ("train.minutes", "train.steps")):
        if limit in asked and other not in asked:  # the file's other limit is not meant either
            changes.pop(other, None)
    return name, overrides.checked(changes | asked)


def configuration(args: argparse.Namespace) -> Config:
    """The resolved configuration of a command line that has `add_configuration`'s options."""
    name, changes = explicit_changes(args)
    config, _ = with_weights(overrides.changed(preset(name or "default"), changes), changes)
    return config


def with_weights(config: Config, changes: Mapping[str, object]) -> tuple[Config, Weights | None]:
    """`config` with the sizes of the weights that it says to begin with, and those. `changes`: what the user asked for."""
    if not config.train.init_from:
        return config, None
    from barellm.interop.sources import open_weights

    weights = open_weights(Path(config.train.init_from), tokenizer=str(changes.get("data.tokenizer", "")))
    return weights.configured(config, changes), weights
