"""6. The residual stream and LayerNorm: attention adds to what is known of a character, and no longer replaces it.

x + attention(norm(x)): the identity is there from the first step, for the forward pass and for the gradient (He et al. 2016).
LayerNorm gives each position mean 0 and variance 1 before attention reads it (pre-norm) and before the classifier does."""

from __future__ import annotations

from dataclasses import dataclass

from common import Sizes, report, steps_asked, train


@dataclass(frozen=True)
class Config(Sizes):
    pass


def declare(p, cfg):
    """The parameters by name. Matrices are (out, in); a norm has a weight and a bias."""
    C, vocab = cfg.d_model, {"valid_rows": cfg.vocab_size}
    return {
        "wte": p.parameter("wte", (cfg.padded_vocab, C), std=0.3, **vocab),
        "ln_1": (p.parameter("ln_1.weight", (C,), value=1.0), p.parameter("ln_1.bias", (C,))),
        "qkv": p.parameter("qkv", (3 * C, C), std=C**-0.5),
        "proj": p.parameter("proj", (C, C), std=C**-0.5),
        "ln_f": (p.parameter("ln_f.weight", (C,), value=1.0), p.parameter("ln_f.bias", (C,))),
        "head": p.parameter("head", (cfg.padded_vocab, C), std=0.02, **vocab),
    }


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = p.embedding(tokens_BT, w["wte"])
    h_BTC = p.layernorm(x_BTC, *w["ln_1"])
    a_BTC = p.attention(*p.split(p.linear(h_BTC, w["qkv"]), 3), heads=cfg.heads)
    x_BTC = p.add(x_BTC, p.linear(a_BTC, w["proj"]))
    return p.classifier(p.layernorm(x_BTC, *w["ln_f"]), w["head"], targets_BT, valid_vocab=cfg.vocab_size)


def main(steps: int) -> float:
    return report(train(Config(heads=4), steps, "residual").val_nats)


if __name__ == "__main__":
    main(steps_asked())
