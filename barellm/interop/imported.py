"""Another program's weights as a checkpoint of barellm, at step 0, with a configuration that says what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from barellm import __version__, models, overrides
from barellm.checkpoint import checkpoint
from barellm.checkpoint.folder import RunFolder
from barellm.checkpoint.weights import Weights
from barellm.config import Config, ModelConfig
from barellm.data.kinds import tokenizer_files
from barellm.fields import entries


def like(weights: Weights) -> Config:
    """The preset of this model's sizes, whatever its vocabulary; else the one that its module names, with them. It has no text."""
    module = models.of(weights.model)
    known = [make() for make in module.PRESETS.values()]
    same = [p for p in known if _sizes(p.model) == _sizes(weights.model)]
    config = weights.configured(same[0] if same else models.preset(module.HUGGING_FACE.preset), {})
    return replace(config, data=replace(config.data, source=""))


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The part of a configuration that is the model's own, and not the run's, the tokenizer's or the text's."""
    known = {name for name, entry in entries(type(model)).items() if not entry.of_run}
    return {name: getattr(model, name) for name in known - {"vocab_size", "padded_vocab", "max_seq"}}


def save(weights: Weights, out: Path, *, config: Config | None = None, step: int = 0, total: int | None = None) -> Path:
    """The checkpoint's folder in the new folder `out`. `config`: what is known of the weights, where they are a run's; they
    are then those of its `step` of `total`."""
    tokenizer = weights.tokenizer
    if tokenizer is None:
        raise weights.without_tokenizer("--tokenizer")
    config = config or like(weights)
    meta = {
        "total_steps": total,
        "config": overrides.to_json(config),
        "source": str(weights.path),
        "tokenizer": {"kind": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "versions": {"barellm": __version__},
    }
    with RunFolder(out, resume=False) as folder:
        folder.need_space(checkpoint.checkpoint_bytes(weights))
        files = tokenizer_files(tokenizer)
        return checkpoint.save(folder.checkpoints, weights, step=step, meta=meta, tokenizer=files, keep=1)
