"""7. The MLP, and blocks: attention moves information between positions, the MLP computes on each position by itself.

A block is both, each behind a LayerNorm and added to the residual stream. Blocks are stacked; `segment` names one for profiles and
for activation checkpointing. Linear layers have biases from here on, as GPT-2's have, and the names of parameters are GPT-2's."""

from __future__ import annotations

from dataclasses import dataclass

from common import Sizes, report, steps_asked, train


@dataclass(frozen=True)
class Config(Sizes):
    pass


def declare(p, cfg):
    """The parameters by name. A matrix is (out, in) and has its bias beside it, a norm has a weight and a bias."""
    C, vocab = cfg.d_model, {"valid_rows": cfg.vocab_size}
    w = {"wte": p.parameter("wte", (cfg.padded_vocab, C), std=0.3, **vocab)}

    def linear(name, N, K):
        w[name] = p.parameter(f"{name}.weight", (N, K), std=K**-0.5), p.parameter(f"{name}.bias", (N,))

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
    return w | {"head": p.parameter("head", (cfg.padded_vocab, C), std=0.02, **vocab)}


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = p.embedding(tokens_BT, w["wte"])
    for h in (f"h.{i}" for i in range(cfg.layers)):
        with p.segment(h):
            qkv = p.split(p.linear(p.layernorm(x_BTC, *w[f"{h}.ln_1"]), *w[f"{h}.attn.c_attn"]), 3)
            x_BTC = p.add(x_BTC, p.linear(p.attention(*qkv, heads=cfg.heads), *w[f"{h}.attn.c_proj"]))
            h_BTF = p.gelu(p.linear(p.layernorm(x_BTC, *w[f"{h}.ln_2"]), *w[f"{h}.mlp.c_fc"]))
            x_BTC = p.add(x_BTC, p.linear(h_BTF, *w[f"{h}.mlp.c_proj"]))
    return p.classifier(p.layernorm(x_BTC, *w["ln_f"]), w["head"], targets_BT, valid_vocab=cfg.vocab_size)


def main(steps: int) -> float:
    return report(train(Config(layers=2, heads=4), steps, "blocks").val_nats)


if __name__ == "__main__":
    main(steps_asked())
