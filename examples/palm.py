"""A model in a file of its own: PaLM's block (Chowdhery et al. 2022), small.

    barellm train palm-3m --model examples/palm.py --out runs/palm
    barellm sample runs/palm --model examples/palm.py --prompt "def main("

Attention and MLP read one norm and add to the stream side by side (Wang and Komatsuzaki 2021), so one product makes what both
need. All heads of queries share one head of keys and values (Shazeer 2019), which makes the KV cache small. There is no bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from barellm.config import Config as Run
from barellm.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from barellm.config.fields import at_least, divides


@dataclass(frozen=True)
class Config(ModelConfig):
    layers: int = at_least(1, 6, "blocks")
    heads: int = divides("d_model", 4, "heads of queries, each of an even width, as RoPE turns pairs", even=True)
    d_model: int = at_least(1, 192, "width of the residual stream")
    d_ff: int = at_least(1, 512, "width between the two products of SwiGLU")
    vocab_size: int = at_least(1, 4096, "token ids")
    padded_vocab: int = at_least(0, 0, "rows of the embedding in memory; 0: the next multiple of 64")
    max_seq: int = at_least(1, 256, "positions")

    @property
    def head_size(self):
        return self.d_model // self.heads

    @property
    def widths(self):
        """Columns of what a block reads of its norm: queries, keys, values, the MLP's gate, and what that lets through."""
        return self.d_model, self.head_size, self.head_size, self.d_ff, self.d_ff


def declare(p, cfg):
    """The parameters by name. Matrices are (out, in)."""
    C, residual = cfg.d_model, 0.02 / sqrt(cfg.layers)
    w = {"wte": p.parameter("wte", (cfg.padded_vocab, C), std=0.02, valid_rows=cfg.vocab_size)}
    for i in range(cfg.layers):
        w[f"h.{i}.norm"] = p.parameter(f"h.{i}.norm", (C,), value=1.0)
        w[f"h.{i}.in"] = p.parameter(f"h.{i}.in", (sum(cfg.widths), C), std=0.02)
        w[f"h.{i}.proj"] = p.parameter(f"h.{i}.proj", (C, C), std=residual)
        w[f"h.{i}.down"] = p.parameter(f"h.{i}.down", (C, cfg.d_ff), std=residual)
    return w | {"norm": p.parameter("norm", (C,), value=1.0)}


def trunk(p, cfg, w, tokens_BT, attend):
    """The normalised residual stream after the last block (B, T, C). `attend(i, q, k, v)` is the attention of block i."""
    turns = p.rope_tables(cfg.max_seq, cfg.head_size, theta=10_000.0)
    x_BTC = p.embedding(tokens_BT, w["wte"])
    for i in range(cfg.layers):
        with p.segment(f"h.{i}"):
            h_BTC = p.rmsnorm(x_BTC, w[f"h.{i}.norm"])
            q, k, v, gate, up = p.split(p.linear(h_BTC, w[f"h.{i}.in"]), cfg.widths)
            a_BTC = attend(i, p.rope(q, turns, heads=cfg.heads), p.rope(k, turns, heads=1), v)
            x_BTC = p.add(x_BTC, p.linear(a_BTC, w[f"h.{i}.proj"]))
            x_BTC = p.add(x_BTC, p.linear(p.swiglu(gate, up), w[f"h.{i}.down"]))
    return p.rmsnorm(x_BTC, w["norm"])


def forward(p, cfg, tokens_BT, targets_BT, *, training):
    """The loss (1,), a sum over targets times the run's scalar inv_targets."""
    w = declare(p, cfg)
    x_BTC = trunk(p, cfg, w, tokens_BT, lambda i, q, k, v: p.attention(q, k, v, heads=cfg.heads, kv_heads=1))
    return p.classifier(x_BTC, w["wte"], targets_BT, valid_vocab=cfg.vocab_size)


def decode(p, cfg, tokens_BT):
    """The logits (B, 1, Vp) of the last position. The caches hold the keys and values of the positions before."""
    w, (B, T) = declare(p, cfg), tokens_BT.shape

    def attend(i, q, k, v):
        caches = [p.cache(f"h.{i}.{kind}_cache", (int(B), int(T), cfg.head_size), p.compute) for kind in "kv"]
        return p.attention_cached(q, k, v, *caches, heads=cfg.heads, kv_heads=1)

    return p.last_logits(trunk(p, cfg, w, tokens_BT, attend), w["wte"])


def palm_3m():
    """On the source of Python's library, as the default run."""
    return Run(
        preset="palm-3m",
        model=Config(),
        optim=OptimConfig(lr=2e-3, min_lr=2e-4, warmup=50, beta2=0.99),
        data=DataConfig(source="stdlib", tokenizer="bpe", bpe_vocab=4096),
        train=TrainConfig(micro_batch_size=8, seq=256, steps=1000, minutes=3.0, eval_every=250, sample_every=500),
    )


PRESETS = {"palm-3m": palm_3m}
