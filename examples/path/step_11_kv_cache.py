"""11. Sampling with a KV cache: keys and values of earlier characters are kept, so a new one costs one position, not all.

`decode` is the same trunk with another attention: it appends the new keys and values to a cache and reads all of it. The loss is
that of program 10 to the bit, since nothing that trains has changed. The program writes a text greedily with the cache, and once
more by whole forward passes without it: the texts are equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import step_08_positions as gpt
from common import report, steps_asked, train
from step_09_mixed_precision import MIXED
from step_10_optimizer import recipe

from barellm import Model

declare, forward = gpt.declare, gpt.forward
PROMPT, COUNT = "The ", 48


@dataclass(frozen=True)
class Config(gpt.Config):
    pass


def decode(p, cfg, tokens_BT):
    """The logits (B, 1, Vp) of the last position. The caches hold the keys and values of the positions before."""
    w, (B, T) = declare(p, cfg), tokens_BT.shape

    def attend(h, q, k, v):
        caches = [p.cache(f"{h}.{kind}_cache", (int(B), int(T), cfg.d_model), p.compute) for kind in "kv"]
        return p.attention_cached(q, k, v, *caches, heads=cfg.heads)

    return p.last_logits(gpt.trunk(p, cfg, w, tokens_BT, attend), w["wte"])


def without_cache(model: Model) -> tuple[str, int]:
    """A greedy completion by a forward pass over the whole text for each character, and how many positions that computed."""
    ids = model.tokenizer.encode(PROMPT).tolist()
    start, positions = len(ids), 0
    for _ in range(COUNT):
        ids.append(int(np.argmax(model.logits([ids])[0, -1])))
        positions += len(ids) - 1
    return model.tokenizer.decode(ids[start:]), positions


def main(steps: int) -> float:
    run = train(Config(**gpt.GPT), steps, "cache", optim=recipe(steps), **MIXED)
    with run.load(device="cpu", dtype="fp32") as model:
        text = model.generate(PROMPT, max_new_tokens=COUNT, temperature=0)
        slow, positions = without_cache(model)
        print(f"greedy: {PROMPT + text!r}")
        print(f"with a cache {len(PROMPT) + COUNT - 1} positions, without one {positions}")
        print(f"the texts are {'equal' if text == slow else f'different: {slow!r}'}")
        print(f"sample: {PROMPT + model.generate(PROMPT, max_new_tokens=200, temperature=0.8, top_k=40, seed=1)!r}")
    return report(run.val_nats)


if __name__ == "__main__":
    main(steps_asked())
