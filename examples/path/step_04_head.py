"""4. One head of self-attention: the weights of the past now depend on what is there.

Each position makes a query, a key and a value (three columns of one matmul). The score of a pair is query times key over
sqrt(d_model); the softmax of a row's scores, the future masked, are the weights of the values' sum (Vaswani et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from common import Sizes, report, steps_asked, train


@dataclass(frozen=True)
class Config(Sizes):
    pass


def declare(p, cfg):
    """The parameters by name. Matrices are (out, in)."""
    C, vocab = cfg.d_model, {"valid_rows": cfg.vocab_size}
    return {
        "wte": p.parameter("wte", (cfg.padded_vocab, C), std=0.3, **vocab),
        "qkv": p.parameter("qkv", (3 * C, C), std=C**-0.5),
        "head": p.parameter("head", (cfg.padded_vocab, C), std=0.02, **vocab),
    }


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = p.embedding(tokens_BT, w["wte"])
    q_BTC, k_BTC, v_BTC = p.split(p.linear(x_BTC, w["qkv"]), 3)
    a_BTC = p.attention(q_BTC, k_BTC, v_BTC, heads=1)
    return p.classifier(a_BTC, w["head"], targets_BT, valid_vocab=cfg.vocab_size)


def main(steps: int) -> float:
    return report(train(Config(), steps, "head").val_nats)


if __name__ == "__main__":
    main(steps_asked())
