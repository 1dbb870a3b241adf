"""Another program's weights as a checkpoint of barellm, at step 0, with a configuration that says what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from barellm import __version__, overrides
from barellm.checkpoint import checkpoint
from barellm.checkpoint.folder import RunFolder
from barellm.checkpoint.weights import Weights
from barellm.config import PRESETS, Config, preset
from barellm.data.kinds import tokenizer_files


def like(weights: Weights) -> Config:
    """The preset of these sizes, else GPT-2's smallest with them; it has no text."""
    sizes = ("layers", "heads", "channels")
    presets = map(preset, PRESETS)
    same = [p for p in presets if all(getattr(p.model, s) == getattr(weights.model, s) for s in sizes) and p.model.bias]
    config = weights.configured(same[0] if same else preset("gpt2-124m"), {})
    return replace(config, data=replace(config.data, source=""))


def save(weights: Weights, out: Path) -> Path:
    """The checkpoint's folder in the new folder `out`."""
    tokenizer = weights.tokenizer
    if tokenizer is None:
        raise weights.without_tokenizer("--tokenizer")
    config = like(weights)
    meta = {
        "config": overrides.to_json(config),
        "source": str(weights.path),
        "tokenizer": {"kind": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "versions": {"barellm": __version__},
    }
    with RunFolder(out, resume=False) as folder:
        folder.need_space(checkpoint.checkpoint_bytes(weights))
        files = tokenizer_files(tokenizer)
        return checkpoint.save(folder.checkpoints, weights, step=0, meta=meta, tokenizer=files, keep=1)
