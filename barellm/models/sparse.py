"""GPT-2 with attention over blocks of keys that a layout lists (Child et al. 2019): each head has a pattern of its own, and the
time and memory of a long sequence go with the blocks that are listed. Weights are those of gpt2.py; attention has no dropout.

A token that is sampled costs a whole forward pass: a layout's kernels want all positions, so there is no KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from barellm.config import Config as Run
from barellm.config import DataConfig, OptimConfig, TrainConfig
from barellm.fields import value
from barellm.models import gpt2
from barellm.models.gpt2 import declare
from barellm.program import patterns

if TYPE_CHECKING:
    from barellm.program.builder import Program
    from barellm.program.tensor import Tensor

__all__ = ["Config", "declare", "decode", "forward"]

WHOLE = True


def _pattern(key: str, found: str, config: Config) -> str | None:
    try:
        patterns.parse(found) if found else None
    except ValueError as error:
        return f"{key}: {error}"
    return None


def _block(key: str, found: int, config: Config) -> str | None:
    fits = 16 <= found <= 128 and found % 16 == 0
    return None if fits else f"{key} is {found}, expected a multiple of 16 up to 128"


@dataclass(frozen=True)
class Config(gpt2.Config):
    layout: str = value(
        "local:256", "patterns of the heads (docs/sparsity.md); empty: every earlier key", check=_pattern
    )
    block: int = value(64, "positions of a block of keys or queries", check=_block)


def forward(p: Program, cfg: Config, tokens_BT: Tensor, targets_BT: Tensor, *, training: bool) -> Tensor:
    """The loss (1,): the sum over valid targets times the scalar inv_targets."""
    w = declare(p, cfg)
    rate = cfg.dropout if training else 0.0

    def dropout(x_BTC: Tensor) -> Tensor:
        return p.dropout(x_BTC, rate, cfg.dropout_bits)

    x_BTC = gpt2.trunk(p, w, tokens_BT, _attention(p, cfg, tokens_BT), dropout)
    return p.classifier(x_BTC, w.wte, targets_BT, valid_vocab=cfg.vocab_size)


def decode(p: Program, cfg: Config, tokens_BT: Tensor) -> Tensor:
    """The fp32 logits (B, 1, Vp) of the last position, of a text from its beginning."""
    w = declare(p, cfg)
    return p.last_logits(gpt2.trunk(p, w, tokens_BT, _attention(p, cfg, tokens_BT), lambda x_BTC: x_BTC), w.wte)


def _attention(p: Program, cfg: Config, tokens_BT: Tensor) -> Callable[[gpt2.Block, Tensor], Tensor]:
    if not cfg.layout:
        return lambda _, qkv_BT3C: p.attention(*p.split(qkv_BT3C, 3), heads=cfg.heads)
    from barellm.program import layouts  # with NumPy, which choosing a preset does not need

    whole = layouts.parse(cfg.layout, length=cfg.max_seq, block=cfg.block, heads=cfg.heads)
    layout = whole.first(int(tokens_BT.shape[1]))
    return lambda _, qkv_BT3C: p.layout_attention(*p.split(qkv_BT3C, 3), layout=layout, heads=cfg.heads)


# --- presets ---


def sparse_char() -> Run:
    """A model of bytes that sees 8192 of them, on two cores: half of its heads look at what is near, the others at what is near and
    at the ends of all stretches of 512 bytes before."""
    muon = {"muon_lr": 0.03, "momentum": 0.85, "turns": 3, "normuon": 0.95}
    return Run(
        preset="sparse-char",
        model=Config(
            layers=3, heads=4, channels=128, vocab_size=256, max_seq=8192, layout="local:256, local:64+fixed:512:64"
        ),
        optim=OptimConfig(name="muon", lr=8e-3, min_lr=0.0, schedule="linear", beta2=0.99, **muon),
        data=DataConfig(source="stdlib", tokenizer="bytes"),
        train=TrainConfig(batch=1, seq=8192, steps=150, eval_every=50, eval_tokens=16 * 8192),
    )


PRESETS: dict[str, Callable[[], Run]] = {"sparse-char": sparse_char}
