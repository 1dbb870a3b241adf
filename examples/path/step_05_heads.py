"""5. Several heads with a projection: one head can look at one kind of thing, four look at four.

The columns of queries, keys and values are divided among the heads, so this costs no parameters but those of the output
projection, which mixes what the heads found."""

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
        "proj": p.parameter("proj", (C, C), std=C**-0.5),
        "head": p.parameter("head", (cfg.padded_vocab, C), std=0.02, **vocab),
    }


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = p.embedding(tokens_BT, w["wte"])
    a_BTC = p.attention(*p.split(p.linear(x_BTC, w["qkv"]), 3), heads=cfg.heads)
    a_BTC = p.linear(a_BTC, w["proj"])
    return p.classifier(a_BTC, w["head"], targets_BT, valid_vocab=cfg.vocab_size)


def main(steps: int) -> float:
    return report(train(Config(heads=4), steps, "heads").val_nats)


if __name__ == "__main__":
    main(steps_asked())
