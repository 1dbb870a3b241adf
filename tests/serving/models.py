"""Small models of random weights for an engine, and what its texts say."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from barellm.api import Model
from barellm.checkpoint.weights import Weights, parameters
from barellm.config import Config as Run
from barellm.config import ModelConfig, TrainConfig
from barellm.data.tokenizers import Ids
from barellm.generation.samplers import Sampling
from barellm.models import gpt2, llama3
from barellm.serving import engine

VOCAB = 97
LLAMA = llama3.Config(
    layers=2, heads=4, kv_heads=2, d_model=32, d_ff=48, vocab_size=VOCAB, max_seq=128, sliding_window=20, window_layers="0",
    qk_norm="head", logits_softcap=9.0, tied=False,
)  # fmt: skip
GPT2 = gpt2.Config(layers=2, heads=4, d_model=32, vocab_size=VOCAB, max_seq=128)


def model_of(config: ModelConfig, dtype: str = "fp32", *, scale: float = 0.2) -> Model:
    """Weights of this deviation, and tokenizer of bare ids."""
    arrays = {}
    for name, t in parameters(config).items():
        shape = (t.valid_rows, *(int(n) for n in t.shape[1:]))
        arrays[name] = (scale * np.random.default_rng(len(arrays)).normal(size=shape)).astype(np.float32)
    weights = Weights(Path("random"), config, arrays, Ids(config.vocab_size))
    return Model(weights, Run(preset="", model=config, train=TrainConfig(dtype=dtype)), "cpu", 0, None)


def request(prompt: int | tuple[int, ...] = 5, count: int = 4, *, ends: tuple[int, ...] = (), **more) -> engine.Request:
    """A greedy one; a prompt that is a number has so many drawn ids."""
    kinds = {name: more.pop(name) for name in ("top_logprobs", "echo") if name in more}
    ids = tuple(np.random.default_rng(prompt).integers(0, VOCAB, prompt).tolist()) if isinstance(prompt, int) else prompt
    return engine.Request(ids, count, Sampling(**{"temperature": 0.0, **more}), frozenset(ends), **kinds)


class Text:
    """What `deliver` was given."""

    def __init__(self) -> None:
        self.events: list[engine.Event] = []
        self.began, self.done = threading.Event(), threading.Event()

    def __call__(self, event: engine.Event) -> None:
        self.events.append(event)
        self.began.set()
        if isinstance(event, engine.Ended | engine.Failed):
            self.done.set()

    @property
    def last(self) -> engine.Event:
        assert self.done.wait(60), "no last event"
        return self.events[-1]

    @property
    def tokens(self) -> list[engine.Token]:
        return [event for event in self.events if isinstance(event, engine.Token)]


def answers(server: engine.Engine, requests: list[engine.Request]) -> list[list[engine.Event]]:
    """The events of texts that were asked for at once."""
    texts = [Text() for _ in requests]
    for one, text in zip(requests, texts, strict=True):
        server.submit(one, text)
    return [text.events for text in texts if text.last]


def alone(server: engine.Engine, one: engine.Request) -> list[engine.Event]:
    """The events of a text while nothing else is there: no other text, and nothing of an earlier one."""
    server._slots.held = [()] * server.slots
    return answers(server, [one])[0]
