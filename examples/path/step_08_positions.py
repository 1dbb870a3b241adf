"""8. Positions and weight tying: the architecture of GPT-2, whole.

Attention sees a set; a learned vector for each position, added to the embedding, tells order apart. The classifier is the
embedding's own matrix, since both say which characters are alike (Press and Wolf 2017). Weights begin as GPT-2's: std 0.02, that of
what adds to the residual stream divided by sqrt(2 layers), because that many things are added."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from common import Sizes, report, steps_asked, train


@dataclass(frozen=True)
class Config(Sizes):
    pass


def declare(p, cfg):
    """The parameters by name. A matrix is (out, in) and has its bias beside it, a norm has a weight and a bias."""
    C = cfg.d_model
    w = {
        "wte": p.parameter("wte", (cfg.padded_vocab, C), std=0.02, valid_rows=cfg.vocab_size),
        "wpe": p.parameter("wpe", (cfg.max_seq, C), std=0.02),
    }

    def linear(name, N, K):
        std = 0.02 / sqrt(2 * cfg.layers) if name.endswith("c_proj") else 0.02
        w[name] = p.parameter(f"{name}.weight", (N, K), std=std), p.parameter(f"{name}.bias", (N,))

    def norm(name):
        w[name] = p.parameter(f"{name}.weight", (C,), value=1.0), p.parameter(f"{name}.bias", (C,))

    for h in (f"h.{i}" for i in range(cfg.layers)):
        norm(f"{h}.ln_1")
        linear(f"{h}.attn.c_attn", 3 * C, C)
        linear(f"{h}.attn.c_proj", C, C)
        norm(f"{h}.ln_2")
        linear(f"{h}.mlp.c_fc", 4 * C, C)
        linear(f"{h}.mlp.c_proj", C, 4 * C)
    norm("ln_f")
    return w


def trunk(p, cfg, w, tokens_BT, attend):
    """The normalized hidden states (B, T, C) after the last block. `attend(h, q, k, v)` is the attention of block h."""
    x_BTC = p.embedding(tokens_BT, w["wte"], w["wpe"])
    for h in (f"h.{i}" for i in range(cfg.layers)):
        with p.segment(h):
            qkv = p.split(p.linear(p.layernorm(x_BTC, *w[f"{h}.ln_1"]), *w[f"{h}.attn.c_attn"]), 3)
            x_BTC = p.add(x_BTC, p.linear(attend(h, *qkv), *w[f"{h}.attn.c_proj"]))
            h_BTF = p.gelu(p.linear(p.layernorm(x_BTC, *w[f"{h}.ln_2"]), *w[f"{h}.mlp.c_fc"]))
            x_BTC = p.add(x_BTC, p.linear(h_BTF, *w[f"{h}.mlp.c_proj"]))
    return p.layernorm(x_BTC, *w["ln_f"])


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = trunk(p, cfg, w, tokens_BT, lambda h, q, k, v: p.attention(q, k, v, heads=cfg.heads))
    return p.classifier(x_BTC, w["wte"], targets_BT, valid_vocab=cfg.vocab_size)


GPT = {"layers": 2, "heads": 4}  # of all programs from here on


def main(steps: int) -> float:
    return report(train(Config(**GPT), steps, "positions").val_nats)


if __name__ == "__main__":
    main(steps_asked())
