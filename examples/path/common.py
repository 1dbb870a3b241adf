"""What the programs of the path share: one text, one set of sizes, and one way to train, so that their losses compare.

The text is the manual of Python's language, which every Python brings along for its `help()`; a token is a character of it."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import barellm
from barellm.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config.fields import at_least, divides
from barellm.data.shards import TokenStream
from barellm.data.sources import Dataset, prepare

BATCH, SEQ, STEPS = 16, 64, 400
_KEPT = tempfile.TemporaryDirectory(prefix="path-")  # until the program ends
FOLDER = Path(_KEPT.name)


@dataclass(frozen=True)
class Sizes(ModelConfig):
    """What every model needs to have, and more of it than the first ones use."""

    vocab_size: int = at_least(1, 256, "token ids; a run takes it from its tokenizer")
    padded_vocab: int = at_least(0, 0, "rows of the embedding; 0: the next multiple of 64")
    max_seq: int = at_least(1, SEQ, "positions")
    d_model: int = at_least(1, 64, "width of the residual stream")
    layers: int = at_least(1, 1, "blocks")
    heads: int = divides("d_model", 1, "attention heads in a block")


@cache
def text() -> DataConfig:
    """A file with the text; the last tenth of it is for validation."""
    file = FOLDER / "manual.txt"
    file.write_text("\n\n".join(topics.values()), encoding="utf-8")
    return DataConfig(source=str(file), tokenizer="chars")


@cache
def dataset() -> Dataset:
    """Its tokens: `train` and `val` are streams of ids."""
    return prepare(text())


def ids_of(stream: TokenStream) -> np.ndarray:
    ids = np.empty(len(stream), np.int32)
    stream.read(0, ids)
    return ids


def train(
    model: ModelConfig, steps: int, name: str, *, optim: dict[str, Any] | None = None, stop_at: int = 0, **keys: Any
) -> barellm.Run:
    """A run of `barellm.train`: Adam at a constant rate, in fp32, without anything that a later program adds by `optim` or `keys`.
    `stop_at` ends it after so many of its steps."""

    def stop(step: barellm.Step) -> None:
        if step.step == stop_at:
            step.stop()

    plain = OptimConfig(**{"lr": 3e-3, "schedule": "constant", "weight_decay": 0.0, "clip": 0.0} | (optim or {}))
    loop = {"micro_batch_size": BATCH, "seq": SEQ, "steps": steps, "eval_every": 0, "eval_tokens": 0, "dtype": "fp32"} | keys
    config = Config(preset=name, model=model, optim=plain, data=text(), train=TrainConfig(**loop))
    return barellm.train(config, out=Path(tempfile.mkdtemp(dir=FOLDER)) / name, device="cpu", quiet=True, callbacks=[stop])


def steps_asked() -> int:
    """`python step_02_bigram_trained.py 50` takes 50 steps."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else STEPS


def report(nats: float) -> float:
    print(f"validation loss: {nats:.3f} nats a character")
    return nats
