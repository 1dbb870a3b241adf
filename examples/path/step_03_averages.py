"""3. The past: each position gets the mean of all characters up to it, by one matmul with a triangular matrix.

Row t of the (T, T) matrix has 1 / (t + 1) for the columns 0 to t, and 0 for the future (the causal mask). Attention makes this
matrix from scores: softmax over the past. With all scores 0 it is the mean, which the program checks. A mean drowns the last
character in all others, so the loss is worse than the bigram's: the weights of the past should depend on what is there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from common import SEQ, Sizes, report, steps_asked, train

from barellm import kernels

FLAT = 1e-9  # multiplies the scores: all weights of the past are equal


@dataclass(frozen=True)
class Config(Sizes):
    pass


def declare(p, cfg):
    """The parameters by name: an embedding of d_model numbers for each character, and the classifier."""
    shape, vocab = (cfg.padded_vocab, cfg.d_model), {"valid_rows": cfg.vocab_size}
    return {"wte": p.parameter("wte", shape, std=0.3, **vocab), "head": p.parameter("head", shape, std=0.02, **vocab)}


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = p.embedding(tokens_BT, w["wte"])
    mean_BTC = p.attention(x_BTC, x_BTC, x_BTC, heads=1, scale=FLAT)
    return p.classifier(mean_BTC, w["head"], targets_BT, valid_vocab=cfg.vocab_size)


def difference() -> float:
    """The largest difference between attention with equal scores and the masked matmul, for random x."""
    x_BTHC = np.random.default_rng(1).standard_normal((2, SEQ, 1, 8), dtype=np.float32)
    mask_TT = np.tril(np.ones((SEQ, SEQ), np.float32))
    means_BTC = mask_TT / mask_TT.sum(1, keepdims=True) @ x_BTHC[:, :, 0]
    return float(abs(kernels.attention(np.zeros_like(x_BTHC), x_BTHC, x_BTHC)[:, :, 0] - means_BTC).max())


def main(steps: int) -> float:
    print(f"masked matmul and attention with equal scores differ by {difference():.0e}")
    return report(train(Config(), steps, "averages").val_nats)


if __name__ == "__main__":
    main(steps_asked())
